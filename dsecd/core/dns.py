# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of the connection with dsec-dns: tell it the policies, open what it asks for.

Here: who may connect, what a new connection is told, requests and answers. Not here: the words
(``dsecd.dns.frames``), and whether an address is opened, which the caller decides again for each request:
dsec-dns reads what hostile code sends, and is believed no further than its policies go.

The last connection counts: an old process that still hangs on its own is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping

from dsecd.dns import frames
from dsecd.linux import peercred

log = logging.getLogger(__name__)

_HELLO_S = 10.0
#: Bytes that may wait for a dsec-dns that does not read; all policies of a full host are some megabytes.
_UNREAD_MAX = 64 << 20

Opener = Callable[[frames.Open], Awaitable[Collection[frames.Address]]]


class DnsLink:
    """Listens for dsec-dns and keeps it informed."""

    def __init__(
        self, settings: frames.Settings, uids: Collection[int], opener: Opener, denied: Callable[[frames.Denied], None]
    ) -> None:
        """``uids``: whom dsec-dns may run as. ``opener`` opens addresses and returns those that it did."""
        self._settings = settings
        self._uids = frozenset(uids)
        self._opener = opener
        self._denied = denied
        self._policies: dict[str, frames.Policy] = {}
        self._writer: asyncio.StreamWriter | None = None

    @property
    def connected(self) -> bool:
        return self._writer is not None

    @property
    def policies(self) -> Mapping[str, frames.Policy]:
        return self._policies

    def put(self, policy: frames.Policy) -> None:
        """A sandbox may resolve names from now on, or others than before."""
        self._policies[policy.sandbox] = policy
        self._send(policy)

    def forget(self, sandbox: str) -> None:
        """A sandbox may resolve no names any more."""
        if self._policies.pop(sandbox, None) is not None:
            self._send(frames.Forget(sandbox=sandbox))

    async def serve(self, listening: socket.socket) -> None:
        """Until cancelled."""
        async with await asyncio.start_unix_server(self._connected, sock=listening) as server:
            await server.serve_forever()

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
            self._begin(writer)
            log.info("dsec-dns connected pid=%d sandboxes=%d", peer.pid, len(self._policies))
            while True:
                await self._heard(await frames.read(reader, frames.TO_DAEMON), writer)
        except (EOFError, ConnectionError, TimeoutError):
            log.info("dsec-dns has gone")
        except frames.LinkError as error:
            log.warning("dsec-dns: %s", error)
        finally:
            if self._writer is writer:
                self._writer = None
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _begin(self, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = writer
        self._send(self._settings)
        for policy in self._policies.values():
            self._send(policy)
        self._send(frames.Synced())

    async def _heard(self, message: frames.ToDaemon, writer: asyncio.StreamWriter) -> None:
        match message:
            case frames.Open():
                addresses = await self._opener(message)
                writer.write(frames.pack(frames.Opened(number=message.number, addresses=tuple(addresses))))
                await writer.drain()
            case frames.Denied():
                self._denied(message)
            case frames.Hello():
                raise frames.LinkError("'hello' came twice")

    def _send(self, message: frames.ToDns) -> None:
        if self._writer is None:
            return
        if self._writer.transport.get_write_buffer_size() > _UNREAD_MAX:
            log.warning("dsec-dns does not read what it is told: cut off")
            self._writer.transport.abort()
            self._writer = None
            return
        self._writer.write(frames.pack(message))
