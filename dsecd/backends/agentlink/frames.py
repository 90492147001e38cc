# SPDX-License-Identifier: Apache-2.0
"""The bytes of the agent protocol: frame headers, fields, and an incremental parser.

Pure functions and one small parser over bytes. No sockets, no asyncio, no meaning of a request: which frame may come
when is decided in `connection`, `calls`, `execs` and `files`. docs/agent-protocol.md is the contract.

Whatever arrives was written by an agent that may have been taken over, so every reader here has one way out:
`Violation`.
"""

import re
import struct
from collections.abc import Callable, Iterable
from typing import Final

HEADER: Final = struct.Struct("<IBBHI")
FIELD: Final = struct.Struct("<HI")
U64_FIELD: Final = struct.Struct("<HIQ")
OUTPUT_HEAD: Final = struct.Struct("<BQ")
DATA_HEAD: Final = struct.Struct("<Q")
RLIMIT: Final = struct.Struct("<IQQ")

PROTOCOL_VERSION: Final = 1
HEADER_BYTES: Final = HEADER.size
MAX_PAYLOAD: Final = 65_536
MAX_DATA: Final = MAX_PAYLOAD - DATA_HEAD.size
MAX_REQUEST: Final = 4 << 20
MAX_CHANNEL: Final = 2**31 - 1
# Sizes and offsets in files and streams are off_t on the other side.
MAX_OFFSET: Final = 2**63 - 1
U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1

FLAG_EOF: Final = 1
FLAG_MORE: Final = 2

STDIN: Final = 0
STDOUT: Final = 1
STDERR: Final = 2

_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_CODE: Final = re.compile(r"[a-z0-9-]{1,40}", re.ASCII)


class Violation(Exception):
    """The agent broke the protocol. Ends the connection; the text names the rule, never echoes payload bytes."""


class Type:
    """Frame types. Plain integers: an enum lookup per frame would cost more than the rest of the dispatch."""

    HELLO: Final = 0x01
    START: Final = 0x02
    ATTACH: Final = 0x03
    CREDIT: Final = 0x04
    INPUT: Final = 0x05
    RESIZE: Final = 0x06
    SIGNAL: Final = 0x07
    LIST: Final = 0x08
    FORGET: Final = 0x09
    USAGE: Final = 0x0A
    PING: Final = 0x0B
    CLOSE: Final = 0x0C
    SHUTDOWN: Final = 0x0D
    PEEK: Final = 0x0E
    OUTPUT: Final = 0x10
    EXIT: Final = 0x12
    INFO: Final = 0x13
    HELLO_OK: Final = 0x14
    STARTED: Final = 0x15
    ATTACHED: Final = 0x16
    OK: Final = 0x1E
    ERROR: Final = 0x1F
    FILE_GET: Final = 0x20
    DATA: Final = 0x21
    FILE_PUT: Final = 0x22
    COMMIT: Final = 0x23
    FILE_STAT: Final = 0x24
    FILE_LIST: Final = 0x25
    FILE_REMOVE: Final = 0x26
    FILE_MKDIR: Final = 0x27
    FILE_RENAME: Final = 0x28
    READY: Final = 0x29
    FREEZE: Final = 0x38
    LIMIT: Final = 0x39
    RENEW: Final = 0x3A
    DIAL: Final = 0x3B
    NETWORK: Final = 0x3C


class Tag:
    """Field tags."""

    PROTOCOL: Final = 1
    GENERATION: Final = 2
    TIME_NS: Final = 3
    VERSION: Final = 4
    ID: Final = 5
    ARGV: Final = 6
    ENV: Final = 7
    CWD: Final = 8
    USER: Final = 9
    FLAGS: Final = 10
    ROWS: Final = 11
    COLS: Final = 12
    RLIMIT: Final = 13
    UMASK: Final = 14
    TIMEOUT_MS: Final = 15
    IDLE_TIMEOUT_MS: Final = 16
    BUFFER_BYTES: Final = 17
    KEEP_MS: Final = 18
    CREDIT: Final = 19
    STREAM: Final = 20
    BYTES: Final = 21
    OFFSET: Final = 22
    OFFSET_OUT: Final = 23
    OFFSET_ERR: Final = 24
    SIGNAL: Final = 25
    SCOPE: Final = 26
    GRACE_MS: Final = 27
    START: Final = 28
    END: Final = 29
    PID_COUNT: Final = 30
    NLINK: Final = 31
    PID: Final = 32
    RUNNING: Final = 33
    KIND: Final = 34
    STATUS: Final = 35
    REASON: Final = 36
    TOTAL_OUT: Final = 37
    TOTAL_ERR: Final = 38
    DROPPED_OUT: Final = 39
    DROPPED_ERR: Final = 40
    CPU_USER_US: Final = 41
    CPU_SYSTEM_US: Final = 42
    MAX_RSS_KIB: Final = 43
    STARTED_NS: Final = 44
    FINISHED_NS: Final = 45
    CODE: Final = 46
    ERRNO: Final = 47
    MESSAGE: Final = 48
    PATH: Final = 49
    TARGET: Final = 50
    MODE: Final = 51
    UID: Final = 52
    GID: Final = 53
    SIZE: Final = 54
    MTIME_NS: Final = 55
    NAME: Final = 56
    CURSOR: Final = 57
    LIMIT: Final = 58
    PART: Final = 59
    EXECS_RUNNING: Final = 60
    EXECS_TOTAL: Final = 61
    INO: Final = 62
    CGROUP: Final = 63
    OOM_KILLS: Final = 64
    PORT: Final = 65


