# SPDX-License-Identifier: Apache-2.0
"""Limits of a sandbox, or of one command in it, as cgroup v2 attributes.

What belongs here: which attribute a limit becomes, in which of the sandbox's cgroups, and which controllers
must be there. What does not: the files themselves (``dsecd.linux.cgroup``). Source: the kernel's
admin-guide/cgroup-v2.rst.

Limits lie on ``run``, where commands live, so that no command can starve the agent beside it. Shares of what is
contended for lie on the sandbox's top cgroup: they count among its siblings, and those are the other sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dsecd.linux import blockdev, cgroup
from libdsec import errors
from libdsec.types import Limits

log = logging.getLogger(__name__)

#: A fork bomb ends here when nothing else was asked for.
DEFAULT_PIDS_MAX = 8192
_CPU_PERIOD_US = 100_000
_MOVE_TIMEOUT_S = 5.0
_WANTED = ("memory", "pids", "cpu", "io")
#: What siblings share; everything else is a bound.
_SHARES = frozenset(("cpu.weight", "cpu.idle", "io.weight", "io.bfq.weight"))
_BFQ_WEIGHT_MAX = 1000
_IO_MAX = {
    "rbps": "io_read_bytes_per_s", "wbps": "io_write_bytes_per_s",
    "riops": "io_reads_per_s", "wiops": "io_writes_per_s",
}  # fmt: skip
_HINT = "run 'dsecctl host' to see what this host offers"


def hand_on_controllers(top: Path, cgroup_dir: Path) -> None:
    """Let the controllers that ``top`` has reach ``cgroup_dir`` below it, as far as the kernel lets us.

    A level that gives its children none ends the way: systemd delegates a unit's cgroup with them all, and they are
    off below it until somebody asks for them.
    """
    for path in (parent for parent in reversed(cgroup_dir.parents) if parent.is_relative_to(top)):
        try:
            cgroup.enable(path, cgroup.controllers(path) & frozenset(_WANTED))
        except cgroup.AttributeRefused as error:
            # EBUSY: processes of others are in it. Limits asked for are then refused, those by default off.
            log.warning("sandboxes have no resource limits: %s", error)
            return


def controller_of(attribute: str) -> str:
    return attribute.partition(".")[0]


def attributes_without_disk(limits: Limits) -> dict[str, str]:
    """cgroup attribute to value for every limit that is set and needs no block device to be named."""
    plain = {
        "memory.max": limits.memory_max_bytes,
        "memory.high": limits.memory_high_bytes,
        "memory.swap.max": limits.swap_max_bytes,
        "memory.oom.group": None if limits.memory_oom_group is None else int(limits.memory_oom_group),
        "cpu.idle": None if limits.cpu_idle is None else int(limits.cpu_idle),
        "cpu.weight": limits.cpu_weight,
        "pids.max": limits.pids_max,
    }
    values = {name: str(value) for name, value in plain.items() if value is not None}
    if limits.cpu_max_permil is not None:
        values["cpu.max"] = f"{limits.cpu_max_permil * _CPU_PERIOD_US // 1000} {_CPU_PERIOD_US}"
    return values


class LimitWriter:
    """Writes limits where the controllers exist, and says where they do not."""

    def __init__(self, cgroup_dir: Path, state_dir: Path) -> None:
        self._dir = cgroup_dir
        self._state_dir = state_dir
        self._hurried: Counter[Path] = Counter()

    def _available(self) -> frozenset[str]:
        return cgroup.controllers(self._dir) & frozenset(_WANTED)

    def attributes(self, limits: Limits) -> dict[str, str]:
        """cgroup attribute to value for every limit that is set. Raises FeatureMissing for io that has no disk."""
        return attributes_without_disk(limits) | self._io(limits)

    def _io(self, limits: Limits) -> dict[str, str]:
        rates = {key: getattr(limits, field) for key, field in _IO_MAX.items()}
        wants_rate = any(value is not None for value in rates.values())
        if not wants_rate and limits.io_weight is None:
            return {}
        names = [field for field in (*_IO_MAX.values(), "io_weight") if getattr(limits, field) is not None]
        values = {}
        try:
            disk = blockdev.disk_of(self._state_dir)
            if wants_rate:
                # All four, since keys that are left out stay as they were.
                given = (f"{key}={'max' if value is None else value}" for key, value in rates.items())
                values["io.max"] = " ".join((disk, *given))
            if limits.io_weight is not None:
                name = blockdev.weight_file(disk, cgroup.root())
                top = _BFQ_WEIGHT_MAX if name == "io.bfq.weight" else limits.io_weight
                values[name] = str(min(limits.io_weight, top))
        except blockdev.NoDisk as error:
            raise errors.FeatureMissing(f"limit {', '.join(names)}: {error}", hint=_HINT, feature="io") from error
        return values

    def check(self, limits: Limits) -> list[str]:
        """Raise FeatureMissing for a limit asked for that the kernel lacks; name the default ones that are off."""
        available = self._available()
        if limits != Limits():
            self._refuse_missing("limit", self.attributes(limits), available)
        return [] if "pids" in available else ["pids.max"]

    def check_idle(self) -> None:
        """Raise FeatureMissing where no cgroup can be told to run only when nobody else does."""
        self._refuse_missing("class batch, which needs", ("cpu.idle",), self._available())

    def make_idle(self, group: Path) -> None:
        """Make a cgroup that runs only when its siblings do not, for many sandboxes. Raises cgroup.AttributeRefused."""
        cgroup.create(group)
        cgroup.enable(self._dir, self._available())
        if group not in self._hurried:
            cgroup.write(group, "cpu.idle", 1)

    @contextlib.contextmanager
    def hurried(self, group: Path) -> Iterator[None]:
        """Let an idle cgroup compete like any sandbox meanwhile."""
        self._hurried[group] += 1
        try:
            cgroup.write(group, "cpu.idle", 0)
            yield
        finally:
            self._hurried[group] -= 1
            if not self._hurried[group]:
                del self._hurried[group]
                cgroup.write(group, "cpu.idle", 1)

    def _refuse_missing(self, doing: str, asked: Iterable[str], available: frozenset[str]) -> None:
        names = sorted(asked)
        missing = sorted({controller_of(name) for name in names} - available)
        if missing:
            lost = ", ".join(name for name in names if controller_of(name) in missing)
            raise errors.FeatureMissing(
                f"{doing} {lost}: this host has no cgroup v2 controller {', '.join(missing)} for sandboxes",
                hint=_HINT, feature=f"cgroup-{missing[0]}",
            )  # fmt: skip
        # A kernel may be built with a controller and without one of its files: our own cgroup shows which it has.
        absent = [name for name in names if not (self._dir / name).exists()]
        if absent:
            raise errors.FeatureMissing(
                f"{doing} {', '.join(absent)}: this kernel has no such cgroup attribute", hint=_HINT, feature=absent[0]
            )

    async def apply(self, sandbox: Path, limits: Limits, *, divided: bool = True) -> None:
        """Write them. ``divided``: ``run`` has cgroups below it, and no process of its own, as a monitor's has.

        Raises cgroup.AttributeRefused; EBUSY when the agent does not leave the sandbox's top cgroup.
        """
        available = self._available()
        if not available:
            return
        await _until_empty(sandbox)
        cgroup.enable(sandbox.parent, available)
        cgroup.enable(sandbox, available)
        if divided:
            _count_kills(sandbox, limits)
        defaults = {"pids.max": str(DEFAULT_PIDS_MAX)} if "pids" in available else {}
        _write(sandbox, defaults | self.attributes(limits))

    async def change(self, sandbox: Path, old: Limits, new: Limits, *, divided: bool = True) -> None:
        """Write what differs between what is in force and what is to be. Raises cgroup.AttributeRefused."""
        before, after = self.attributes(old), self.attributes(new)
        lifted = {name: _unlimited(name, value) for name, value in before.items() if name not in after}
        changed = {name: value for name, value in after.items() if before.get(name) != value}
        if not lifted and not changed:
            return
        if divided:
            _count_kills(sandbox, new)
        # What is lifted first: an idle cgroup takes no weight.
        _write(sandbox, lifted)
        _write(sandbox, changed)


def _write(sandbox: Path, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        cgroup.write(sandbox if name in _SHARES else sandbox / "run", name, value)


def _count_kills(sandbox: Path, limits: Limits) -> None:
    """Where memory is limited each command's cgroup counts its own, so that one killed for it can be told from others.

    Not elsewhere: a cgroup with memory of its own costs more to make, and stays until its pages have gone.
    """
    if limits.memory_max_bytes is not None or limits.memory_high_bytes is not None:
        cgroup.enable(sandbox / "run", frozenset(("memory",)))


def _unlimited(name: str, value: str) -> str:
    """What an attribute is when nobody has set it."""
    if name == "pids.max":
        return str(DEFAULT_PIDS_MAX)
    if name == "io.max":
        return f"{value.split()[0]} rbps=max wbps=max riops=max wiops=max"
    plain = {"cpu.weight": "100", "cpu.idle": "0", "io.weight": "default 100", "io.bfq.weight": "default 100"}
    plain |= {"memory.oom.group": "0", "cpu.max": f"max {_CPU_PERIOD_US}"}
    return plain.get(name, "max")


async def _until_empty(path: Path) -> None:
    """A cgroup that gives controllers to its children may hold no processes itself: wait until the agent, which starts
    there, has moved aside. It takes some 10 ms, so re-reading is as good as a notification."""
    deadline = time.monotonic() + _MOVE_TIMEOUT_S
    while cgroup.procs(path) and time.monotonic() < deadline:  # noqa: ASYNC110 - the kernel sets no event
        await asyncio.sleep(0.002)
