# SPDX-License-Identifier: Apache-2.0
"""Turns: reclaiming the cold memory of one sandbox, by DAMON or by its cgroup.

Here: what a turn does to the kernel, and how it ends. Not here: whose turn it is and whether there may be any
(``idleness.py``, ``reclaim.py``). Everything here blocks and runs in a thread, one call at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsecd.linux import cgroup, damon, mappings, psi

#: A sandbox that idles as a whole needs no long proof that a page is cold.
IDLE_AGE_S = 5.0
#: How many processes of a sandbox, and cgroups in it, are looked at: their number is the sandbox's to choose.
_PIDS_MAX, _CGROUPS_MAX = 256, 256
#: A mapping is watched that holds so much and is not mostly empty, since DAMON's quota is of addresses. What lies
#: between two is watched with them when it is no more.
_RESIDENT_MIN_BYTES, _SPARSE_AT_MOST, _GAP_BYTES = 64 << 10, 8, 256 << 10
#: Of all processes together, the ones that hold most.
_RANGES_MAX = 128
#: DAMON counts its own steps, which on a busy host take longer than they should, by this factor at most.
_SLOW = 1.5
#: Beyond that and what the quota takes: until DAMON has split the address space where it differs.
_SETTLE_S = 5.0
#: A turn that leaves less than this part of what it could have taken has brought what it can: others wait for theirs.
_ALL_BUT = 8
_CHUNK_BYTES = 8 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Ended:
    """A turn that is over, with the sandbox's memory before and after."""

    sandbox_id: str
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True)
class _Turn:
    sandbox_id: str
    cgroup: Path
    before_bytes: int
    most_bytes: int  # that it can bring
    last_bytes: int  # when it was looked at last
    ends_at: float

    def is_done(self, now_bytes: int) -> bool:
        return self.before_bytes - now_bytes >= self.most_bytes - self.most_bytes // _ALL_BUT


def memory_bytes(path: Path) -> int | None:
    """memory.current; None without the memory controller, or when the cgroup is gone."""
    text = cgroup.read(path, "memory.current")
    return int(text) if text is not None and text.isdecimal() else None


class DamonTurns:
    """Turns by kdamonds of our own, a sandbox each."""

    def __init__(self, record: Path, number: int, quota_bytes_per_s: int) -> None:
        """``record`` keeps the mark by which the next daemon knows what this one took."""
        self._record = record
        self._number = number
        self._quota = quota_bytes_per_s
        self._turns: dict[int, _Turn] = {}

    def take(self) -> None:
        """Take the kdamonds, also those that an earlier daemon left. Raises damon.InUse, OSError."""
        mark = recorded_mark(self._record) or damon.new_mark()
        self._record.write_text(str(mark))
        damon.take(self._number, mark)

    @property
    def free(self) -> int:
        return self._number - len(self._turns)

    def start(self, sandbox_id: str, path: Path, age_s: float) -> bool:
        """Begin a turn; False when there is nothing to watch. Raises damon.InUse, OSError."""
        before, targets = memory_bytes(path), worth_watching(largest(path))
        if before is None or not targets:
            return False
        index = next(index for index in range(self._number) if index not in self._turns)
        try:
            damon.start(index, targets, damon.Rules(age_s=age_s, quota_bytes_per_s=self._quota))
        except ProcessLookupError:
            return False
        watched_bytes = sum(end - begin for target in targets for begin, end in target.ranges)
        lasts_s = _SLOW * age_s + watched_bytes / self._quota + _SETTLE_S
        # What is watched may be others' memory, too, and partly none at all.
        most_bytes = min(before, watched_bytes)
        self._turns[index] = _Turn(sandbox_id, path, before, most_bytes, before, time.monotonic() + lasts_s)
        return True

    def end(self, *, all_of_them: bool = False) -> list[Ended]:
        """End those that took next to all, whose time is over and that bring no more, or whose sandbox has ended."""
        ended = []
        for index, turn in list(self._turns.items()):
            now = memory_bytes(turn.cgroup)
            over = all_of_them or not damon.runs(index) or (now is not None and turn.is_done(now))
            if not over and time.monotonic() < turn.ends_at:
                continue
            if not over and now is not None and now < turn.last_bytes - _CHUNK_BYTES:
                # Slower than the quota, as compressing may be, but still at it.
                self._turns[index] = replace(turn, last_bytes=now, ends_at=time.monotonic() + 2 * _SETTLE_S)
                continue
            damon.stop(index)
            del self._turns[index]
            ended.append(Ended(turn.sandbox_id, turn.before_bytes, turn.before_bytes if now is None else now))
        return ended

    def give_back(self) -> None:
        """Leave DAMON as it was found."""
        self._turns.clear()
        give_back(self._record)


