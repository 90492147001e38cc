# SPDX-License-Identifier: Apache-2.0
"""What `make bench-memory` concludes from what it measured: it can pass, it can fail, and too little tells nothing."""

from collections.abc import Sequence

import pytest

from tests.vm.bench_memory import Piece, Promise, promises

_SANDBOXES, _PIECES = 20, 15
_BUSY = {"auto": 0.9, "control": 0.9}


def _rounds(instructions: Sequence[float], used_s: Sequence[float], pieces: int = _PIECES) -> list[list[Piece]]:
    return [[Piece(many, time_s, 1.0, 1.0)] * pieces for many, time_s in zip(instructions, used_s, strict=True)]


def _judged(
    *, auto_s: float = 0.4, control_s: Sequence[float] = (0.4, 0.4), auto_instructions: float = 3e8,
    pieces: int = _PIECES, held: float = 0.7, control_busy: float = 0.9, sandboxes: int = _SANDBOXES,
) -> list[Promise]:  # fmt: skip
    per = {
        "off": _rounds((3e8, 3e8), (0.3, 0.3)),
        "auto": _rounds([auto_instructions] * 2, [auto_s] * 2, pieces),
        "control": _rounds([3e8] * len(control_s), control_s),
    }
    return promises(sandboxes, held, per, {**_BUSY, "control": control_busy})


def _verdicts(told: Sequence[Promise]) -> list[str]:
    return [promise.verdict for promise in told]


def test_what_costs_no_more_than_an_equal_load_passes() -> None:
    assert _verdicts(_judged()) == ["PASS"] * 3
    # By a third more time than without any load, as beside the equal one.
    assert _judged()[2].found == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("miss", "expected"),
    [
        ({"held": 0.76}, ["FAIL", "PASS", "PASS"]),
        ({"auto_instructions": 3.2e8}, ["PASS", "FAIL", "PASS"]),
        ({"auto_s": 0.43}, ["PASS", "PASS", "FAIL"]),
    ],
)
def test_each_promise_fails_by_itself(miss: dict[str, float], expected: list[str]) -> None:
    assert _verdicts(_judged(**miss)) == expected  # type: ignore[arg-type]  # each name has one type


def test_time_tells_nothing_beside_a_load_that_is_not_equal_or_not_even() -> None:
    for told, reason in (
        (_judged(auto_s=0.43, control_busy=1.05), "+17% of DAMON's time"),
        (_judged(auto_s=0.43, control_busy=0.75), "-17% of DAMON's time"),
        (_judged(auto_s=0.43, control_s=(0.4, 0.43)), "differ by 7.5%"),
    ):
        assert _verdicts(told) == ["PASS", "PASS", "PENDING"]
        assert reason in str(told[2])


def test_too_little_tells_nothing() -> None:
    assert _verdicts(_judged(sandboxes=19, held=0.8)) == ["PENDING"] * 3
    assert _verdicts(_judged(pieces=14, auto_s=0.5)) == ["PASS", "PENDING", "PENDING"]
