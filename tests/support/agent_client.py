# SPDX-License-Identifier: Apache-2.0
"""A small blocking client of the agent protocol, for tests.

Written from docs/agent-protocol.md alone and sharing nothing with the daemon's client, so that the two check each
other. One thread, one connection; frames of channels nobody waits for at the moment are put aside.
"""

from __future__ import annotations

import collections
import dataclasses
import socket
import struct
import time
from collections.abc import Iterable

TYPES = {
    "HELLO": 0x01, "START": 0x02, "ATTACH": 0x03, "CREDIT": 0x04, "INPUT": 0x05, "RESIZE": 0x06, "SIGNAL": 0x07,
    "LIST": 0x08, "FORGET": 0x09, "USAGE": 0x0A, "PING": 0x0B, "CLOSE": 0x0C, "SHUTDOWN": 0x0D, "PEEK": 0x0E,
    "OUTPUT": 0x10, "EXIT": 0x12, "INFO": 0x13, "HELLO_OK": 0x14, "STARTED": 0x15, "ATTACHED": 0x16, "OK": 0x1E,
    "ERROR": 0x1F, "FILE_GET": 0x20, "DATA": 0x21, "FILE_PUT": 0x22, "COMMIT": 0x23, "FILE_STAT": 0x24,
    "FILE_LIST": 0x25, "FILE_REMOVE": 0x26, "FILE_MKDIR": 0x27, "FILE_RENAME": 0x28, "READY": 0x29,
}  # fmt: skip
NAMES = {number: name for name, number in TYPES.items()}

TAG_ORDER = """
    PROTOCOL GENERATION TIME_NS VERSION ID ARGV ENV CWD USER FLAGS ROWS COLS RLIMIT UMASK TIMEOUT_MS
    IDLE_TIMEOUT_MS BUFFER_BYTES KEEP_MS CREDIT STREAM BYTES OFFSET OFFSET_OUT OFFSET_ERR SIGNAL SCOPE GRACE_MS
    START END PID_COUNT NLINK PID RUNNING KIND STATUS REASON TOTAL_OUT TOTAL_ERR DROPPED_OUT DROPPED_ERR
    CPU_USER_US CPU_SYSTEM_US MAX_RSS_KIB STARTED_NS FINISHED_NS CODE ERRNO MESSAGE PATH TARGET MODE UID GID
    SIZE MTIME_NS NAME CURSOR LIMIT PART EXECS_RUNNING EXECS_TOTAL INO
    CGROUP OOM_KILLS
"""
TAGS = {name: number for number, name in enumerate(TAG_ORDER.split(), start=1)}
TAG_NAMES = {number: name for name, number in TAGS.items()}
BYTES_TAGS = {
    "VERSION", "ID", "ARGV", "ENV", "CWD", "USER", "RLIMIT", "CODE", "MESSAGE", "PATH", "TARGET", "NAME", "PART",
    "CGROUP",
}  # fmt: skip

PTY, STDIN, ATTACH = 1, 2, 4
EOF, MORE = 1, 2

Value = int | str | bytes
Field = tuple[str, Value]
Fields = dict[str, "int | bytes"]


def encode(items: Iterable[Field]) -> bytes:
    """A field list."""
    out = bytearray()
    for name, item in items:
        value = item
        if isinstance(value, int):
            value = struct.pack("<Q", value)
        raw = value.encode() if isinstance(value, str) else value
        out += struct.pack("<HI", TAGS[name], len(raw)) + raw
    return bytes(out)


def decode(payload: bytes) -> Fields:
    """The field list of a payload; raises ValueError when it is malformed or has a tag twice."""
    fields: Fields = {}
    at = 0
    while at < len(payload):
        tag, size = struct.unpack_from("<HI", payload, at)
        raw = payload[at + 6 : at + 6 + size]
        at += 6 + size
        if len(raw) != size:
            raise ValueError("field cut short")
        name = TAG_NAMES[tag]
        if name in fields:
            raise ValueError(f"{name} twice")
        fields[name] = raw if name in BYTES_TAGS else struct.unpack("<Q", raw)[0]
    return fields


@dataclasses.dataclass(frozen=True)
class Frame:
    type: str
    flags: int
    channel: int
    payload: bytes

    @property
    def fields(self) -> Fields:
        return decode(self.payload)


