# SPDX-License-Identifier: Apache-2.0
"""Requests that end with one answer: optional INFO records, then OK or ERROR. And PEEK, whose answer has bytes.

Long-lived channels are elsewhere: commands in `execs`, transfers in `files`.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from dsecd.backends.agentlink.connection import Channel, Connection
from dsecd.backends.agentlink.frames import MAX_OFFSET, OUTPUT_HEAD, Fields, Tag, Type, Violation, raw, u64
from dsecd.backends.agentlink.records import LinkLost, Peeked, error_from

T = TypeVar("T")

# A name of 255 bytes, a symlink target of 4,096 and twenty numbers fit well.
MAX_INFO: Final = 8_192
MAX_LIST_EXECS: Final = 2_048


class Call(Channel, Generic[T]):
    """One request. `items` are its decoded INFO records, at least `least` and at most `most` of them."""

    __slots__ = ("_decode", "_least", "_most", "future", "items")

    def __init__(self, conn: Connection, decode: Callable[[Fields], T] | None, least: int, most: int) -> None:
        super().__init__(conn)
        self._decode = decode
        self._least = least
        self._most = most
        self.items: list[T] = []
        self.future: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()

    def frame(self, kind: int, flags: int, payload: memoryview) -> bool:
        if kind == Type.INFO and self._decode is not None:
            if len(self.items) >= self._most or len(payload) > MAX_INFO:
                raise Violation("more records than were asked for")
            self.items.append(self._decode(Fields(payload)))
            return False
        if kind == Type.OK:
            if len(self.items) < self._least:
                raise Violation("an answer without its record")
            fields = Fields(payload)
            if not self.future.done():
                self.future.set_result(fields)
        elif kind == Type.ERROR:
            error = error_from(Fields(payload))
            if not self.future.done():
                self.future.set_exception(error)
        else:
            raise self.unexpected(kind)
        return True

    def lost(self, error: LinkLost) -> None:
        if not self.future.done():
            self.future.set_exception(error.again())


async def request(
    conn: Connection,
    kind: int,
    payload: bytes = b"",
    decode: Callable[[Fields], T] | None = None,
    least: int = 0,
    most: int = 0,
) -> tuple[Fields, list[T]]:
    """Sends one request and waits for its answer. Raises AgentError, LinkLost; CLOSE is sent when cancelled."""
    if conn.paused:
        await conn.drain()
    call = Call(conn, decode, least, most)
    conn.open(call, kind, (payload,))
    try:
        return await call.future, call.items
    finally:
        conn.abandon(call)


async def request_one(conn: Connection, kind: int, payload: bytes, decode: Callable[[Fields], T]) -> T:
    """A request that is answered by exactly one record."""
    _, items = await request(conn, kind, payload, decode, 1, 1)
    return items[0]


class _Peek(Channel):
    """A PEEK: OUTPUT of one stream at rising offsets, then OK with the ring's bounds."""

    __slots__ = ("_asked", "_left", "_stream", "data", "future", "offset")

    def __init__(self, conn: Connection, stream: int, offset: int, most: int) -> None:
        super().__init__(conn)
        self._asked = offset
        self._stream = stream
        self._left = most
        self.data = bytearray()
        self.offset: int | None = None
        self.future: asyncio.Future[Peeked] = asyncio.get_running_loop().create_future()

    def frame(self, kind: int, flags: int, payload: memoryview) -> bool:
        if kind == Type.OUTPUT:
            self._output(payload)
            return False
        if kind == Type.OK:
            result = self._result(Fields(payload))
            if not self.future.done():
                self.future.set_result(result)
        elif kind == Type.ERROR:
            error = error_from(Fields(payload))
            if not self.future.done():
                self.future.set_exception(error)
        else:
            raise self.unexpected(kind)
        return True

    def _output(self, payload: memoryview) -> None:
        size = len(payload) - OUTPUT_HEAD.size
        if size < 0 or size > self._left:
            raise Violation("more output than was asked for")
        stream, offset = OUTPUT_HEAD.unpack_from(payload)
        place = self._asked if self.offset is None else self.offset + len(self.data)
        if stream != self._stream or offset < place:
            raise Violation("output of another place than was asked for")
        if size == 0 and self.offset is not None:
            raise Violation("output without bytes")
        if self.offset is None or offset != place:
            # The ring moved on meanwhile: what came before the gap is no longer part of what it holds.
            self.data.clear()
            self.offset = offset
        self._left -= size
        self.data += payload[OUTPUT_HEAD.size :]

    def _result(self, fields: Fields) -> Peeked:
        start, end = fields.u64(Tag.START), fields.u64(Tag.END)
        offset = max(self._asked, start) if self.offset is None else self.offset
        if start > end or (self.data and offset + len(self.data) > end):
            raise Violation("a ring whose bounds do not hold its bytes")
        return Peeked(bytes(self.data), start, end, offset)

    def lost(self, error: LinkLost) -> None:
        if not self.future.done():
            self.future.set_exception(error.again())


async def peek(conn: Connection, exec_id: str, stream: int, offset: int, max_bytes: int) -> Peeked:
    """Reads held output without attaching. Raises AgentError, LinkLost, ValueError."""
    if stream not in (1, 2) or not 0 <= offset <= MAX_OFFSET or max_bytes < 0:
        raise ValueError("peek takes stream 1 or 2 and an offset and size that are not negative")
    if conn.paused:
        await conn.drain()
    call = _Peek(conn, stream, offset, max_bytes)
    payload = (
        raw(Tag.ID, exec_id.encode("ascii"))
        + u64(Tag.STREAM, stream)
        + u64(Tag.OFFSET, offset)
        + u64(Tag.BYTES, max_bytes)
    )
    conn.open(call, Type.PEEK, (payload,))
    try:
        return await call.future
    finally:
        conn.abandon(call)
