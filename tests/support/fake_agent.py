# SPDX-License-Identifier: Apache-2.0
"""An agent that says whatever a test tells it to, also what no agent may say.

Its codec is written from docs/agent-protocol.md on its own and shares nothing with the daemon's, so that a number
misread there fails here. The tests drive it frame by frame over a socket pair in the daemon's own loop.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

from dsecd.backends.agentlink.link import AgentLink, LinkLost, connect_socket

TIMEOUT_S = 60.0


class Frame(NamedTuple):
    """A frame from the daemon; `fields` maps a tag to its values in order (empty for raw payloads)."""

    kind: int
    flags: int
    channel: int
    payload: bytes
    fields: dict[int, list[bytes]]

    def number(self, tag: int) -> int:
        (value,) = self.fields[tag]
        (number,) = struct.unpack("<Q", value)
        return int(number)


def field(tag: int, value: int | bytes | str) -> bytes:
    """One field."""
    data = struct.pack("<Q", value) if isinstance(value, int) else value
    data = data.encode() if isinstance(data, str) else data
    return struct.pack("<HI", tag, len(data)) + data


def fields(**values: int | bytes | str) -> bytes:
    """Fields by the names of the tags that answers use, in small letters."""
    return b"".join(field(TAGS[name], value) for name, value in values.items())


def make_frame(kind: int, channel: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """One frame."""
    return struct.pack("<IBBHI", len(payload), kind, flags, 0, channel) + payload


def output(stream: int, offset: int, data: bytes) -> bytes:
    """The payload of an OUTPUT."""
    return struct.pack("<BQ", stream, offset) + data


def exit_fields(exec_id: str, out: int = 0, err: int = 0, /, **changes: int | bytes | str) -> bytes:
    """The payload of an EXIT with status 0."""
    values: dict[str, int | bytes | str] = {
        "id": exec_id, "kind": 1, "status": 0, "reason": 0, "total_out": out, "total_err": err,
        "dropped_out": 0, "dropped_err": 0, "cpu_user_us": 10, "cpu_system_us": 20, "max_rss_kib": 30,
        "started_ns": 40, "finished_ns": 50,
    }  # fmt: skip
    return fields(**(values | changes))


def file_fields(**changes: int | bytes | str) -> bytes:
    """The payload of an INFO about a regular file."""
    values: dict[str, int | bytes | str] = {
        "mode": 0o100644, "uid": 1, "gid": 2, "size": 3, "mtime_ns": 4, "nlink": 1, "ino": 6,
    }  # fmt: skip
    return fields(**(values | changes))


TAGS = {
    "protocol": 1, "generation": 2, "time_ns": 3, "version": 4, "id": 5, "argv": 6, "env": 7, "cwd": 8, "user": 9,
    "flags": 10, "rows": 11, "cols": 12, "rlimit": 13, "umask": 14, "timeout_ms": 15, "idle_timeout_ms": 16,
    "buffer_bytes": 17, "keep_ms": 18, "credit": 19, "stream": 20, "bytes": 21, "offset": 22, "offset_out": 23,
    "offset_err": 24, "signal": 25, "scope": 26, "grace_ms": 27, "start": 28, "end": 29, "pid_count": 30,
    "nlink": 31, "pid": 32, "running": 33, "kind": 34, "status": 35, "reason": 36, "total_out": 37, "total_err": 38,
    "dropped_out": 39, "dropped_err": 40, "cpu_user_us": 41, "cpu_system_us": 42, "max_rss_kib": 43,
    "started_ns": 44, "finished_ns": 45, "code": 46, "errno": 47, "message": 48, "path": 49, "target": 50,
    "mode": 51, "uid": 52, "gid": 53, "size": 54, "mtime_ns": 55, "name": 56, "cursor": 57, "limit": 58, "part": 59,
    "execs_running": 60, "execs_total": 61, "ino": 62, "cgroup": 63, "oom_kills": 64, "port": 65,
}  # fmt: skip

_RAW = (0x05, 0x21)  # INPUT, DATA


class FakeAgent:
    """The agent's end of a connection. Use as an async context manager."""

    def __init__(self) -> None:
        self.host, self._sock = socket.socketpair()
        self._sock.setblocking(False)
        self._buffer = b""
        self.lost: list[LinkLost] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()

    async def linked(
        self, generation: int = 7, on_lost: Callable[[LinkLost], None] | None = None
    ) -> AgentLink:
        """Greets as an honest agent would and returns the daemon's end."""
        task = asyncio.ensure_future(self.connect(generation, on_lost))
        hello = await self.receive(0x01)
        assert hello.channel == 0
        assert hello.number(TAGS["protocol"]) == 1
        assert hello.number(TAGS["generation"]) == generation
        await self.send(0x14, 0, fields(protocol=1, version="1", generation=generation, pid_count=1))
        return await task

    async def connect(
        self, generation: int = 7, on_lost: Callable[[LinkLost], None] | None = None
    ) -> AgentLink:
        """The daemon's side of the greeting alone."""
        return await connect_socket(
            self.host, generation=generation, timeout_s=TIMEOUT_S, on_lost=on_lost or self.lost.append
        )

    async def receive(self, kind: int | None = None) -> Frame:
        """The next frame, which must be of `kind` when given."""
        async with asyncio.timeout(TIMEOUT_S):
            header = await self._exactly(12)
            size, found, flags, zero, channel = struct.unpack("<IBBHI", header)
            assert zero == 0
            assert size <= 65536
            payload = await self._exactly(size)
        assert kind is None or found == kind, f"frame {found:#x} came where {kind:#x} was due"
        return Frame(found, flags, channel, payload, {} if found in _RAW else _read_fields(payload))

    async def quiet(self) -> bool:
        """Whether the daemon has sent nothing that was not received yet."""
        for _ in range(5):
            await asyncio.sleep(0)
        try:
            return not self._buffer and not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._buffer

    async def send(self, kind: int, channel: int, payload: bytes = b"", flags: int = 0) -> None:
        """Sends one frame."""
        await self.send_bytes(make_frame(kind, channel, payload, flags))

    async def send_bytes(self, data: bytes) -> None:
        """Sends anything; a daemon that hangs up meanwhile is not this side's fault."""
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(self._sock, data), TIMEOUT_S)
        except (BrokenPipeError, ConnectionResetError):
            pass

    async def hung_up(self) -> bool:
        """Waits for the end of the stream, reading what is left."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(TIMEOUT_S):
            try:
                while await loop.sock_recv(self._sock, 65536):
                    pass
            except ConnectionResetError:
                pass
        return True

    def hang_up(self) -> None:
        """Closes this end."""
        self._sock.close()

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = await asyncio.get_running_loop().sock_recv(self._sock, 65536)
            assert data, "the daemon closed the connection"
            self._buffer += data
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data


def _read_fields(payload: bytes) -> dict[int, list[bytes]]:
    result: dict[int, list[bytes]] = {}
    while payload:
        tag, size = struct.unpack("<HI", payload[:6])
        result.setdefault(tag, []).append(payload[6 : 6 + size])
        payload = payload[6 + size :]
    return result
