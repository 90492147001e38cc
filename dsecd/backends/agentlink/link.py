# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of the agent protocol: connecting to a sandbox's agent, and everything it can be asked.

Requests are typed here and written by `calls`, `execs` and `files`. No policy: time limits of requests are the
caller's (`asyncio.timeout` around any of them; cancelling releases the channel), except that connecting has its own.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsecd.backends.agentlink.calls import MAX_LIST_EXECS, peek, request, request_one
from dsecd.backends.agentlink.connection import Connection, Root, broken
from dsecd.backends.agentlink.execs import ExecChannel, start_payloads
from dsecd.backends.agentlink.files import FILE_WINDOW, FileReader, FileWriter, absolute, at_path
from dsecd.backends.agentlink.frames import (
    MAX_OFFSET,
    PROTOCOL_VERSION,
    U64_MAX,
    Fields,
    Tag,
    Type,
    Violation,
    check_id,
    raw,
    u64,
)
from dsecd.backends.agentlink.machine import MachineRequests
from dsecd.backends.agentlink.many import ManyFiles
from dsecd.backends.agentlink.pulse import Pulse
from dsecd.backends.agentlink.records import (
    MAX_PID,
    AgentError,
    Collected,
    ExecRecord,
    Exit,
    ExitKind,
    ExitReason,
    FileInfo,
    LinkLost,
    Output,
    Peeked,
    StartRequest,
    Usage,
    dir_entry_from,
    exec_record_from,
    file_info_from,
    usage_from,
)

__all__ = [
    "AgentError",
    "AgentLink",
    "Collected",
    "ExecChannel",
    "ExecRecord",
    "Exit",
    "ExitKind",
    "ExitReason",
    "FileInfo",
    "FileReader",
    "FileWriter",
    "LinkLost",
    "Output",
    "Peeked",
    "StartRequest",
    "Usage",
    "connect",
    "connect_socket",
]

WINDOW: Final = 65_536
# Bounds what one hostile listing can make us hold; the protocol allows 10,000.
MAX_LIST_LIMIT: Final = 2_000
MAX_LISTINGS: Final = 4

OnLost = Callable[[LinkLost], None]


async def connect(path: Path | str, *, generation: int, timeout_s: float, on_lost: OnLost) -> "AgentLink":
    """Connects to the agent that listens at a Unix socket path of at most 107 bytes, and greets it.

    `on_lost` is called once when the connection ends later, other than by `close`. Raises OSError when there is no
    listener, TimeoutError, AgentError (`stale-generation`), LinkLost.
    """
    async with asyncio.timeout(timeout_s):
        sock = await _dial(os.fspath(path))
        return await _greet(sock, generation, on_lost)


async def connect_socket(
    sock: socket.socket, *, generation: int, timeout_s: float, on_lost: OnLost
) -> "AgentLink":
    """As `connect`, over a connected stream socket (vsock, a VMM's channel). Takes the socket over."""
    async with asyncio.timeout(timeout_s):
        return await _greet(sock, generation, on_lost)


async def _dial(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        pause_s = 0.001
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                # unix(7): EAGAIN means that the backlog is full and nothing was started, so there is nothing to
                # wait for on the descriptor.
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, 0.05)
    except BaseException:  # whatever ends the attempt, cancellation too, the descriptor goes with it
        sock.close()
        raise


async def _greet(sock: socket.socket, generation: int, on_lost: OnLost) -> "AgentLink":
    loop = asyncio.get_running_loop()
    try:
        sock.setblocking(False)
        _, conn = await loop.create_connection(Connection, sock=sock)
    except BaseException:  # as in _dial
        sock.close()
        raise
    try:
        root = Root(conn)
        hello = (
            u64(Tag.PROTOCOL, PROTOCOL_VERSION)
            + u64(Tag.GENERATION, generation)
            + u64(Tag.TIME_NS, time.time_ns())
        )
        conn.open_root(root, Type.HELLO, hello)
        fields = await root.greeting
        try:
            link = AgentLink(conn, fields, generation)
        except Violation as violation:
            raise conn.end(broken(violation)) from None
        if conn.failure is not None:  # lost since it was greeted, and nobody has been told
            raise conn.failure.again()
    except BaseException:  # as in _dial
        await conn.close()
        raise
    conn.on_lost = on_lost
    Pulse(conn)
    return link


