# SPDX-License-Identifier: Apache-2.0
"""Handlers about the daemon itself: host, operations, events, the API's description.

Here: see the routes. Not here: what they report (``dsecd.core``).
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import WSMsgType, web
from pydantic import BaseModel

from dsecd.api import openapi as description
from dsecd.api.call import Call
from dsecd.api.router import Handler
from dsecd.api.sockets import first_of
from dsecd.core.events import Follower
from libdsec import types as t

_EVENTS = 1000
_SANDBOXES = 1000


async def openapi(_call: Call) -> web.StreamResponse:
    return web.Response(body=description.document(), content_type="application/json")


async def version(call: Call) -> BaseModel:
    return call.core.host.version()


async def host(call: Call) -> BaseModel:
    return await call.core.host.report()


async def doctor(call: Call) -> BaseModel:
    return await call.core.host.doctor()


async def memory(call: Call) -> BaseModel:
    return await call.core.memory.report(
        call.principal, call.texts("sandbox"), after=call.text("after"), limit=call.integer("limit") or _SANDBOXES
    )


async def operations(call: Call) -> BaseModel:
    return t.OperationList(operations=tuple(call.core.operations.list(call.principal)))


async def operation(call: Call) -> BaseModel:
    wait_s = call.seconds("wait_s")
    return await call.core.operations.wait(call.principal, call.parameters["operation_id"], wait_s)


async def operation_cancel(call: Call) -> BaseModel:
    return await call.core.operations.cancel(call.principal, call.parameters["operation_id"])


async def events(call: Call) -> BaseModel:
    since, limit = call.integer("since") or 0, call.integer("limit") or _EVENTS
    wait_s = call.seconds("wait_s")
    if wait_s:
        return await call.core.events.wait(since, wait_s, limit, call.principal)
    return call.core.events.after(since, limit, call.principal)


async def events_stream(call: Call) -> web.StreamResponse:
    follower = call.core.events.follow(call.integer("since"), call.principal)
    socket = await call.sockets.accept(call.request)
    error = await first_of(_tell(socket, follower), _until_left(socket))
    await call.sockets.end(socket, error)
    return socket


async def _tell(socket: web.WebSocketResponse, follower: Follower) -> None:
    while found := await follower.next():
        for event in found:
            await socket.send_str(event.model_dump_json())


async def _until_left(socket: web.WebSocketResponse) -> None:
    while (await socket.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
        pass  # nothing is expected, nothing is kept


HANDLERS: Mapping[str, Handler] = {
    handler.__name__: handler
    for handler in (
        openapi, version, host, doctor, memory, operations, operation, operation_cancel, events, events_stream,
    )
}  # fmt: skip
