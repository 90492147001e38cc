# SPDX-License-Identifier: Apache-2.0
"""The frames that test host and tests exchange over a serial port, and finding them in a damaged stream.

Here: bytes to frames and back; both ends import it. Not here: what a frame asks for (``guest_agent.py``,
``channel.py``).

A port outlives who speaks on it: a saved machine, a rebooted guest or a test that was killed leaves half a frame
behind. So a frame starts with a mark and is checked by a sum, and what is neither is skipped.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

#: The name of the port, below /dev/virtio-ports in the guest.
PORT = "dsec.testhost"
PAYLOAD_MAX = 1 << 16

_MARK = b"\xd5\xecT\x01"
_HEADER = struct.Struct(">4sBIII")  # mark, kind, request, length of the payload, sum over the rest

#: More bytes than any frame that the other side may still be waiting for, and no mark among them.
FILLER = bytes(_HEADER.size + PAYLOAD_MAX)


class Kind(IntEnum):
    """What a frame is. From SYNC to KILL: to the guest; SYNC and the rest: from it."""

    SYNC = 1  # payload: what is to come back in a SYNC; ends whatever still runs
    RUN = 2  # payload: JSON, see guest_agent.Agent
    INPUT = 3
    INPUT_END = 4
    KILL = 5
    OUTPUT = 6
    ERRORS = 7
    EXIT = 8  # payload: JSON {"status": ..., "reason": ..., "seconds": ...}


class Frame(NamedTuple):
    """One message; ``request`` tells which command it belongs to."""

    kind: Kind
    request: int
    payload: bytes = b""


def encode(frame: Frame) -> bytes:
    """The bytes of a frame.  Raises ValueError when its payload is too long."""
    if len(frame.payload) > PAYLOAD_MAX:
        raise ValueError(f"a payload of {len(frame.payload)} bytes, at most {PAYLOAD_MAX}")
    return _HEADER.pack(_MARK, frame.kind, frame.request, len(frame.payload), _sum(frame)) + frame.payload


class Decoder:
    """Takes bytes as they come, gives whole frames, and counts the bytes that belonged to none."""

    def __init__(self) -> None:
        self.skipped = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that ``data`` completes.  To be used up before the next call."""
        self._buffer += data
        while self._to_mark():
            _mark, kind, request, length, expected = _HEADER.unpack_from(self._buffer)
            if length > PAYLOAD_MAX or kind not in iter(Kind):
                self._skip(1)
                continue
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            frame = Frame(Kind(kind), request, bytes(self._buffer[_HEADER.size : end]))
            if _sum(frame) != expected:
                self._skip(1)
                continue
            del self._buffer[:end]
            yield frame

    def _to_mark(self) -> bool:
        """Drop what lies before the next mark; true when a whole header is there."""
        start = self._buffer.find(_MARK)
        # The end of the buffer may be the beginning of a mark.
        self._skip(max(0, len(self._buffer) - len(_MARK) + 1) if start < 0 else start)
        return start >= 0 and len(self._buffer) >= _HEADER.size

    def _skip(self, count: int) -> None:
        self.skipped += count
        del self._buffer[:count]


def _sum(frame: Frame) -> int:
    return zlib.crc32(frame.payload, zlib.crc32(struct.pack(">BI", frame.kind, frame.request)))
