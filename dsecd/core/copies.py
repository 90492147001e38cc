# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that begin as a copy of another, all or none.

What belongs here: making several at once, and removing those that were made when one cannot be. What does not: what
they are copies of (``forks.py``, ``snapshots.py``), the life of a copy, which is that of any sandbox
(``lifecycle.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsecd.core.lifecycle import Lifecycle
from dsecd.core.live import Live
from dsecd.core.principal import Principal
from dsecd.core.publishing import any_free
from dsecd.core.registry import Registry
from libdsec.types import CreateRequest, SandboxList, SandboxSpec


@dataclass(frozen=True)
class Model:
    """What copies begin as."""

    spec: SandboxSpec
    layers: tuple[str, ...]
    origin: Path  # what the backend saved
    snapshot: str = ""  # its name, if it stays


class Copies:
    """Makes them, a few at once."""

    def __init__(self, registry: Registry, lifecycle: Lifecycle, *, parallel: int) -> None:
        self._registry = registry
        self._lifecycle = lifecycle
        self._gate = asyncio.Semaphore(parallel)

    async def make(self, principal: Principal, model: Model, ids: Sequence[str | None]) -> SandboxList:
        """One for each id, None for one that is made up. Raises what kept one from being made; then there are none."""
        made = await asyncio.gather(*(self._copy(principal, model, copy_id) for copy_id in ids), return_exceptions=True)
        copies = [one for one in made if isinstance(one, Live)]
        failures = [one for one in made if isinstance(one, BaseException)]
        if failures:
            for copy in copies:
                await self._lifecycle.delete(copy, "another copy could not be made")
            raise failures[0]
        return SandboxList(sandboxes=tuple(copy.record.to_wire() for copy in copies))

    async def _copy(self, principal: Principal, model: Model, copy_id: str | None) -> Live:
        # A host name of the user's own would be all copies', and a port of the host's is one's alone.
        publish = any_free(model.spec.publish)
        spec = model.spec.model_copy(update={"hostname": None, "publish": publish})
        async with self._gate:
            request = CreateRequest(spec=spec, id=copy_id)
            live = self._registry.admit(principal, request, layers=model.layers, snapshot=model.snapshot)
            live.box.origin = model.origin
            await self._lifecycle.create(live)
            return live
