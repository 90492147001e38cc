# SPDX-License-Identifier: Apache-2.0
"""Copies of running sandboxes, made at once.

What belongs here: saving one for as long as its copies are being made. What does not: how a kind of sandbox is saved
(``dsecd.backends``), the making (``copies.py``), what is saved under a name (``snapshots.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from dsecd.backends.base import Saves
from dsecd.core.copies import Copies, Model
from dsecd.core.live import Live
from dsecd.core.principal import Principal
from dsecd.core.registry import Registry
from dsecd.core.tasks import Tasks
from libdsec.snapshots import ForkRequest
from libdsec.types import SandboxList, State


class Forks:
    """A copy goes on as a task of the daemon: a client that goes away does not stop it half-way."""

    def __init__(self, registry: Registry, copies: Copies, tasks: Tasks) -> None:
        self._registry = registry
        self._copies = copies
        self._tasks = tasks

    async def fork(self, principal: Principal, sandbox_id: str, request: ForkRequest) -> SandboxList:
        """Copies of a sandbox that runs. Raises what kept one from being made; then there are none."""
        live = self._registry.find(principal, sandbox_id, "fork")
        return await asyncio.shield(self._tasks.spawn(f"fork {sandbox_id}", self._fork(principal, live, request)))

    async def _fork(self, principal: Principal, live: Live, request: ForkRequest) -> SandboxList:
        ids: Sequence[str | None] = request.ids or [None] * request.count
        async with live.lock:
            live.require("fork", State.RUNNING)
            async with _saved(live, self._registry.saves("fork", live)) as origin:
                model = Model(live.record.spec, live.record.layers, origin)
                return await self._copies.make(principal, model, ids)


@contextlib.asynccontextmanager
async def _saved(live: Live, saves: Saves) -> AsyncIterator[Path]:
    origin = await saves.save(live.box, "fork", paused=False)
    try:
        yield origin
    finally:
        await saves.discard(origin)
