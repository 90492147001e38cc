# SPDX-License-Identifier: Apache-2.0
"""Commands: how START and ATTACH are written, and the channel that carries a command's output, input and end."""

import asyncio
import errno
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, Self

from dsecd.backends.agentlink.connection import Channel, Connection
from dsecd.backends.agentlink.flow import MAX_ALLOWANCE, Allowance, Waiter, Window
from dsecd.backends.agentlink.frames import (
    FLAG_EOF,
    MAX_PAYLOAD,
    OUTPUT_HEAD,
    RLIMIT,
    STDERR,
    STDOUT,
    U32_MAX,
    U64_MAX,
    Fields,
    Tag,
    Type,
    Violation,
    as_bytes,
    check_id,
    frame,
    raw,
    split_request,
    u64,
)
from dsecd.backends.agentlink.records import (
    MAX_PID,
    AgentError,
    Collected,
    Exit,
    LinkLost,
    Output,
    StartRequest,
    error_from,
    exit_from,
)

_FLAG_PTY: Final = 1
_FLAG_STDIN: Final = 2
_FLAG_ATTACH: Final = 4

# Past this many waiting pieces the two streams lose their order between each other (which two pipes never had), so
# that a flood of one-byte writes costs little more memory than its bytes.
_MAX_PIECES: Final = 512
_OUTPUT_HEAD: Final = OUTPUT_HEAD.size


def start_payloads(request: StartRequest, *, attach: bool, window: int) -> list[bytes]:
    """The START request. Raises ValueError for what cannot be a request, AgentError `too-large` over 4 MiB."""
    if not request.argv:
        raise ValueError("a command has at least one argument")
    fields = [raw(Tag.ID, check_id(request.exec_id).encode())]
    fields += [raw(Tag.ARGV, as_bytes(argument)) for argument in request.argv]
    fields += [raw(Tag.ENV, as_bytes(entry)) for entry in request.env]
    flags = (
        (_FLAG_PTY if request.pty else 0)
        | (_FLAG_STDIN if request.stdin_open else 0)
        | (_FLAG_ATTACH if attach else 0)
    )
    fields += [u64(Tag.FLAGS, flags), u64(Tag.UMASK, request.umask)]
    if request.cwd:
        fields.append(raw(Tag.CWD, as_bytes(request.cwd)))
    if request.user:
        fields.append(raw(Tag.USER, as_bytes(request.user)))
    if attach:
        fields.append(u64(Tag.CREDIT, window))
    if request.keep_ms is not None:
        fields.append(u64(Tag.KEEP_MS, request.keep_ms))
    optional = (
        (Tag.ROWS, request.rows),
        (Tag.COLS, request.cols),
        (Tag.TIMEOUT_MS, request.timeout_ms),
        (Tag.IDLE_TIMEOUT_MS, request.idle_timeout_ms),
        (Tag.BUFFER_BYTES, request.buffer_bytes),
    )
    fields += [u64(tag, value) for tag, value in optional if value]
    fields += [_rlimit(*limit) for limit in request.rlimits]
    fields += [raw(Tag.CGROUP, f"{name}={value}".encode()) for name, value in request.cgroup]
    try:
        return split_request(fields)
    except ValueError as error:
        raise AgentError("too-large", errno.E2BIG, str(error)) from error


def _rlimit(resource: int, soft: int, hard: int) -> bytes:
    if not (0 <= resource <= U32_MAX and 0 <= soft <= U64_MAX and 0 <= hard <= U64_MAX):
        raise ValueError("a resource limit that does not fit its type")
    return raw(Tag.RLIMIT, RLIMIT.pack(resource, soft, hard))


class _Piece:
    """Bytes of one stream that wait to be read."""

    __slots__ = ("data", "offset", "stream")

    def __init__(self, stream: int, offset: int, data: bytes) -> None:
        self.stream = stream
        self.offset = offset
        self.data: bytes | bytearray = data


class _Pieces:
    """Output in the order it came, neighbours of one stream joined."""

    __slots__ = ("_last", "_queue")

    def __init__(self) -> None:
        self._queue: deque[_Piece] = deque()
        self._last: list[_Piece | None] = [None, None, None]

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, stream: int, offset: int, data: memoryview) -> None:
        last = self._last[stream]
        if last is None or (self._queue[-1] is not last and len(self._queue) < _MAX_PIECES):
            piece = self._last[stream] = _Piece(stream, offset, bytes(data))
            self._queue.append(piece)
            return
        if isinstance(last.data, bytes):
            last.data = bytearray(last.data)
        last.data += data

    def pop(self) -> Output:
        piece = self._queue.popleft()
        if self._last[piece.stream] is piece:
            self._last[piece.stream] = None
        return Output(piece.stream, piece.offset, bytes(piece.data))


