# SPDX-License-Identifier: Apache-2.0
"""Keyword options of the SDK's calls, typed, and what becomes of results.

Here: pure helpers both forms of the SDK use. Not here: the wire types they fill (``types.py``).
"""

from __future__ import annotations

import secrets
import signal as signals
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

from libdsec import types as t
from libdsec.connection import build, new_key
from libdsec.errors import ExecFailed, ExecTimeout, InvalidSpec, SandboxLost
from libdsec.frames import StreamName

#: Standard input is read in pieces of this size.
PIECE_BYTES = 256 * 1024


class SpecOptions(TypedDict, total=False):
    """The fields of SandboxSpec that ``Sandbox`` does not name itself."""

    command: Sequence[str] | None
    user: str | None
    workdir: str | None
    hostname: str | None
    readonly_root: bool
    tmp_size_bytes: int
    shm_size_bytes: int
    network: t.Policy
    publish: Sequence[str] | str
    cpu_class: Literal["latency", "batch"]
    limits: t.Limits
    apparmor: t.AppArmor | Mapping[str, Any] | None


class ExecOptions(TypedDict, total=False):
    """The fields of ExecRequest but for argv and stdin."""

    exec_id: str
    env: Mapping[str, str]
    cwd: str | None
    user: str | None
    umask: int
    rlimits: Mapping[t.RlimitName, t.Rlimit]
    timeout_s: float | None
    idle_timeout_s: float | None
    max_output_bytes: int
    buffer_bytes: int
    keep_s: float
    limits: t.Limits | None


def exec_request(command: Sequence[str | Sequence[str]], **fields: Any) -> t.ExecRequest:
    """The request for ``exec("ls", "-l")`` or ``exec(["ls", "-l"])``, with an exec id."""
    if len(command) == 1 and not isinstance(command[0], str):
        command = list(command[0])
    if fields.get("exec_id") is None:
        fields["exec_id"] = new_key()
    return build(t.ExecRequest, "exec", argv=tuple(command), **fields)


class Readable(Protocol):
    """Anything with the ``read`` of a binary file."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; none at the end."""


def pieces(source: bytes | str | Readable | None) -> Iterator[bytes]:
    """Standard input in pieces of bounded size."""
    if source is None or isinstance(source, bytes | str):
        data = as_bytes(source) or b""
        yield from (data[begin : begin + PIECE_BYTES] for begin in range(0, len(data), PIECE_BYTES))
        return
    while piece := source.read(PIECE_BYTES):
        yield piece


class Collected:
    """Output of a followed command, the first ``limit`` bytes of each stream; the rest is counted, not kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[StreamName, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._truncated: set[StreamName] = set()

    def add(self, name: StreamName, data: bytes) -> None:
        """Take a piece."""
        kept = self._kept[name]
        room = self._limit - len(kept)
        kept += data[: max(room, 0)]
        if len(data) > room:
            self._truncated.add(name)

    def result(self, info: t.ExecInfo) -> t.ExecResult:
        """The result, once the command has ended."""
        return t.ExecResult(
            **info.model_dump(),
            stdout=bytes(self._kept["stdout"]),
            stderr=bytes(self._kept["stderr"]),
            stdout_truncated="stdout" in self._truncated,
            stderr_truncated="stderr" in self._truncated,
        )


def as_bytes(data: bytes | str | None) -> bytes | None:
    """Text as UTF-8."""
    return data.encode() if isinstance(data, str) else data


def new_sandbox_id() -> str:
    """An id for a sandbox, made here so that a creation which is cut short can be undone by name."""
    return f"s{secrets.token_hex(6)}"


def describe_end(info: t.ExecInfo) -> str:
    """How an exec ended, in words."""
    if info.signal is not None:
        try:
            name = signals.Signals(info.signal).name
        except ValueError:
            name = f"signal {info.signal}"
        return f"it was ended by {name}" + (", for want of memory" if info.reason is t.ExecReason.OOM else "")
    return f"it ended with status {info.exit_code}"


def timed_out(info: t.ExecInfo) -> bool:
    """Whether its deadline ended it. One that died of its own signal did not time out."""
    return info.reason in (t.ExecReason.TIMEOUT, t.ExecReason.IDLE_TIMEOUT)


def settle(sandbox: str, argv: Sequence[str], result: t.ExecInfo, *, check: bool) -> None:
    """Raise ExecTimeout when the deadline ended it, ExecFailed when ``check`` and it did not end with 0.

    A command that went down with its sandbox has no result of its own: SandboxLost.
    """
    what = f"exec {argv[0]!r} in '{sandbox}'" if argv else f"exec '{result.exec_id}' in '{sandbox}'"
    if timed_out(result):
        kind = "no output for too long" if result.reason is t.ExecReason.IDLE_TIMEOUT else "its time was up"
        late = ExecTimeout(f"{what}: it was killed, {kind}", exec_id=result.exec_id, reason=result.reason)
        late.result = result
        raise late
    if result.reason is t.ExecReason.SHUTDOWN:
        raise SandboxLost(f"{what}: the sandbox was stopped while it ran", exec_id=result.exec_id)
    if check and result.exit_code != 0:
        failed = ExecFailed(
            f"{what}: {describe_end(result)}", exec_id=result.exec_id, exit_code=result.exit_code
        )
        failed.result = result
        raise failed


def guest_path(path: str) -> str:
    """A path in a sandbox. Raises InvalidSpec when it is not absolute."""
    if not path.startswith("/") or "\0" in path:
        raise InvalidSpec(
            f"path {path!r}: must be absolute", errors=[{"path": "path", "message": "must be absolute"}]
        )
    return path
