# SPDX-License-Identifier: Apache-2.0
"""Proactive reclaim: taking from sandboxes the memory that they do not touch, before anybody needs it.

Here: one task that looks at some sandboxes at a time and gives turns to those where it pays, as long as the host's
state asks for it. Not here: who that is (``idleness.py``), what a turn does (``turns.py``), telling what is used
(``memory.py``).

Each look reads two small files of at most ``SLICE`` sandboxes, whatever their number.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from dsecd.backends.plan import in_thread
from dsecd.core.idleness import Idleness, Reading
from dsecd.core.turns import IDLE_AGE_S, DamonTurns, Ended, by_cgroup, memory_bytes
from dsecd.linux import cgroup, damon, psi, swap

log = logging.getLogger(__name__)

Method = Literal["damon", "memory.reclaim", "off"]

SLICE = 200
#: DAMON that could not be had is asked for again after so long.
_RETRY_S = 60.0


@dataclass(frozen=True)
class ReclaimSettings:
    """When and how; the configuration's section `memory` says what each means."""

    reclaim: Literal["auto", "damon", "memory.reclaim", "off"]
    age_s: float
    sweep_s: float
    min_bytes: int
    quota_bytes_per_s: int
    kdamonds: int
    start_below_permil: int
    stop_below_permil: int
    pressure_max_percent: float


