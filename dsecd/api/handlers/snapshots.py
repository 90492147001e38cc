# SPDX-License-Identifier: Apache-2.0
"""Handlers about copies of running sandboxes: forks, and snapshots with names.

Here: see the routes. Not here: copies (``dsecd.core.forks``, ``dsecd.core.snapshots``).
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from dsecd.api.call import Call
from dsecd.api.router import Handler
from libdsec import snapshots as s
from libdsec import types as t


async def fork(call: Call) -> BaseModel:
    return await call.core.forks.fork(call.principal, call.id, call.json(s.ForkRequest))


async def snapshot_create(call: Call) -> BaseModel:
    return await call.core.snapshots.create(call.principal, call.id, call.json(s.SnapshotRequest))


async def snapshots(call: Call) -> BaseModel:
    return call.core.snapshots.list(call.principal)


async def snapshot_inspect(call: Call) -> BaseModel:
    return call.core.snapshots.get(call.principal, call.id)


async def snapshot_remove(call: Call) -> BaseModel:
    await call.core.snapshots.remove(call.principal, call.id)
    return t.Empty()


async def clone(call: Call) -> BaseModel:
    return await call.core.snapshots.clone(call.principal, call.id, call.json(s.CloneRequest))


HANDLERS: Mapping[str, Handler] = {
    handler.__name__: handler
    for handler in (fork, snapshot_create, snapshots, snapshot_inspect, snapshot_remove, clone)
}
