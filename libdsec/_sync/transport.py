# SPDX-License-Identifier: Apache-2.0
# Made by tools/unasync.py from libdsec/_async; edit that.
"""Requests to the daemon: one at a time, retried while that is safe, or as a stream of bytes.

Here: connections, time limits, retries. Not here: which routes there are (``calls.py``).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import httpx
from pydantic import BaseModel

from libdsec import connection as c
from libdsec._sync.primitives import WebSocket, exchange, http_transport, sleep
from libdsec.errors import ConnectionFailed, DsecError, NoCapacity
from libdsec.routes import BY_NAME

_JSON = {"content-type": "application/json"}


def _timeouts(limit_s: float | None) -> dict[str, float | None]:
    return {"connect": c.OPEN_TIMEOUT_S, "read": limit_s, "write": limit_s, "pool": None}


class Transport:
    """A pool of connections to one daemon; safe to share by all that a program runs.

    ``timeout_s`` replaces each route's own limit for plain requests. ``retry_s`` bounds how long a request is repeated
    after the daemon went away (a restart) or had no capacity; a daemon that never answered is waited for
    ``connect_wait_s``. Nothing is repeated that could then happen twice.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float | None = None,
        retry_s: float = 30.0,
        connect_wait_s: float = 0.0,
        agent: str = c.AGENT,
    ) -> None:
        self.socket = c.socket_path(socket)
        self.timeout_s = timeout_s
        self.retry_s = retry_s
        self.connect_wait_s = connect_wait_s
        self.agent = agent
        self._answered = False
        self._http = http_transport(self.socket)
        self._headers = {"user-agent": agent, "accept": "application/json"}

    def close(self) -> None:
        """Close every idle connection."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def request(
        self,
        name: str,
        *,
        body: BaseModel | bytes | None = None,
        query: Mapping[str, c.QueryValue] | None = None,
        read_timeout_s: float | None = None,
        **path: str,
    ) -> bytes:
        """Send one request of route ``name`` and return the body of its answer. Raises what the daemon says."""
        route = BY_NAME[name]
        where = c.target(route, path, query or {})
        content = (
            body.model_dump_json(exclude_defaults=True).encode() if isinstance(body, BaseModel) else body
        )
        limit = c.read_timeout_s(route, read_timeout_s if read_timeout_s is not None else self.timeout_s)
        began = time.monotonic()
        pause_s = 0.02
        while True:
            try:
                return self._once(route.method, where, content, limit, name)
            except (ConnectionFailed, NoCapacity) as exc:
                left_s = began + self.patience_s(exc, name) - time.monotonic()
                if left_s <= 0:
                    raise
            sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(pause_s * 2, 1.0)

    def patience_s(self, exc: DsecError, name: str) -> float:
        """For how long after its first attempt a request that failed so is repeated."""
        if isinstance(exc, NoCapacity):
            # One that the daemon had wait for room has waited for as long as its caller wanted.
            return self.retry_s if exc.retryable and "waited_s" not in exc.details else 0
        if exc.details.get("gave_up") or (exc.details.get("sent", True) and name not in c.REPEATABLE):
            return 0
        return self.retry_s if self._answered else self.connect_wait_s

    def _once(
        self, method: str, where: str, content: bytes | None, limit_s: float | None, name: str
    ) -> bytes:
        # Not through httpx: what it adds to a small request (URLs, headers and bodies as objects) is a good part of its
        # time, and nothing that is of use here.
        headers = self._headers if content is None else {**self._headers, **_JSON}
        try:
            status, data = exchange(self._http, method, where, headers, content, limit_s)
        except c.HTTPCORE_ERRORS as exc:
            raise c.transport_error(self.socket, name, exc) from exc
        self._answered = True
        if status >= 400:
            raise c.error_of(status, data)
        return data

    def _open(self, request: httpx.Request, name: str) -> httpx.Response:
        """Send a request; its answer, with the body still to be read."""
        try:
            response = self._http.handle_request(request)
        except httpx.TransportError as exc:
            raise c.transport_error(self.socket, name, exc) from exc
        self._answered = True
        return response

    def _exchange(self, request: httpx.Request, name: str) -> bytes:
        """Send a request; the body of its answer. Raises what the daemon says."""
        response = self._open(request, name)
        try:
            data = response.read()
        except httpx.TransportError as exc:
            raise c.transport_error(self.socket, name, exc) from exc
        finally:
            response.close()
        if response.status_code >= 400:
            raise c.error_of(response.status_code, data)
        return data

    def _build(
        self,
        method: str,
        where: str,
        content: bytes | Iterator[bytes] | None,
        limit_s: float | None,
        headers: Mapping[str, str],
    ) -> httpx.Request:
        # The transport is called directly, without httpx's client: redirects, cookies and proxies have no place here,
        # and a third of the time of a small request goes with them.
        return httpx.Request(
            method,
            f"http://dsec{where}",
            headers={"host": "dsec", **self._headers, **headers},
            content=content,
            extensions={"timeout": _timeouts(limit_s)},
        )

    def raw(self, method: str, where: str, body: bytes | None = None) -> bytes:
        """Send any request; the body of its answer. ``where`` is path and query as they are. Not repeated."""
        headers = _JSON if body is not None else {}
        return self._exchange(
            self._build(method, where, body, self.timeout_s, headers), f"{method} {where}"
        )

    @contextmanager
    def download(
        self,
        name: str,
        *,
        query: Mapping[str, c.QueryValue],
        accept: str,
        body: BaseModel | None = None,
        **path: str,
    ) -> Iterator[httpx.Response]:
        """Open a streamed answer; leaving the block closes its connection. Not repeated."""
        where = c.target(BY_NAME[name], path, query)
        content = None if body is None else body.model_dump_json(exclude_defaults=True).encode()
        headers = {"accept": accept} if content is None else {"accept": accept, **_JSON}
        request = self._build(BY_NAME[name].method, where, content, self.timeout_s, headers)
        response = self._open(request, name)
        try:
            if response.status_code >= 400:
                raise c.error_of(response.status_code, response.read())
            yield response
        except httpx.TransportError as exc:
            raise c.transport_error(self.socket, name, exc) from exc
        finally:
            response.close()

    def upload(
        self,
        name: str,
        content: Iterator[bytes],
        *,
        query: Mapping[str, c.QueryValue],
        content_type: str,
        **path: str,
    ) -> bytes:
        """Send a streamed body and return the body of the answer. Not repeated."""
        where = c.target(BY_NAME[name], path, query)
        request = self._build(
            BY_NAME[name].method, where, content, self.timeout_s, {"content-type": content_type}
        )
        return self._exchange(request, name)

    def websocket(
        self, name: str, *, query: Mapping[str, c.QueryValue] | None = None, **path: str
    ) -> WebSocket:
        """Open the WebSocket of route ``name``. Not repeated."""
        socket = WebSocket.connect(self.socket, c.target(BY_NAME[name], path, query or {}), self.agent)
        self._answered = True
        return socket
