# SPDX-License-Identifier: Apache-2.0
"""WebSockets: opening, errors, ending, and closing all of them when the daemon stops.

Here: what every WebSocket route needs. Not here: what is said over them (``exec_stream.py``,
``handlers/system.py``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress

from aiohttp import WSCloseCode, web

from libdsec.errors import DsecError

#: Of a message from the client.
MESSAGE_MAX_BYTES = 1 << 20
#: How long the other side may take to answer a close.
CLOSE_TIMEOUT_S = 1.0


class Sockets:
    """The WebSockets that are open."""

    def __init__(self) -> None:
        self._open: set[web.WebSocketResponse] = set()

    async def accept(self, request: web.BaseRequest) -> web.WebSocketResponse:
        """Shake hands.  Raises aiohttp's HTTPException when it is not a proper WebSocket request."""
        # No heartbeat: the kernel tells when the other end of a Unix socket is gone, and a client that is
        # slow on purpose would answer none. No compression: it costs more than it saves inside one machine.
        socket = web.WebSocketResponse(
            max_msg_size=MESSAGE_MAX_BYTES, compress=False, timeout=CLOSE_TIMEOUT_S
        )
        await socket.prepare(request)
        self._open.add(socket)
        return socket

    async def end(self, socket: web.WebSocketResponse, error: DsecError | None = None) -> None:
        """Close it: normally, or after saying what went wrong as a text message with the error's JSON."""
        self._open.discard(socket)
        with suppress(ConnectionError):
            if error is not None:
                await socket.send_str(json.dumps(error.to_wire(), default=str))
            await socket.close(code=WSCloseCode.OK if error is None else WSCloseCode.INTERNAL_ERROR)

    async def close_all(self) -> None:
        """Tell every client that the daemon is going away; it may come back to the next one."""
        sockets, self._open = list(self._open), set()
        async with asyncio.TaskGroup() as group:
            for socket in sockets:
                group.create_task(_leave(socket))


async def _leave(socket: web.WebSocketResponse) -> None:
    with suppress(ConnectionError):
        await socket.close(code=WSCloseCode.GOING_AWAY, message=b"the daemon is stopping")


async def first_of(*coros: Coroutine[object, object, None]) -> DsecError | None:
    """Run all until the first one ends, then cancel the others; the error of the tree that ended it, if one did.

    A broken connection counts as an end without error; any other exception comes out.
    """
    errors: list[DsecError] = []
    ended = asyncio.Event()

    async def run(coro: Coroutine[object, object, None]) -> None:
        try:
            await coro
        except DsecError as error:
            errors.append(error)
        except ConnectionError:
            pass
        ended.set()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(coro)) for coro in coros]
            await ended.wait()
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as group_error:
        # A bug: one traceback is enough, and whoever catches it knows the single kind.
        raise group_error.exceptions[0] from None
    return errors[0] if errors else None
