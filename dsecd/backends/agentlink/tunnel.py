# SPDX-License-Identifier: Apache-2.0
"""Connections to ports inside a virtual machine: DIAL, with a socket as its end on this side.

What belongs here: moving bytes between the channel and the socket, in both directions and with each side's credit. What
does not: who reads and writes the socket's other end.

All of it happens in callbacks of the event loop, so there is no task that somebody would have to wait for.
"""

import asyncio
import contextlib
import select
import socket
from typing import Final

from dsecd.backends.agentlink.connection import Channel, Connection
from dsecd.backends.agentlink.flow import MAX_ALLOWANCE, Window
from dsecd.backends.agentlink.frames import (
    DATA_HEAD,
    FLAG_EOF,
    STDIN,
    Fields,
    Tag,
    Type,
    Violation,
    frame,
    u64,
)
from dsecd.backends.agentlink.records import AgentError, LinkLost, error_from

_WINDOW: Final = 262_144
_PIECE_BYTES: Final = 32_768
#: A socket whose other end has been half closed does not tell by itself that it was closed since.
_LOOK_S: Final = 5.0


class Tunnel(Channel):
    """One connection. It ends with its channel, or when the other end of its socket is closed."""

    __slots__ = ("_credit", "_ended", "_loop", "_offset", "_opening", "_over", "_sock", "_timer", "_unsent", "_window")

    def __init__(self, conn: Connection) -> None:
        super().__init__(conn)
        self._loop = asyncio.get_running_loop()
        self._opening: asyncio.Future[None] = self._loop.create_future()
        self._sock: socket.socket | None = None
        self._window = Window(conn, STDIN, _WINDOW)
        self._credit = 0  # bytes that the agent takes
        self._offset = 0  # of what came
        self._unsent = bytearray()  # came, and not in the socket yet
        self._ended = False  # nothing more comes
        self._over = False  # nor is anything taken any more
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, port: int) -> socket.socket:
        """Connect to a port on the guest's loopback. Raises AgentError (`refused` when nobody listens), LinkLost."""
        if self.conn.paused:
            await self.conn.drain()
        self.conn.open(self, Type.DIAL, (u64(Tag.PORT, port) + u64(Tag.CREDIT, _WINDOW),))
        self._window.bind(self)
        try:
            await self._opening
        except asyncio.CancelledError:
            self.conn.abandon(self)
            raise
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._sock = ours
        self._flush()
        self._read_on()
        if not self.opened and not self._unsent:
            self._close()
        return theirs

    # -- from the agent

    def frame(self, kind: int, flags: int, payload: memoryview) -> bool:
        if kind == Type.ERROR:
            self._fail(error_from(Fields(payload)))
            return True
        if kind == Type.READY and not self._opening.done():
            self._credit = Fields(payload).u64(Tag.CREDIT, MAX_ALLOWANCE, 0)
            self._opening.set_result(None)
        elif not self._opening.done() or self._opening.exception() is not None:
            raise self.unexpected(kind)
        elif kind == Type.CREDIT:
            self._credit += Fields(payload).u64(Tag.BYTES, MAX_ALLOWANCE)
            if self._credit > MAX_ALLOWANCE:
                raise Violation("more credit than any buffer has")
            self._read_on()
        elif kind == Type.DATA:
            self._data(payload)
        elif kind == Type.OK:
            self._ended = self._over = True
            self._flush()
            return True
        else:
            raise self.unexpected(kind)
        return False

    def _data(self, payload: memoryview) -> None:
        size = len(payload) - DATA_HEAD.size
        if size < 0 or self._ended or DATA_HEAD.unpack_from(payload)[0] != self._offset:
            raise Violation("data of a connection out of its place")
        self._window.take(size)
        self._offset += size
        self._unsent += payload[DATA_HEAD.size :]
        self._ended = size == 0
        self._flush()

    def lost(self, error: LinkLost) -> None:
        self._fail(error.again())

    def _fail(self, error: AgentError | LinkLost) -> None:
        if not self._opening.done():
            self._opening.set_exception(error)
            return
        self._unsent.clear()
        self._close()

    # -- to the socket

    def _flush(self) -> None:
        """Into the socket what it takes; what it takes not, later."""
        if self._sock is None:
            return
        try:
            sent = self._sock.send(self._unsent) if self._unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:  # nobody reads any more
            self._give_up()
            return
        del self._unsent[:sent]
        if sent and self.opened:
            self._window.give(sent)
        if self._unsent:
            self._loop.add_writer(self._sock, self._flush)
            return
        self._loop.remove_writer(self._sock)
        if self._ended:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
            if self._over:
                self._close()

    # -- from the socket

    def _read_on(self) -> None:
        if self._sock is not None and self.opened and self._timer is None and self._credit > 0:
            self._loop.add_reader(self._sock, self._readable)

    def _readable(self) -> None:
        assert self._sock is not None
        if self.conn.paused:
            self._loop.remove_reader(self._sock)
            self.conn.defer(self._read_on)
            return
        try:
            data = self._sock.recv(min(_PIECE_BYTES, self._credit))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._give_up()
            return
        self._credit -= len(data)
        self.conn.send(frame(Type.INPUT, self.number, data, 0 if data else FLAG_EOF))
        if not data:
            self._loop.remove_reader(self._sock)
            self._look()
        elif self._credit == 0:
            self._loop.remove_reader(self._sock)

    def _look(self) -> None:
        """After its end: give up when nobody has the other end any more."""
        if self._sock is None:
            return
        poll = select.poll()
        poll.register(self._sock, 0)
        if any(events & select.POLLHUP for _fd, events in poll.poll(0)):
            self._give_up()
            return
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _give_up(self) -> None:
        self.conn.abandon(self)
        self._unsent.clear()
        self._close()

    def _close(self) -> None:
        sock, self._sock = self._sock, None
        if self._timer is not None:
            self._timer.cancel()
        if sock is not None:
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
            sock.close()
