# SPDX-License-Identifier: Apache-2.0
"""Container sandboxes: an OverlayFS of idmapped EROFS layers, run by crun in namespaces of its own.

What belongs here: the plan that makes one, and what can be done to a running one. What does not: what the steps do
(``container_steps.py``), how one is started (``launch.py``), its OCI configuration (``oci.py``), the agent's protocol
(``agentlink``), when and for whom (``dsecd.core``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Mapping, Sequence

from dsecd.backends import files
from dsecd.backends.agentlink.link import AgentError, LinkLost
from dsecd.backends.base import Box, Saves, Site, translated
from dsecd.backends.container_steps import KILL_TIMEOUT_S, ContainerSteps
from dsecd.backends.plan import Step
from dsecd.linux import cgroup, mechanisms, pidfd, userns
from libdsec import errors
from libdsec.memory import MachineMemory
from libdsec.network import Policy
from libdsec.types import BackendState, Limits, NetworkState, SandboxSpec

#: What the agent may take beyond the grace it was told.
_LAST_WORDS_S = 2.0
#: Mechanisms without which there is no container at all.
_NEEDED = frozenset((
    "user-namespaces", "mount-namespaces", "idmapped-mounts", "overlay-data-only", "erofs-file", "cgroup-v2",
    "cgroup-freeze", "cgroup-kill", "pidfd", "clone-into-cgroup", "seccomp", "crun",
))  # fmt: skip


class ContainerBackend:
    """See ``base.Backend``."""

    name = "container"
    needs = _NEEDED
    ids = userns.SIZE
    saves: Saves | None = None

    def __init__(self, site: Site) -> None:
        self._steps = ContainerSteps(site)
        self.cgroup = self._steps.cgroup

    def probe(self) -> BackendState:
        missing = [status for status in mechanisms.report() if status.name in _NEEDED and status.works is False]
        detail = "; ".join(f"{status.name}: {status.reason}" for status in missing)
        return BackendState(name=self.name, works=not missing, detail=detail)

    def check(self, spec: SandboxSpec) -> list[str]:
        self._steps.network.check(spec.network)
        steps = self._steps
        return [
            *steps.limits.check(spec.limits), *steps.confinement.check(spec), *steps.classes.check(spec),
        ]  # fmt: skip

    def residents(self) -> set[str]:
        return self._steps.residents()

    async def take_stock(self, boxes: Sequence[Box]) -> None:
        await self._steps.confinement.take_stock(boxes)

    def disk_steps(self, box: Box) -> Sequence[Step]:
        on, do = functools.partial, self._steps
        return (Step("disk", "directories for what it writes", on(do.make_disk, box), on(do.trash_disk, box)),)

    def run_steps(self, box: Box) -> Sequence[Step]:
        on, do = functools.partial, self._steps
        return (
            Step("rundir", "bundle and log directory", on(do.make_rundir, box), on(do.remove_rundir, box)),
            # Before the cgroup, so that it is removed when there is no process any more that it could confine.
            Step("profile", "AppArmor profile", on(do.confinement.acquire, box),
                 on(do.confinement.release, box)),
            Step("cgroup", "cgroup with agent/ and run/", on(do.make_cgroup, box), on(do.remove_cgroup, box)),
            Step("launch", "stack the layers and start the agent", on(do.launch, box), on(do.end, box)),
            Step("network", "device and policy", on(do.network.attach, box), on(do.network.detach, box)),
            Step("connect", "connection to the agent", on(do.identify_and_connect, box), on(do.disconnect, box)),
            Step("limits", "limits of the cgroup", on(do.apply_limits, box)),
        )

    async def reconnect(self, box: Box) -> None:
        await self._steps.network.settle(box)
        await self._steps.reconnect(box)

    async def pause(self, box: Box) -> None:
        with translated(f"pause '{box.id}'"):
            if not await cgroup.freeze(self._steps.cgroup(box) / "run", KILL_TIMEOUT_S):
                await cgroup.thaw(self._steps.cgroup(box) / "run")
                raise errors.TimedOut(f"pause '{box.id}': not all processes stood still after {KILL_TIMEOUT_S:g} s")

    async def resume(self, box: Box) -> None:
        with translated(f"resume '{box.id}'"):
            if not await cgroup.thaw(self._steps.cgroup(box) / "run"):
                raise errors.TimedOut(f"resume '{box.id}': still frozen (is a cgroup above it frozen?)")

    def kill(self, box: Box) -> None:
        cgroup.kill(self._steps.cgroup(box))

    async def shut_down(self, box: Box, grace_s: float) -> None:
        # Whatever keeps it from ending in peace, an agent's lies too: what is left is killed next. TimeoutError and
        # ProcessLookupError are OSErrors.
        with contextlib.suppress(LinkLost, AgentError, OSError):
            await cgroup.thaw(self._steps.cgroup(box) / "run")
            if box.link is None or box.process is None:
                return
            with files.closing(pidfd.open(box.process)) as fd:
                async with asyncio.timeout(grace_s + _LAST_WORDS_S):
                    await box.link.shutdown(int(grace_s * 1000))
                    await pidfd.wait_exit(fd, grace_s + _LAST_WORDS_S)

    async def set_limits(self, box: Box, limits: Limits) -> None:
        await self._steps.set_limits(box, limits)

    def exec_limits(self, limits: Limits) -> Mapping[str, str]:
        self._steps.limits.check(limits)
        return self._steps.limits.attributes(limits)

    async def set_network(self, box: Box, policy: Policy) -> None:
        await self._steps.network.change(box, policy)

    async def dial(self, box: Box, port: int) -> socket.socket:
        return await self._steps.network.dial(box, port)

    def network(self, box: Box) -> NetworkState:
        return self._steps.network.state(box)

    def usage(self, box: Box) -> Mapping[str, int]:
        with translated(f"read the cgroup of '{box.id}'"):
            return cgroup.stat(self._steps.cgroup(box))

    async def machine_memory(self, box: Box) -> MachineMemory | None:
        del box
        return None

    def death(self, box: Box) -> str | None:
        # The agent's own cgroup: commands that ended this way are none of its business.
        events = cgroup.read_keyed(self._steps.cgroup(box) / "agent", "memory.events")
        return "oom" if events.get("oom_kill") else None
