# SPDX-License-Identifier: Apache-2.0
"""What the agent link takes and gives: requests, records, events and errors, and how records are read from fields.

Values only. Nothing here knows a socket. Each `*_from` function checks every number against what Linux could say and
raises `Violation` otherwise; plausible lies remain lies about the liar's own sandbox.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from dsecd.backends.agentlink.frames import MAX_OFFSET, U32_MAX, U64_MAX, Fields, Tag, Violation

# PID_MAX_LIMIT in the kernel, include/linux/threads.h.
MAX_PID = 1 << 22
MAX_NAME = 255
MAX_PATH = 4096
MAX_MESSAGE = 512
MAX_ERRNO = 4095


class AgentError(Exception):
    """The agent refused or failed one request; the link stays up."""

    def __init__(self, code: str, errno: int = 0, message: str = "") -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.errno = errno
        self.message = message


class LinkLost(Exception):
    """The connection is gone. `violation` names the broken rule when that is why, else it is None."""

    def __init__(self, reason: str, violation: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.violation = violation

    def again(self) -> "LinkLost":
        """A fresh instance, since raising one exception object in several tasks would mix their tracebacks."""
        return LinkLost(self.reason, self.violation)


class ExitKind(enum.IntEnum):
    """How the leader of an exec ended."""

    EXITED = 1
    SIGNALLED = 2


class ExitReason(enum.IntEnum):
    """Who ended an exec."""

    ENDED = 0
    TIMEOUT = 1
    IDLE_TIMEOUT = 2
    KILLED = 3
    SHUTDOWN = 4
    OOM = 5


@dataclass(frozen=True, slots=True)
class StartRequest:
    """One command to run. Times in milliseconds, 0 = none; sizes in bytes, 0 = the agent's default.

    `env` holds `K=V` entries. `cwd` empty means the user's home. `user` is `uid`, `uid:gid`, `name` or `name:group`,
    empty for uid 0. `rlimits` holds (resource, soft, hard) with numbers as in getrlimit(2). `cgroup` holds attributes
    of the command's own cgroup, with values as the kernel takes them.
    """

    exec_id: str
    argv: Sequence[str | bytes]
    env: Sequence[str | bytes] = ()
    cwd: str | bytes = ""
    user: str = ""
    pty: bool = False
    rows: int = 0
    cols: int = 0
    stdin_open: bool = False
    rlimits: Sequence[tuple[int, int, int]] = ()
    umask: int = 0o022
    timeout_ms: int = 0
    idle_timeout_ms: int = 0
    buffer_bytes: int = 0
    keep_ms: int | None = None
    cgroup: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes of stream 1 (stdout, or the PTY) or 2 (stderr); `offset` counts from the exec's first byte."""

    stream: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Exit:
    """How an exec ended. `status` is the exit code or the signal number. Times are wall clock nanoseconds."""

    exec_id: str
    kind: ExitKind
    status: int
    reason: ExitReason
    total_out: int
    total_err: int
    dropped_out: int
    dropped_err: int
    cpu_user_us: int
    cpu_system_us: int
    max_rss_kib: int
    started_ns: int
    finished_ns: int
    oom_kills: int = 0


@dataclass(frozen=True, slots=True)
class Collected:
    """A finished exec with the first bytes of each stream. Totals count everything that was produced."""

    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    stdout_total: int
    stderr_total: int
    exit: Exit


@dataclass(frozen=True, slots=True)
class ExecRecord:
    """One exec the agent knows. `offset_*` follow the newest byte; `exit` is None while it runs."""

    exec_id: str
    running: bool
    pid: int
    offset_out: int
    offset_err: int
    started_ns: int
    exit: Exit | None


