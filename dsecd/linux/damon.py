# SPDX-License-Identifier: Apache-2.0
"""DAMON through sysfs: kernel threads that find which pages of some processes are not touched, and page them out.

What belongs here: taking kdamonds, aiming one at processes, reading what it did, giving them back.  What does not:
whom to aim at, and when.  Linux documentation, admin-guide/mm/damon/usage; the layout is that of 6.2 and later.

The interface is one for the whole host, has no owners, and forgets everything when the number of kdamonds is written.
So nothing is taken unless that number is 0, and what was taken bears a mark by which a later process knows it again: an
update interval that nobody else would choose.  Somebody else's kdamonds are never changed, whether they run or not.
"""

import errno
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ADMIN = Path("/sys/kernel/mm/damon/admin/kdamonds")

#: More than these are not watched at once: each costs some samples.
TARGETS_MAX = 64

# How often mappings are looked up anew, in microseconds: about a minute, whichever mark is drawn.
_UPDATE_US = 60_000_000
_MARKS = 1 << 20
_AT_MOST = (1 << 32) - 1
_NICE = 19


class InUse(OSError):
    """Somebody else uses DAMON: its configuration is theirs."""

    def __init__(self, what: str, path: Path) -> None:
        super().__init__(errno.EBUSY, f"use DAMON: {what}", os.fspath(path))


@dataclass(frozen=True)
class Target:
    """A process, by its pid as the caller sees it, and where in it to look."""

    pid: int
    #: First address and the one behind the last, of whole pages; lowest first, none twice.
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Rules:
    """What counts as cold, and how fast it is paged out."""

    #: Untouched for so long. Measured in steps of `aggregation_ms`.
    age_s: float
    #: Of addresses, whether there is memory behind them or not.
    quota_bytes_per_s: int
    sample_ms: int = 100
    aggregation_ms: int = 1000
    #: Of all targets together: a region is watched by touching one page of it in each sample.
    regions_min: int = 10
    regions_max: int = 200


def new_mark() -> int:
    """A mark for what will be taken, to be kept where a later process finds it."""
    return _UPDATE_US + random.randrange(1, _MARKS)


def mark_from(text: str) -> int | None:
    """A mark that was kept as text; None for what cannot be one, such as the interval that everybody uses."""
    number = int(text) if text.strip().isascii() and text.strip().isdecimal() else 0
    return number if _UPDATE_US < number < _UPDATE_US + _MARKS else None


def count(admin: Path = ADMIN) -> int:
    """How many kdamonds are set up, whoever's.  Raises FileNotFoundError without DAMON's sysfs interface."""
    return int((admin / "nr_kdamonds").read_text())


def owned(mark: int, admin: Path = ADMIN) -> bool:
    """Whether there are kdamonds and each bears the mark."""
    number = count(admin)
    return number > 0 and all(_mark_of(admin / str(index)) == mark for index in range(number))


def take(number: int, mark: int, admin: Path = ADMIN) -> None:
    """Set up kdamonds 0 to `number` - 1, idle; what bears the mark from before is stopped and taken over.

    Raises InUse, and leaves everything as it is, when there are any of somebody else's.
    """
    there = count(admin)
    if there:
        if not owned(mark, admin):
            raise InUse(f"{there} kdamond(s) of somebody else are set up", admin / "nr_kdamonds")
        give_back(mark, admin)
    _write(admin / "nr_kdamonds", number)
    for index in range(number):
        _write(admin / str(index) / "contexts/nr_contexts", 1)
        _write(_context(index, admin) / "monitoring_attrs/intervals/update_us", mark)


def give_back(mark: int, admin: Path = ADMIN) -> None:
    """Stop all that bears the mark and leave DAMON as it is after boot; nothing of anybody else's is touched."""
    if not owned(mark, admin):
        return
    for index in range(count(admin)):
        stop(index, admin)
    _write(admin / "nr_kdamonds", 0)


