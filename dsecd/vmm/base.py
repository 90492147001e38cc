# SPDX-License-Identifier: Apache-2.0
"""What every virtual machine monitor is to a backend: one small interface, and the values that it takes and gives.

What belongs here: ``Driver`` and its values. What does not: any one monitor (a file each beside this one), what the
guest is for and what lies on its disks (``dsecd.backends``).

A driver keeps nothing about a machine in memory that it could not find again: everything derives from its ``Place``,
so a machine that an earlier daemon started is driven like one's own.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dsecd.linux.pidfd import Process

#: Sizes of memory and of layers are multiples of it: what virtio-pmem maps at a time.
ALIGN_BYTES = 2 << 20


@dataclass(frozen=True)
class Nic:
    """A network device: a tap that exists on the host."""

    tap: str
    mac: str
    fd: int = -1  # the tap, open; the monitor is given it, and the caller lets go of it when the monitor runs


@dataclass(frozen=True)
class Machine:
    """What a virtual machine is made of. Paths are the host's; the monitor's user need not reach them."""

    kernel: Path
    initramfs: Path | None
    cmdline: str  # the driver adds what its machine type needs: the console, how to end, how the agent is reached
    vcpus: int
    memory_bytes: int
    layers: tuple[Path, ...] = ()  # read-only images, shared by machines: /dev/pmem0, /dev/pmem1, …
    disk: Path | None = None  # raw, the machine's own: /dev/vda
    nics: tuple[Nic, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where on this host one machine lives; all of it derives from the sandbox's id."""

    id: str
    rundir: Path  # its own directory, 0700 and root's, made and removed by the caller: sockets, logs, pid
    cgroup: Path  # exists; the monitor is started in it
    uid: int  # user and group of the monitor, nobody else's
    profile: str = ""  # what ``Driver.profile`` said, loaded; empty where monitors are not confined


@dataclass(frozen=True)
class Snapshot:
    """The files of a machine that was saved while it stood still; immutable once they are written."""

    state: Path
    memory: Path


@dataclass(frozen=True)
class Probe:
    """Whether a driver can run machines here; ``detail`` says how (kvm, tcg, version), or why not."""

    works: bool
    detail: str


class VmmError(OSError):
    """The monitor refused a command, answered nonsense or is gone."""

    #: What to do about it, where that is known.
    hint = ""


class Driver(Protocol):
    """A virtual machine monitor. Calls may come for a machine that an earlier daemon started."""

    name: str
    #: Parts of the names that the mappings of a guest's memory have in /proc/PID/smaps.
    memory_names: Sequence[str]

    def probe(self) -> Probe:
        """Blocks. Runs in a thread."""
        ...

    def start(self, place: Place, machine: Machine, restore: Snapshot | None = None) -> None:
        """Start the monitor: unprivileged, in namespaces of its own and in the place's cgroup.

        Returns when its process runs; the guest boots meanwhile. With ``restore`` the guest stands still until
        ``resume``, and its memory is the snapshot's, copy-on-write; ``machine`` must be the one that was saved, but
        for the disk, which is a copy, and names of taps. Blocks. Runs in one of mountns.FreshThreads, which it
        changes. Raises OSError, proc.ProcessFailed.
        """
        ...

    def process(self, place: Place) -> Process | None:
        """The monitor as the host sees it, None when it is gone."""
        ...

    async def dial(self, place: Place, timeout_s: float) -> socket.socket:
        """A connected stream to the guest's agent, which from now on is the only one; waits for the guest to boot.

        Raises TimeoutError, OSError (ConnectionError when the monitor ended meanwhile).
        """
        ...

    async def pause(self, place: Place) -> None:
        """Stop all virtual processors; already is fine. Raises VmmError, OSError, TimeoutError, as all below do."""
        ...

    async def resume(self, place: Place) -> None:
        """Let them run; already is fine."""
        ...

    async def save(self, place: Place, target: Snapshot) -> Mapping[str, str]:
        """Write state and memory of a machine that stands still, which it still does afterwards.

        The target's files do not exist before; their directory is root's alone. Returns what ``likeness`` was when
        the machine was started. A full disk is an OSError that says so.
        """
        ...

    def profile(self, *, network: bool) -> str:
        """The AppArmor profile that was written for the monitors of machines with or without a ``network`` device. May
        block for a moment the first time."""
        ...

    def likeness(self, *, network: bool) -> Mapping[str, str]:
        """What must be the same for a machine that was saved, with or without a ``network`` device, to be restored by
        this driver on this host: the monitor, its version, the shape of its machines, the processor. Blocks. Runs in a
        thread. Raises OSError, proc.ProcessFailed."""
        ...

    async def memory(self, place: Place) -> Mapping[str, int]:
        """What the balloon device reports, in bytes, named as Linux does (``free``, ``total``, ``available``,
        ``disk_caches`` …); empty before the guest's driver has reported. The guest's word."""
        ...

    def last_words(self, place: Place) -> str:
        """The end of what the monitor and the guest's console printed, bounded; for messages."""
        ...

    def forget(self, place: Place) -> None:
        """Remove what the driver made outside of ``place.rundir`` for a machine whose processes are gone; absent is
        fine. Blocks. Runs in a thread."""
        ...

    def residents(self) -> set[str]:
        """Ids of all machines of which there is something outside of their ``rundir``."""
        ...
