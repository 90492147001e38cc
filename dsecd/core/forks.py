# SPDX-License-Identifier: Apache-2.0
"""Copies of running sandboxes.

What belongs here: making them, all or none. What does not: how a kind of sandbox is copied (``dsecd.backends``), the
life of a copy, which is that of any sandbox (``lifecycle.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from dsecd.core.lifecycle import Lifecycle
from dsecd.core.live import Live
from dsecd.core.principal import Principal
from dsecd.core.registry import Registry
from dsecd.core.tasks import Tasks
from libdsec.types import CreateRequest, ForkRequest, SandboxList, SandboxSpec, State


class Forks:
    """A copy goes on as a task of the daemon: a client that goes away does not stop it half-way."""

    def __init__(self, registry: Registry, lifecycle: Lifecycle, tasks: Tasks, *, parallel: int) -> None:
        self._registry = registry
        self._lifecycle = lifecycle
        self._tasks = tasks
        self._gate = asyncio.Semaphore(parallel)

    async def fork(self, principal: Principal, sandbox_id: str, request: ForkRequest) -> SandboxList:
        """Copies of a sandbox that runs. Raises what kept one from being made; then there are none."""
        live = self._registry.find(principal, sandbox_id, "fork")
        return await asyncio.shield(self._tasks.spawn(f"fork {sandbox_id}", self._fork(principal, live, request)))

    async def _fork(self, principal: Principal, live: Live, request: ForkRequest) -> SandboxList:
        # A host name of the user's own would be all copies'.
        spec = live.record.spec.model_copy(update={"hostname": None})
        ids: Sequence[str | None] = request.ids or [None] * request.count
        async with live.lock:
            live.require("fork", State.RUNNING)
            async with live.backend.saved(live.box) as origin:
                made = await asyncio.gather(
                    *(self._copy(principal, spec, copy_id, origin) for copy_id in ids), return_exceptions=True
                )
        copies = [one for one in made if isinstance(one, Live)]
        failures = [one for one in made if isinstance(one, BaseException)]
        if failures:
            for copy in copies:
                await self._lifecycle.delete(copy, "another copy could not be made")
            raise failures[0]
        return SandboxList(sandboxes=tuple(copy.record.to_wire() for copy in copies))

    async def _copy(self, principal: Principal, spec: SandboxSpec, copy_id: str | None, origin: Path) -> Live:
        async with self._gate:
            live = self._registry.admit(principal, CreateRequest(spec=spec, id=copy_id))
            live.box.origin = origin
            await self._lifecycle.create(live)
            return live