class Reclaim:
    """See above. ``ids`` names all sandboxes that run, ``cgroup_of`` tells the cgroup of one, None when it ended."""

    def __init__(
        self, settings: ReclaimSettings, runtime_dir: Path, cgroup_dir: Path, ids: Callable[[], Iterable[str]],
        cgroup_of: Callable[[str], Path | None],
    ) -> None:  # fmt: skip
        self._settings = settings
        self._cgroup_dir = cgroup_dir
        self._ids = ids
        self._cgroup_of = cgroup_of
        self._turns = DamonTurns(runtime_dir / "damon", settings.kdamonds, settings.quota_bytes_per_s)
        self._have_damon = False
        self._damon_at = 0.0  # when it was asked for last
        self._why_no_damon = ""
        self._round: deque[str] = deque()
        self.idleness = Idleness(idle_s=settings.age_s, min_bytes=settings.min_bytes)
        self.method: Method = "off"
        self.detail = "not begun yet"
        #: From each sandbox that is still there, and from all that ever were.
        self.reclaimed: dict[str, int] = {}
        self.reclaimed_bytes = 0

    async def run(self) -> None:
        """Until cancelled; then DAMON is given back, once no thread is at it, and what was reclaimed stays so."""
        if self._settings.reclaim == "off":
            self.detail = "by configuration"
            # What a daemon with another configuration left, if it was killed.
            await in_thread(self._turns.give_back)
            return
        try:
            while True:
                try:
                    await self._sweep()
                except OSError as error:
                    log.warning("reclaim: %s", error)
                await asyncio.sleep(self._settings.sweep_s)
        finally:
            await in_thread(self._turns.give_back)

    async def _sweep(self) -> None:
        now = time.monotonic()
        if not self._round:
            names = list(self._ids())
            self.idleness.keep(names)
            self.reclaimed = {name: self.reclaimed[name] for name in names if name in self.reclaimed}
            self._round.extend(names)
        names = [self._round.popleft() for _ in range(min(SLICE, len(self._round)))]
        places = [(name, path) for name in names if (path := self._cgroup_of(name)) is not None]
        for name, reading in await in_thread(_read, places):
            self.idleness.note(name, reading, now)
        pause = await in_thread(self._choose)
        self._account(await in_thread(functools.partial(self._turns.end, all_of_them=bool(pause))))
        if pause or self.method == "off":
            return
        if self.method == "damon":
            await self._by_damon()
        else:
            await self._by_cgroup()

    async def _by_damon(self) -> None:
        for name in self.idleness.next(self._turns.free, idle_only=False):
            path = self._cgroup_of(name)
            if path is None:
                continue
            age_s = min(IDLE_AGE_S, self._settings.age_s) if self.idleness.idle(name) else self._settings.age_s
            self.idleness.begin(name)
            try:
                started = await in_thread(self._turns.start, name, path, age_s)
            except damon.InUse as error:
                self._have_damon, self._why_no_damon = False, str(error)
                started = False
            except OSError as error:
                log.warning("reclaim from '%s': %s", name, error)
                started = False
            if not started:
                # Nothing to watch in it: as if it had had its turn.
                self.idleness.end(name, time.monotonic())

    async def _by_cgroup(self) -> None:
        """As much in a sweep as the kdamonds would take in its time, of idle sandboxes alone."""
        budget = int(self._settings.quota_bytes_per_s * self._settings.sweep_s)
        for name in self.idleness.next(self._settings.kdamonds, idle_only=True):
            path = self._cgroup_of(name)
            if path is None or budget <= 0:
                continue
            self.idleness.begin(name)
            take = functools.partial(by_cgroup, pressure_max_percent=self._settings.pressure_max_percent)
            ended = await in_thread(take, name, path, budget)
            if ended is not None:
                budget -= max(0, ended.before_bytes - ended.after_bytes)
                self._account([ended])

    def _account(self, ended: Sequence[Ended]) -> None:
        for turn in ended:
            self.idleness.end(turn.sandbox_id, time.monotonic(), left_bytes=turn.after_bytes)
            fell = max(0, turn.before_bytes - turn.after_bytes)
            self.reclaimed[turn.sandbox_id] = self.reclaimed.get(turn.sandbox_id, 0) + fell
            self.reclaimed_bytes += fell

    def _choose(self) -> str:
        """Set method and detail by what there is now; why it has to pause, "" when it has not.  Blocks."""
        self.method, self.detail = self._means()
        pause = "" if self.method == "off" else self._pause()
        if pause:
            self.detail = f"paused: {pause}" + (f"; {self.detail}" if self.detail else "")
        return pause

    def _means(self) -> tuple[Method, str]:
        wanted, why = self._settings.reclaim, ""
        have_swap = bool(swap.areas())
        if wanted in ("auto", "damon"):
            if have_swap and self._take_damon():
                return "damon", ""
            why = self._why_no_damon if have_swap else "there is no swap area, so anonymous memory stays where it is"
            if wanted == "damon":
                return "off", f"no DAMON: {why}"
        if not (self._cgroup_dir / "memory.reclaim").exists():
            return "off", "; ".join(text for text in (why, f"{self._cgroup_dir} has no memory.reclaim") if text)
        return "memory.reclaim", why

    def _take_damon(self) -> bool:
        if not self._have_damon and (not self._damon_at or time.monotonic() - self._damon_at > _RETRY_S):
            self._damon_at = time.monotonic()
            try:
                self._turns.take()
                self._have_damon = True
            except OSError as error:
                # Somebody else's, or not in this kernel: both are told, neither is ours to mend.
                self._why_no_damon = str(error)
        return self._have_damon

    def _pause(self) -> str:
        memory = psutil.virtual_memory()
        permil = memory.available * 1000 // memory.total
        if permil >= self._settings.start_below_permil:
            return f"{permil / 10:g} % of the host's memory is available"
        if permil < self._settings.stop_below_permil:
            return f"only {permil / 10:g} % of the host's memory is available, which is the kernel's to mend"
        pressure = psi.read("memory")
        if pressure is not None and pressure.some.avg10 > self._settings.pressure_max_percent:
            return f"tasks lose {pressure.some.avg10:g} % of their time waiting for memory"
        return ""


def _read(places: Sequence[tuple[str, Path]]) -> list[tuple[str, Reading]]:
    """What their cgroups count; those that ended are left out.  Blocks."""
    found = []
    for name, path in places:
        memory = memory_bytes(path)
        if memory is not None:
            cpu_us = cgroup.read_keyed(path, "cpu.stat").get("usage_usec", 0)
            found.append((name, Reading(memory, cpu_us)))
    return found
