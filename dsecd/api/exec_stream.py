# SPDX-License-Identifier: Apache-2.0
"""A running command over a WebSocket, both ways.

Here: the frames of docs/api.md and who waits for whom. Not here: the command (``dsecd.core.execs``).

Memory is bounded in both directions: output counts as consumed, so that the command may produce more, only
when the socket has taken it; input is read ahead by a few messages, so that a resize or a signal behind it is
still seen.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import TypeVar

from aiohttp import WSMessage, WSMsgType, web
from pydantic import ValidationError

from dsecd.api.call import Call, explain, invalid
from dsecd.api.room import crowded
from dsecd.api.sockets import first_of
from dsecd.core.execs import ExecStream
from libdsec.errors import DsecError, InvalidSpec, TooLarge
from libdsec.types import ExecInfo, ResizeRequest, SignalRequest, StreamStart

T = TypeVar("T")

# From the client.
STDIN, STDIN_EOF, RESIZE, SIGNAL, DETACH = 0x00, 0x01, 0x02, 0x03, 0x04
# From the daemon.
STARTED, STDOUT, STDERR, STDIN_ACCEPTED, EXIT = 0x10, 0x11, 0x12, 0x13, 0x1F

#: How long a client may take to say what it wants.
START_TIMEOUT_S = 10.0
#: Messages of input held while the command does not read.
STDIN_AHEAD = 4
_VALUES_MAX = 100_000

_OFFSET = struct.Struct("<Q")
_KIND_OF_STREAM = {1: bytes([STDOUT]), 2: bytes([STDERR])}


async def exec_stream(call: Call) -> web.StreamResponse:
    """Start or attach, then pass frames until the command ends, the client leaves or the daemon stops."""
    sockets = call.sockets
    socket = await sockets.accept(call.request)
    error: DsecError | None = None
    try:
        start = await _first_message(socket)
        if start is None:
            return socket
        stream = await call.core.execs.open_stream(call.principal, call.id, start)
        try:
            error = await _Conversation(socket, stream).hold()
        finally:
            await stream.detach()
    except DsecError as failure:
        error = failure
    except ConnectionError:
        pass  # gone; what it started goes on
    finally:
        if error is not None:
            error.request_id = call.request_id
        await sockets.end(socket, error)
    return socket


async def _first_message(socket: web.WebSocketResponse) -> StreamStart | None:
    """What the client wants; None when it left without saying."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            message = await socket.receive()
    except TimeoutError:
        raise InvalidSpec(f"exec stream: no first message within {START_TIMEOUT_S:g} s") from None
    if message.type is WSMsgType.TEXT:
        return _parse(StreamStart.model_validate_json, message.data)
    if message.type is WSMsgType.BINARY:
        raise InvalidSpec("exec stream: the first message must be text, a StreamStart")
    return None


class _Conversation:
    """One WebSocket and one command."""

    def __init__(self, socket: web.WebSocketResponse, stream: ExecStream) -> None:
        self._socket = socket
        self._stream = stream
        self._stdin: asyncio.Queue[bytes | None] = asyncio.Queue(STDIN_AHEAD)

    async def hold(self) -> DsecError | None:
        """Until one side has ended; the error that ended it, if one did."""
        info = ExecInfo(exec_id=self._stream.exec_id, pid=self._stream.pid, running=True)
        await self._socket.send_bytes(bytes([STARTED]) + info.model_dump_json().encode())
        return await first_of(self._pass_output(), self._take_input(), self._pass_stdin())

    async def _pass_output(self) -> None:
        socket, stream = self._socket, self._stream
        while True:
            event = await stream.next()
            if isinstance(event, ExecInfo):
                await socket.send_bytes(bytes([EXIT]) + event.model_dump_json().encode())
                return
            await socket.send_bytes(_KIND_OF_STREAM[event.stream] + _OFFSET.pack(event.offset) + event.data)
            stream.consumed(event.stream, len(event.data))

    async def _take_input(self) -> None:
        while (message := await self._socket.receive()).type is WSMsgType.BINARY:
            if not await self._understand(message):
                return
        if message.type is WSMsgType.TEXT:
            raise InvalidSpec("exec stream: only the first message is text")
        if message.type is WSMsgType.ERROR:
            raise InvalidSpec(f"exec stream: {message.data}")

    async def _understand(self, message: WSMessage) -> bool:
        """Act on one message; False when it was the last."""
        data: bytes = message.data
        kind = data[0] if data else None
        if kind == STDIN:
            await self._stdin.put(data[1:])
        elif kind == STDIN_EOF:
            await self._stdin.put(None)
        elif kind == RESIZE:
            size = _parse(ResizeRequest.model_validate_json, data[1:])
            await self._stream.resize(size.rows, size.cols)
        elif kind == SIGNAL:
            signal = _parse(SignalRequest.model_validate_json, data[1:])
            await self._stream.signal(signal.signal, signal.tree)
        elif kind == DETACH:
            return False
        else:
            raise InvalidSpec(f"exec stream: no message begins with {data[:1].hex() or 'nothing'}")
        return True

    async def _pass_stdin(self) -> None:
        """Bytes of a start are counted from 0, of an attachment from where it attached."""
        taken = 0
        while (data := await self._stdin.get()) is not None:
            await self._stream.write_stdin(data)
            taken += len(data)
            await self._socket.send_bytes(bytes([STDIN_ACCEPTED]) + _OFFSET.pack(taken))
        await self._stream.close_stdin()
        await asyncio.Event().wait()  # the end of input is not the end of the conversation


def _parse(read: Callable[[bytes | str], T], data: bytes | str) -> T:
    if crowded(data.encode(errors="replace") if isinstance(data, str) else data, _VALUES_MAX):
        raise TooLarge(f"exec stream: the message has more than {_VALUES_MAX} values", limit=_VALUES_MAX)
    try:
        return read(data)
    except ValidationError as error:
        raise invalid(explain(error)) from None
