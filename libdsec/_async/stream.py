# SPDX-License-Identifier: Apache-2.0
"""One running command as a pair of streams that survives a restart of the daemon.

Here: reading, writing, re-attaching at the right byte. Not here: frames and offsets (``libdsec/frames.py``).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from libdsec import connection as c
from libdsec import types as t
from libdsec._async.calls import AsyncExecCalls
from libdsec._async.primitives import Lock, WebSocket, sleep
from libdsec.errors import (
    AlreadyExists,
    ConnectionFailed,
    DsecError,
    InfraError,
    NotFound,
    WrongState,
    from_wire,
)
from libdsec.frames import (
    STDIN_BYTES,
    ClientFrame,
    Cursor,
    Lines,
    ServerFrame,
    StreamName,
    accepted,
    split_output,
)
from libdsec.options import settle

#: How much of stderr is kept for the reader of ``stdout``.
TAIL_BYTES = 64 * 1024


class AsyncLink:
    """The connection to one command: opened, and opened again where it broke."""

    def __init__(
        self,
        client: AsyncExecCalls,
        sandbox: str,
        start: t.StreamStart,
        *,
        reconnect_s: float = 30.0,
        allow_gap: bool = False,
    ) -> None:
        self.sandbox = sandbox
        self.exec_id = start.attach or (start.start and start.start.exec_id) or c.new_key()
        self.stderr_tail = bytearray()
        self._what = f"exec '{self.exec_id}' in '{sandbox}'"
        self._client = client
        self._start = start
        self._reconnect_s = reconnect_s
        self._pty = start.start is not None and start.start.pty
        self._cursors: dict[StreamName, Cursor] = {
            "stdout": Cursor("stdout", start.stdout_offset, allow_gap=allow_gap),
            "stderr": Cursor("stderr", start.stderr_offset, allow_gap=allow_gap),
        }
        self._socket: WebSocket | None = None
        self._generation = 0
        self._lock = Lock()
        self._info: t.ExecInfo | None = None
        self._over = False
        self._detached = False
        self._failure: DsecError | None = None
        self._stdin_sent = self._stdin_accepted = 0
        self._trouble_since: float | None = None

    @property
    def info(self) -> t.ExecInfo:
        """What is known of the command; final once ``ended``."""
        if self._info is None:
            raise WrongState(f"exec in '{self.sandbox}': it is not started yet")
        return self._info

    def _finished(self) -> bool:
        """Whether nothing more is to be read: all was, or we detached. Another task may have seen to either."""
        return self._over or self._detached

    async def open(self) -> Self:
        """Start the command, or attach. Raises ExecNotStarted, NotFound, WrongState, ConnectionFailed."""
        began = time.monotonic()
        while True:
            try:
                await self._connect()
                return self
            except ConnectionFailed as exc:
                if exc.details.get("sent"):
                    await self._again(self._generation, exc)
                    return self
                if time.monotonic() > began + self._client.patience_s(exc, "exec_stream"):
                    raise
            await sleep(0.1)

    async def _connect(self) -> None:
        """Open a connection: to start the command the first time, to attach to it later."""
        attaching = self._start.attach is not None or self._info is not None or self._generation > 0
        try:
            await self._handshake(attach=attaching)
        except NotFound:
            # The first request was lost unread, so it can be sent again.
            if self._start.start is None or self._info is not None or not attaching:
                raise
            await self._start_again()

    async def _start_again(self) -> None:
        try:
            await self._handshake(attach=False)
        except AlreadyExists:
            await self._handshake(attach=True)

    async def _handshake(self, *, attach: bool) -> None:
        socket = await self._client.websocket("exec_stream", id=self.sandbox)
        self._generation += 1
        try:
            await socket.send(self._opening(attach=attach).model_dump_json(exclude_defaults=True))
            message = await socket.receive()
            if isinstance(message, str):
                raise from_wire(c.parse(t.ErrorBody, message.encode(), "exec_stream").model_dump())
            if message[:1] != bytes([ServerFrame.STARTED]):
                raise InfraError(f"exec in '{self.sandbox}': the daemon's first frame is no start")
            self._info = c.parse(t.ExecInfo, message[1:], "exec_stream")
            # The daemon counts what it passes on anew for each connection.
            self._stdin_sent = self._stdin_accepted = 0
        except BaseException:
            await socket.close()
            raise
        self._socket = socket

    def _opening(self, *, attach: bool) -> t.StreamStart:
        if not attach:
            return self._start
        return t.StreamStart(
            attach=self.exec_id,
            stdout_offset=self._cursors["stdout"].offset,
            stderr_offset=self._cursors["stderr"].offset,
            stdin=self._start.stdin,
        )

    async def _again(self, generation: int, lost: ConnectionFailed) -> None:
        """Attach again after ``lost``, unless another task already has."""
        async with self._lock:
            if generation != self._generation or self._finished():
                return
            if self._stdin_sent > self._stdin_accepted and not self._pty:
                self._failure = InfraError(
                    f"{self._what}: the connection broke while standard input was under way",
                    hint="the command still runs; attach to it by its exec id",
                    exec_id=self.exec_id,
                )
                raise self._failure from lost
            await self._drop()
            pause_s = 0.0 if self._trouble_since is None else 0.05
            self._trouble_since = self._trouble_since or time.monotonic()
            while True:
                await sleep(pause_s)
                pause_s = min(max(pause_s * 2, 0.02), 1.0)
                try:
                    await self._connect()
                    if self._finished():
                        await self._drop()
                    return
                except DsecError as exc:
                    late = time.monotonic() > self._trouble_since + self._reconnect_s
                    if not exc.retryable or late:
                        self._failure = exc
                        raise

    async def _drop(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _current(self) -> tuple[WebSocket | None, int]:
        """Our connection and its number; None when the stream is over or detached. Raises what ended it.

        Waits while another task or thread attaches again: meanwhile there is none.
        """
        socket = self._socket
        if socket is None:
            async with self._lock:
                socket = self._socket
            if socket is None and not self._finished():
                raise self._failure or WrongState(f"{self._what}: the stream is closed")
        return socket, self._generation

    async def _send(self, message: bytes) -> None:
        while not self._over:
            socket, generation = await self._current()
            if socket is None:
                if not self._detached:
                    return
                raise WrongState(f"write to {self._what}: the stream is closed")
            try:
                await socket.send(message)
                return
            except ConnectionFailed as exc:
                await self._again(generation, exc)


class AsyncExecStream(AsyncLink):
    """A command whose output is read as it comes: ``async for name, data in stream``.

    Every byte is handed out exactly once, in order within its stream, or InfraError is raised. When the connection
    breaks, the stream attaches again by itself for up to ``reconnect_s``. Leaving a ``with`` block kills a command that
    still runs; ``detach()`` lets it go on. Reading and writing may happen in two threads or tasks.
    """

    @property
    def ended(self) -> bool:
        """Whether the command has ended and all its output was read."""
        return self._over

    @property
    def offsets(self) -> tuple[int, int]:
        """Offsets of stdout and stderr after the last byte read, to attach again later."""
        return self._cursors["stdout"].offset, self._cursors["stderr"].offset

    @property
    def missed_bytes(self) -> int:
        """Bytes that were gone before they could be read (only with ``allow_gap``)."""
        return sum(cursor.missed_bytes for cursor in self._cursors.values())

    async def read(self) -> tuple[StreamName, bytes] | None:
        """The next piece of output and the name of its stream; None when the command has ended or we detached."""
        while not self._finished():
            socket, generation = await self._current()
            if socket is None:
                continue
            try:
                message = await socket.receive()
            except ConnectionFailed as exc:
                await self._again(generation, exc)
                continue
            piece = await self._understand(message)
            if piece is not None:
                return piece
        return None

    async def _understand(self, message: bytes | str) -> tuple[StreamName, bytes] | None:
        if isinstance(message, str):
            await self._drop()
            self._failure = from_wire(c.parse(t.ErrorBody, message.encode(), "exec_stream").model_dump())
            raise self._failure
        self._trouble_since = None
        kind = message[0] if message else None
        if kind in (ServerFrame.STDOUT, ServerFrame.STDERR):
            name: StreamName = "stdout" if kind == ServerFrame.STDOUT else "stderr"
            fresh = self._cursors[name].take(*split_output(message))
            return (name, fresh) if fresh else None
        if kind == ServerFrame.STDIN_ACCEPTED:
            self._stdin_accepted = accepted(message)
        elif kind == ServerFrame.EXIT:
            self._info = c.parse(t.ExecInfo, message[1:], "exec_stream")
            self._over = True
            await self._drop()
            self._cursors["stdout"].finish(self._info.stdout_bytes)
            self._cursors["stderr"].finish(self._info.stderr_bytes)
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[StreamName, bytes]:
        piece = await self.read()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def lines(
        self, *, encoding: str = "utf-8", errors: str = "replace"
    ) -> AsyncIterator[tuple[StreamName, str]]:
        """The output as lines of text, each with the name of its stream."""
        cutters: dict[StreamName, Lines] = {
            "stdout": Lines(encoding, errors),
            "stderr": Lines(encoding, errors),
        }
        while (piece := await self.read()) is not None:
            for line in cutters[piece[0]].feed(piece[1]):
                yield piece[0], line
        for name, cutter in cutters.items():
            for line in cutter.feed(b"", final=True):
                yield name, line

    @property
    async def stdout(self) -> AsyncIterator[str]:
        """The lines of stdout; the newest 64 KiB of stderr go to ``stderr_tail`` meanwhile."""
        cutter = Lines()
        while (piece := await self.read()) is not None:
            if piece[0] == "stdout":
                for line in cutter.feed(piece[1]):
                    yield line
            else:
                self.stderr_tail += piece[1]
                del self.stderr_tail[:-TAIL_BYTES]
        for line in cutter.feed(b"", final=True):
            yield line

    async def wait(self, *, check: bool = False) -> t.ExecInfo:
        """Read and drop the rest of the output; how the command ended.

        Raises ExecTimeout when its deadline ended it, ExecFailed when ``check`` and its status is not 0.
        """
        while await self.read() is not None:
            pass
        argv = self._start.start.argv if self._start.start is not None else ()
        settle(self.sandbox, argv, self.info, check=check)
        return self.info

    # --- writing -----------------------------------------------------------------------------------------------

    async def write(self, data: bytes | str) -> None:
        """Send standard input; waits while the command does not read, so that something must read its output."""
        view = memoryview(data.encode() if isinstance(data, str) else data)
        for begin in range(0, len(view), STDIN_BYTES):
            chunk = view[begin : begin + STDIN_BYTES]
            self._stdin_sent += len(chunk)
            await self._send(bytes([ClientFrame.STDIN]) + chunk)

    async def close_stdin(self) -> None:
        """Tell the command that its standard input has ended."""
        await self._send(bytes([ClientFrame.EOF]))

    async def resize(self, rows: int, cols: int) -> None:
        """Resize its terminal."""
        body = c.build(t.ResizeRequest, "", rows=rows, cols=cols).model_dump_json().encode()
        await self._send(bytes([ClientFrame.RESIZE]) + body)

    async def signal(self, signal: int, *, tree: bool = False) -> None:
        """Send a signal; ``tree`` (only SIGKILL) reaches every process of the exec. Has arrived on return."""
        await self._client.exec_signal(self.sandbox, self.exec_id, signal, tree=tree)

    # --- ending ------------------------------------------------------------------------------------------------

    async def detach(self) -> None:
        """Leave the command running and close the stream; attach again by ``exec_id`` and ``offsets``."""
        self._detached = True
        if self._socket is not None:
            try:
                await self._socket.send(bytes([ClientFrame.DETACH]))
            except ConnectionFailed:
                pass  # as good as detached
        await self._drop()

    async def close(self) -> None:
        """Kill the command with all its processes when it still runs, and close the stream."""
        try:
            if not self._over and not self._detached and self._info is not None:
                await self.signal(9, tree=True)
        except DsecError:
            pass  # it has just ended, or nobody is there to kill it
        finally:
            self._detached = True
            await self._drop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
