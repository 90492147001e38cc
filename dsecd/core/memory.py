# SPDX-License-Identifier: Apache-2.0
"""What memory sandboxes and the host use: the report behind `dsecctl mem`.

Here: reading it, for a page of sandboxes at a time. Not here: reclaiming any (``reclaim.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import psutil

from dsecd.core.live import Live
from dsecd.core.principal import Principal
from dsecd.core.reclaim import Reclaim
from dsecd.core.registry import Registry
from dsecd.core.turns import memory_bytes
from dsecd.linux import cgroup, psi, swap
from libdsec.memory import HostMemory, MachineMemory, MemoryReport, SandboxMemory
from libdsec.types import State

#: Each is a connection to a monitor, and some wait for their guests.
_MACHINES_AT_ONCE = 32
_ALIVE = (State.RUNNING, State.PAUSED)


def alive(live: Live) -> bool:
    """Whether it has processes."""
    return live.record.state in _ALIVE


class MemoryUse:
    """Reports on memory."""

    def __init__(self, registry: Registry, reclaim: Reclaim, cgroup_dir: Path) -> None:
        self._registry = registry
        self._reclaim = reclaim
        self._cgroup_dir = cgroup_dir
        self._asking = asyncio.Semaphore(_MACHINES_AT_ONCE)

    async def report(
        self, principal: Principal, names: Sequence[str], *, after: str | None, limit: int
    ) -> MemoryReport:
        """The host, and a page of the sandboxes. Raises NotFound, Denied for one that is named."""
        if names:
            lives = [self._registry.find(principal, name, "read the memory of") for name in dict.fromkeys(names)]
        else:
            lives = [live for live in self._registry.all() if principal.sees(live.record.owner_uid)]
        found = sorted(live.id for live in lives if alive(live) and (after is None or live.id > after))
        page = found[:limit]
        lives = [live for name in page if (live := self._registry.get(name))]
        places = [(live.id, live.backend.cgroup(live.box)) for live in lives]
        host, sandboxes = await asyncio.to_thread(self._read, places)
        machines = await asyncio.gather(*map(self._machine, lives))
        sandboxes = [
            one if machine is None else one.model_copy(update={"machine": machine})
            for one, machine in zip(sandboxes, machines, strict=True)
        ]
        return MemoryReport(host=host, sandboxes=tuple(sandboxes), next=page[-1] if len(found) > limit else None)

    async def _machine(self, live: Live) -> MachineMemory | None:
        async with self._asking:
            return await live.backend.machine_memory(live.box)

    def _read(self, places: Sequence[tuple[str, Path]]) -> tuple[HostMemory, list[SandboxMemory]]:
        """Blocks.  Runs in a thread."""
        return self._host(), [self._sandbox(name, path) for name, path in places]

    def _host(self) -> HostMemory:
        memory, areas, zram = psutil.virtual_memory(), swap.areas(), swap.zram_held()
        pressure = psi.read("memory")
        return HostMemory(
            total_bytes=memory.total,
            available_bytes=memory.available,
            sandboxes_bytes=memory_bytes(self._cgroup_dir),
            swap_total_bytes=sum(area.size_bytes for area in areas),
            swap_used_bytes=sum(area.used_bytes for area in areas),
            zram_stored_bytes=None if zram is None else zram.original_bytes,
            zram_memory_bytes=None if zram is None else zram.memory_bytes,
            pressure_some_percent=None if pressure is None else pressure.some.avg10,
            pressure_full_percent=None if pressure is None else pressure.full.avg10,
            reclaim=self._reclaim.method,
            reclaim_detail=self._reclaim.detail,
            reclaimed_bytes=self._reclaim.reclaimed_bytes,
        )

    def _sandbox(self, name: str, path: Path) -> SandboxMemory:
        stat = cgroup.read_keyed(path, "memory.stat")
        swapped = cgroup.read(path, "memory.swap.current")
        pressure = psi.read("memory", path)
        return SandboxMemory(
            id=name,
            used_bytes=memory_bytes(path),
            cold_bytes=_sum(stat, "inactive_anon", "inactive_file"),
            swapped_bytes=int(swapped) if swapped is not None and swapped.isdecimal() else None,
            refaults=_sum(stat, "workingset_refault_anon", "workingset_refault_file"),
            reclaimed_bytes=self._reclaim.reclaimed.get(name, 0),
            idle_s=self._reclaim.idleness.idle_for_s(name),
            pressure_some_percent=None if pressure is None else pressure.some.avg10,
            pressure_full_percent=None if pressure is None else pressure.full.avg10,
        )


def _sum(stat: dict[str, int], *names: str) -> int | None:
    """None where the kernel does not count them: there is no memory controller."""
    return sum(stat[name] for name in names) if all(name in stat for name in names) else None
