# SPDX-License-Identifier: Apache-2.0
"""File transfers through the agent: FILE_GET as an async iterator, FILE_PUT as a writer.

One-answer file requests (stat, list, remove, ...) are plain calls, made in `link`.
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Final, Self

from dsecd.backends.agentlink.connection import Channel, Connection
from dsecd.backends.agentlink.flow import MAX_ALLOWANCE, Allowance, Waiter, Window
from dsecd.backends.agentlink.frames import (
    DATA_HEAD,
    MAX_DATA,
    MAX_OFFSET,
    STDIN,
    Fields,
    Tag,
    Type,
    Violation,
    as_bytes,
    data_frame,
    frame,
    raw,
    u64,
)
from dsecd.backends.agentlink.records import AgentError, FileInfo, LinkLost, error_from, file_info_from

FILE_WINDOW: Final = 262_144
_DATA_HEAD: Final = DATA_HEAD.size
# Data extents end at block borders, so this many separate pieces within a window is no file's layout.
_SMALLEST_PIECE: Final = 256


def absolute(path: str | bytes) -> bytes:
    """The bytes of a path inside. Raises ValueError."""
    data = as_bytes(path)
    if not data.startswith(b"/") or len(data) >= 4096:
        raise ValueError("a path has to be absolute and shorter than 4,096 bytes")
    return data


def at_path(path: str | bytes, user: str) -> bytes:
    """The fields every file request begins with. Raises ValueError."""
    fields = raw(Tag.PATH, absolute(path))
    return fields + raw(Tag.USER, as_bytes(user)) if user else fields


class FileReader(Channel):
    """One download. `async for offset, data in reader`; holes of the file are not sent, `info.size` has its size.

    Ends silently after the last byte. Use as an async context manager, or call `aclose`.
    """

    __slots__ = (
        "_done",
        "_failure",
        "_last",
        "_payload",
        "_pieces",
        "_position",
        "_stop",
        "_waiter",
        "_window",
        "end",
        "info",
    )

    def __init__(self, conn: Connection, payload: bytes, offset: int, length: int, window: int) -> None:
        super().__init__(conn)
        self.info: FileInfo | None = None
        # The offset that was reached, once all was read: less than asked for when the file shrank meanwhile.
        self.end: int | None = None
        self._payload = payload + u64(Tag.CREDIT, window)
        self._window = Window(conn, STDIN, window)
        self._position = offset
        self._stop = offset + length if length else MAX_OFFSET
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._last = 0
        self._done = False
        self._failure: AgentError | LinkLost | None = None
        self._waiter = Waiter("two tasks read one file transfer")

    def frame(self, kind: int, flags: int, payload: memoryview) -> bool:
        if kind == Type.ERROR:
            self._end(error_from(Fields(payload)))
            return True
        if self.info is None:
            if kind != Type.INFO:
                raise self.unexpected(kind)
            self.info = file_info_from(Fields(payload))
        elif kind == Type.DATA:
            self._data(payload)
        elif kind == Type.OK:
            end = Fields(payload).u64(Tag.END, MAX_OFFSET, self._position)
            if end < self._position:
                raise Violation("a file that ends before its data")
            self.end = end
            self._end(None)
            return True
        else:
            raise self.unexpected(kind)
        self._waiter.wake()
        return False

    def _data(self, payload: memoryview) -> None:
        size = len(payload) - _DATA_HEAD
        if size <= 0:
            raise Violation("file data without bytes")
        (offset,) = DATA_HEAD.unpack_from(payload)
        if offset < self._position or offset + size > self._stop:
            raise Violation("file data out of its place")
        self._window.take(size)
        if self._pieces and offset == self._position and len(self._pieces[-1][1]) < _SMALLEST_PIECE:
            begin, small = self._pieces.pop()
            self._pieces.append((begin, small + payload[_DATA_HEAD:]))
        else:
            self._pieces.append((offset, bytes(payload[_DATA_HEAD:])))
            if len(self._pieces) > 16 + self._window.size // _SMALLEST_PIECE:
                raise Violation("file data in crumbs")
        self._position = offset + size

    def lost(self, error: LinkLost) -> None:
        self._end(error.again())

    async def open(self) -> FileInfo:
        """Sends the request if it was not, and waits for the file's record. Raises AgentError, LinkLost."""
        if not self._done and not self.number:
            if self.conn.paused:
                await self.conn.drain()
            self.conn.open(self, Type.FILE_GET, (self._payload,))
            self._window.bind(self)
        while self.info is None and self._failure is None:
            await self._wait()
        if self._failure is not None:
            raise self._failure
        assert self.info is not None
        return self.info

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, bytes]:
        """The next piece; the one before counts as consumed. Raises AgentError, LinkLost; cancelling it closes."""
        if self.info is None:
            await self.open()
        if self._last and self.opened:
            self._window.give(self._last)
        self._last = 0
        while True:
            if self._failure is not None:
                raise self._failure
            if self._pieces:
                break
            if self._done:
                raise StopAsyncIteration
            await self._wait()
        offset, data = self._pieces.popleft()
        self._last = len(data)
        return offset, data

    async def aclose(self) -> None:
        """Gives the transfer up if it is still going on. Reading on then fails: an end would look like the file's."""
        self.conn.abandon(self)
        self._pieces.clear()
        self._end(AgentError("aborted", 0, "the transfer was closed by its reader"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _end(self, failure: AgentError | LinkLost | None) -> None:
        self._done = True
        self._failure = self._failure or failure
        self._waiter.wake()

    async def _wait(self) -> None:
        try:
            await self._waiter.wait()
        except asyncio.CancelledError:
            await self.aclose()
            raise


class FileWriter(Channel):
    """One upload. Nothing is visible at its path before `commit` returns; leaving it without commit aborts."""

    __slots__ = (
        "_allowance",
        "_committed",
        "_failure",
        "_finished",
        "_ready",
        "_result",
        "_waiter",
        "offset",
    )

    def __init__(self, conn: Connection) -> None:
        super().__init__(conn)
        # How much of a resumed upload is there already.
        self.offset = 0
        self._allowance = Allowance()
        self._ready = False
        self._committed = False
        self._result: FileInfo | None = None
        self._finished = False
        self._failure: AgentError | LinkLost | None = None
        self._waiter = Waiter("two tasks use one upload")

    def frame(self, kind: int, flags: int, payload: memoryview) -> bool:
        fields = Fields(payload)
        if kind == Type.ERROR:
            self._end(error_from(fields))
            return True
        if kind == Type.READY and not self._ready:
            self.offset = fields.u64(Tag.OFFSET, MAX_OFFSET, 0)
            self._allowance.add(fields.u64(Tag.CREDIT, MAX_ALLOWANCE, 0))
            self._ready = True
            self._waiter.wake()
        elif kind == Type.CREDIT and self._ready:
            self._allowance.add_from(fields)
        elif kind == Type.OK and self._committed:
            self._result = file_info_from(fields) if Tag.MODE in fields else None
            self._finished = True
            self._waiter.wake()
            return True
        else:
            raise self.unexpected(kind)
        return False

    def lost(self, error: LinkLost) -> None:
        self._end(error.again())

    async def open(self, payload: bytes) -> Self:
        """Sends FILE_PUT and waits until the agent takes data. Raises AgentError, LinkLost."""
        if self.conn.paused:
            await self.conn.drain()
        self.conn.open(self, Type.FILE_PUT, (payload,))
        while not self._ready and self._failure is None:
            await self._wait()
        if self._failure is not None:
            raise self._failure
        return self

    async def write(self, offset: int, data: bytes) -> None:
        """Sends `data` for `offset` as the agent takes it; skipped ranges become holes.

        Raises AgentError when the upload failed, LinkLost. Cancelling it aborts the upload.
        """
        view = memoryview(data)
        while view:
            try:
                size = await self._allowance.take(min(len(view), MAX_DATA))
            except asyncio.CancelledError:
                await self.aclose()
                raise
            if not size or not self.opened:
                raise self._failure or ValueError("the upload is over")
            self.conn.send(data_frame(self.number, offset, view[:size]))
            view, offset = view[size:], offset + size
            if self.conn.paused:
                await self.conn.drain()

    async def commit(self, size: int) -> FileInfo | None:
        """Gives the file its final size and its name. Returns its record when the agent sends one.

        Raises AgentError, LinkLost. Cancelled, it leaves open whether the file is there.
        """
        if self.opened and not self._committed:
            self.conn.send(frame(Type.COMMIT, self.number, u64(Tag.SIZE, size)))
            self._committed = True
        while not self._finished:
            if self._failure is not None:
                raise self._failure
            if not self.opened:
                raise ValueError("the upload is over")
            await self._wait()
        return self._result

    async def aclose(self) -> None:
        """Aborts the upload if it is still going on."""
        self.conn.abandon(self)
        self._allowance.end()
        self._waiter.wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _end(self, failure: AgentError | LinkLost) -> None:
        self._failure = self._failure or failure
        self._allowance.end()
        self._waiter.wake()

    async def _wait(self) -> None:
        try:
            await self._waiter.wait()
        except asyncio.CancelledError:
            await self.aclose()
            raise
