# SPDX-License-Identifier: Apache-2.0
"""The task that reclaims, around turns that are stood in for: this kernel need not have DAMON."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from dsecd.core import reclaim
from dsecd.core.reclaim import Reclaim, ReclaimSettings
from dsecd.core.turns import DamonTurns, Ended

_SETTINGS = ReclaimSettings(
    reclaim="memory.reclaim", age_s=1, sweep_s=0.01, min_bytes=0, quota_bytes_per_s=1, kdamonds=1,
    start_below_permil=1001, stop_below_permil=0, pressure_max_percent=100,
)  # fmt: skip


class _SlowTurns(DamonTurns):
    """Notes what is done to them, the end of a turn only once it may be over."""

    def __init__(self, record: Path, number: int, quota_bytes_per_s: int) -> None:
        super().__init__(record, number, quota_bytes_per_s)
        self.begun, self.may_end, self.done = threading.Event(), threading.Event(), list[str]()

    def end(self, *, all_of_them: bool = False) -> list[Ended]:
        del all_of_them
        self.begun.set()
        self.may_end.wait(60)
        self.done.append("end")
        return []

    def give_back(self) -> None:
        self.done.append("give back")


def test_damon_is_given_back_when_no_thread_is_at_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim, "DamonTurns", _SlowTurns)
    task = Reclaim(_SETTINGS, tmp_path, tmp_path, ids=list, cgroup_of=lambda _name: None)
    turns = task._turns
    assert isinstance(turns, _SlowTurns)

    async def stop_meanwhile() -> None:
        running = asyncio.create_task(task.run())
        await asyncio.to_thread(turns.begun.wait, 60)
        running.cancel()
        # More than enough for it to be given back too early.
        await asyncio.wait([running], timeout=0.3)
        turns.may_end.set()
        await asyncio.wait([running], timeout=60)
        assert running.cancelled()

    asyncio.run(stop_meanwhile())
    assert turns.done == ["end", "give back"]
