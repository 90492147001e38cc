# SPDX-License-Identifier: Apache-2.0
"""Which monitor runs machines on this host: as configured, or what is installed and works.

What belongs here: the choice, and finding the monitor that a machine was started with.  What does not: the monitors.

The choice is for machines that are started from now on.  One that runs, or left something behind, stays with the
monitor that started it, whatever the configuration says since.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

from dsecd.linux.pidfd import Process
from dsecd.vmm.base import Driver, Machine, Place, Probe, Snapshot, VmmError
from dsecd.vmm.firecracker.driver import Firecracker
from dsecd.vmm.qemu import Qemu

#: auto: Firecracker where it works, else QEMU.
Asked = Literal["auto", "qemu", "firecracker"]


class Choice:
    """Both monitors as one.  See ``base.Driver``."""

    name = "choice"
    memory_names: Sequence[str] = (*Firecracker.memory_names, *Qemu.memory_names)

    def __init__(self, asked: Asked, firecracker: Firecracker, qemu: Driver) -> None:
        self._asked = asked
        self._firecracker = firecracker
        self._qemu = qemu
        self._lock = threading.Lock()
        self._chosen: Driver | None = None

    def probe(self) -> Probe:
        """What machines are started with, and why not with Firecracker where that was asked for in vain."""
        with self._lock:
            self._chosen = None  # what is installed may have changed
        chosen = self.chosen()
        found = chosen.probe()
        if chosen is self._qemu and self._asked == "auto":
            why_not = self._firecracker.probe()
            return Probe(found.works, f"{found.detail} (no Firecracker: {why_not.detail})")
        return found

    def chosen(self) -> Driver:
        """The monitor for new machines.  Blocks the first time: it is tried.  Runs in a thread."""
        with self._lock:
            if self._chosen is None:
                wanted = self._asked == "firecracker" or (self._asked == "auto" and self._firecracker.probe().works)
                self._chosen = self._firecracker if wanted else self._qemu
            return self._chosen

    def _of(self, place: Place) -> Driver:
        return self._firecracker if self._firecracker.knows(place) else self._qemu

    def start(self, place: Place, machine: Machine, restore: Snapshot | None = None) -> None:
        chosen = self._for(network=bool(machine.nics))
        if self._of(place) is not chosen and self._of(place).process(place) is None:
            self._of(place).forget(place)
        chosen.start(place, machine, restore)

    def _for(self, *, network: bool) -> Driver:
        """Firecracker opens its taps itself, with a header before each frame in which a guest may ask for a checksum
        anywhere in it, after it was judged: a port in there could become another. So it is given none.
        """
        chosen = self.chosen()
        if not network or chosen is self._qemu:
            return chosen
        if self._asked == "firecracker":
            raise VmmError("machines with a network run under QEMU only: set 'microvm.monitor' to \"auto\" or \"qemu\"")
        return self._qemu

    def process(self, place: Place) -> Process | None:
        return self._of(place).process(place)

    async def dial(self, place: Place, timeout_s: float) -> socket.socket:
        return await self._of(place).dial(place, timeout_s)

    async def pause(self, place: Place) -> None:
        await self._of(place).pause(place)

    async def resume(self, place: Place) -> None:
        await self._of(place).resume(place)

    async def save(self, place: Place, target: Snapshot) -> Mapping[str, str]:
        return await self._of(place).save(place, target)

    def profile(self, *, network: bool) -> str:
        wanted = self._qemu if network and self._asked != "firecracker" else self.chosen()
        return wanted.profile(network=network)

    def likeness(self, *, network: bool) -> Mapping[str, str]:
        return self._for(network=network).likeness(network=network)

    async def memory(self, place: Place) -> Mapping[str, int]:
        return await self._of(place).memory(place)

    def last_words(self, place: Place) -> str:
        return self._of(place).last_words(place)

    def forget(self, place: Place) -> None:
        self._firecracker.forget(place)
        self._qemu.forget(place)

    def residents(self) -> set[str]:
        return self._firecracker.residents() | self._qemu.residents()
