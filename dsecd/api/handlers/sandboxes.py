# SPDX-License-Identifier: Apache-2.0
"""Handlers about sandboxes.

Here: see the routes. Not here: what happens to a sandbox (``dsecd.core.sandboxes``).
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from dsecd.api.call import Call
from dsecd.api.forward import forward
from dsecd.api.router import Handler
from dsecd.core.operations import Report
from libdsec import types as t
from libdsec.errors import InvalidSpec

#: Sandboxes on one page of a list, when the client does not say.
PAGE = 1000
#: How long one creation may wait for room, within the time of its route.
MAX_WAIT_S = 110.0


async def create(call: Call) -> BaseModel:
    request = call.json(t.CreateRequest)
    if request.wait_s is not None and request.wait_s > MAX_WAIT_S:
        raise InvalidSpec(
            f"create: wait_s: at most {MAX_WAIT_S:g} s, a batch may wait longer",
            errors=[{"path": "wait_s", "message": f"must be at most {MAX_WAIT_S:g}"}],
        )
    return await call.core.sandboxes.create(call.principal, request)


async def create_batch(call: Call) -> BaseModel:
    sandboxes, principal, request = call.core.sandboxes, call.principal, call.json(t.BatchCreateRequest)

    async def job(report: Report) -> list[t.BatchItem]:
        return await sandboxes.create_batch(principal, request, report)

    return await call.core.operations.start("create-batch", principal, job)


async def list_(call: Call) -> BaseModel:
    return call.core.sandboxes.list(
        call.principal,
        labels=call.texts("label"),
        states=_states(call),
        after=call.text("after"),
        limit=call.integer("limit") or PAGE,
    )


async def inspect(call: Call) -> BaseModel:
    return call.core.sandboxes.get(call.principal, call.id)


async def usage(call: Call) -> BaseModel:
    return await call.core.sandboxes.usage(call.principal, call.id)


async def network(call: Call) -> BaseModel:
    return await call.core.sandboxes.network(call.principal, call.id)


async def update(call: Call) -> BaseModel:
    return await call.core.sandboxes.update(call.principal, call.id, call.json(t.UpdateRequest))


async def delete(call: Call) -> BaseModel:
    await call.core.sandboxes.delete(call.principal, call.id)
    return t.Empty()


async def stop(call: Call) -> BaseModel:
    return await call.core.sandboxes.stop(call.principal, call.id, call.json(t.StopRequest))


async def start(call: Call) -> BaseModel:
    wait_s = call.seconds("wait_s") if "wait_s" in call.query else None
    return await call.core.sandboxes.start(call.principal, call.id, wait_s)


async def pause(call: Call) -> BaseModel:
    return await call.core.sandboxes.pause(call.principal, call.id)


async def resume(call: Call) -> BaseModel:
    return await call.core.sandboxes.resume(call.principal, call.id)


async def wait(call: Call) -> BaseModel:
    return await call.core.sandboxes.wait(call.principal, call.id, _states(call), call.seconds("wait_s"))


def _states(call: Call) -> list[t.State]:
    return [t.State(text) for text in call.texts("state")]


HANDLERS: Mapping[str, Handler] = {
    "list": list_,
    **{
        handler.__name__: handler
        for handler in (
            create, create_batch, inspect, usage, network, forward, update, delete, stop, start, pause, resume, wait,
        )
    },
}