def recorded_mark(record: Path) -> int | None:
    """The mark that a daemon kept, if any."""
    try:
        return damon.mark_from(record.read_text())
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def give_back(record: Path) -> None:
    """Give back the kdamonds that a daemon took and kept record of."""
    mark = recorded_mark(record)
    if mark is not None:
        with contextlib.suppress(FileNotFoundError):
            damon.give_back(mark)
    record.unlink(missing_ok=True)


def largest(path: Path) -> list[int]:
    """The processes with the most memory in the cgroup and below, as many as DAMON watches at once."""
    sizes = [(size, pid) for pid in _pids(path) if (size := _resident(pid)) > 0]
    return [pid for _size, pid in sorted(sizes, reverse=True)[: damon.TARGETS_MAX]]


def worth_watching(pids: Sequence[int]) -> list[damon.Target]:
    """Where in these processes the memory is; without those that have none to speak of, or are gone."""
    found = [(mapping, pid) for pid in pids for mapping in _mappings(pid) if _dense(mapping)]
    found.sort(key=lambda one: one[0].resident_bytes, reverse=True)
    chosen: dict[int, list[mappings.Mapping]] = {}
    for mapping, pid in found[:_RANGES_MAX]:
        chosen.setdefault(pid, []).append(mapping)
    return [damon.Target(pid, _joined(of_one)) for pid, of_one in chosen.items()]


def _mappings(pid: int) -> list[mappings.Mapping]:
    try:
        return mappings.of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return []


def _dense(mapping: mappings.Mapping) -> bool:
    return mapping.resident_bytes >= max(_RESIDENT_MIN_BYTES, mapping.size_bytes // _SPARSE_AT_MOST)


def _joined(found: Iterable[mappings.Mapping]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for mapping in sorted(found, key=lambda one: one.begin):
        begin = ranges.pop()[0] if ranges and mapping.begin - ranges[-1][1] <= _GAP_BYTES else mapping.begin
        ranges.append((begin, mapping.end))
    return tuple(ranges)


def _pids(path: Path) -> Iterator[int]:
    left, groups = _PIDS_MAX, [path]
    for group in groups:
        for pid in cgroup.procs(group)[:left]:
            left -= 1
            yield pid
        if left == 0:
            return
        groups += cgroup.children(group)[: _CGROUPS_MAX - len(groups)]


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):  # it has ended
        return 0


def by_cgroup(sandbox_id: str, path: Path, budget_bytes: int, *, pressure_max_percent: float) -> Ended | None:
    """Let the kernel take what it thinks is cold, in pieces.

    Until it finds no more, the budget is spent, or the sandbox waits for memory. None without the memory controller.
    """
    before = memory_bytes(path)
    if before is None:
        return None
    place = path / "run" if (path / "run" / "memory.reclaim").exists() else path
    for _ in range(max(1, budget_bytes // _CHUNK_BYTES)):
        pressure = psi.read("memory", place)
        if pressure is not None and pressure.some.avg10 > pressure_max_percent:
            break
        try:
            cgroup.write(place, "memory.reclaim", _CHUNK_BYTES)
        except cgroup.AttributeRefused as error:
            # EAGAIN: it found less than that. ENOENT, ENODEV: the sandbox has ended.
            if error.errno not in (errno.EAGAIN, errno.ENOENT, errno.ENODEV):
                raise
            break
    after = memory_bytes(path)
    return Ended(sandbox_id, before, before if after is None else after)
