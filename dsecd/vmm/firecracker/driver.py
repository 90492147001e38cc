# SPDX-License-Identifier: Apache-2.0
"""Firecracker as a monitor of microVMs: see ``base.Driver``.

What belongs here: the order in which a process is jailed, found, told its machine, and let go.  What does not: single
calls (api), their fields (models), the jail (jail), the guest's port (vsock).

The kernel says which process a machine is: the one of the machine's user in the machine's cgroup.  Nothing that the
process itself writes is asked for that, and nothing is kept in memory, so a new daemon finds it the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from dsecd.linux import apparmor, cgroup, cpuinfo, mountns, pidfd, proc, syscalls
from dsecd.linux.mechanisms import by_name
from dsecd.linux.pidfd import Process
from dsecd.vmm.base import Machine, Place, Probe, Snapshot
from dsecd.vmm.firecracker import install, jail, models, vsock
from dsecd.vmm.firecracker.api import Api, Endpoint
from dsecd.vmm.firecracker.errors import (
    BadSnapshot,
    CallTimedOut,
    ConnectRefused,
    FirecrackerError,
    NotAnswering,
    StartFailed,
)
from dsecd.vmm.firecracker.jail import Jail, Limits, Programs
from dsecd.vmm.firecracker.plan import AGENT_PORT, binds, largest_file, load, requests

#: In apparmor/dsec-firecracker: the jailer's becomes Firecracker's when the one executes the other.
PROFILE, JAILER_PROFILE = "dsec-firecracker", "dsec-jailer"
_JAILER_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 15.0
#: A snapshot writes all of the guest's memory, at disk speed.
_SAVE_TIMEOUT_S = 600.0
_KILL_TIMEOUT_S = 10.0
#: Firecracker lets go of a connection that the guest has not answered after two seconds, and may not say so.
_DIAL_TRY_S = 2.5
_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.1
_STATE_LIMIT_BYTES, _MEMORY_LIMIT_BYTES = 16 << 20, 1 << 42
_LENT = "snapshot"


class Firecracker:
    """See ``base.Driver``."""

    name = "firecracker"
    # memfd_create(2) of its own, or a snapshot's file.
    memory_names: Sequence[str] = ("memfd:guest_mem", f"/{jail.MEMORY}")

    def __init__(self, programs: Programs, jails: Path, launch_ns: int, kernel: Callable[[], Path]) -> None:
        """``jails`` is on a disk, the one that snapshots go to; ``launch_ns`` a mount namespace with few mounts;
        ``kernel`` finds what guests boot."""
        jails.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._programs = programs
        self._jails = jails
        self._launch_ns = launch_ns
        self._kernel = kernel

    def probe(self) -> Probe:
        try:
            found = install.check(self._programs)
            install.check_kernel(self._kernel())
        except (OSError, proc.ProcessFailed, ValueError) as error:
            return Probe(works=False, detail=str(error))
        kvm = by_name("kvm").check()
        if not kvm.works:
            return Probe(works=False, detail=f"Firecracker {found} needs KVM: {kvm.reason}")
        return Probe(works=True, detail=f"Firecracker {found} with kvm")

    # ------------------------------------------------------------------------------------------------- starting

    def start(self, place: Place, machine: Machine, restore: Snapshot | None = None) -> None:
        if self.process(place) is not None:
            raise StartFailed(f"start '{place.id}'", f"process {self.process(place)} of it runs already")
        home = self._jail(place)
        home.remove()
        given = binds(machine, restore)
        try:
            if machine.disk is not None:
                os.chown(machine.disk, place.uid, place.uid)
            home.prepare(given)
            mountns.enter_copy(self._launch_ns)
            # A process that needs no tap has no network at all.
            network = 0 if machine.nics else syscalls.CLONE_NEWNET
            syscalls.unshare(syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS | network)
            home.attach(given)
            _run_jailer(place, home, Limits(file_bytes=largest_file(machine)))
            asyncio.run(self._tell(place, machine, restore))
            home.seal()
        except BaseException:
            self._kill(place, home)
            home.detach(given)
            home.remove()
            raise

    async def _tell(self, place: Place, machine: Machine, restore: Snapshot | None) -> None:
        """Wait for the API of a process that has just been started, and make the machine with it."""
        version = await self._await_api(place)
        async with self._api(place) as api:
            try:
                if restore is not None:
                    await api.send(load(machine), timeout_s=_START_TIMEOUT_S)
                    return
                for request in requests(machine, version):
                    await api.send(request)
            except FirecrackerError as error:
                why = f"{error}{_dying_words(self._jail(place))}"
                raise StartFailed(f"start '{place.id}'", why, error.hint) from error

    async def _await_api(self, place: Place) -> models.Version:
        """Which release answers.  A process has to appear within moments: the jailer has ended by now."""
        deadline, pause_s = time.monotonic() + _START_TIMEOUT_S, _FIRST_POLL_S
        while True:
            try:
                async with self._api(place) as api:
                    return await api.version()
            except (NotAnswering, CallTimedOut) as error:
                # The jailer was in the cgroup, and so is all that it started.
                gone = not cgroup.populated(place.cgroup)
                if gone or time.monotonic() > deadline:
                    why = "ended before its API answered" if gone else f"no API after {_START_TIMEOUT_S:g} s: {error}"
                    raise StartFailed(
                        f"start '{place.id}'", f"firecracker {why}{_dying_words(self._jail(place))}",
                        "run 'dsecctl doctor': it tries Firecracker and KVM",
                    ) from error  # fmt: skip
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _kill(self, place: Place, home: Jail) -> None:
        """End whatever a start that failed has started."""
        cgroup.kill(place.cgroup)
        # Were the cgroup not where the jailer looked for it, it would have left the process outside of it.
        stray = home.pid()
        if stray is not None and _uid_of(stray) == place.uid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stray, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while cgroup.populated(place.cgroup) and time.monotonic() < deadline:
            time.sleep(_FIRST_POLL_S)

    # -------------------------------------------------------------------------------------------------- finding

    def process(self, place: Place) -> Process | None:
        for pid in cgroup.procs(place.cgroup):
            # The jailer is root's until the moment it becomes Firecracker.
            if _uid_of(pid) == place.uid:
                return pidfd.identify(pid)
        return None

    def knows(self, place: Place) -> bool:
        """Whether there is anything of this machine."""
        return self._jail(place).directory.exists()

    def residents(self) -> set[str]:
        return {path.name for path in self._jails.iterdir()}

    def forget(self, place: Place) -> None:
        self._jail(place).remove()

    def last_words(self, place: Place) -> str:
        home = self._jail(place)
        return "\n".join(text for name in (jail.CONSOLE, jail.LOG) if (text := home.tail(name)))

    def _jail(self, place: Place) -> Jail:
        return Jail(self._jails / place.id, place.id, place.uid, self._programs)

    @contextlib.asynccontextmanager
    async def _api(self, place: Place) -> AsyncIterator[Api]:
        process = self.process(place)
        if process is None:
            raise NotAnswering(f"talk to firecracker of '{place.id}'", "it is not running")
        try:
            opened = self._jail(place).opened()
            with opened as root:
                yield Api(Endpoint(root, jail.API_SOCKET, place.uid, process))
        except FileNotFoundError as error:
            raise NotAnswering(f"talk to firecracker of '{place.id}'", str(error)) from error

    # -------------------------------------------------------------------------------------------------- running

    async def dial(self, place: Place, timeout_s: float) -> socket.socket:
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_POLL_S
        while True:
            process, left_s = self.process(place), deadline - time.monotonic()
            if process is None:
                words = _dying_words(self._jail(place))
                raise ConnectionResetError(errno.ECONNRESET, f"firecracker of '{place.id}' ended{words}")
            try:
                with self._jail(place).opened() as root:
                    limit_s = min(max(left_s, _FIRST_POLL_S), _DIAL_TRY_S)
                    return await vsock.connect(root, jail.VSOCK_SOCKET, AGENT_PORT, timeout_s=limit_s)
            except (ConnectRefused, NotAnswering, CallTimedOut, FileNotFoundError) as error:
                # Not yet: the guest boots, or the process is about to be seen as gone.
                if deadline - time.monotonic() < pause_s:
                    raise TimeoutError(f"no agent of '{place.id}' after {timeout_s:g} s: {error}") from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    async def pause(self, place: Place) -> None:
        async with self._api(place) as api:
            await api.send(models.VmState("Paused"))

    async def resume(self, place: Place) -> None:
        async with self._api(place) as api:
            await api.send(models.VmState("Resumed"))

    async def memory(self, place: Place) -> Mapping[str, int]:
        async with self._api(place) as api:
            found = await api.get(models.BalloonStats)
        told = {
            "free": found.free_memory, "total": found.total_memory, "available": found.available_memory,
            "disk_caches": found.disk_caches, "swap_in": found.swap_in, "swap_out": found.swap_out,
        }  # fmt: skip
        return {name: value for name, value in told.items() if value is not None}

    def profile(self, *, network: bool) -> str:
        del network
        return PROFILE

    def likeness(self, *, network: bool) -> Mapping[str, str]:
        del network
        return {"monitor": self.name, "version": install.check(self._programs), **cpuinfo.likeness()}

    async def save(self, place: Place, target: Snapshot) -> Mapping[str, str]:
        home = self._jail(place)
        await asyncio.to_thread(home.lend, _LENT)
        try:
            async with self._api(place) as api:
                version = await api.version()
                if (await api.get(models.InstanceInfo)).state != "Paused":
                    raise BadSnapshot(f"save '{place.id}'", "it is running", "pause it first")
                request = models.SnapshotCreate(f"/{_LENT}/{jail.STATE}", f"/{_LENT}/{jail.MEMORY}")
                await api.send(request, timeout_s=_SAVE_TIMEOUT_S)
            await asyncio.to_thread(_take, place, home, target)
        finally:
            await asyncio.to_thread(home.drop, _LENT)
        return {"monitor": self.name, "version": models.version_text(version), **cpuinfo.likeness()}


def _run_jailer(place: Place, home: Jail, limits: Limits) -> None:
    group = place.cgroup.relative_to(cgroup.root())
    if place.profile:
        # On a thread that executes nothing else.
        apparmor.confine_next(JAILER_PROFILE)
    try:
        proc.run_blocking(home.argv(str(group), limits), timeout_s=_JAILER_TIMEOUT_S)
    except proc.ProcessFailed as error:
        raise StartFailed(f"start '{place.id}'", str(error), "look at the jailer's words above") from error


def _take(place: Place, home: Jail, target: Snapshot) -> None:
    """Move what a snapshot wrote out of the jail, after a look at what it is.  Blocks."""
    home.take_back(_LENT)
    taken: list[Path] = []
    try:
        for name, path, most in (
            (jail.STATE, target.state, _STATE_LIMIT_BYTES),
            (jail.MEMORY, target.memory, _MEMORY_LIMIT_BYTES),
        ):
            home.take(f"{_LENT}/{name}", path, limit_bytes=most)
            taken.append(path)
    except BaseException as error:
        for path in taken:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, FirecrackerError):
            raise BadSnapshot(f"save '{place.id}'", str(error)) from error
        raise


def _dying_words(home: Jail) -> str:
    words = home.tail(jail.LOG)
    return f"; last line: {words.splitlines()[-1]}" if words else ""


def _uid_of(pid: int) -> int | None:
    """The user a process runs as; None when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # "Uid:" with the real id first; no name of a process can hold a line of its own there.  proc_pid_status(5)
    return int(status.partition("\nUid:")[2].split(None, 1)[0])