class AgentLink:
    """A greeted connection to one sandbox's agent. Every request raises LinkLost when it is or gets lost."""

    def __init__(self, conn: Connection, hello: Fields, generation: int) -> None:
        """Raises Violation when the greeting does not fit."""
        if hello.u64(Tag.PROTOCOL) != PROTOCOL_VERSION or hello.u64(Tag.GENERATION, U64_MAX) != generation:
            raise Violation("a greeting for another protocol version or generation")
        self.version = hello.text(Tag.VERSION, 64)
        self.pid_count = hello.u64(Tag.PID_COUNT, MAX_PID, 0)
        self._conn = conn
        self.machine = MachineRequests(conn)
        self.many = ManyFiles(conn)
        self._listings = asyncio.Semaphore(MAX_LISTINGS)

    async def close(self) -> None:
        """Ends the connection; `on_lost` is not called. Commands go on and keep their output for 10 seconds."""
        await self._conn.close()

    async def ping(self, timeout_s: float) -> None:
        """Raises TimeoutError, LinkLost."""
        async with asyncio.timeout(timeout_s):
            await request(self._conn, Type.PING)

    async def usage(self) -> Usage:
        """The agent's counters."""
        return await request_one(self._conn, Type.USAGE, b"", usage_from)

    async def shutdown(self, grace_ms: int) -> None:
        """Asks the agent to end the sandbox; returns when it has said that it will. Raises AgentError."""
        await request(self._conn, Type.SHUTDOWN, u64(Tag.GRACE_MS, grace_ms))

    # -- commands

    async def start(self, request: StartRequest, *, attach: bool, window: int = WINDOW) -> ExecChannel:
        """Runs a command. Without `attach` the channel returned tells id and pid and has nothing to read.

        `window`: bytes per output stream that may be on their way or unread. Raises AgentError, ValueError.
        Cancelled, the command may run nevertheless.
        """
        payloads = start_payloads(request, attach=attach, window=window)
        channel = await ExecChannel(self._conn, request.exec_id, window).open(Type.START, payloads)
        if not attach:
            await channel.detach()
        return channel

    async def attach(
        self, exec_id: str, *, offset_out: int = 0, offset_err: int = 0, window: int = WINDOW
    ) -> ExecChannel:
        """Follows a command from the offsets given, or from the oldest bytes held: see `offsets` of the channel.

        Another reader of it is told `detached`. Raises AgentError (`not-found`, `invalid` for an offset not reached).
        """
        payload = (
            _id(exec_id)
            + u64(Tag.OFFSET_OUT, offset_out)
            + u64(Tag.OFFSET_ERR, offset_err)
            + u64(Tag.CREDIT, window)
        )
        channel = ExecChannel(self._conn, exec_id, window, (offset_out, offset_err))
        return await channel.open(Type.ATTACH, [payload])

    async def list_execs(self, exec_id: str | None = None) -> list[ExecRecord]:
        """All commands the agent knows, or the one asked for. Raises AgentError."""
        payload = b"" if exec_id is None else _id(exec_id)
        most = MAX_LIST_EXECS if exec_id is None else 1
        async with self._listings:
            _, records = await request(self._conn, Type.LIST, payload, exec_record_from, 0, most)
        return records

    async def forget(self, exec_id: str) -> None:
        """Drops an ended command with its output. Raises AgentError (`busy` while it runs)."""
        await request(self._conn, Type.FORGET, _id(exec_id))

    async def signal(self, exec_id: str, signum: int, *, tree: bool) -> None:
        """Signals the leader's process group, or with `tree` everything the command left. Raises AgentError."""
        payload = _id(exec_id) + u64(Tag.SIGNAL, signum) + u64(Tag.SCOPE, int(tree))
        await request(self._conn, Type.SIGNAL, payload)

    async def resize(self, exec_id: str, rows: int, cols: int) -> None:
        """Sets the size of a command's PTY in characters. Raises AgentError."""
        await request(self._conn, Type.RESIZE, _id(exec_id) + u64(Tag.ROWS, rows) + u64(Tag.COLS, cols))

    async def peek(self, exec_id: str, stream: int, offset: int, max_bytes: int) -> Peeked:
        """Reads held output (stream 1 or 2) without attaching. Raises AgentError, ValueError."""
        return await peek(self._conn, check_id(exec_id), stream, offset, max_bytes)

    # -- files. `path` is absolute inside the sandbox; `user` as in StartRequest. All raise AgentError, ValueError.

    def get_file(
        self,
        path: str | bytes,
        *,
        user: str = "",
        offset: int = 0,
        length: int = 0,
        window: int = FILE_WINDOW,
    ) -> FileReader:
        """A download of `length` bytes (0 = to the end) from `offset`; nothing is sent before `open` or iteration."""
        if not 0 <= offset <= MAX_OFFSET or length < 0:
            raise ValueError("a range outside of any file")
        length = min(length, MAX_OFFSET - offset)  # no file has more; 0 behind all that one can have is nothing, too
        payload = at_path(path, user) + u64(Tag.OFFSET, offset) + u64(Tag.BYTES, length)
        return FileReader(self._conn, payload, offset, length, window)

    async def put_file(
        self,
        path: str | bytes,
        *,
        user: str = "",
        mode: int | None = None,
        umask: int = 0o022,
        parents: bool = False,
        exclusive: bool = False,
        part: str | None = None,
        mtime_ns: int | None = None,
    ) -> FileWriter:
        """Begins an upload. `part` names it so that it can be resumed after the connection was lost."""
        flags = (1 if parents else 0) | (2 if exclusive else 0) | (4 if part else 0)
        payload = at_path(path, user) + u64(Tag.UMASK, umask) + u64(Tag.FLAGS, flags)
        if mode is not None:
            payload += u64(Tag.MODE, mode)
        if part:
            payload += raw(Tag.PART, check_id(part).encode())
        if mtime_ns is not None:
            payload += u64(Tag.MTIME_NS, mtime_ns & U64_MAX)
        return await FileWriter(self._conn).open(payload)

    async def stat(self, path: str | bytes, user: str = "", *, follow: bool = False) -> FileInfo:
        """One file's record."""
        payload = at_path(path, user) + u64(Tag.FLAGS, int(follow))
        return await request_one(self._conn, Type.FILE_STAT, payload, file_info_from)

    async def list_dir(
        self, path: str | bytes, user: str = "", cursor: int = 0, limit: int = 1_000
    ) -> tuple[list[FileInfo], int]:
        """A page of at most `limit` entries (at most MAX_LIST_LIMIT) and the cursor of the next one, 0 at the end."""
        limit = max(1, min(limit, MAX_LIST_LIMIT))
        payload = at_path(path, user) + u64(Tag.CURSOR, cursor) + u64(Tag.LIMIT, limit)
        async with self._listings:
            fields, entries = await request(self._conn, Type.FILE_LIST, payload, dir_entry_from, 0, limit)
        try:
            return entries, fields.u64(Tag.CURSOR, U64_MAX, 0)
        except Violation as violation:
            raise self._conn.end(broken(violation)) from None

    async def remove(self, path: str | bytes, user: str = "", *, recursive: bool = False) -> None:
        """Removes a file, or with `recursive` a tree; symlinks are not followed."""
        await request(self._conn, Type.FILE_REMOVE, at_path(path, user) + u64(Tag.FLAGS, int(recursive)))

    async def mkdir(
        self,
        path: str | bytes,
        user: str = "",
        mode: int = 0o777,
        umask: int = 0o022,
        *,
        parents: bool = False,
    ) -> None:
        """Makes a directory, with `parents` those above it too."""
        payload = at_path(path, user) + u64(Tag.MODE, mode) + u64(Tag.UMASK, umask)
        await request(self._conn, Type.FILE_MKDIR, payload + u64(Tag.FLAGS, int(parents)))

    async def rename(self, path: str | bytes, target: str | bytes, user: str = "") -> None:
        """Renames `path` to the absolute path `target`."""
        await request(self._conn, Type.FILE_RENAME, at_path(path, user) + raw(Tag.TARGET, absolute(target)))


def _id(exec_id: str) -> bytes:
    return raw(Tag.ID, check_id(exec_id).encode())