def start(index: int, targets: Sequence[Target], rules: Rules, admin: Path = ADMIN) -> None:
    """Let a kdamond that was taken watch processes where they say and page out what is cold there.  Blocks.

    Given ranges, and not all of the address spaces: DAMON takes what lies between a program and its heap, up to a
    gigabyte and more of nothing, for one range, finds it cold, and spends its quota there.

    Raises ProcessLookupError when one of them is gone, InUse while one of the kernel's own DAMON modules runs.
    """
    context = _context(index, admin)
    _write(context / "operations", "fvaddr")
    intervals = context / "monitoring_attrs/intervals"
    _write(intervals / "aggr_us", rules.aggregation_ms * 1000)
    _write(intervals / "sample_us", rules.sample_ms * 1000)
    # Each as it may be beside the other's old value: the kernel refuses a minimum above the maximum only at the start.
    _write(context / "monitoring_attrs/nr_regions/min", max(3, rules.regions_min))
    ranges = sum(len(target.ranges) for target in targets)
    _write(context / "monitoring_attrs/nr_regions/max", max(rules.regions_max, 3 * ranges))
    _write(context / "targets/nr_targets", len(targets))
    for number, target in enumerate(targets):
        _write_target(context / f"targets/{number}", target)
    _write(context / "schemes/nr_schemes", 1)
    _write_scheme(context / "schemes/0", rules)
    state = admin / str(index) / "state"
    try:
        _write(state, "on")
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise InUse("damon_reclaim, damon_lru_sort or damon_stat is enabled", state) from error
        if error.errno == errno.EINVAL:
            pids = [target.pid for target in targets]
            raise ProcessLookupError(errno.ESRCH, f"watch processes {pids}: one is gone", str(state)) from error
        raise
    _give_way(int((admin / str(index) / "pid").read_text()))


def _give_way(pid: int) -> None:
    """Let the kernel's thread run when nobody else wants the processor: it compresses what it pages out, which takes
    more of one than finding it, and a quota of bytes does not limit that on a slow host. setpriority(2).
    """
    try:
        # The number is one of the first pid namespace, and may be another process's in ours.
        if Path(f"/proc/{pid}/comm").read_text().startswith("kdamond"):
            os.setpriority(os.PRIO_PROCESS, pid, _NICE)
    except (FileNotFoundError, ProcessLookupError):  # it has ended already, or is not to be seen
        pass


def _write_target(place: Path, target: Target) -> None:
    _write(place / "pid_target", target.pid)
    _write(place / "regions/nr_regions", len(target.ranges))
    for number, (begin, end) in enumerate(target.ranges):
        _write(place / f"regions/{number}/start", begin)
        _write(place / f"regions/{number}/end", end)


def _write_scheme(scheme: Path, rules: Rules) -> None:
    """Page out whatever no sample found touched, for as many aggregations as make up the age."""
    _write(scheme / "action", "pageout")
    pattern = scheme / "access_pattern"
    _write(pattern / "sz/min", os.sysconf("SC_PAGE_SIZE"))
    _write(pattern / "sz/max", (1 << 63) - 1)
    _write(pattern / "nr_accesses/min", 0)
    _write(pattern / "nr_accesses/max", 0)
    _write(pattern / "age/min", max(1, round(rules.age_s * 1000 / rules.aggregation_ms)))
    _write(pattern / "age/max", _AT_MOST)
    _write(scheme / "quotas/ms", 0)
    _write(scheme / "quotas/bytes", rules.quota_bytes_per_s)
    _write(scheme / "quotas/reset_interval_ms", 1000)
    _write(scheme / "watermarks/metric", "none")


def runs(index: int, admin: Path = ADMIN) -> bool:
    """Whether the kdamond is at work; it ends by itself when all that it watches is gone."""
    return (admin / str(index) / "state").read_text().strip() == "on"


def stop(index: int, admin: Path = ADMIN) -> None:
    """End its work; one that does not work is fine.  Blocks until its thread has ended."""
    if runs(index, admin):
        try:
            _write(admin / str(index) / "state", "off")
        except OSError:
            # It ended by itself in between.
            if runs(index, admin):
                raise


def _context(index: int, admin: Path) -> Path:
    return admin / str(index) / "contexts/0"


def _mark_of(kdamond: Path) -> int | None:
    try:
        return int((kdamond / "contexts/0/monitoring_attrs/intervals/update_us").read_text())
    except FileNotFoundError:
        return None


def _write(path: Path, value: str | int) -> None:
    """Raises OSError with the path and the value that was refused."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, str(value).encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise OSError(error.errno, f"write '{value}': {error.strerror}", os.fspath(path)) from error
