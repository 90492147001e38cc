# SPDX-License-Identifier: Apache-2.0
"""The commands that the daemon in memory knows (``fake_daemon.py``): what they print and how they end.

Here: a command and its state. Not here: routes and streams.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from typing import Any

from libdsec import types as t
from libdsec.errors import ExecNotStarted


@dataclass
class Exec:
    """A command: what it printed, and how it ended unless it still runs."""

    request: t.ExecRequest
    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int | None = 0
    signal: int | None = None
    reason: t.ExecReason = t.ExecReason.EXITED
    running: bool = False
    stdin: bytearray = field(default_factory=bytearray)
    signals: list[int] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: Offset of the oldest byte of stdout that is still held.
    oldest: int = 0

    def info(self) -> dict[str, Any]:
        ended: dict[str, Any] = {"exit_code": self.exit_code, "signal": self.signal, "reason": self.reason}
        sizes = {"stdout_bytes": len(self.stdout), "stderr_bytes": len(self.stderr)}
        base: dict[str, Any] = {"exec_id": self.request.exec_id, "pid": 7, "running": self.running, **sizes}
        return base if self.running else base | ended

    def end(self, code: int | None = 0, signal: int | None = None) -> None:
        self.running, self.exit_code, self.signal = False, code, signal
        self.changed.set()

    def result(self) -> t.ExecResult:
        limit = self.request.max_output_bytes
        return t.ExecResult(
            **self.info(), stdout=self.stdout[:limit], stdout_truncated=len(self.stdout) > limit,
            stderr=self.stderr[:limit], stderr_truncated=len(self.stderr) > limit,
        )  # fmt: skip


def pattern(size: int) -> bytes:
    """Bytes that are different at every offset, so that a lost or doubled one shows."""
    return b"".join(struct.pack(">I", n) for n in range((size + 3) // 4))[:size]


def run(request: t.ExecRequest, stdin: bytes | None) -> Exec:
    """What the commands do."""
    name, *args = request.argv
    command = Exec(request)
    match name:
        case "echo":
            command.stdout = " ".join(args).encode() + b"\n"
        case "cat":
            command.stdout = stdin or b""
        case "exit":
            command.exit_code = int(args[0])
            command.stderr = b"exiting\n"
        case "die":
            command.exit_code, command.signal = None, int(args[0])
        case "emit":
            command.stdout = pattern(int(args[0]))
        case "raw":
            command.stdout = bytes.fromhex(args[0])
        case "late":
            command.exit_code, command.signal, command.reason = None, 9, t.ExecReason.TIMEOUT
            command.stdout = b"before the deadline\n"
        case "shutdown":
            command.exit_code, command.signal, command.reason = None, 15, t.ExecReason.SHUTDOWN
        case "sleep" | "reader":
            command.running = True
        case "xargs":
            command.exit_code = 0
        case _:
            reason = "not-executable" if name == "noexec" else "not-found"
            raise ExecNotStarted(f"exec {name!r}: {reason}", reason=reason)
    return command
