# SPDX-License-Identifier: Apache-2.0
"""A connection into a sandbox over a WebSocket, both ways.

Here: the messages of docs/api.md and who waits for whom. Not here: the connection (``dsecd.core.sandboxes``).

Memory is bounded in both directions: what one side does not take, the other cannot send.
"""

from __future__ import annotations

import asyncio
import json

from aiohttp import WSMsgType, web

from dsecd.api.call import Call
from dsecd.api.sockets import first_of
from libdsec.errors import DsecError, InvalidSpec

_READ_BYTES = 1 << 16


async def forward(call: Call) -> web.StreamResponse:
    """Connect, then pass bytes until both directions have ended or the client leaves."""
    port = call.integer("port")
    assert port is not None
    socket = await call.sockets.accept(call.request)
    error: DsecError | None = None
    try:
        connection = await call.core.sandboxes.dial(call.principal, call.id, port)
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            await socket.send_str(json.dumps({"port": port}))
            error = await _pass(socket, reader, writer)
        finally:
            writer.close()
    except DsecError as failure:
        error = failure
    except ConnectionError:
        pass
    finally:
        if error is not None:
            error.request_id = call.request_id
        await call.sockets.end(socket, error)
    return socket


async def _pass(
    socket: web.WebSocketResponse, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> DsecError | None:
    ended = [asyncio.Event(), asyncio.Event()]

    async def out() -> None:
        while data := await reader.read(_READ_BYTES):
            await socket.send_bytes(data)
        await socket.send_bytes(b"")
        ended[0].set()
        await asyncio.Event().wait()  # the client may have more to send

    async def into() -> None:
        while (message := await socket.receive()).type is WSMsgType.BINARY:
            if message.data:
                writer.write(message.data)
                await writer.drain()
            else:
                writer.write_eof()
                ended[1].set()
        if message.type is WSMsgType.TEXT:
            raise InvalidSpec("forward: messages are binary")

    async def both() -> None:
        for event in ended:
            await event.wait()

    return await first_of(out(), into(), both())
