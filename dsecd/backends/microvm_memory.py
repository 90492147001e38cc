# SPDX-License-Identifier: Apache-2.0
"""What memory a microVM costs its host, and what its guest says of it.

What belongs here: putting both together, and bounding the guest's word. What does not: the kernel's count
(``linux/smaps.py``), the balloon device (``dsecd.vmm``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress

from dsecd.backends.base import Box
from dsecd.backends.microvm_steps import MicrovmSteps
from dsecd.backends.plan import in_thread
from dsecd.linux import smaps
from libdsec.memory import MachineMemory

#: How long the guest may take to say anything; most say it at once.
_TOLD_S = 3.0
#: What cannot be more than the machine has; all else are counters since it booted.
_SIZES = frozenset(("total", "free", "available", "disk_caches"))
#: The largest number that every reader of JSON takes for what it is.
_MOST = 1 << 53
#: Names of the same in QEMU's words.
_NAMES = {"total_memory": "total", "free_memory": "free", "available_memory": "available"}


def cost(steps: MicrovmSteps, box: Box) -> MachineMemory | None:
    """What the host pays. Blocks. Runs in a thread."""
    process = steps.driver.process(steps.place(box))
    if process is None:
        return None
    held = smaps.read(process.pid, {"guest": steps.driver.memory_names, "layers": ("/layer",)})
    return MachineMemory(
        guest_bytes=held["guest"].shared, layers_bytes=held["layers"].shared, monitor_bytes=held[""].shared,
        guest_resident_bytes=held["guest"].resident, size_bytes=_size(steps, box),
    )  # fmt: skip


async def report(steps: MicrovmSteps, box: Box) -> MachineMemory | None:
    """What the host pays, with what the guest says as far as it says anything in time."""
    found = await in_thread(cost, steps, box)
    if found is None:
        return None
    told: Mapping[str, int] = {}
    # TimeoutError is an OSError, and so is what a monitor refuses: then the guest says nothing.
    with suppress(OSError):
        async with asyncio.timeout(_TOLD_S):
            told = await steps.driver.memory(steps.place(box))
    return found.model_copy(update={"told": bounded(told, found.size_bytes)})


def bounded(told: Mapping[str, int], size_bytes: int) -> dict[str, int]:
    """The guest's word by Linux's names, none of it more than it can be."""
    named = {_NAMES.get(name, name): value for name, value in told.items()}
    return {name: max(0, min(value, size_bytes if name in _SIZES else _MOST)) for name, value in named.items()}


def _size(steps: MicrovmSteps, box: Box) -> int:
    with suppress(OSError, ValueError):
        return int(json.loads(steps.disks.boot_file(box, "machine").read_text())["memory_bytes"])
    return box.spec.limits.memory_max_bytes or 0
