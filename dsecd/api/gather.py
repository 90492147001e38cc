# SPDX-License-Identifier: Apache-2.0
"""A transport that sends a first small write together with the second.

Here: only that. aiohttp writes the head of a response and its body one after the other; on a Unix socket each
write wakes the reader, who then finds half an answer. Not here: anything about HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any

#: More than this is not worth holding back, nor copying.
HOLD_BYTES = 32 << 10


class Gathered:
    """Stands for ``transport``: a small write waits for another, at most until the loop's turn ends."""

    __slots__ = ("_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes | bytearray | memoryview] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        first = not self._held
        # A copy: the caller may use its buffer again, as with a real transport.
        self._held.append(bytes(data))
        if first and len(data) < HOLD_BYTES:
            self._loop.call_soon(self._flush)
        else:
            # A head and its body are together: no need to wait for the turn's end.
            self._flush()

    def writelines(self, chunks: Any) -> None:
        self.write(b"".join(chunks))

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._held.clear()
        self._transport.abort()