class AgentError(Exception):
    """An ERROR frame."""

    def __init__(self, fields: Fields) -> None:
        code, message = fields["CODE"], fields["MESSAGE"]
        assert isinstance(code, bytes) and isinstance(message, bytes)
        self.code = code.decode()
        self.errno = fields["ERRNO"]
        super().__init__(f"{self.code}: {message.decode(errors='replace')} (errno {int(self.errno)})")


class Closed(Exception):
    """The agent ended the connection."""


class AgentClient:
    """One connection. Every wait has a limit, so a test fails rather than hangs."""

    def __init__(self, path: str, *, generation: int = 1, hello: bool = True, timeout_s: float = 60) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(timeout_s)
        self.sock.connect(path)
        self.timeout_s = timeout_s
        self.buffer = bytearray()
        self.aside: dict[int, collections.deque[Frame]] = collections.defaultdict(collections.deque)
        self.last_channel = 0
        self.hello_ok: Fields = {}
        if hello:
            self.hello_ok = self.say_hello(generation)

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def say_hello(self, generation: int) -> Fields:
        self.send(
            "HELLO", [("PROTOCOL", 1), ("GENERATION", generation), ("TIME_NS", time.time_ns())], channel=0
        )
        return self.expect(0, "HELLO_OK").fields

    # ---- frames

    def channel(self) -> int:
        self.last_channel += 1
        return self.last_channel

    def send_raw(self, type: int, payload: bytes, channel: int, flags: int = 0) -> None:
        self.sock.sendall(struct.pack("<IBBHI", len(payload), type, flags, 0, channel) + payload)

    def send(self, type: str, fields: Iterable[Field] = (), *, channel: int, flags: int = 0) -> None:
        self.send_raw(TYPES[type], encode(fields), channel, flags)

    def read_frame(self, timeout_s: float | None = None) -> Frame:
        """The next frame of any channel. Raises TimeoutError, Closed."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while True:
            if len(self.buffer) >= 12:
                size, kind, flags, zero, channel = struct.unpack_from("<IBBHI", self.buffer)
                assert size <= 65536 and zero == 0, "malformed header"
                if len(self.buffer) >= 12 + size:
                    payload = bytes(self.buffer[12 : 12 + size])
                    del self.buffer[: 12 + size]
                    return Frame(NAMES[kind], flags, channel, payload)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.sock.settimeout(left)
            try:
                data = self.sock.recv(262144)
            except ConnectionResetError:
                data = b""
            finally:
                self.sock.settimeout(self.timeout_s)
            if not data:
                raise Closed
            self.buffer += data

    def read_on(self, channel: int, timeout_s: float | None = None) -> Frame:
        """The next frame of this channel."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while not self.aside[channel]:
            frame = self.read_frame(deadline - time.monotonic())
            self.aside[frame.channel].append(frame)
        return self.aside[channel].popleft()

    def expect(self, channel: int, *types: str, timeout_s: float | None = None) -> Frame:
        frame = self.read_on(channel, timeout_s)
        if frame.type == "ERROR" and "ERROR" not in types:
            raise AgentError(frame.fields)
        assert frame.type in types, f"{frame.type} instead of {types}"
        return frame

    def request(self, type: str, fields: Iterable[Field] = ()) -> tuple[list[Frame], Fields]:
        """A request answered by any number of frames and OK; raises AgentError."""
        channel = self.channel()
        self.send(type, fields, channel=channel)
        frames = []
        while (frame := self.expect(channel, "INFO", "OUTPUT", "DATA", "OK")).type != "OK":
            frames.append(frame)
        return frames, frame.fields

    def ping(self) -> float:
        """Seconds a PING took."""
        begun = time.monotonic()
        self.request("PING")
        return time.monotonic() - begun

    # ---- execs

    def start(self, argv: list[str | bytes], *, id: str, flags: int = ATTACH, credit: int = 1 << 20,
              fields: Iterable[Field] = ()) -> ExecChannel:  # fmt: skip
        """Sends START and returns at once; the answer is read by ExecChannel.started or .wait."""
        channel = self.channel()
        arguments = [("ARGV", argument) for argument in argv]
        options: list[Field] = [("ID", id), ("FLAGS", flags), ("CREDIT", credit)]
        self.send("START", [*options, *arguments, *fields], channel=channel)
        return ExecChannel(self, channel, id)

    def attach(self, id: str, *, out: int = 0, err: int = 0, credit: int = 1 << 20) -> ExecChannel:
        channel = self.channel()
        self.send(
            "ATTACH",
            [("ID", id), ("OFFSET_OUT", out), ("OFFSET_ERR", err), ("CREDIT", credit)],
            channel=channel,
        )
        exec_ = ExecChannel(self, channel, id)
        exec_.started_fields = self.expect(channel, "ATTACHED").fields
        exec_.offsets = {
            1: int(exec_.started_fields["OFFSET_OUT"]),
            2: int(exec_.started_fields["OFFSET_ERR"]),
        }
        exec_.first = dict(exec_.offsets)
        return exec_

    def run(self, argv: list[str | bytes], *, id: str, flags: int = ATTACH, credit: int = 1 << 20,
            fields: Iterable[Field] = (), timeout_s: float = 60) -> ExecChannel:  # fmt: skip
        """Starts, waits for the end, and returns the channel with everything it said."""
        exec_ = self.start(argv, id=id, flags=flags, credit=credit, fields=fields)
        exec_.wait(timeout_s)
        return exec_

    def list(self, id: str | None = None) -> dict[str, Fields]:
        frames, _ = self.request("LIST", [("ID", id)] if id else [])
        return {str(f.fields["ID"], "ascii"): f.fields for f in frames}  # type: ignore[arg-type]


