# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of the connection with dsec-dns: tell it the policies, answer what it asks.

What belongs here: who may connect, what a new connection is told, requests and answers. What does not: the words
(``dsecd.dns.frames``), and whether an address is opened, which each sandbox's ``Resolver`` decides again: dsec-dns
reads what hostile code sends, and is believed no further than the policies go.

The last connection counts: an old process that still hangs on its own is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Collection
from typing import Protocol

from dsecd.dns import frames
from dsecd.linux import peercred

log = logging.getLogger(__name__)

_HELLO_S = 10.0
#: How long a change waits for dsec-dns to know of it.
_HEARD_S = 1.0
#: Bytes that may wait for a dsec-dns that does not read; the policies of a full host are some megabytes.
_UNREAD_MAX = 64 << 20


class Resolver(Protocol):
    """What answers for one sandbox."""

    def open(self, request: frames.Open) -> Collection[frames.Address]:
        """Open addresses of a name, and return those that are open now. Blocks for microseconds."""
        ...

    def refused(self, denied: frames.Denied) -> None:
        """Queries were refused."""
        ...


class DnsLink:
    """Listens for dsec-dns and keeps it informed. Everything here is for the event loop's thread."""

    def __init__(self, settings: frames.Settings, uids: Collection[int]) -> None:
        """``uids``: whom dsec-dns may run as."""
        self.settings = settings
        self._uids = frozenset(uids)
        self._known: dict[str, tuple[frames.Policy, Resolver]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._heard: dict[int, asyncio.Event] = {}
        #: Of the dsec-dns that is connected.
        self.pid: int | None = None

    async def put(self, policy: frames.Policy, resolver: Resolver) -> None:
        """A sandbox may resolve names from now on, or others than before; returns once dsec-dns, if there, knows."""
        self._known[policy.sandbox] = policy, resolver
        self._send(policy)
        await self._until_heard()

    async def forget(self, sandbox: str) -> None:
        """A sandbox may resolve no names any more."""
        if self._known.pop(sandbox, None) is not None:
            self._send(frames.Forget(sandbox=sandbox))
            await self._until_heard()

    async def serve(self, listening: socket.socket) -> None:
        """Until cancelled."""
        server = await asyncio.start_unix_server(self._connected, sock=listening)
        try:
            await asyncio.Event().wait()
        finally:
            # Not wait_closed: that would wait for dsec-dns, which stays.
            server.close()
            if self._writer is not None:
                self._writer.transport.abort()

    async def _until_heard(self) -> None:
        if self._writer is None:
            return
        number = next(self._numbers)
        event = self._heard[number] = asyncio.Event()
        try:
            self._send(frames.Mark(number=number))
            async with asyncio.timeout(_HEARD_S):
                await event.wait()
        except TimeoutError:
            log.warning("dsec-dns has not taken note of a change within %g s", _HEARD_S)
        finally:
            del self._heard[number]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            peer = peercred.peer(writer.get_extra_info("socket"))
            if peer.uid not in self._uids:
                raise frames.LinkError(f"uid {peer.uid} is not dsec-dns")
            writer.write(frames.pack(frames.Hello(version=frames.VERSION)))
            async with asyncio.timeout(_HELLO_S):
                hello = await frames.read(reader, frames.TO_DAEMON)
            if not isinstance(hello, frames.Hello) or hello.version != frames.VERSION:
                raise frames.LinkError(f"expected 'hello' of version {frames.VERSION}, got {hello!r}")
            self._begin(writer, peer.pid)
            log.info("dsec-dns connected pid=%d sandboxes=%d", peer.pid, len(self._known))
            while True:
                self._take(await frames.read(reader, frames.TO_DAEMON), writer)
                await writer.drain()
        except (EOFError, ConnectionError, TimeoutError):
            log.info("dsec-dns has gone")
        except frames.LinkError as error:
            log.warning("dsec-dns: %s", error)
        finally:
            if self._writer is writer:
                self._end()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _begin(self, writer: asyncio.StreamWriter, pid: int) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self.pid = writer, pid
        self._send(self.settings)
        for policy, _resolver in self._known.values():
            self._send(policy)
        self._send(frames.Synced())

    def _end(self) -> None:
        """Nobody has to wait any more for one that is not there."""
        self._writer = self.pid = None
        for event in self._heard.values():
            event.set()

    def _take(self, message: frames.ToDaemon, writer: asyncio.StreamWriter) -> None:
        match message:
            case frames.Open():
                known = self._known.get(message.sandbox)
                addresses = tuple(known[1].open(message)) if known is not None else ()
                writer.write(frames.pack(frames.Opened(number=message.number, addresses=addresses)))
            case frames.Denied():
                if (known := self._known.get(message.sandbox)) is not None:
                    known[1].refused(message)
            case frames.Heard():
                if (event := self._heard.get(message.number)) is not None:
                    event.set()
            case frames.Hello():
                raise frames.LinkError("'hello' came twice")

    def _send(self, message: frames.ToDns) -> None:
        if self._writer is None:
            return
        if self._writer.transport.get_write_buffer_size() > _UNREAD_MAX:
            log.warning("dsec-dns does not read what it is told: cut off")
            self._writer.transport.abort()
            self._end()
            return
        self._writer.write(frames.pack(message))