TYPE_NAMES: Final[dict[int, str]] = {
    value: name for name, value in vars(Type).items() if not name.startswith("_")
}

# Types an agent may send, with the flag bits each may carry.
FROM_AGENT: Final[dict[int, int]] = {
    Type.CREDIT: 0,
    Type.OUTPUT: FLAG_EOF,
    Type.EXIT: 0,
    Type.INFO: 0,
    Type.HELLO_OK: 0,
    Type.STARTED: 0,
    Type.ATTACHED: 0,
    Type.OK: 0,
    Type.ERROR: 0,
    Type.DATA: FLAG_EOF,
    Type.READY: 0,
}

Sink = Callable[[int, int, int, memoryview], None]


class FrameParser:
    """Cuts a byte stream into frames, however it was chunked.

    `feed` calls `sink(type, flags, channel, payload)` per frame. The payload is a view that is valid only during that
    call: the receive buffer is used again afterwards. Headers are checked as soon as their 12 bytes are there, so
    what is held between calls never exceeds one legal frame.
    """

    __slots__ = ("_need", "_tail")

    def __init__(self) -> None:
        self._tail = bytearray()
        self._need = HEADER_BYTES

    def feed(self, data: memoryview, sink: Sink) -> None:
        """Takes the next bytes of the stream. Raises Violation, and whatever `sink` raises."""
        if self._tail:
            # Growing in place keeps a frame that trickles in byte by byte linear in time.
            self._tail += data
            if len(self._tail) < self._need:
                return
            data, self._tail = memoryview(self._tail), bytearray()
        position, end, need = 0, len(data), HEADER_BYTES
        while end - position >= HEADER_BYTES:
            length, kind, flags, reserved, channel = HEADER.unpack_from(data, position)
            _check_header(length, kind, flags, reserved)
            need = HEADER_BYTES + length
            if end - position < need:
                break
            sink(kind, flags, channel, data[position + HEADER_BYTES : position + need])
            position += need
            need = HEADER_BYTES
        self._need = need
        if position < end:
            self._tail = bytearray(data[position:])

    @property
    def held_bytes(self) -> int:
        """Bytes of an unfinished frame that are being kept."""
        return len(self._tail)


def _check_header(length: int, kind: int, flags: int, reserved: int) -> None:
    allowed = FROM_AGENT.get(kind)
    if allowed is None:
        raise Violation(f"frame type {kind:#04x} is not one an agent sends")
    if length > MAX_PAYLOAD:
        raise Violation(f"{TYPE_NAMES[kind]} payload of {length} bytes is over the limit")
    if flags & ~allowed or reserved:
        raise Violation(f"reserved bits set in a {TYPE_NAMES[kind]} header")


def frame(kind: int, channel: int, payload: bytes | memoryview = b"", flags: int = 0) -> bytes:
    """One whole frame. `payload` is at most MAX_PAYLOAD bytes (the caller's duty)."""
    return HEADER.pack(len(payload), kind, flags, 0, channel) + payload


def data_frame(channel: int, offset: int, data: memoryview) -> bytes:
    """A DATA frame for at most MAX_DATA bytes of a file, copied once."""
    head = HEADER.pack(DATA_HEAD.size + len(data), Type.DATA, 0, 0, channel)
    return b"".join((head, DATA_HEAD.pack(offset), data))


