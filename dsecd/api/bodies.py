# SPDX-License-Identifier: Apache-2.0
"""Contents of files as HTTP bodies: plain bytes, or extents that leave holes out.

Here: both forms in both directions. Not here: files (``dsecd.core.files``).

The form ``application/x-dsec-extents`` is a row of frames: u64 offset and u32 length, little-endian, then
that many bytes; offsets rise, and a frame of length 0 says where the file ends.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from aiohttp import web

from libdsec.errors import InvalidSpec
from libdsec.routes import EXTENTS as EXTENTS
from libdsec.routes import PLAIN as PLAIN
from libdsec.routes import RECORDS as RECORDS

#: An upload whose client, or a download whose file, does not move for so long is given up.
IDLE_TIMEOUT_S = 300.0

_FRAME = struct.Struct("<QI")
_ZEROS = bytes(1 << 16)


class Sink(Protocol):
    """Where an upload goes."""

    async def write(self, offset: int, data: bytes) -> None: ...


class ExtentReader:
    """Cuts a row of frames that arrives in pieces of any size; holds no more than a header."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._left = 0
        #: Where the next byte belongs; at the end, where the file ends.
        self.offset = 0

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each part.  Raises InvalidSpec for offsets that fall."""
        view = memoryview(piece)
        while view:
            if self._left:
                data = bytes(view[: self._left])
                yield self.offset, data
                self.offset += len(data)
                self._left -= len(data)
                view = view[len(data) :]
                continue
            need = _FRAME.size - len(self._header)
            self._header += view[:need]
            view = view[need:]
            if len(self._header) == _FRAME.size:
                offset, self._left = _FRAME.unpack(self._header)
                self._header.clear()
                if offset < self.offset:
                    raise InvalidSpec(f"body: an extent at {offset} comes after {self.offset}")
                self.offset = offset

    def finish(self) -> None:
        """Raises InvalidSpec when the body ended within a frame."""
        if self._left or self._header:
            raise InvalidSpec("body: the last extent is cut short")


async def receive(request: web.BaseRequest, sink: Sink, first: int, *, extents: bool) -> int:
    """Pass a request's body on; where the file ends as far as the body tells.

    ``first`` is the offset of a plain body's first byte. Raises InvalidSpec, and TimeoutError when nothing
    moves.
    """
    reader = ExtentReader()
    offset = first
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(IDLE_TIMEOUT_S) as limit:
        while piece := await request.content.readany():
            if extents:
                for at, data in reader.feed(piece):
                    await sink.write(at, data)
            else:
                await sink.write(offset, piece)
                offset += len(piece)
            limit.reschedule(loop.time() + IDLE_TIMEOUT_S)
    if not extents:
        return offset
    reader.finish()
    return reader.offset


async def send_plain(
    response: web.StreamResponse, source: AsyncIterator[tuple[int, bytes]], first: int, end: int
) -> None:
    """Send the bytes from ``first`` to ``end``; holes as zeros."""
    position = first
    async for offset, data in source:
        await _send_zeros(response, offset - position)
        await response.write(data)
        position = offset + len(data)
    await _send_zeros(response, end - position)


async def _send_zeros(response: web.StreamResponse, count: int) -> None:
    while count > 0:
        await response.write(_ZEROS[:count])
        count -= len(_ZEROS)


async def send_extents(
    response: web.StreamResponse, source: AsyncIterator[tuple[int, bytes]], end: int
) -> None:
    """Send what is no hole, and where it ends: after all that was sent, since files of /proc say they are empty."""
    async for offset, data in source:
        await response.write(_FRAME.pack(offset, len(data)) + data)
        end = max(end, offset + len(data))
    await response.write(_FRAME.pack(end, 0))
