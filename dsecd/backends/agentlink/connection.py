# SPDX-License-Identifier: Apache-2.0
"""One connection to one agent: bytes in and out, the table of open channels, and what ends it.

Transport only. What a request means is in `calls`, `execs` and `files`, which subclass `Channel`. Thousands of
connections live in one loop, so there is no task and no timer here: frames are handled inside the transport's read
callback, and waiting is futures that those frames resolve.

Memory per connection is bounded: one unfinished frame, what channels hold under their credit, and a write buffer
that new requests and bulk data wait for.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, cast
from weakref import WeakKeyDictionary

from dsecd.backends.agentlink.frames import (
    FLAG_MORE,
    MAX_CHANNEL,
    TYPE_NAMES,
    Fields,
    FrameParser,
    Type,
    Violation,
    frame,
)
from dsecd.backends.agentlink.records import AgentError, LinkLost, error_from

# One read takes at most this much, so that a flood of tiny frames holds the loop only for milliseconds.
READ_BYTES: Final = 131_072
# Counts those closed by us until the agent has seen it.
MAX_OPEN_CHANNELS: Final = 4_096
# What may still be on its way for a channel when its CLOSE is sent.
ABANDONED_BYTES: Final = 64 << 20

_FINAL: Final = frozenset((Type.OK, Type.ERROR, Type.EXIT))

# All connections of a loop receive into one buffer: the loop calls get_buffer, recv_into and buffer_updated without
# anything in between, and nothing keeps a view of it afterwards.
_SCRATCH: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview]] = WeakKeyDictionary()


class Channel:
    """One request and everything about it. Subclasses say which frames may come and what they do."""

    __slots__ = ("conn", "number", "opened")

    def __init__(self, conn: "Connection") -> None:
        self.conn = conn
        self.number = 0
        self.opened = False

    def frame(self, kind: int, flags: int, payload: memoryview) -> bool:
        """Takes one frame; returns True when it was the channel's last. Raises Violation.

        `payload` is valid during the call only.
        """
        raise NotImplementedError

    def lost(self, error: LinkLost) -> None:
        """The connection is gone: fail whoever waits."""

    def unexpected(self, kind: int) -> Violation:
        """The violation for a frame that has no place on this channel now."""
        return Violation(f"{TYPE_NAMES[kind]} is not an answer to what {type(self).__name__} asked")


def broken(rule: Violation) -> LinkLost:
    """The loss of a connection for a rule that the agent broke."""
    return LinkLost(f"the agent broke the protocol: {rule}", str(rule))


class Connection(asyncio.BufferedProtocol):
    """The protocol object of one agent connection."""

    __slots__ = (
        "_closed",
        "_deferred",
        "_fence",
        "_loop",
        "_next",
        "_parser",
        "_scratch",
        "_transport",
        "_writers",
        "_zombies",
        "channels",
        "failure",
        "heard",
        "on_lost",
        "paused",
        "pulse",
    )

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        scratch = _SCRATCH.get(self._loop)
        if scratch is None:
            scratch = _SCRATCH[self._loop] = memoryview(bytearray(READ_BYTES))
        self._scratch = scratch
        self._parser = FrameParser()
        self.channels: dict[int, Channel] = {}
        self._next = 0
        self._closed = self._loop.create_future()
        self._deferred: set[Callable[[], None]] = set()
        self._fence: _Fence | None = None
        self._transport: asyncio.Transport | None = None
        self._writers: set[asyncio.Future[None]] = set()
        self._zombies: list[int] = []
        self.failure: LinkLost | None = None
        self.on_lost: Callable[[LinkLost], None] | None = None
        self.paused = False
        #: How often something arrived.
        self.heard = 0
        #: What looks after an agent that went silent, and dies with the connection.
        self.pulse: asyncio.TimerHandle | None = None

    # -- the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self.heard += 1
        try:
            self._parser.feed(self._scratch[:nbytes], self._dispatch)
        except Violation as violation:
            self.end(broken(violation))

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f"the connection to the agent broke: {exc}" if exc else "the agent closed the connection"
        error = self._fail(LinkLost(reason))
        self._transport = None
        if not self._closed.done():
            self._closed.set_result(None)
        callback, self.on_lost = self.on_lost, None
        if callback is not None:
            callback(error.again())

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._wake_writers()
        deferred, self._deferred = self._deferred, set()
        for flush in deferred:
            flush()

    # -- channels

    def open(self, channel: Channel, kind: int, payloads: Sequence[bytes]) -> None:
        """Gives `channel` a number and sends its request; several payloads are one split request.

        Await `drain()` before when `paused`. Raises LinkLost when the connection is gone, AgentError `busy` when too
        many channels are open.
        """
        if self.failure is not None:
            raise self.failure.again()
        if len(self.channels) >= MAX_OPEN_CHANNELS:
            raise AgentError("busy", 0, "too many requests are open on this sandbox's agent")
        number = self._register(channel)
        if len(payloads) == 1:
            self.send(frame(kind, number, payloads[0]))
            return
        last = len(payloads) - 1
        self.send(
            b"".join(
                frame(kind, number, payload, 0 if index == last else FLAG_MORE)
                for index, payload in enumerate(payloads)
            )
        )

    def open_root(self, channel: Channel, kind: int, payload: bytes) -> None:
        """Opens channel 0, the connection itself, with its request. Raises LinkLost."""
        if self.failure is not None:
            raise self.failure.again()
        self.channels[0] = channel
        channel.opened = True
        self.send(frame(kind, 0, payload))

    def send(self, data: bytes) -> None:
        """Writes whole frames. Does nothing when the connection is gone: its channels have been told."""
        if self._transport is not None and self.failure is None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Waits until the write buffer has room. Raises LinkLost."""
        while self.paused and self.failure is None:
            waiter = self._loop.create_future()
            self._writers.add(waiter)
            try:
                await waiter
            finally:
                self._writers.discard(waiter)
        if self.failure is not None:
            raise self.failure.again()

    def defer(self, flush: Callable[[], None]) -> None:
        """Calls `flush` once when writing is possible again: an agent that does not read must not fill our buffer."""
        self._deferred.add(flush)

    def abandon(self, channel: Channel) -> None:
        """Sends CLOSE for a channel that is still open; what is on its way for it is then thrown away.

        A PING behind the CLOSE marks the point after which another frame for that number is a violation.
        """
        if not channel.opened:
            return
        channel.opened = False
        number = channel.number
        self.channels[number] = _Abandoned(self)
        self._zombies.append(number)
        self.send(frame(Type.CLOSE, number))
        if self._fence is None:
            self.raise_fence()

    def raise_fence(self) -> None:
        """Sends the PING behind the CLOSEs sent so far, if there were any."""
        self._fence = None
        if self._zombies and self.failure is None:
            numbers, self._zombies = self._zombies, []
            self._fence = _Fence(self, numbers)
            self.send(frame(Type.PING, self._register(self._fence)))

    def end(self, error: LinkLost) -> LinkLost:
        """Ends the connection now, because of `error` if it still stood; returns what to raise."""
        error = self._fail(error)
        if self._transport is not None:
            # Not close(): that would wait for an agent that may never read again.
            self._transport.abort()
        return error.again()

    async def close(self) -> None:
        """Closes the connection without CLOSE for its channels; returns when the descriptor is gone."""
        self.on_lost = None
        self.end(LinkLost("the link was closed"))
        if self._transport is not None:
            await asyncio.shield(self._closed)

    # -- inside

    def _dispatch(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        channel = self.channels.get(number)
        if channel is None:
            raise Violation(f"{TYPE_NAMES[kind]} on a channel that is not open")
        if channel.frame(kind, flags, payload):
            channel.opened = False
            del self.channels[number]

    def _register(self, channel: Channel) -> int:
        number = self._next
        while True:
            number = number + 1 if number < MAX_CHANNEL else 1
            if number not in self.channels:
                break
        self._next = number
        self.channels[number] = channel
        channel.number = number
        channel.opened = True
        return number

    def _fail(self, error: LinkLost) -> LinkLost:
        """Marks the connection as gone, tells every channel, and returns the first reason."""
        if self.failure is None:
            self.failure = error
            if self.pulse is not None:
                self.pulse.cancel()
            channels, self.channels = self.channels, {}
            for channel in channels.values():
                channel.opened = False
                channel.lost(error)
            self._deferred.clear()
            self._wake_writers()
        return self.failure

    def _wake_writers(self) -> None:
        for waiter in self._writers:
            if not waiter.done():
                waiter.set_result(None)


class _Abandoned(Channel):
    """Swallows what was on its way when CLOSE was sent."""

    __slots__ = ("_left",)

    def __init__(self, conn: Connection) -> None:
        super().__init__(conn)
        self._left = ABANDONED_BYTES

    def frame(self, kind: int, flags: int, payload: memoryview) -> bool:
        self._left -= len(payload)
        if self._left < 0:
            raise Violation("a closed channel goes on sending")
        return kind in _FINAL


class _Fence(Channel):
    """The PING behind one or more CLOSEs."""

    __slots__ = ("_numbers",)

    def __init__(self, conn: Connection, numbers: list[int]) -> None:
        super().__init__(conn)
        self._numbers = numbers

    def frame(self, kind: int, flags: int, payload: memoryview) -> bool:
        if kind != Type.OK:
            raise self.unexpected(kind)
        for number in self._numbers:
            # Gone already when its last frame crossed our CLOSE.
            if isinstance(self.conn.channels.get(number), _Abandoned):
                del self.conn.channels[number]
        self.conn.raise_fence()
        return True


class Root(Channel):
    """Channel 0: the greeting, and later the agent's word that it closes the connection."""

    __slots__ = ("greeting",)

    def __init__(self, conn: Connection) -> None:
        super().__init__(conn)
        self.greeting: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()

    def frame(self, kind: int, flags: int, payload: memoryview) -> bool:
        if kind == Type.ERROR:
            error = error_from(Fields(payload))
            if self.greeting.done():
                self.conn.end(LinkLost(f"the agent closed the connection: {error.code}"))
            else:
                self.greeting.set_exception(error)
            return False
        if kind != Type.HELLO_OK or self.greeting.done():
            raise self.unexpected(kind)
        self.greeting.set_result(Fields(payload))
        return False

    def lost(self, error: LinkLost) -> None:
        if not self.greeting.done():
            self.greeting.set_exception(error.again())