class ExecChannel(Channel):
    """One command's streams. One task reads (`next` or `collect`), one may write (`write_stdin`).

    Memory held is at most the window for each stream: `consumed` tells how much of what `next` returned has been
    dealt with, and only that makes the agent send more.
    """

    __slots__ = (
        "_asked",
        "_delivered",
        "_exit",
        "_failure",
        "_kept",
        "_limit",
        "_pieces",
        "_received",
        "_started",
        "_stdin",
        "_stdin_closed",
        "_waiter",
        "_windows",
        "exec_id",
        "pid",
        "running",
    )

    def __init__(
        self, conn: Connection, exec_id: str, window: int, asked: tuple[int, int] | None = None
    ) -> None:
        super().__init__(conn)
        self.exec_id = exec_id
        self.pid = 0
        self.running = True
        # Offsets an ATTACH asked for; None for a START.
        self._asked = asked
        # Lists of three are indexed by stream number.
        self._received = [0, 0, 0]
        self._delivered = [0, 0, 0]
        self._windows = (Window(conn, STDOUT, window), Window(conn, STDERR, window))
        self._pieces = _Pieces()
        self._kept: list[bytearray] | None = None
        self._limit = 0
        self._stdin = Allowance()
        self._stdin_closed = False
        self._started = False
        self._exit: Exit | None = None
        self._failure: AgentError | LinkLost | None = None
        self._waiter = Waiter("two tasks read one command")

    # -- frames

    def frame(self, kind: int, flags: int, payload: memoryview) -> bool:
        if kind == Type.ERROR:
            self._end(error_from(Fields(payload)))
            return True
        if not self._started:
            self._opened(kind, Fields(payload))
        elif kind == Type.OUTPUT:
            self._output(payload)
        elif kind == Type.EXIT:
            self._exited(Fields(payload))
            return True
        elif kind == Type.CREDIT:
            self._stdin.add_from(Fields(payload))
        else:
            raise self.unexpected(kind)
        return False

    def _opened(self, kind: int, fields: Fields) -> None:
        if kind != (Type.STARTED if self._asked is None else Type.ATTACHED):
            raise self.unexpected(kind)
        self._started = True
        self._stdin.add(fields.u64(Tag.CREDIT, MAX_ALLOWANCE, 0))
        if self._asked is None:
            self.pid = fields.u64(Tag.PID, MAX_PID)
        else:
            self.running = bool(fields.u64(Tag.RUNNING, 1))
            offsets = (fields.u64(Tag.OFFSET_OUT), fields.u64(Tag.OFFSET_ERR))
            self._received[STDOUT:], self._delivered[STDOUT:] = offsets, offsets
            if offsets[0] < self._asked[0] or offsets[1] < self._asked[1]:
                # Handing out bytes from before the place asked for would make a resuming reader see them twice.
                self.conn.abandon(self)
                self._end(AgentError("invalid", errno.EINVAL, "the offset is behind the end of the output"))
                return
        self._waiter.wake()

    def _output(self, payload: memoryview) -> None:
        size = len(payload) - _OUTPUT_HEAD
        if size <= 0:
            raise Violation("output without bytes")
        stream, offset = OUTPUT_HEAD.unpack_from(payload)
        if stream != STDOUT and stream != STDERR:
            raise Violation(f"output of stream {stream}")
        if offset != self._received[stream]:
            raise Violation("an output offset that is not where the stream was")
        self._windows[stream - 1].take(size)
        self._received[stream] = offset + size
        if self._kept is not None:
            # While collecting only the end is worth waking for.
            self._keep(stream, payload[_OUTPUT_HEAD:])
            return
        self._pieces.push(stream, offset, payload[_OUTPUT_HEAD:])
        self._waiter.wake()

    def _exited(self, fields: Fields) -> None:
        if fields.ident() != self.exec_id:
            raise Violation("the end of another command")
        ended = exit_from(fields, self.exec_id)
        if ended.total_out < self._received[STDOUT] or ended.total_err < self._received[STDERR]:
            raise Violation("totals below what was sent")
        self._end(ended)

    def _end(self, how: Exit | AgentError | LinkLost) -> None:
        self.running = False
        if isinstance(how, Exit):
            self._exit = how
        elif self._failure is None:
            self._failure = how
        self._stdin.end()
        self._waiter.wake()

    def lost(self, error: LinkLost) -> None:
        self._end(error.again())

    # -- for AgentLink

    async def open(self, kind: int, payloads: list[bytes]) -> Self:
        """Sends START or ATTACH and waits for its answer. Raises AgentError, LinkLost."""
        if self.conn.paused:
            await self.conn.drain()
        self.conn.open(self, kind, payloads)
        for window in self._windows:
            window.bind(self)
        while not self._started and self._failure is None:
            await self._wait()
        if self._failure is not None:
            raise self._failure
        return self

    # -- for the caller

    @property
    def offsets(self) -> tuple[int, int]:
        """Offsets of stdout and stderr after the last byte that `next` returned: where to attach again."""
        return self._delivered[STDOUT], self._delivered[STDERR]

    async def next(self) -> Output | Exit:
        """The next event; Exit is the last one, and the answer again to every call after it.

        Raises LinkLost, and AgentError `detached` when another reader took over or `detach` was called. Cancelling
        it detaches.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if self._pieces:
                output = self._pieces.pop()
                self._delivered[output.stream] = output.offset + len(output.data)
                return output
            if self._exit is not None:
                return self._exit
            await self._wait()

    async def events(self) -> AsyncIterator[Output | Exit]:
        """Every event to the Exit. Each Output counts as consumed when the next one is asked for."""
        while True:
            event = await self.next()
            yield event
            if isinstance(event, Exit):
                return
            self.consumed(event.stream, len(event.data))

    def consumed(self, stream: int, size: int) -> None:
        """Gives back credit for `size` bytes of `stream` that `next` returned. Raises ValueError for more."""
        if self.opened:
            self._windows[stream - 1].give(size)

    async def write_stdin(self, data: bytes) -> None:
        """Sends `data` as the command takes it. What comes after the command's end is dropped. Raises LinkLost.

        Cancelling it may leave a part written. Raises ValueError after `close_stdin`.
        """
        if self._stdin_closed:
            raise ValueError("stdin was closed")
        view = memoryview(data)
        while view:
            size = await self._stdin.take(min(len(view), MAX_PAYLOAD))
            if not self.opened:
                if isinstance(self._failure, LinkLost):
                    raise self._failure.again()
                return
            self.conn.send(frame(Type.INPUT, self.number, view[:size]))
            view = view[size:]
            if self.conn.paused:
                await self.conn.drain()

    async def close_stdin(self) -> None:
        """End of file on stdin. Does nothing the second time or after the command's end."""
        if self._stdin_closed or not self.opened:
            return
        self._stdin_closed = True
        self.conn.send(frame(Type.INPUT, self.number, b"", FLAG_EOF))

    async def collect(self, limit_bytes: int) -> Collected:
        """Reads to the end, keeping the first `limit_bytes` of each stream and dropping the rest as it comes.

        Raises what `next` raises. Cancelling it detaches.
        """
        begin = self.offsets
        self._limit = limit_bytes
        self._kept = [bytearray(), bytearray(), bytearray()]
        while self._pieces:
            piece = self._pieces.pop()
            self._keep(piece.stream, memoryview(piece.data))
        while self._exit is None:
            if self._failure is not None:
                raise self._failure
            await self._wait()
        ended, out, err = self._exit, self._kept[STDOUT], self._kept[STDERR]
        return Collected(
            bytes(out),
            bytes(err),
            begin[0] + len(out) < ended.total_out,
            begin[1] + len(err) < ended.total_err,
            ended.total_out,
            ended.total_err,
            ended,
        )

    async def detach(self) -> None:
        """Stops following; the command goes on. Does nothing when the channel has ended."""
        if self.opened:
            self.conn.abandon(self)
            self._end(AgentError("detached", 0, "this reader detached"))

    # -- inside

    def _keep(self, stream: int, data: memoryview) -> None:
        assert self._kept is not None
        kept = self._kept[stream]
        room = self._limit - len(kept)
        if room > 0:
            kept += data[:room]
        self._delivered[stream] += len(data)
        self.consumed(stream, len(data))

    async def _wait(self) -> None:
        try:
            await self._waiter.wait()
        except asyncio.CancelledError:
            await self.detach()
            raise