@dataclass(frozen=True, slots=True)
class Peeked:
    """Held output without attaching: `data` begins at `offset`; the ring holds [`start`, `end`)."""

    data: bytes
    start: int
    end: int
    offset: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The agent's own counters of its sandbox."""

    pid_count: int
    execs_running: int
    execs_total: int
    cpu_user_us: int
    cpu_system_us: int
    max_rss_kib: int


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file. `mode` includes the type bits of stat(2). `name` is set in listings, `target` for symlinks."""

    name: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    nlink: int
    ino: int
    target: bytes | None


def error_from(fields: Fields) -> AgentError:
    """An ERROR frame as an exception."""
    return AgentError(
        fields.code(), fields.u64(Tag.ERRNO, MAX_ERRNO, 0), fields.text(Tag.MESSAGE, MAX_MESSAGE)
    )


def exit_from(fields: Fields, exec_id: str) -> Exit:
    """The EXIT fields of exec `exec_id`."""
    kind = fields.u64(Tag.KIND, 2)
    status = fields.u64(Tag.STATUS, 255 if kind == ExitKind.EXITED else 64)
    if kind == 0 or (kind == ExitKind.SIGNALLED and status == 0):
        raise Violation("an exit of no kind")
    return Exit(
        exec_id,
        ExitKind(kind),
        status,
        ExitReason(fields.u64(Tag.REASON, max(ExitReason))),
        fields.u64(Tag.TOTAL_OUT),
        fields.u64(Tag.TOTAL_ERR),
        fields.u64(Tag.DROPPED_OUT, default=0),
        fields.u64(Tag.DROPPED_ERR, default=0),
        fields.u64(Tag.CPU_USER_US, default=0),
        fields.u64(Tag.CPU_SYSTEM_US, default=0),
        fields.u64(Tag.MAX_RSS_KIB, default=0),
        fields.u64(Tag.STARTED_NS, default=0),
        fields.u64(Tag.FINISHED_NS, default=0),
        fields.u64(Tag.OOM_KILLS, MAX_PID, 0),
    )


def exec_record_from(fields: Fields) -> ExecRecord:
    """One INFO of a LIST."""
    exec_id = fields.ident()
    running = bool(fields.u64(Tag.RUNNING, 1))
    return ExecRecord(
        exec_id,
        running,
        fields.u64(Tag.PID, MAX_PID, 0),
        fields.u64(Tag.OFFSET_OUT),
        fields.u64(Tag.OFFSET_ERR),
        fields.u64(Tag.STARTED_NS, default=0),
        None if running else exit_from(fields, exec_id),
    )


def usage_from(fields: Fields) -> Usage:
    """The INFO of a USAGE."""
    return Usage(
        fields.u64(Tag.PID_COUNT, MAX_PID),
        fields.u64(Tag.EXECS_RUNNING, U32_MAX, 0),
        fields.u64(Tag.EXECS_TOTAL, default=0),
        fields.u64(Tag.CPU_USER_US, default=0),
        fields.u64(Tag.CPU_SYSTEM_US, default=0),
        fields.u64(Tag.MAX_RSS_KIB, default=0),
    )


def file_info_from(fields: Fields) -> FileInfo:
    """The INFO of a FILE_STAT or FILE_GET."""
    return FileInfo(
        fields.raw(Tag.NAME, MAX_NAME) or b"",
        fields.u64(Tag.MODE, 0o177777),
        fields.u64(Tag.UID, U32_MAX),
        fields.u64(Tag.GID, U32_MAX),
        fields.u64(Tag.SIZE, MAX_OFFSET),
        fields.signed(Tag.MTIME_NS),
        fields.u64(Tag.NLINK, U32_MAX, 0),
        fields.u64(Tag.INO, U64_MAX, 0),
        fields.raw(Tag.TARGET, MAX_PATH),
    )


def dir_entry_from(fields: Fields) -> FileInfo:
    """One INFO of a FILE_LIST.

    NAME must be a single path component, or a client that joins it to a path would leave the directory.
    """
    info = file_info_from(fields)
    if info.name in (b"", b".", b"..") or b"/" in info.name or b"\0" in info.name:
        raise Violation("a directory entry's name is not a single path component")
    return info
