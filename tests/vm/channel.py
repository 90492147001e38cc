# SPDX-License-Identifier: Apache-2.0
"""Running commands in the test host from outside, over a virtio-serial port that QEMU shows as a Unix socket.

Here: the side outside of ``guest_agent.py``: one command at a time, each with an end. Not here: the machine
(``host.py``), the form of frames (``frames.py``).
"""

from __future__ import annotations

import io
import json
import os
import select
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tests.vm.frames import FILLER, PAYLOAD_MAX, Decoder, Frame, Kind, encode

#: How long the guest may take, beyond a command's own limit, to say that the limit was reached.
GRACE_S = 180.0
#: A command that writes more than this into memory is a mistake.
OUTPUT_MAX = 64 << 20
_ATTEMPT_S = 2.0


class ChannelError(Exception):
    """The guest does not answer, or not as agreed. Says nothing about the command."""


class CommandFailed(AssertionError):
    """A command in the guest ended other than by exit status 0; the text holds the end of its output."""

    def __init__(self, result: Result) -> None:
        self.result = result
        super().__init__(str(result))


@dataclass(frozen=True)
class Result:
    """How a command ended. ``status`` below zero is a signal's number; ``reason``: exit, timeout or not-started."""

    argv: tuple[str, ...]
    status: int
    reason: str
    seconds: float
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Its standard output, as UTF-8."""
        return self.stdout.decode(errors="replace")

    @property
    def ok(self) -> bool:
        """It ended by itself and with status 0."""
        return self.reason == "exit" and self.status == 0

    def __str__(self) -> str:
        tails = [
            f"--- {name}\n{data[-8000:].decode(errors='replace')}"
            for name, data in (("stdout", self.stdout), ("stderr", self.stderr))
            if data
        ]
        head = f"{shlex.join(self.argv)}: {self.reason}, status {self.status}, after {self.seconds:.1f} s"
        return "\n".join([head, *tails])


class Channel:
    """A connection to the guest's agent. Not for several threads."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        """Connect and wait for the agent.  Raises ChannelError."""
        self._path = path
        self._decoder = Decoder()
        self._request = int.from_bytes(os.urandom(3))
        self._socket = self._connect(time.monotonic() + timeout_s)

    def close(self) -> None:
        """Disconnect; the agent waits for the next."""
        self._socket.close()

    def run(
        self, argv: Sequence[str], *, stdin: bytes | BinaryIO = b"", stdout: BinaryIO | None = None,
        timeout_s: float = 300.0, env: Mapping[str, str] | None = None, cwd: str = "/root",
    ) -> Result:  # fmt: skip
        """Run a command as root in the guest and wait for its end.

        ``stdin`` is sent as it is read; ``stdout`` takes the output in place of the result. The command is killed
        after ``timeout_s``.  Raises ChannelError when the guest answers nothing, or not in time.
        """
        self._request = (self._request + 1) & 0xFFFFFFFF
        spec = {"argv": list(argv), "env": dict(env or {}), "cwd": cwd, "timeout_s": timeout_s}
        source = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
        sinks = {Kind.OUTPUT: stdout or _Bounded(), Kind.ERRORS: _Bounded()}
        end = self._exchange(spec, source, sinks, time.monotonic() + timeout_s + GRACE_S)
        errors, output = sinks[Kind.ERRORS], sinks[Kind.OUTPUT]
        return Result(
            tuple(argv), int(end["status"]), str(end["reason"]), float(end["seconds"]),
            output.getvalue() if isinstance(output, _Bounded) else b"",
            errors.getvalue() if isinstance(errors, _Bounded) else b"",
        )  # fmt: skip

    def _exchange(
        self, spec: dict[str, object], source: BinaryIO, sinks: Mapping[Kind, BinaryIO], deadline: float
    ) -> dict[str, str]:
        """Send the command and its input, take its output, until its end arrives and all begun is sent."""
        outgoing = self._outgoing(spec, source)
        pending, end = memoryview(next(outgoing)), None
        while end is None or pending:
            if not pending and end is None:
                pending = memoryview(next(outgoing, b""))
            readable, writable = self._ready(deadline, writing=bool(pending))
            if writable:
                pending = pending[self._socket.send(pending) :]
            for frame in self._received() if readable else ():
                if frame.request != self._request:
                    continue  # a late word of an earlier command
                if frame.kind is Kind.EXIT:
                    end = json.loads(frame.payload)
                elif frame.kind in sinks:
                    sinks[frame.kind].write(frame.payload)
        assert isinstance(end, dict)
        return end

    def _outgoing(self, spec: dict[str, object], source: BinaryIO) -> Iterator[bytes]:
        yield encode(Frame(Kind.RUN, self._request, json.dumps(spec).encode()))
        while data := source.read(PAYLOAD_MAX):
            yield encode(Frame(Kind.INPUT, self._request, data))
        yield encode(Frame(Kind.INPUT_END, self._request))

    def _ready(self, deadline: float, *, writing: bool) -> tuple[bool, bool]:
        left = max(0.0, deadline - time.monotonic())
        readable, writable, _ = select.select([self._socket], [self._socket] if writing else [], [], left)
        if not readable and not writable:
            raise ChannelError("the guest says nothing, long after the command's time was over")
        return bool(readable), bool(writable)

    def _received(self) -> Iterator[Frame]:
        try:
            data = self._socket.recv(PAYLOAD_MAX)
        except OSError as error:
            raise ChannelError(f"the connection to the guest broke: {error}") from error
        if not data:
            raise ChannelError("QEMU closed the connection to the guest")
        return self._decoder.feed(data)

    def _connect(self, deadline: float) -> socket.socket:
        attempts = 0
        while True:
            peer = socket.socket(socket.AF_UNIX)
            try:
                peer.settimeout(_ATTEMPT_S)
                peer.connect(str(self._path))
                # The first attempt is for an agent that waits between frames; the next for one that waits inside one.
                if self._synced(peer, FILLER if attempts else b""):
                    peer.setblocking(False)
                    return peer
            except OSError as error:
                # No socket: QEMU is gone. No answer: the agent is not there yet.
                if not isinstance(error, TimeoutError) or not self._path.exists():
                    time.sleep(0.1)
            except BaseException:
                peer.close()
                raise
            peer.close()
            attempts += 1
            if time.monotonic() > deadline:
                raise ChannelError(f"the guest's agent does not answer ({attempts} attempts)")

    def _synced(self, peer: socket.socket, filler: bytes) -> bool:
        """Send a random word, and read until it comes back; whatever comes before it is of an earlier life."""
        word = os.urandom(16)
        peer.sendall(filler + encode(Frame(Kind.SYNC, 0, word)))
        self._decoder = Decoder()
        end = time.monotonic() + _ATTEMPT_S
        while time.monotonic() < end:
            data = peer.recv(PAYLOAD_MAX)
            if not data:
                return False
            for frame in self._decoder.feed(data):
                if frame.kind is Kind.SYNC and frame.payload == word:
                    return True
        return False


class _Bounded(io.BytesIO):
    """Memory with an end."""

    def write(self, data: object) -> int:
        assert isinstance(data, bytes)
        if self.tell() + len(data) > OUTPUT_MAX:
            raise ChannelError(f"a command wrote more than {OUTPUT_MAX} bytes; give `stdout` a file")
        return super().write(data)
