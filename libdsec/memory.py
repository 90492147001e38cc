# SPDX-License-Identifier: Apache-2.0
"""Types of the API about memory: what sandboxes and the host use, and what was reclaimed.

Here: the answer of one route. Not here: limits of memory, and what else a sandbox uses (``types.py``).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from libdsec.types import OpenModel


class MachineMemory(OpenModel):
    """Memory of a virtual machine: what the host pays for it, as the host's kernel counts it, and what the guest says.

    What the host pays is the sum of the first three: a page that several machines share counts for each by its part.
    """

    guest_bytes: int = Field(description="of the guest's memory that is resident")
    layers_bytes: int = Field(description="of the images that it maps")
    monitor_bytes: int = Field(description="everything else of the monitor: its program, buffers, translated code")
    guest_resident_bytes: int = Field(description="of the guest's memory, shared pages whole")
    size_bytes: int = Field(description="of the machine")
    told: dict[str, int] = Field(
        default_factory=dict, description="the guest's word, in bytes, for looking only: total, free, available, "
        "disk_caches …; no more than the machine has, and empty before its driver has told anything",
    )  # fmt: skip


class SandboxMemory(OpenModel):
    """Memory of one sandbox that runs or is paused, as the host's kernel counts it; None where it does not.

    A page that several sandboxes share, as they do files of the same layers, counts for the one that brought it in.
    """

    id: str
    used_bytes: int | None = Field(None, description="memory.current")
    cold_bytes: int | None = Field(None, description="not touched of late: inactive anonymous and file pages")
    swapped_bytes: int | None = Field(None, description="memory.swap.current, before compression")
    refaults: int | None = Field(None, description="pages that were taken and then needed again, ever")
    reclaimed_bytes: int = Field(description="by which it fell while dsecd reclaimed from it, since dsecd's start")
    idle_s: float | None = Field(None, description="for how long it has used next to no processor")
    pressure_some_percent: float | None = Field(None, description="time in which a task waited for memory, last 10 s")
    pressure_full_percent: float | None = Field(None, description="time in which all tasks did, last 10 s")
    machine: MachineMemory | None = Field(None, description="of a virtual machine")


class HostMemory(OpenModel):
    """Memory of the host; each page counts once, however many share it."""

    total_bytes: int
    available_bytes: int
    sandboxes_bytes: int | None = Field(None, description="of all sandboxes together: memory.current of their parent")
    swap_total_bytes: int
    swap_used_bytes: int
    zram_stored_bytes: int | None = Field(None, description="in zram, before compression; None without zram swap")
    zram_memory_bytes: int | None = Field(None, description="memory that this takes")
    pressure_some_percent: float | None = None
    pressure_full_percent: float | None = None
    reclaim: Literal["damon", "memory.reclaim", "off"] = Field(description="how cold memory is reclaimed now")
    reclaim_detail: str = Field("", description="why not otherwise")
    reclaimed_bytes: int = Field(description="from all sandboxes, since dsecd's start")


class MemoryReport(OpenModel):
    host: HostMemory
    sandboxes: tuple[SandboxMemory, ...] = Field(description="those that run or are paused, by id")
    next: str | None = Field(None, description="pass as `after` for the next page")
