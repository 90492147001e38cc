# SPDX-License-Identifier: Apache-2.0
"""Small requests of the synchronous client, by the standard library's HTTP client over the daemon's socket.

Here: connections that are kept, and one request with one answer on one of them. Not here: streams of bytes, which go
through httpx, and retries (``transport.py``). Why not httpx for both: parsing an answer in pure Python takes it as long
as the daemon takes to make it, and an exec is one such request. Raises httpcore's errors, as httpx's transport would.
"""

from __future__ import annotations

import http.client
import select
import socket as socketlib
import threading
import time
from collections.abc import Mapping

import httpcore

from libdsec.connection import OPEN_TIMEOUT_S, POOL


class _Connection(http.client.HTTPConnection):
    """One connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("dsec")
        self._path = path
        self.idle_since = 0.0

    def connect(self) -> None:
        sock = socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM)
        try:
            sock.settimeout(OPEN_TIMEOUT_S)
            sock.connect(self._path)
        except TimeoutError as exc:
            sock.close()
            raise httpcore.ConnectTimeout(str(exc)) from exc
        except OSError as exc:
            sock.close()
            raise httpcore.ConnectError(str(exc)) from exc
        self.sock = sock

    def is_usable(self) -> bool:
        """Whether the daemon has kept an idle connection open: one that can be read has ended, or is out of step."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)


class Connections:
    """Kept connections to one daemon; safe to use from several threads."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []

    def close(self) -> None:
        """Close those that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def exchange(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes | None, limit_s: float | None
    ) -> tuple[int, bytes]:
        """Status and body of the answer. Raises httpcore's ConnectError, ReadTimeout, ReadError and their like."""
        connection = self._take()
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(limit_s)
            status, data, keep = _talk(connection, method, target, headers, content)
        except BaseException:
            connection.close()
            raise
        self._give(connection) if keep else connection.close()
        return status, data

    def _take(self) -> _Connection:
        oldest = time.monotonic() - (POOL.keepalive_expiry or 0.0)
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return _Connection(self._path)
            if connection.idle_since >= oldest and connection.is_usable():
                return connection
            connection.close()

    def _give(self, connection: _Connection) -> None:
        connection.idle_since = time.monotonic()
        with self._lock:
            if len(self._idle) < (POOL.max_keepalive_connections or 0):
                self._idle.append(connection)
                return
        connection.close()


def _talk(
    connection: _Connection, method: str, target: str, headers: Mapping[str, str], content: bytes | None
) -> tuple[int, bytes, bool]:
    try:
        try:
            connection.request(method, target, body=content, headers=dict(headers))
        except (BrokenPipeError, ConnectionResetError):
            # A daemon that refuses a request may have answered, and gone, without reading all of it.
            early = http.client.HTTPResponse(connection.sock, method=method)
            early.begin()
            return early.status, early.read(), False
        response = connection.getresponse()
        return response.status, response.read(), not response.will_close
    except TimeoutError as exc:
        raise httpcore.ReadTimeout(str(exc)) from exc
    except http.client.HTTPException as exc:
        raise httpcore.RemoteProtocolError(str(exc) or "the daemon closed the connection") from exc
    except OSError as exc:
        raise httpcore.ReadError(str(exc)) from exc