def u64(tag: int, value: int) -> bytes:
    """One integer field. Raises ValueError when `value` does not fit in 64 bits."""
    if not 0 <= value <= U64_MAX:
        raise ValueError(f"{value} does not fit in an unsigned 64-bit field")
    return U64_FIELD.pack(tag, 8, value)


def raw(tag: int, value: bytes) -> bytes:
    """One bytes or text field."""
    return FIELD.pack(tag, len(value)) + value


def as_bytes(value: str | bytes) -> bytes:
    """Text or bytes for a field that the kernel treats as bytes. Raises ValueError on NUL."""
    data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)
    if 0 in data:
        raise ValueError("a NUL byte cannot be part of a path, an argument or an environment variable")
    return data


def check_id(value: str) -> str:
    """An exec id or part name. Raises ValueError when it is not `[A-Za-z0-9_-]{1,64}`."""
    if not _ID.fullmatch(value):
        raise ValueError(f"not a valid id: {value!r}")
    return value


def split_request(fields: Iterable[bytes]) -> list[bytes]:
    """Payloads of a request whose fields may not fit in one frame.

    Cuts between fields where it can; only a field that is longer than a frame is itself cut. Raises ValueError when
    all of it is over MAX_REQUEST.
    """
    fields = list(fields)
    total = sum(map(len, fields))
    if total <= MAX_PAYLOAD:
        return [b"".join(fields)]
    if total > MAX_REQUEST:
        raise ValueError(f"a request of {total} bytes is over the limit of {MAX_REQUEST}")
    payloads: list[bytes] = []
    current = bytearray()
    for field in fields:
        if current and len(current) + len(field) > MAX_PAYLOAD:
            payloads.append(bytes(current))
            current.clear()
        current += field
        while len(current) > MAX_PAYLOAD:
            payloads.append(bytes(current[:MAX_PAYLOAD]))
            del current[:MAX_PAYLOAD]
    payloads.append(bytes(current))
    return payloads


class Fields:
    """The fields of one payload, read with a limit on each value."""

    __slots__ = ("_values",)

    def __init__(self, payload: memoryview | bytes) -> None:
        """Raises Violation when a field is cut short or comes twice: nothing an agent sends has repeated fields."""
        data = bytes(payload)
        values: dict[int, bytes] = {}
        position, end = 0, len(data)
        while position < end:
            if end - position < 6:
                raise Violation("a field header is cut short")
            tag, length = FIELD.unpack_from(data, position)
            position += 6
            if length > end - position:
                raise Violation("a field is longer than its frame")
            if tag in values:
                raise Violation(f"field {tag} comes twice")
            values[tag] = data[position : position + length]
            position += length
        self._values = values

    def __contains__(self, tag: int) -> bool:
        return tag in self._values

    def u64(self, tag: int, most: int = MAX_OFFSET, default: int | None = None) -> int:
        """An integer of at most `most`. Raises Violation when it is larger, malformed, or absent with no default."""
        value = self._values.get(tag)
        if value is None:
            if default is None:
                raise Violation(f"field {tag} is missing")
            return default
        if len(value) != 8:
            raise Violation(f"field {tag} is not 8 bytes long")
        number = int.from_bytes(value, "little")
        if number > most:
            raise Violation(f"field {tag} is larger than {most}")
        return number

    def signed(self, tag: int) -> int:
        """A time that may lie before 1970: the same 8 bytes in two's complement. 0 when absent."""
        number = self.u64(tag, U64_MAX, 0)
        return number - 2**64 if number > MAX_OFFSET else number

    def raw(self, tag: int, most: int) -> bytes | None:
        """Bytes of at most `most`, or None when absent. Raises Violation when longer."""
        value = self._values.get(tag)
        if value is not None and len(value) > most:
            raise Violation(f"field {tag} is longer than {most} bytes")
        return value

    def text(self, tag: int, most: int) -> str:
        """Text with undecodable bytes replaced; empty when absent. Raises Violation when over `most` bytes."""
        return (self.raw(tag, most) or b"").decode("utf-8", "replace")

    def ident(self, tag: int = Tag.ID) -> str:
        """An id. Raises Violation when absent or not of an id's form."""
        value = self.text(tag, 64)
        if not _ID.fullmatch(value):
            raise Violation("an id has a wrong form")
        return value

    def code(self) -> str:
        """The stable code of an ERROR. Raises Violation when absent or not of a code's form."""
        value = self.text(Tag.CODE, 40)
        if not _CODE.fullmatch(value):
            raise Violation("an error code has a wrong form")
        return value
