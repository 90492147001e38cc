# SPDX-License-Identifier: Apache-2.0
"""What the steps that run a microVM do and undo.

What belongs here: one method for each step and one for its undo, which works from the box's id alone. What does not:
their order (``microvm.py``), what stays after a stop (``microvm_disks.py``), what machine it is (``machines.py``), the
monitor (``dsecd.vmm``).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from dsecd.backends import classes, machines, network, oci
from dsecd.backends.agentlink.link import connect_socket
from dsecd.backends.base import Box, Site, translated
from dsecd.backends.limits import DEFAULT_PIDS_MAX
from dsecd.backends.machine_host import MachineHost
from dsecd.backends.machine_network import MachineNetwork
from dsecd.backends.microvm_disks import BOOT_FILES, NOTED, MicrovmDisks
from dsecd.backends.plan import in_thread
from dsecd.linux import cgroup, mountns
from dsecd.vmm.base import Machine, Place, Snapshot
from dsecd.vmm.guest import Boot
from libdsec import errors
from libdsec.types import Limits, SandboxSpec

_CGROUP_PREFIX = "vm-"
_GREET_S = 60.0  # an emulated guest on a busy host is slow
_RECONNECT_S = 60.0
#: A monitor that writes its disk through ends when the host has done that, beside all others who write.
_KILL_TIMEOUT_S = 30.0
_GONE_TIMEOUT_S = 1.0


class MicrovmSteps:
    """Everything a running microVM has on this host, made and removed by the id of its box."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._settings = site.machines
        self.disks = MicrovmDisks(site)
        self._runs = site.runtime_dir / "vms"
        self._runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.classes = classes.shared(site)
        self.host = MachineHost(site)
        self.driver = self.host.driver
        self.network = MachineNetwork(network.shared(site))
        self._limits = self.classes.limits
        # A boot is work for a processor from its beginning to its end: more at once only get slower.
        self._launches = asyncio.Semaphore(max(2, os.cpu_count() or 1))
        self._threads = mountns.FreshThreads()

    def check(self, spec: SandboxSpec) -> list[str]:
        """Raise for what is asked for and cannot be had here; name the defaults that are off."""
        self._limits.check(machines.asked_of_host(spec.limits))
        return [*self.host.check_profile(network=spec.network != "none"), *self.classes.check(spec)]

    def residents(self) -> set[str]:
        found = {path.name for place in (self.disks.directory, self._runs) for path in place.iterdir()}
        groups = self.classes.groups()
        found |= {name.removeprefix(_CGROUP_PREFIX) for name in groups if name.startswith(_CGROUP_PREFIX)}
        return found | self.driver.residents() | self.network.names()

    def cgroup(self, box: Box) -> Path:
        """The cgroup of everything of the box; the monitor is in its child ``run``."""
        return self.classes.group(box, f"{_CGROUP_PREFIX}{box.id}")

    def place(self, box: Box) -> Place:
        return Place(
            id=box.id, rundir=self._runs / box.id, cgroup=self.cgroup(box) / "run", uid=box.uid_base,
            profile=box.profile,
        )  # fmt: skip

    def last_words(self, box: Box) -> str:
        return self.driver.last_words(self.place(box))

    async def make_rundir(self, box: Box) -> None:
        with translated(f"start '{box.id}'"):
            (self._runs / box.id).mkdir(mode=0o700)

    async def remove_rundir(self, box: Box) -> None:
        shutil.rmtree(self._runs / box.id, ignore_errors=True)

    async def make_cgroup(self, box: Box) -> None:
        with translated(f"start '{box.id}'"):
            self.classes.prepare(box)
            await in_thread(cgroup.create, self.cgroup(box) / "run")

    async def remove_cgroup(self, box: Box) -> None:
        with translated(f"remove the cgroup of '{box.id}'"):
            await cgroup.wait_empty(self.cgroup(box), _GONE_TIMEOUT_S)
            await in_thread(cgroup.remove, self.cgroup(box), _GONE_TIMEOUT_S)

    async def attach(self, box: Box) -> None:
        # A copy has what it is a copy of, whatever its policy.
        copied = box.origin is not None and machines.noted_network(box.origin / NOTED)
        await self.network.attach(box, device=copied or (box.origin is None and box.spec.network != "none"))

    async def launch(self, box: Box) -> None:
        with translated(f"start '{box.id}'"):
            machine = await in_thread(self._machine, box)
            box.profile = self.host.profile(network=bool(machine.nics))
            restore = None if box.origin is None else Snapshot(box.origin / "state", box.origin / "memory")
            async with self._launches:
                with self.classes.not_starved(self.cgroup(box)):
                    await in_thread(_start, self, box, machine, restore, executor=self._threads)
            self.network.let_go(box)

    def _machine(self, box: Box) -> Machine:
        """What it is started as, noted down beside its disk. Blocks. Runs in a thread."""
        environment, disk, nics = self.disks.environment(box), self.disks.disk(box), self.network.nics(box)
        kernel, initramfs, noted = (self.disks.boot_file(box, name) for name in BOOT_FILES)
        if box.origin is not None:
            for path in (kernel, initramfs, noted):
                path.hardlink_to(box.origin / path.name)
            return machines.noted(noted, Boot(kernel, initramfs), environment=environment, disk=disk, nics=nics)
        boot = self.host.boot()
        machine = machines.machine(
            box.id, box.spec, self._settings, boot, environment=environment, disk=disk, nics=nics,
            dns_server=self._site.network.dns_server,
        )  # fmt: skip
        for path in (kernel, initramfs, noted):
            path.unlink(missing_ok=True)
        kernel.hardlink_to(boot.kernel)
        initramfs.hardlink_to(boot.initramfs)
        machines.note(machine, noted)
        return machine

    async def end(self, box: Box) -> None:
        """Kill the monitor, wherever its start got to."""
        with translated(f"end '{box.id}'"):
            if cgroup.populated(self.cgroup(box)):
                await in_thread(cgroup.kill, self.cgroup(box))
        with self.classes.not_starved(self.cgroup(box)):
            ended = await cgroup.wait_empty(self.cgroup(box), _KILL_TIMEOUT_S)
        if not ended:
            raise errors.TimedOut(
                f"end '{box.id}': its monitor still lives {_KILL_TIMEOUT_S:g} s after SIGKILL (stuck in the kernel?)",
                hint="delete it again later; its resources stay reserved until then",
            )
        with translated(f"end '{box.id}'"):
            await in_thread(self.driver.forget, self.place(box))
        self.classes.cookies.forget(box)
        box.process = None

    async def identify_and_connect(self, box: Box) -> None:
        box.process = self.driver.process(self.place(box))
        try:
            await self._connect(box, self._settings.boot_timeout_s, told=False)
        except (errors.SandboxLost, errors.Refused) as error:
            raise errors.BackendFailed(
                f"start '{box.id}': its machine ended before its agent answered; last words: {self.last_words(box)!r}"
            ) from error
        except errors.TimedOut as error:
            raise errors.BackendFailed(
                f"start '{box.id}': its agent did not answer within {self._settings.boot_timeout_s:g} s; "
                f"last words: {self.last_words(box)!r}",
                hint="raise microvm.boot_timeout_s in dsecd.toml on a slow host",
            ) from error

    async def disconnect(self, box: Box) -> None:
        if box.link is not None:
            link, box.link = box.link, None
            await link.close()

    async def reconnect(self, box: Box) -> None:
        self.classes.restore(self.cgroup(box))
        if box.process is not None:
            self.classes.cookies.worn(box, box.process.pid)
        await self._connect(box, _RECONNECT_S, told=True)

    async def _connect(self, box: Box, timeout_s: float, *, told: bool) -> None:
        """``told``: it knows already who it is."""
        with translated(f"connect to the agent of '{box.id}'"), self.classes.not_starved(self.cgroup(box)):
            if box.origin is not None:
                await self.driver.resume(self.place(box))
            sock = await self.driver.dial(self.place(box), timeout_s)
            box.link = await connect_socket(
                sock, generation=self._site.generation, timeout_s=_GREET_S, on_lost=box.on_link_lost
            )
            if not told and machines.noted_network(self.disks.boot_file(box, NOTED)):
                await self.network.tell_guest(box)
            if box.origin is not None:
                await box.link.machine.renew(oci.hostname(box.id, box.spec))
                await box.link.machine.freeze(frozen=False)

    async def apply_limits(self, box: Box) -> None:
        with translated(f"limit '{box.id}'"), self.classes.not_starved(self.cgroup(box)):
            limits = machines.host_limits(box.spec.limits, self._settings)
            await self._limits.apply(self.cgroup(box), limits, divided=False)

    async def change_limits(self, box: Box, limits: Limits) -> None:
        old = box.spec.limits
        machines.check_change(box.id, old, limits)
        if box.link is None:
            raise errors.SandboxLost(f"limit '{box.id}': its agent does not answer", retryable=True)
        with translated(f"limit '{box.id}'"):
            if limits.pids_max != old.pids_max:
                await box.link.machine.limit_pids(limits.pids_max or DEFAULT_PIDS_MAX)
            before, after = (machines.host_limits(one, self._settings) for one in (old, limits))
            await self._limits.change(self.cgroup(box), before, after, divided=False)


def _start(steps: MicrovmSteps, box: Box, machine: Machine, restore: Snapshot | None) -> None:
    """Blocks. Runs in one of mountns.FreshThreads, which it changes: what it starts inherits its cookie, and so do all
    threads of the monitor."""
    steps.classes.cookies.put_on(box)
    steps.driver.start(steps.place(box), machine, restore)
    if (process := steps.driver.process(steps.place(box))) is not None:
        steps.classes.cookies.worn(box, process.pid)
