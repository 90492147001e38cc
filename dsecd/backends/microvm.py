# SPDX-License-Identifier: Apache-2.0
"""MicroVM sandboxes: a kernel of their own, an environment mapped from the host's page cache, a disk to write to.

What belongs here: the plan that makes one, and what can be done to a running one. What does not: what the steps do
(``microvm_steps.py``), the monitors that run it (``dsecd.vmm``), the agent's protocol (``agentlink``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Mapping, Sequence

from dsecd.backends import files, machines, microvm_memory
from dsecd.backends.agentlink.link import AgentError, AgentLink, LinkLost
from dsecd.backends.base import Box, Saves, Site, translated
from dsecd.backends.microvm_saves import MicrovmSaves
from dsecd.backends.microvm_steps import MicrovmSteps
from dsecd.backends.plan import Step
from dsecd.linux import cgroup, mechanisms, pidfd
from libdsec import errors
from libdsec.memory import MachineMemory
from libdsec.network import Policy
from libdsec.types import BackendState, Limits, NetworkState, SandboxSpec

#: What a guest may take beyond the grace it was told, to write its files and to end.
_LAST_WORDS_S = 5.0
_FREEZE_S = 10.0
_DIAL_S = 10.0
#: Mechanisms without which there is no microVM at all.
_NEEDED = frozenset((
    "mount-namespaces", "overlay-data-only", "erofs-file", "mkfs-erofs", "cgroup-v2", "cgroup-kill", "pidfd", "crun",
    "mkfs-ext4",
))  # fmt: skip


class MicrovmBackend:
    """See ``base.Backend``."""

    name = "microvm"
    #: Not every host is one for virtual machines; `probe` says what this one lacks.
    needs: frozenset[str] = frozenset()
    #: All that a kernel has: the last of 32 bits means "no change" to it, setresuid(2).
    ids = (1 << 32) - 1

    def __init__(self, site: Site) -> None:
        self._steps = MicrovmSteps(site)
        self.saves: Saves | None = MicrovmSaves(self._steps, site.state_dir)
        self.cgroup = self._steps.cgroup

    def probe(self) -> BackendState:
        missing = [status for status in mechanisms.report() if status.name in _NEEDED and status.works is False]
        if missing:
            detail = "; ".join(f"{status.name}: {status.reason}" for status in missing)
            return BackendState(name=self.name, works=False, detail=detail)
        works, detail = self._steps.host.probe()
        return BackendState(name=self.name, works=works, detail=detail)

    def check(self, spec: SandboxSpec) -> list[str]:
        machines.check(spec)
        self._steps.network.check(spec.network)
        return self._steps.check(spec)

    def residents(self) -> set[str]:
        return self._steps.residents()

    async def take_stock(self, boxes: Sequence[Box]) -> None:
        """They share nothing that has to be counted."""

    def disk_steps(self, box: Box) -> Sequence[Step]:
        on, do = functools.partial, self._steps.disks
        return (
            Step("disk", "a disk for what it writes", on(do.make, box), on(do.trash, box)),
            Step("environment", "its layers as one image", on(do.link_environment, box)),
        )

    def run_steps(self, box: Box) -> Sequence[Step]:
        on, do = functools.partial, self._steps
        return (
            Step("rundir", "sockets, keys and logs", on(do.make_rundir, box), on(do.remove_rundir, box)),
            Step("cgroup", "cgroup of the monitor", on(do.make_cgroup, box), on(do.remove_cgroup, box)),
            Step("network", "device and policy", on(do.attach, box), on(do.network.detach, box)),
            Step("launch", "start the monitor and let the guest boot", on(do.launch, box), on(do.end, box)),
            Step("connect", "connection to the agent", on(do.identify_and_connect, box), on(do.disconnect, box)),
            Step("limits", "limits of the cgroup", on(do.apply_limits, box)),
        )

    async def reconnect(self, box: Box) -> None:
        await self._steps.network.settle(box)
        await self._steps.reconnect(box)

    async def pause(self, box: Box) -> None:
        await _freeze(self._steps, box, "pause", frozen=True)

    async def resume(self, box: Box) -> None:
        await _freeze(self._steps, box, "resume", frozen=False)

    def kill(self, box: Box) -> None:
        cgroup.kill(self._steps.cgroup(box))

    async def shut_down(self, box: Box, grace_s: float) -> None:
        # Whatever keeps it from ending in peace, an agent's lies too: what is left is killed next. TimeoutError and
        # ProcessLookupError are OSErrors.
        with contextlib.suppress(LinkLost, AgentError, OSError):
            if box.link is None or box.process is None:
                return
            with files.closing(pidfd.open(box.process)) as fd:
                async with asyncio.timeout(grace_s + _LAST_WORDS_S):
                    await box.link.machine.freeze(frozen=False)
                    await box.link.shutdown(int(grace_s * 1000))
                    await pidfd.wait_exit(fd, grace_s + _LAST_WORDS_S)

    async def set_limits(self, box: Box, limits: Limits) -> None:
        await self._steps.change_limits(box, limits)

    def exec_limits(self, limits: Limits) -> Mapping[str, str]:
        return machines.exec_limits(limits)

    async def set_network(self, box: Box, policy: Policy) -> None:
        await self._steps.network.change(box, policy)

    async def dial(self, box: Box, port: int) -> socket.socket:
        doing = f"connect to port {port} of '{box.id}'"
        with translated(doing):
            try:
                async with asyncio.timeout(_DIAL_S):
                    return await _link(box, "connect to").machine.dial(port)
            except AgentError as error:
                if error.code == "refused":
                    raise errors.Refused(f"{doing}: nobody listens there") from error
                raise

    def network(self, box: Box) -> NetworkState:
        return self._steps.network.state(box)

    def usage(self, box: Box) -> Mapping[str, int]:
        with translated(f"read the cgroup of '{box.id}'"):
            counted = dict(cgroup.stat(self._steps.cgroup(box)))
        counted.pop("pids.current", None)  # the monitor's threads say nothing about the sandbox
        if "memory.current" not in counted and (cost := microvm_memory.cost(self._steps, box)) is not None:
            counted["memory.current"] = cost.guest_bytes + cost.monitor_bytes
        return counted

    async def machine_memory(self, box: Box) -> MachineMemory | None:
        return await microvm_memory.report(self._steps, box)

    def death(self, box: Box) -> str | None:
        events = cgroup.read_keyed(self._steps.cgroup(box), "memory.events")
        if events.get("oom_kill"):
            return "oom"
        said = self._steps.last_words(box)
        return f"crash; last words: {said!r}" if "Kernel panic" in said else None


async def _freeze(steps: MicrovmSteps, box: Box, doing: str, *, frozen: bool) -> None:
    # The guest does it, for which a machine of batch has to get time.
    with translated(f"{doing} '{box.id}'"), steps.classes.not_starved(steps.cgroup(box)):
        async with asyncio.timeout(_FREEZE_S):
            await _link(box, doing).machine.freeze(frozen=frozen)


def _link(box: Box, doing: str) -> AgentLink:
    if box.link is None:
        raise errors.SandboxLost(f"{doing} '{box.id}': its agent does not answer", retryable=True)
    return box.link
