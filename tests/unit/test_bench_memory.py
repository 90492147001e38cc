# SPDX-License-Identifier: Apache-2.0
"""What `make bench-memory` concludes from what it measured: it can pass, it can fail, and too little tells nothing."""

from collections.abc import Sequence

import pytest

from tests.vm.bench_memory import Piece, Promise, Turn, compared, interval, promises

_NS = 1e-9


def _pieces(instructions: float, number: int) -> list[list[Piece]]:
    return [[Piece(instructions, 0.4, 1.0, 1.0)] * number] * 2


def _turns(reclaim: Sequence[float], *, control: float = 2.0, others: float = 0.9) -> list[Turn]:
    """Turns of reclaim by what an instruction took in them, in ns, between such of the other load."""
    turns = [Turn("control", control * _NS, 0.9, 3e8)]
    for one in reclaim:
        turns += [Turn("auto", one * _NS, others, 3e8), Turn("control", control * _NS, 0.9, 3e8)]
    return turns


def _judged(
    *, turns: Sequence[Turn] = tuple(_turns([2.0] * 12)), instructions: float = 3e8, pieces: int = 15,
    held: float = 0.7, sandboxes: int = 20,
) -> list[Promise]:  # fmt: skip
    per = {"off": _pieces(3e8, 15), "auto": _pieces(instructions, pieces)}
    return promises(sandboxes, held, per, [turns])


def _verdicts(told: Sequence[Promise]) -> list[str]:
    return [promise.verdict for promise in told]


def test_what_costs_no_more_than_an_equal_load_passes() -> None:
    told = _judged(turns=_turns([2.08] * 12))
    assert _verdicts(told) == ["PASS"] * 3
    assert told[2].found == pytest.approx(1.04)


def test_each_promise_fails_by_itself() -> None:
    assert _verdicts(_judged(held=0.76)) == ["FAIL", "PASS", "PASS"]
    assert _verdicts(_judged(instructions=3.2e8)) == ["PASS", "FAIL", "PASS"]
    assert _verdicts(_judged(turns=_turns([2.12] * 12))) == ["PASS", "PASS", "FAIL"]


def test_too_little_tells_nothing() -> None:
    assert _verdicts(_judged(sandboxes=19, held=0.8)) == ["PENDING"] * 3
    assert _verdicts(_judged(pieces=14)) == ["PASS", "PENDING", "PASS"]
    assert _verdicts(_judged(turns=_turns([3.0] * 11))) == ["PASS", "PASS", "PENDING"]


def test_turns_that_differ_too_much_to_tell_say_so() -> None:
    told = _judged(turns=_turns([1.8, 2.4] * 6))
    assert _verdicts(told) == ["PASS", "PASS", "PENDING"]
    assert "from 0.900 to 1.200" in str(told[2])


def test_a_turn_is_compared_with_those_around_it_and_only_beside_an_equal_load() -> None:
    drifting = [
        Turn("control", 1 * _NS, 0.9, 3e8), Turn("auto", 2 * _NS, 0.9, 3e8), Turn("control", 3 * _NS, 0.9, 3e8),
        Turn("auto", 9 * _NS, 0.7, 3e8), Turn("control", 3 * _NS, 0.9, 3e8),
    ]  # fmt: skip
    assert compared([drifting]) == [pytest.approx(1.0)]
    assert _verdicts(_judged(turns=_turns([2.0] * 12, others=0.7))) == ["PASS", "PASS", "PENDING"]


def test_the_interval_is_the_one_of_tables_of_the_sign_test() -> None:
    # Of 12 the third from below and from above, of 18 the fifth.
    assert interval(list(range(1, 13))) == (3, 10)
    assert interval(list(range(1, 19))) == (5, 14)
