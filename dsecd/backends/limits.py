# SPDX-License-Identifier: Apache-2.0
"""Limits of a sandbox as cgroup v2 attributes.

What belongs here: which attribute a limit becomes, in which of the sandbox's cgroups, and which controllers
must be there. What does not: the files themselves (``dsecd.linux.cgroup``). Source: the kernel's
admin-guide/cgroup-v2.rst.

Limits lie on ``run``, where commands live, so that no command can starve the agent beside it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from dsecd.linux import cgroup
from libdsec import errors
from libdsec.types import Limits

log = logging.getLogger(__name__)

#: A fork bomb ends here when nothing else was asked for.
DEFAULT_PIDS_MAX = 8192
_CPU_PERIOD_US = 100_000
_MOVE_TIMEOUT_S = 5.0
_WANTED = ("memory", "pids", "cpu", "io")


def attributes(limits: Limits) -> dict[str, str]:
    """cgroup attribute to value for every limit that is set; the default for pids when none is."""
    plain = {
        "memory.max": limits.memory_max_bytes,
        "memory.high": limits.memory_high_bytes,
        "memory.swap.max": limits.swap_max_bytes,
        "cpu.weight": limits.cpu_weight,
        "pids.max": limits.pids_max or DEFAULT_PIDS_MAX,
    }
    values = {name: str(value) for name, value in plain.items() if value is not None}
    if limits.cpu_max_permil is not None:
        values["cpu.max"] = f"{limits.cpu_max_permil * _CPU_PERIOD_US // 1000} {_CPU_PERIOD_US}"
    return values


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


class LimitWriter:
    """Writes limits where the controllers exist, and says where they do not."""

    def __init__(self, cgroup_dir: Path) -> None:
        self._dir = cgroup_dir

    def _available(self) -> frozenset[str]:
        return cgroup.controllers(self._dir) & frozenset(_WANTED)

    def check(self, limits: Limits) -> list[str]:
        """Raise FeatureMissing for a limit asked for without its controller; name the default ones that are off."""
        available = self._available()
        asked = attributes(limits)
        if limits.pids_max is None:
            del asked["pids.max"]
        missing = sorted({name.split(".")[0] for name in asked} - available)
        if missing:
            names = ", ".join(name for name in sorted(asked) if name.split(".")[0] in missing)
            raise errors.FeatureMissing(
                f"limit {names}: this host has no cgroup v2 controller {', '.join(missing)} for sandboxes",
                hint="run 'dsecctl host' to see what this host offers",
                feature=f"cgroup-{missing[0]}",
            )
        return [] if "pids" in available else ["pids.max"]

    async def apply(self, sandbox: Path, limits: Limits) -> None:
        """Write them. Raises cgroup.AttributeRefused; EBUSY when the agent does not leave the sandbox's top cgroup."""
        available = self._available()
        if not available:
            return
        await _until_empty(sandbox)
        cgroup.enable(self._dir, available)
        cgroup.enable(sandbox, available)
        for name, value in attributes(limits).items():
            if name.split(".")[0] in available:
                cgroup.write(sandbox / "run", name, value)


async def _until_empty(path: Path) -> None:
    """A cgroup that gives controllers to its children may hold no processes itself: wait until the agent, which starts
    there, has moved aside. It takes some 10 ms, so re-reading is as good as a notification."""
    deadline = time.monotonic() + _MOVE_TIMEOUT_S
    while cgroup.procs(path) and time.monotonic() < deadline:  # noqa: ASYNC110 - the kernel sets no event
        await asyncio.sleep(0.002)
