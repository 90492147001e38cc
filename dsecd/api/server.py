# SPDX-License-Identifier: Apache-2.0
"""Connections: who is at the other end, how many there may be, and what a client may make the daemon hold.

Here: aiohttp's low-level server on one listening Unix socket, with peer credentials read once per connection.
Not here: requests (``dispatch.py``), making the socket (``dsecd/listen.py``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from dsecd.api import wire
from dsecd.api.dispatch import Dispatcher
from dsecd.api.gather import Gathered
from dsecd.api.router import Handler
from dsecd.core.principal import Principal
from dsecd.core.services import Core
from libdsec.routes import Route

log = logging.getLogger(__name__)

#: From the first byte of a request to the end of its headers.
HEADER_TIMEOUT_S = 10.0
#: Requests sent ahead while an earlier one is being answered; more is no client, it is a flood.
PIPELINE_MAX = 64
#: A kept connection costs a descriptor; it is closed by its client, or after this long without a request.
KEEPALIVE_S = 3600.0
#: What is left of a body that was refused is read and thrown away for this long, so that the client sees the
#: answer.
LINGER_S = 2.0
BACKLOG = 4096


class Connection(RequestHandler):
    """One client's connection."""

    __slots__ = ("_header_timer", "_owner", "principal")

    def __init__(
        self, owner: Server, manager: web.Server, loop: asyncio.AbstractEventLoop, **options: Any
    ) -> None:
        super().__init__(manager, loop=loop, **options)
        self._owner = owner
        self._header_timer: asyncio.TimerHandle | None = None
        self.principal: Principal | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuses a peer that the kernel cannot name, and one that has too many connections already."""
        # asyncio wraps the socket; the wrapper has all that reading credentials takes.
        sock = cast(socket.socket, transport.get_extra_info("socket"))
        try:
            principal = self._owner.authenticate(sock)
        except OSError as error:
            log.warning("connection refused: no peer credentials: %s", error)
            cast(asyncio.Transport, transport).abort()
            return
        self.principal = principal
        if not self._owner.admit(self):
            log.warning("connection refused: too many uid=%d pid=%d", principal.uid, principal.pid)
            cast(asyncio.Transport, transport).abort()
            self.principal = None
            return
        gathered = Gathered(cast(asyncio.Transport, transport), self._loop)
        super().connection_made(cast(asyncio.Transport, gathered))

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        if self.principal is not None:
            self._owner.dismiss(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bounds what aiohttp would keep without limit: slow headers, pipelined requests."""
        if self.principal is None:
            return
        super().data_received(data)
        if self._messages or self._current_request is not None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None
            if len(self._messages) > PIPELINE_MAX:
                log.warning("connection closed: it sends ahead without reading uid=%d", self.principal.uid)
                self._abort()
        elif self._header_timer is None:
            self._header_timer = self._loop.call_later(HEADER_TIMEOUT_S, self._headers_late)

    def _headers_late(self) -> None:
        self._header_timer = None
        if not self._messages and self._current_request is None:
            log.debug("connection closed: its request did not arrive in time")
            self._abort()

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is not HTTP, in the same form as every other error."""
        if isinstance(exc, ConnectionError):
            raise exc  # nobody to answer to, or half an answer is out: aiohttp closes the connection
        request_id = self._owner.dispatcher.new_request_id()
        if status >= 500:
            log.error("request failed request=%s", request_id, exc_info=exc)
            response = wire.error_response(wire.internal(request_id), request_id)
        else:
            text = " ".join((message or str(exc)).split())[:200]
            response = wire.error_response(wire.BadRequest(f"read a request: {text}"), request_id)
        response.force_close()
        return response


def principal_of(request: web.BaseRequest) -> Principal:
    """Who is at the other end. The place where a token in a header will be looked at, when there are tokens."""
    connection = request.protocol
    assert isinstance(connection, Connection)
    assert connection.principal is not None  # connection_made refuses what it cannot name
    return connection.principal


class Server:
    """The API on one listening socket."""

    def __init__(
        self,
        core: Core,
        routes: Sequence[Route],
        handlers: Mapping[str, Handler],
        authenticate: Callable[[socket.socket], Principal],
        *,
        max_request_bytes: int,
        max_body_bytes_per_user: int,
        max_connections_per_user: int,
    ) -> None:
        self.dispatcher = Dispatcher(
            core, routes, handlers, principal_of,
            max_request_bytes=max_request_bytes, max_body_bytes_per_user=max_body_bytes_per_user,
        )  # fmt: skip
        self.authenticate = authenticate
        self._max_connections = max_connections_per_user
        self._by_uid: Counter[int] = Counter()
        self._http = web.Server(self.dispatcher.handle)
        self._listener: asyncio.Server | None = None

    def admit(self, connection: Connection) -> bool:
        """Count a connection; False when its user has too many. Root is not limited."""
        assert connection.principal is not None
        uid = connection.principal.uid
        if uid != 0 and self._by_uid[uid] >= self._max_connections:
            return False
        self._by_uid[uid] += 1
        return True

    def dismiss(self, connection: Connection) -> None:
        assert connection.principal is not None
        uid = connection.principal.uid
        self._by_uid[uid] -= 1
        if self._by_uid[uid] <= 0:
            del self._by_uid[uid]

    async def start(self, listening: socket.socket) -> None:
        """Serve connections from a bound Unix socket, which now belongs to the server."""
        loop = asyncio.get_running_loop()

        def connection() -> Connection:
            return Connection(
                self, self._http, loop,
                keepalive_timeout=KEEPALIVE_S, tcp_keepalive=False, access_log=None, lingering_time=LINGER_S,
                auto_decompress=False,
            )  # fmt: skip

        # Not create_unix_server: it would remove the socket's file at the end, which is systemd's or the next
        # daemon's.
        self._listener = await loop.create_server(connection, sock=listening, backlog=BACKLOG)

    def stop_accepting(self) -> None:
        """New connections wait in the kernel's queue or are refused; new requests are told to come back."""
        self.dispatcher.stopping = True
        if self._listener is not None:
            self._listener.close()

    async def close(self, grace_s: float) -> None:
        """Let requests that are under way end for ``grace_s`` seconds, then break them off."""
        self.stop_accepting()
        await self.dispatcher.sockets.close_all()
        self._http.pre_shutdown()  # ends idle connections, which shutdown would wait for
        await self._http.shutdown(grace_s)
