# SPDX-License-Identifier: Apache-2.0
"""The few things that differ between asyncio and threads. ``libdsec/_sync/primitives.py`` is its hand-written twin.

Here: sleeping, locks, blocking calls, a job beside the caller, one WebSocket. Not here: anything that knows the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import httpcore
import httpx
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

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

Lock = asyncio.Lock
sleep = asyncio.sleep


class _Transport(httpx.AsyncHTTPTransport):
    """httpx's, on a pool that small requests use without it."""

    def __init__(self, socket: str) -> None:
        self.pool = self._pool = httpcore.AsyncConnectionPool(
            uds=socket,
            max_connections=POOL.max_connections,
            max_keepalive_connections=POOL.max_keepalive_connections,
            keepalive_expiry=POOL.keepalive_expiry,
        )


def http_transport(socket: str) -> _Transport:
    """Connections to the daemon."""
    return _Transport(socket)


async def exchange(
    transport: _Transport,
    method: str,
    target: str,
    headers: Mapping[str, str],
    content: bytes | None,
    limit_s: float | None,
) -> tuple[int, bytes]:
    """One small request: status and body of its answer. Raises httpcore's errors."""
    fields = {"host": "dsec", **headers}
    if content is not None:
        fields["content-length"] = str(len(content))
    timeouts = {"connect": OPEN_TIMEOUT_S, "read": limit_s, "write": limit_s, "pool": None}
    url = httpcore.URL(scheme=b"http", host=b"dsec", port=None, target=target.encode())
    request = httpcore.Request(
        method,
        url,
        headers=[(name.encode(), value.encode()) for name, value in fields.items()],
        content=content,
        extensions={"timeout": timeouts},
    )
    response = await transport.pool.handle_async_request(request)
    try:
        return response.status, await response.aread()
    finally:
        await response.aclose()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call without stopping the loop."""
    return await asyncio.to_thread(function, *args, **kwargs)


@asynccontextmanager
async def beside(job: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run ``job`` beside the block; leaving the block waits for it, failing in the block cancels it."""

    async def run() -> None:
        await job()

    task = asyncio.ensure_future(run())
    try:
        yield
    except BaseException:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    await task


class Crew:
    """Short jobs beside the block, at most ``size`` at once. Leaving the block waits for them and raises the first
    failure; failing in the block cancels them."""

    def __init__(self, size: int) -> None:
        self._free = asyncio.Semaphore(size)
        self._tasks: set[asyncio.Future[None]] = set()
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        return self

    async def start(self, job: Callable[[], Awaitable[None]]) -> None:
        """Begin a job once there is a place for it. Raises what an earlier one failed with."""
        await self._free.acquire()
        if self._failure is not None:
            raise self._failure
        task = asyncio.ensure_future(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except Exception as exc:  # noqa: BLE001  raised where the block is left
            self._failure = self._failure or exc
        finally:
            self._free.release()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if exc is None and self._failure is not None:
            raise self._failure


class WebSocket:
    """One WebSocket over the daemon's Unix socket. Every failure is a ConnectionFailed or the daemon's own error."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, socket: str, target: str, agent: str) -> WebSocket:
        """Open ``target`` (path and query)."""
        try:
            # No keep-alive pings: the kernel tells when the peer of a Unix socket is gone, and a reader that is slow on
            # purpose would answer no ping. No compression: it costs more than it saves inside one machine.
            connection = await unix_connect(
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

    async def receive(self) -> bytes | str:
        """The next message."""
        try:
            return await self._connection.recv()
        except ConnectionClosed as exc:
            raise ConnectionFailed("read from the daemon: the connection was closed", sent=True) from exc

    async def send(self, message: bytes | str) -> None:
        """Send one message; waits while the daemon does not read."""
        try:
            await self._connection.send(message)
        except ConnectionClosed as exc:
            raise ConnectionFailed("write to the daemon: the connection was closed", sent=True) from exc

    async def close(self) -> None:
        """Close it; harmless when it is closed."""
        try:
            await self._connection.close()
        except BaseException:
            # Cancelled while shaking hands: the descriptor must not outlive us.
            self._connection.transport.abort()
            raise