class ExecChannel:
    """A channel that follows an exec; checks that offsets never skip or repeat."""

    def __init__(self, client: AgentClient, channel: int, id: str) -> None:
        self.client = client
        self.channel = channel
        self.id = id
        self.data = {1: bytearray(), 2: bytearray()}
        self.offsets = {1: 0, 2: 0}
        self.first = {1: 0, 2: 0}
        self.started_fields: Fields | None = None
        self.exit: Fields | None = None
        self.input_credit = 0

    @property
    def out(self) -> bytes:
        return bytes(self.data[1])

    @property
    def err(self) -> bytes:
        return bytes(self.data[2])

    def started(self) -> Fields:
        """The STARTED fields; raises AgentError when the exec could not be started."""
        if self.started_fields is None:
            self.started_fields = self.client.expect(self.channel, "STARTED").fields
            self.input_credit = int(self.started_fields["CREDIT"])
        return self.started_fields

    def credit(self, stream: int, size: int) -> None:
        self.client.send("CREDIT", [("STREAM", stream), ("BYTES", size)], channel=self.channel)

    def step(self, timeout_s: float | None = None, *, consume: bool = True) -> Frame:
        """One more frame of the exec, taken into account; gives credit back for output when `consume`."""
        self.started()
        frame = self.client.expect(self.channel, "OUTPUT", "EXIT", "CREDIT", timeout_s=timeout_s)
        if frame.type == "OUTPUT":
            stream, offset = struct.unpack_from("<BQ", frame.payload)
            body = frame.payload[9:]
            assert offset == self.offsets[stream], (
                f"stream {stream}: offset {offset} instead of {self.offsets[stream]}"
            )
            assert body, "empty OUTPUT"
            self.offsets[stream] += len(body)
            self.data[stream] += body
            if consume:
                self.credit(stream, len(body))
        elif frame.type == "CREDIT":
            assert frame.fields["STREAM"] == 0
            self.input_credit += int(frame.fields["BYTES"])
        else:
            self.exit = frame.fields
            assert self.exit["ID"] == self.id.encode()
        return frame

    def wait(self, timeout_s: float = 60) -> Fields:
        """Reads until EXIT."""
        deadline = time.monotonic() + timeout_s
        self.started()
        while self.exit is None:
            self.step(max(0.001, deadline - time.monotonic()))
        return self.exit

    def read_until(self, needle: bytes, stream: int = 1, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while needle not in self.data[stream]:
            frame = self.step(max(0.001, deadline - time.monotonic()))
            assert frame.type != "EXIT", f"ended before {needle!r}: {self.data}"

    def input(self, data: bytes, *, eof: bool = False) -> None:
        """Sends all of it, waiting for credit as needed."""
        self.started()
        view = memoryview(data)
        while view:
            while self.input_credit == 0 and self.exit is None:
                self.step()
            if self.exit is not None:
                return
            piece = view[: min(65536, self.input_credit)]
            self.client.send_raw(TYPES["INPUT"], bytes(piece), self.channel)
            self.input_credit -= len(piece)
            view = view[len(piece) :]
        if eof:
            self.client.send_raw(TYPES["INPUT"], b"", self.channel, EOF)

    def close(self) -> None:
        self.client.send("CLOSE", channel=self.channel)
