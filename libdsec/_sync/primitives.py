# SPDX-License-Identifier: Apache-2.0
"""The few things that differ between asyncio and threads. ``libdsec/_async/primitives.py`` is its hand-written twin.

Here: sleeping, locks, blocking calls, a job beside the caller, one WebSocket. Not here: anything that knows the API.
"""

from __future__ import annotations

import queue
import socket as socketlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import httpcore
import httpx
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, unix_connect

from libdsec._sync.plain import Connections
from libdsec.connection import (
    CLOSE_TIMEOUT_S,
    MAX_MESSAGE_BYTES,
    OPEN_TIMEOUT_S,
    POOL,
    error_of_handshake,
    unreachable,
)
from libdsec.errors import ConnectionFailed

P = ParamSpec("P")
T = TypeVar("T")

#: How long jobs that are given up may take to clear away what they began.
_FAREWELL_S = 5.0

Lock = threading.Lock
sleep = time.sleep


class _Backend(httpcore.SyncBackend):
    """httpcore's, but for the socket of a failed attempt, which it leaves to the garbage collector."""

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        with socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM) as probe:
            probe.settimeout(timeout)
            try:
                probe.connect(path)
            except TimeoutError as exc:
                raise httpcore.ConnectTimeout(str(exc)) from exc
            except OSError as exc:
                raise httpcore.ConnectError(str(exc)) from exc
        return super().connect_unix_socket(path, timeout, socket_options)


class _Transport(httpx.HTTPTransport):
    """httpx's, on a pool with our backend."""

    def __init__(self, socket: str) -> None:
        self.plain = Connections(socket)
        self._pool = httpcore.ConnectionPool(
            uds=socket,
            max_connections=POOL.max_connections,
            max_keepalive_connections=POOL.max_keepalive_connections,
            keepalive_expiry=POOL.keepalive_expiry,
            network_backend=_Backend(),
        )

    def close(self) -> None:
        self.plain.close()
        super().close()


def http_transport(socket: str) -> _Transport:
    """Connections to the daemon."""
    return _Transport(socket)


def exchange(
    transport: _Transport,
    method: str,
    target: str,
    headers: Mapping[str, str],
    content: bytes | None,
    limit_s: float | None,
) -> tuple[int, bytes]:
    """One small request: status and body of its answer. Raises httpcore's errors."""
    return transport.plain.exchange(method, target, headers, content, limit_s)


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call: here simply that."""
    return function(*args, **kwargs)


@contextmanager
def beside(job: Callable[[], None]) -> Iterator[None]:
    """Run ``job`` in a thread beside the block; leaving the block waits for it and passes its error on."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            job()
        except BaseException as exc:  # noqa: BLE001  handed to the caller's thread below
            failure.append(exc)

    thread = threading.Thread(target=run, name="libdsec", daemon=True)
    thread.start()
    yield
    thread.join()
    if failure:
        raise failure[0]


class Crew:
    """Short jobs in threads beside the block, at most ``size`` at once. Leaving the block waits for them and raises the
    first failure; failing in the block waits for those that run, ``_FAREWELL_S`` at most, and begins no more."""

    def __init__(self, size: int) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(1)
        self._size = size
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._over = False

    def __enter__(self) -> Self:
        return self

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job once there is a place for it. Raises what an earlier one failed with."""
        if self._failure is not None:
            raise self._failure
        if len(self._threads) < self._size:
            # Daemons: a job that hangs must not keep a program from ending.
            thread = threading.Thread(target=self._work, name="libdsec", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._failure is None and not self._over:
                    job()
            except BaseException as exc:  # noqa: BLE001  raised where the block is left
                self._failure = self._failure or exc

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = exc is not None
        deadline = time.monotonic() + _FAREWELL_S
        for _ in self._threads:
            try:
                self._jobs.put(None, timeout=max(0.0, deadline - time.monotonic()) if self._over else None)
            except queue.Full:
                return
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()) if self._over else None)
        if exc is None and self._failure is not None:
            raise self._failure


class WebSocket:
    """One WebSocket over the daemon's Unix socket. Every failure is a ConnectionFailed or the daemon's own error."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    def connect(cls, socket: str, target: str, agent: str) -> WebSocket:
        """Open ``target`` (path and query)."""
        try:
            # See the twin for why there are no pings and no compression.
            connection = unix_connect(
                socket,
                f"ws://dsec{target}",
                compression=None,
                max_size=MAX_MESSAGE_BYTES,
                open_timeout=OPEN_TIMEOUT_S,
                close_timeout=CLOSE_TIMEOUT_S,
                ping_interval=None,
                user_agent_header=agent,
                proxy=None,
            )
        except InvalidStatus as exc:
            raise error_of_handshake(exc.response.status_code, exc.response.body) from exc
        except (OSError, EOFError, WebSocketException) as exc:
            raise unreachable(socket, exc) from exc
        return cls(connection)

    def receive(self) -> bytes | str:
        """The next message."""
        try:
            return self._connection.recv()
        except ConnectionClosed as exc:
            raise ConnectionFailed("read from the daemon: the connection was closed", sent=True) from exc

    def send(self, message: bytes | str) -> None:
        """Send one message; waits while the daemon does not read."""
        try:
            self._connection.send(message)
        except ConnectionClosed as exc:
            raise ConnectionFailed("write to the daemon: the connection was closed", sent=True) from exc

    def close(self) -> None:
        """Close it; harmless when it is closed."""
        self._connection.close()
