# SPDX-License-Identifier: Apache-2.0
"""Whether the host has room for one more sandbox, by what it suffers from and not by what was promised to whom.

What belongs here: memory that is available and pressure stall information, against thresholds. What does not: reading
one pressure file (``dsecd.linux.psi``), who is let in (``admission.py``).

Figures are read when somebody asks, at most ten times a second, so a host on which nothing is created pays nothing.
The kernel's average over 10 s is slow to rise; so what was lost since a moment ago counts as well, whichever is more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsecd.linux import psi

_FRESH_S = 0.1
#: Loss since an earlier look counts when that is so long ago; then a newer look takes its place.
_SHORTEST_S, _LONGEST_S = 0.5, 2.0
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Thresholds:
    """In percent: of memory that must be available, of time that may be lost; 100 of time is never too much."""

    memory_available_min_percent: float = 5.0
    memory_some_percent: float = 40.0
    memory_full_percent: float = 15.0
    io_full_percent: float = 80.0
    cpu_some_percent: float = 100.0


@dataclass(frozen=True)
class Shortage:
    """What there is too little of."""

    resource: str
    measure: str  # available, some or full
    percent: float
    limit_percent: float
    retry_after_s: int

    def __str__(self) -> str:
        if self.measure == "available":
            return f"{self.percent:.1f} % of {self.resource} is available, {self.limit_percent:g} % is kept free"
        who = "a task" if self.measure == "some" else "every task"
        return (
            f"{who} waited for {self.resource} {self.percent:.0f} % of the time, {self.limit_percent:g} % is allowed"
        )


@dataclass(frozen=True)
class Reading:
    """One look: percentages by name such as "memory_some", and what is short."""

    figures: dict[str, float]
    shortage: Shortage | None


class Gauge:
    """Looks at the host, and at the cgroup of all sandboxes, whose limits may be tighter."""

    def __init__(
        self, thresholds: Thresholds, cgroup_dir: Path | None = None, *, meminfo: Path = _MEMINFO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._thresholds = thresholds
        self._cgroup_dir = cgroup_dir
        self._meminfo = meminfo
        self._clock = clock
        self._last: tuple[float, Reading] | None = None
        self._bases: dict[tuple[str, str, bool], tuple[float, int]] = {}

    def look(self) -> Reading:
        """The newest figures, or those of a moment ago."""
        now = self._clock()
        if self._last is None or now - self._last[0] >= _FRESH_S:
            self._last = now, self._read(now)
        return self._last[1]

    def _read(self, now: float) -> Reading:
        figures: dict[str, float] = {}
        shortages = []
        available = _available_percent(self._meminfo)
        if available is not None:
            figures["memory_available"] = available
            floor = self._thresholds.memory_available_min_percent
            if available < floor:
                shortages.append(Shortage("memory", "available", available, floor, 5))
        for resource in ("memory", "io", "cpu"):
            for measure, percent in self._stalls(resource, now).items():
                figures[f"{resource}_{measure}"] = percent
                limit = getattr(self._thresholds, f"{resource}_{measure}_percent", 100.0)
                if percent > limit:
                    shortages.append(Shortage(resource, measure, percent, limit, 10))
        return Reading(figures, shortages[0] if shortages else None)

    def _stalls(self, resource: str, now: float) -> dict[str, float]:
        """Percent of time lost, on the host or among the sandboxes, whichever is more."""
        found: dict[str, float] = {}
        for own in (False, True) if self._cgroup_dir is not None else (False,):
            pressure = psi.read(resource, self._cgroup_dir if own else None)
            if pressure is None:
                continue
            for measure, stall in (("some", pressure.some), ("full", pressure.full)):
                percent = max(stall.avg10, self._recent((resource, measure, own), stall.total_us, now))
                found[measure] = max(found.get(measure, 0.0), percent)
        return found

    def _recent(self, key: tuple[str, str, bool], total_us: int, now: float) -> float:
        began, before = self._bases.setdefault(key, (now, total_us))
        passed = now - began
        if passed >= _LONGEST_S:
            self._bases[key] = now, total_us
        # A look of long ago says nothing about now.
        if not _SHORTEST_S <= passed < 5 * _LONGEST_S:
            return 0.0
        return min(100.0, (total_us - before) / (passed * 1e4))


def _available_percent(meminfo: Path) -> float | None:
    """MemAvailable of MemTotal, proc_meminfo(5)."""
    wanted = {}
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            wanted[name] = int(rest.split()[0])
    return 100 * wanted["MemAvailable"] / wanted["MemTotal"] if len(wanted) == 2 else None
