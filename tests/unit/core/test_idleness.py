# SPDX-License-Identifier: Apache-2.0
"""Whose memory is reclaimed next: decided by readings and times alone."""

import pytest

from dsecd.core.idleness import Idleness, Reading

MIB = 1 << 20


def watched(**used_us_per_s: int) -> Idleness:
    """Sandboxes of 100 MiB that were read for 60 s, each using so much processor time."""
    idleness = Idleness(idle_s=30, min_bytes=16 * MIB)
    for second in range(0, 61, 5):
        for name, used in used_us_per_s.items():
            idleness.note(name, Reading(100 * MIB, used * second), second)
    return idleness


def test_the_idle_come_before_those_at_work_and_the_large_before_the_small() -> None:
    idleness = watched(busy=500_000, small=0, large=100)
    idleness.note("large", Reading(300 * MIB, 6000), 61)
    assert idleness.next(9, idle_only=False) == ["large", "small", "busy"]
    assert idleness.next(9, idle_only=True) == ["large", "small"]
    assert idleness.next(1, idle_only=False) == ["large"]


@pytest.mark.parametrize(("used_us_per_s", "idle"), [(0, True), (9_000, True), (11_000, False), (1_000_000, False)])
def test_idle_is_who_uses_less_than_one_percent_of_a_processor(used_us_per_s: int, *, idle: bool) -> None:
    assert watched(it=used_us_per_s).idle("it") is idle


def test_idleness_begins_anew_with_each_piece_of_work() -> None:
    idleness = watched(it=0)
    idleness.note("it", Reading(100 * MIB, 5_000_000), 65)
    assert not idleness.idle("it")
    idleness.note("it", Reading(100 * MIB, 5_000_000), 90)
    assert not idleness.idle("it")
    idleness.note("it", Reading(100 * MIB, 5_000_000), 95)
    assert idleness.idle("it")
    assert idleness.idle_for_s("it") == 30


def test_a_new_sandbox_is_left_alone_until_it_has_shown_what_it_does() -> None:
    idleness = Idleness(idle_s=30, min_bytes=0)
    for now in (0, 29):
        idleness.note("new", Reading(100 * MIB, 0), now)
    assert idleness.next(9, idle_only=False) == []
    idleness.note("new", Reading(100 * MIB, 0), 30)
    assert idleness.next(9, idle_only=False) == ["new"]


def test_a_sandbox_that_uses_little_is_left_alone() -> None:
    idleness = watched(it=0)
    idleness.note("it", Reading(15 * MIB, 0), 61)
    assert idleness.next(9, idle_only=False) == []


def test_nobody_has_two_turns_at_once() -> None:
    idleness = watched(it=0)
    idleness.begin("it")
    assert idleness.next(9, idle_only=False) == []


@pytest.mark.parametrize(
    ("memory_mib", "now", "again"),
    [(40, 70, False), (49, 70, False), (53, 70, True), (40, 91, False), (40, 92, True)],
)
def test_a_turn_follows_when_memory_has_grown_or_much_later(memory_mib: int, now: float, *, again: bool) -> None:
    idleness = watched(it=0)
    idleness.begin("it")
    idleness.end("it", 61, left_bytes=40 * MIB)
    idleness.note("it", Reading(memory_mib * MIB, 0), now)
    assert idleness.next(9, idle_only=False) == (["it"] if again else [])


def test_turns_that_change_nothing_become_rarer() -> None:
    idleness, now, gaps = watched(it=0), 61.0, []
    for _ in range(7):
        idleness.begin("it")
        idleness.end("it", now, left_bytes=100 * MIB)
        last = now
        while not idleness.next(1, idle_only=False):
            now += 10
            idleness.note("it", Reading(100 * MIB, 0), now)
        gaps.append(now - last)
    assert gaps == [40, 70, 130, 250, 490, 610, 610]


def test_who_was_at_work_has_another_turn_once_idle() -> None:
    idleness = watched(it=500_000)
    idleness.begin("it")
    idleness.end("it", 61, left_bytes=100 * MIB)
    idleness.note("it", Reading(100 * MIB, 30_000_000), 70)
    assert idleness.next(9, idle_only=False) == []
    idleness.note("it", Reading(100 * MIB, 30_000_000), 100)
    assert idleness.next(9, idle_only=False) == ["it"]


def test_a_restarted_sandbox_is_a_new_one() -> None:
    idleness = watched(it=500_000)
    idleness.note("it", Reading(100 * MIB, 7), 61)
    assert idleness.idle_for_s("it") == 0


def test_those_that_are_gone_are_forgotten() -> None:
    idleness = watched(here=0, gone=0)
    idleness.keep(["here"])
    assert idleness.next(9, idle_only=False) == ["here"]
    assert idleness.idle_for_s("gone") is None
    idleness.end("gone", 70)
