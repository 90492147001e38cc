# SPDX-License-Identifier: Apache-2.0
"""Frames of the exec WebSocket and of bodies of files, sparse or many, and the book-keeping of stream offsets.

Here: pure encoding, decoding and checking; docs/api.md has the formats. Not here: input and output.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Literal, NamedTuple

from libdsec.errors import InfraError

StreamName = Literal["stdout", "stderr"]


class ClientFrame(IntEnum):
    """First byte of a binary message to the daemon."""

    STDIN = 0x00
    EOF = 0x01
    RESIZE = 0x02
    SIGNAL = 0x03
    DETACH = 0x04


class ServerFrame(IntEnum):
    """First byte of a binary message from the daemon."""

    STARTED = 0x10
    STDOUT = 0x11
    STDERR = 0x12
    STDIN_ACCEPTED = 0x13
    EXIT = 0x1F


_OFFSET = struct.Struct("<Q")
#: One message of standard input holds at most this much.
STDIN_BYTES = 32 * 1024


def output_frame(stream: StreamName, offset: int, data: bytes) -> bytes:
    """A STDOUT or STDERR message."""
    kind = ServerFrame.STDOUT if stream == "stdout" else ServerFrame.STDERR
    return bytes([kind]) + _OFFSET.pack(offset) + data


def split_output(message: bytes) -> tuple[int, bytes]:
    """Offset and bytes of a STDOUT or STDERR message. Raises InfraError when it is too short."""
    if len(message) < 9:
        raise InfraError("read an exec's output: the daemon sent a frame without an offset")
    return int(_OFFSET.unpack_from(message, 1)[0]), message[9:]


def accepted(message: bytes) -> int:
    """Bytes of standard input that have reached the sandbox, from a STDIN_ACCEPTED message."""
    return int(_OFFSET.unpack_from(message, 1)[0]) if len(message) >= 9 else 0


class Cursor:
    """Where the reader of one output stream is: hands out each byte once, and notices when some are missing."""

    def __init__(self, name: StreamName, offset: int = 0, *, allow_gap: bool = False) -> None:
        self.name = name
        self.offset = offset
        self.missed_bytes = 0
        self._allow_gap = allow_gap

    def take(self, offset: int, data: bytes) -> bytes:
        """The new part of ``data``, which lies at ``offset``. Raises InfraError when bytes before it were lost."""
        if offset > self.offset:
            self._skip_to(offset)
        fresh = data[self.offset - offset :]
        self.offset += len(fresh)
        return fresh

    def finish(self, total: int) -> None:
        """Check that everything the command printed, ``total`` bytes, was handed out."""
        if total > self.offset:
            self._skip_to(total)

    def _skip_to(self, offset: int) -> None:
        lost = offset - self.offset
        if not self._allow_gap:
            raise InfraError(
                f"read {self.name}: {lost} bytes after offset {self.offset} are gone",
                hint="read sooner, or start the command with a larger buffer_bytes",
                stream=self.name,
                offset=self.offset,
                lost_bytes=lost,
            )
        self.missed_bytes += lost
        self.offset = offset


class Lines:
    """Cuts a stream of bytes into lines of text; a character or line split over chunks comes out whole."""

    def __init__(self, encoding: str = "utf-8", errors: str = "replace") -> None:
        self._decoder = codecs.getincrementaldecoder(encoding)(errors)
        self._parts: list[str] = []

    def feed(self, data: bytes, *, final: bool = False) -> Iterator[str]:
        """The lines completed by ``data``, without their ends; with ``final`` also an unfinished last one."""
        *whole, rest = self._decoder.decode(data, final).split("\n")
        for line in whole:
            self._parts.append(line)
            yield "".join(self._parts).removesuffix("\r")
            self._parts = []
        if rest:
            self._parts.append(rest)
        if final and self._parts:
            yield "".join(self._parts)
            self._parts = []


# --- many files --------------------------------------------------------------------------------------------------

_RECORD = struct.Struct("<IqII")


def record(mode: int, mtime_ns: int, name: bytes, data: bytes) -> bytes:
    """One file of an ``application/x-dsec-files`` body; ``mode`` as stat(2) has it, ``name`` empty in a download."""
    return _RECORD.pack(mode, mtime_ns, len(name), len(data)) + name + data


class Record(NamedTuple):
    """A file that was asked for. ``mode`` 0: it has to be asked for alone."""

    mode: int
    mtime_ns: int
    data: bytes


class Records:
    """Reads a download's ``application/x-dsec-files`` body that arrives in pieces of any size; holds one file."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def feed(self, piece: bytes) -> Iterator[Record]:
        """Each file found. Raises InfraError for one larger than any that was asked for."""
        self._data += piece
        begin = 0
        while len(self._data) >= begin + _RECORD.size:
            mode, mtime_ns, name, size = _RECORD.unpack_from(self._data, begin)
            if name or size > self._max_bytes:
                raise InfraError(f"read files: one comes with {size} bytes and a name of {name}")
            end = begin + _RECORD.size + size
            if len(self._data) < end:
                break
            yield Record(mode, mtime_ns, bytes(self._data[end - size : end]))
            begin = end
        del self._data[:begin]


# --- sparse files ------------------------------------------------------------------------------------------------

_EXTENT = struct.Struct("<QI")
#: One extent frame holds at most this much.
EXTENT_BYTES = 256 * 1024


def extent(offset: int, data: bytes) -> bytes:
    """One frame of an ``application/x-dsec-extents`` body; one without data marks the end of the file at ``offset``."""
    return _EXTENT.pack(offset, len(data)) + data


class Extents:
    """Reads an ``application/x-dsec-extents`` body that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._offset = 0
        self._left = 0
        #: Where the file ends, once a frame without data has said so.
        self.end: int | None = None

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Offset and data of each part found. Raises InfraError for offsets that fall."""
        view = memoryview(piece)
        while view:
            if self._left == 0:
                need = _EXTENT.size - len(self._head)
                self._head += view[:need]
                view = view[need:]
                if len(self._head) == _EXTENT.size:
                    self._start()
                continue
            data = bytes(view[: self._left])
            view = view[len(data) :]
            yield self._offset, data
            self._offset += len(data)
            self._left -= len(data)

    def _start(self) -> None:
        offset, length = _EXTENT.unpack(self._head)
        self._head.clear()
        if offset < self._offset:
            raise InfraError(f"read a file: an extent at {offset} came after {self._offset}")
        self._offset, self._left = offset, length
        if length == 0:
            self.end = offset

    @property
    def complete(self) -> bool:
        """Whether the body may end here."""
        return self._left == 0 and not self._head
