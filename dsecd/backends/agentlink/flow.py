# SPDX-License-Identifier: Apache-2.0
"""Credit in both directions: how much the agent may still send us, and how much we may still send it. And waiting."""

import asyncio
import struct
from typing import Final

from dsecd.backends.agentlink.connection import Channel, Connection
from dsecd.backends.agentlink.frames import STDIN, Fields, Tag, Type, Violation, frame

# An honest agent grants about what its buffers hold; more is an attempt to make us lose count.
MAX_ALLOWANCE: Final = 64 << 20

_CREDIT: Final = struct.Struct("<HIQHIQ")


class Waiter:
    """Where the one task that uses a channel waits until a frame's arrival wakes it."""

    __slots__ = ("_crowd", "_future")

    def __init__(self, crowd: str) -> None:
        """`crowd` says what is wrong when two tasks come."""
        self._crowd = crowd
        self._future: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Returns when it was woken. Raises RuntimeError when another waits."""
        if self._future is not None:
            raise RuntimeError(self._crowd)
        self._future = asyncio.get_running_loop().create_future()
        try:
            await self._future
        finally:
            self._future = None

    def wake(self) -> None:
        """Harmless when nobody waits."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Window:
    """Credit that we granted for one stream; memory held for it never exceeds its size."""

    __slots__ = ("_conn", "_credit", "_half", "_number", "_owed", "_stream", "size")

    def __init__(self, conn: Connection, stream: int, size: int) -> None:
        """`size` in bytes, at least 1. Raises ValueError."""
        if not 1 <= size <= MAX_ALLOWANCE:
            raise ValueError(f"a window of {size} bytes is not between 1 and {MAX_ALLOWANCE}")
        self._conn = conn
        self._number = 0
        self._stream = stream
        self.size = self._credit = size
        self._owed = 0
        self._half = (size + 1) // 2

    def bind(self, channel: Channel) -> None:
        """Says which channel the window belongs to, once it has a number."""
        self._number = channel.number

    def take(self, size: int) -> None:
        """The agent sent `size` bytes. Raises Violation when that is more than it may."""
        if size > self._credit:
            raise Violation("more bytes than credit was given for")
        self._credit -= size

    def give(self, size: int) -> None:
        """`size` received bytes were consumed; sends CREDIT when half the window is owed. Raises ValueError."""
        if size < 0 or self._owed + self._credit + size > self.size:
            raise ValueError(f"{size} bytes consumed, which is more than were received")
        self._owed += size
        if self._owed >= self._half:
            self.flush()

    def flush(self) -> None:
        """Sends the credit owed, or leaves it until the connection takes writes again."""
        if self._conn.paused:
            self._conn.defer(self.flush)
            return
        owed, self._owed = self._owed, 0
        self._credit += owed
        payload = _CREDIT.pack(Tag.STREAM, 8, self._stream, Tag.BYTES, 8, owed)
        self._conn.send(frame(Type.CREDIT, self._number, payload))


class Allowance:
    """Credit that the agent granted us for stdin or an upload. One taker at a time."""

    __slots__ = ("_credit", "_waiter", "ended")

    def __init__(self) -> None:
        self._credit = 0
        self._waiter = Waiter("two tasks write to one stream")
        self.ended = False

    def add(self, size: int) -> None:
        """The agent granted `size` more bytes. Raises Violation when what is outstanding gets absurd."""
        if size + self._credit > MAX_ALLOWANCE:
            raise Violation("more credit than any buffer has")
        self._credit += size
        self._waiter.wake()

    def add_from(self, fields: Fields) -> None:
        """A CREDIT frame. Raises Violation."""
        size = fields.u64(Tag.BYTES, MAX_ALLOWANCE)
        if size == 0 or fields.u64(Tag.STREAM, 2, STDIN) != STDIN:
            raise Violation("a CREDIT frame that grants nothing")
        self.add(size)

    def end(self) -> None:
        """Nothing more can be sent: takers get 0."""
        self.ended = True
        self._waiter.wake()

    async def take(self, most: int) -> int:
        """Takes 1 to `most` bytes of credit, waiting for it; 0 when there will be none."""
        while self._credit == 0 and not self.ended:
            await self._waiter.wait()
        if self.ended:
            return 0
        taken = min(most, self._credit)
        self._credit -= taken
        return taken
