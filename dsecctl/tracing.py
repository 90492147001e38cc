# SPDX-License-Identifier: Apache-2.0
"""Watching the processes of one sandbox through bcc: what they execute, open and connect to, as events.

Here: compiling and attaching ``ebpf/trace.c``, and its records as values. Not here: the command
(``commands/trace.py``).

bcc wants the kernel's headers for the includes of its own preamble. The program includes nothing, so that stubs of
these few files do, whatever kernel runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from libdsec.errors import Denied, FeatureMissing, Refused

KINDS = ("exec", "open", "connect")
_SWITCHES = {"exec": "EXECS", "open": "OPENS", "connect": "CONNECTS"}
#: As ebpf/trace.c has them.
_EXEC, _EXEC_END, _OPEN, _CONNECT = 1, 2, 3, 4
_ARGS, _ARG_BYTES, _PATH_BYTES = 24, 96, 512
#: An exec whose end does not come: the process was killed in it.
_PATIENCE_S = 2.0
#: Taken from the kernel before they are told.
_AT_ONCE = 4096
_TYPES = """
#ifndef DSEC_STUB
#define DSEC_STUB
typedef unsigned char u8, __u8;
typedef unsigned short u16, umode_t, __u16, __be16, __le16, __sum16;
typedef unsigned int u32, __u32, __be32, __le32, __wsum;
typedef unsigned long long u64, __u64, __be64, __le64;
typedef signed char s8, __s8;
typedef short s16, __s16;
typedef int s32, __s32, pid_t;
typedef long long s64, __s64;
typedef unsigned long size_t, uintptr_t;
typedef _Bool bool;
#define CONFIG_BPF_SYSCALL 1
#define PAGE_SIZE 4096
#define NULL ((void *)0)
#define __aligned_u64 __u64 __attribute__((aligned(8)))
#endif
"""
_STUBS = {
    "linux/kconfig.h": "#include <linux/types.h>\n",
    "linux/types.h": _TYPES,
    "linux/version.h":
        "#define LINUX_VERSION_CODE 0x060c00\n#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))\n",
    "linux/log2.h": "", "linux/bpf_common.h": "", "asm/page.h": "", "uapi/linux/if_packet.h": "",
    "uapi/linux/bpf.h": "#include <bcc/bpf.h>\n",
}  # fmt: skip
# include/uapi/asm-generic/fcntl.h
_ACCESS = ("O_RDONLY", "O_WRONLY", "O_RDWR")
_FLAGS = {
    0o100: "O_CREAT", 0o200: "O_EXCL", 0o400: "O_NOCTTY", 0o1000: "O_TRUNC", 0o2000: "O_APPEND", 0o4000: "O_NONBLOCK",
    0o10000: "O_DSYNC", 0o40000: "O_DIRECT", 0o200000: "O_DIRECTORY", 0o400000: "O_NOFOLLOW", 0o1000000: "O_NOATIME",
    0o2000000: "O_CLOEXEC", 0o10000000: "O_PATH", 0o20000000: "O_TMPFILE",
}  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """One thing that a process did. Texts are the sandbox's own, whatever bytes they were."""

    at: float  # since 1970
    kind: str
    pid: int  # as the host counts
    inside_pid: int  # as the sandbox does; 0 if that is not known
    tid: int
    comm: str
    fields: dict[str, Any]
    error: str  # the errno's name; none when empty


class Trace:
    """Attached while the block lasts."""

    def __init__(self, cgroup: Path, kinds: Collection[str], tell: Callable[[Traced], None]) -> None:
        """Raises Denied, FeatureMissing with what to install, Refused. Blocks for a second and more."""
        if os.geteuid() != 0:
            raise Denied("trace: only root may look into the kernel", hint="run it as root, with sudo for example")
        self._cgroup = cgroup
        self._tell = tell
        self._records: list[bytes] = []
        self._interrupted: BaseException | None = None
        self._pending: dict[int, tuple[float, Traced]] = {}
        self._bpf: Any = None
        self._lost = 0
        self._boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        bcc = _bcc()
        source = _source().read_text()
        flags = [f"-D{_SWITCHES[kind]}" for kind in kinds] + _namespace(cgroup)
        #: Whether the programs are where only calls of the traced kinds pass.
        self.by_function = False
        with _stub_headers():
            said = ""
            for more in (["-DBY_FUNCTION"] if bcc.BPF.support_kfunc() else [], []):
                with _set_aside() as aside:
                    try:
                        self._bpf = bcc.BPF(text=source, cflags=[*flags, *more])
                        self.by_function = bool(more)
                        break
                    # Broad: bcc raises bare exceptions, with what was wrong on standard error only.
                    except Exception as error:  # noqa: BLE001
                        said = _gist(aside) or str(error)
            else:
                raise FeatureMissing(
                    f"trace: the kernel does not take the programs: {said}",
                    hint="a kernel with CONFIG_DEBUG_INFO_BTF or CONFIG_FTRACE_SYSCALLS can", feature="trace",
                )  # fmt: skip
        fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._bpf["group"][ctypes.c_int(0)] = fd
        finally:
            os.close(fd)
        self._bpf["events"].open_ring_buffer(self._keep)

    def close(self) -> None:
        self._bpf.cleanup()

    def poll(self, timeout_s: float) -> bool:
        """Tell of what comes within the time; whether the sandbox still runs."""
        self._bpf.ring_buffer_poll(int(timeout_s * 1000))
        records, self._records = self._records, []
        if self._interrupted is not None:
            raise self._interrupted
        for record in records:
            self._take(record)
        late = time.monotonic() - _PATIENCE_S
        for tid in [tid for tid, (began, _traced) in self._pending.items() if began < late]:
            self._tell(self._pending.pop(tid)[1])
        return self._cgroup.exists()

    def lost(self) -> int:
        """How many events there was no room for since the last call."""
        total = int(self._bpf["lost"][ctypes.c_int(0)].value)
        fresh, self._lost = total - self._lost, total
        return fresh

    def _keep(self, _context: object, data: int, size: int) -> int:
        """Called from within the library, where an exception would vanish. Stops it after some, however many come."""
        try:
            self._records.append(ctypes.string_at(data, size))
        except BaseException as error:  # noqa: BLE001 - handed to who polls
            self._interrupted = error
            return -1
        return 0 if len(self._records) < _AT_ONCE else -1

    def _take(self, record: bytes) -> None:
        event = _Event.from_buffer_copy(record)
        if event.kind == _EXEC_END:
            # A thread that executes becomes the process's first one.
            pending = self._pending.pop(event.tid, None) or self._pending.pop(event.pid, None)
            if pending is not None:
                self._tell(_ended(pending[1], event.result))
            return
        traced = self._traced(event, record)
        if event.kind == _EXEC:
            self._pending[event.tid] = time.monotonic(), traced
        else:
            self._tell(traced)

    def _traced(self, event: _Event, record: bytes) -> Traced:
        if event.kind == _EXEC:
            count = min(event.flags, _ARGS)
            begin = ctypes.sizeof(_Event)
            argv = [record[begin + number * _ARG_BYTES :][:_ARG_BYTES] for number in range(count)]
            fields: dict[str, Any] = {"path": _text(event.path), "argv": [_text(word) for word in argv]}
            if event.flags > _ARGS:
                fields["more_arguments"] = True
            kind = "exec"
        elif event.kind == _OPEN:
            fields, kind = {"path": _text(event.path), "flags": open_flags(event.flags)}, "open"
        else:
            fields, kind = address(bytes(event.path[: event.size])), "connect"
        error = errno.errorcode.get(-event.result, str(-event.result)) if event.result < 0 else ""
        if event.kind == _OPEN and event.result >= 0:
            fields["fd"] = event.result
        return Traced(
            self._boot + event.at_ns / 1e9, kind, event.pid, event.inside_pid, event.tid, _text(event.comm), fields,
            error,
        )  # fmt: skip


class _Event(ctypes.Structure):
    """struct event of ebpf/trace.c"""

    _fields_ = (
        ("at_ns", ctypes.c_uint64), ("pid", ctypes.c_uint32), ("tid", ctypes.c_uint32),
        ("inside_pid", ctypes.c_uint32), ("result", ctypes.c_int32), ("flags", ctypes.c_uint64),
        ("kind", ctypes.c_uint32), ("size", ctypes.c_uint32), ("_comm", ctypes.c_ubyte * 16),
        ("_text", ctypes.c_ubyte * _PATH_BYTES),
    )  # fmt: skip
    at_ns: int
    pid: int
    tid: int
    inside_pid: int
    result: int
    flags: int
    kind: int
    size: int

    @property
    def comm(self) -> bytes:
        return bytes(self._comm)

    @property
    def path(self) -> bytes:
        return bytes(self._text)


def open_flags(flags: int) -> list[str]:
    """The names of an open's flags; what has none as a number."""
    names = [_ACCESS[flags & 3] if flags & 3 < 3 else "3"]
    left = flags & ~3
    # O_TMPFILE has the bit of O_DIRECTORY, and O_LARGEFILE is no choice of anybody's.
    for bit, name in sorted(_FLAGS.items(), reverse=True):
        if left & bit == bit:
            names.append(name)
            left &= ~bit
    left &= ~0o100000
    return names if not left else [*names, hex(left)]


def address(data: bytes) -> dict[str, Any]:
    """What a connect's address says. connect(2), ip(7), ipv6(7), unix(7)."""
    if len(data) < 2:
        return {"family": "none"}
    family = int.from_bytes(data[:2], "little")
    if family == socket.AF_INET and len(data) >= 8:
        shown = socket.inet_ntop(socket.AF_INET, data[4:8])
        return {"family": "inet", "address": shown, "port": int.from_bytes(data[2:4])}
    if family == socket.AF_INET6 and len(data) >= 24:
        shown = socket.inet_ntop(socket.AF_INET6, data[8:24])
        return {"family": "inet6", "address": shown, "port": int.from_bytes(data[2:4])}
    if family == socket.AF_UNIX:
        path = data[2:]
        abstract = path[:1] == b"\0" and len(path) > 1
        return {"family": "unix", "path": "@" + path[1:].decode(errors="backslashreplace") if abstract else _text(path)}
    return {"family": "unspecified" if family == 0 else str(family)}


def _ended(traced: Traced, result: int) -> Traced:
    error = errno.errorcode.get(-result, str(-result)) if result < 0 else ""
    return Traced(
        traced.at, traced.kind, traced.pid, traced.inside_pid, traced.tid, traced.comm, traced.fields, error
    )


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode(errors="backslashreplace")


def _bcc() -> Any:
    try:
        return importlib.import_module("bcc")
    except ImportError as error:
        raise FeatureMissing(f"trace: {error}", hint="apt install python3-bpfcc", feature="trace") from error


def _source() -> Path:
    """Beside the package in a checkout, else where the package has put it."""
    built = Path(__file__).resolve().parents[1] / "ebpf/trace.c"
    return built if built.exists() else Path("/usr/lib/dsec/trace.c")


def _namespace(cgroup: Path) -> list[str]:
    """The process namespace of the sandbox, by one of its processes."""
    for listed in (cgroup / "agent/cgroup.procs", cgroup / "cgroup.procs"):
        with contextlib.suppress(OSError, IndexError):
            status = os.stat(f"/proc/{listed.read_text().split()[0]}/ns/pid")
            device = os.major(status.st_dev) << 20 | os.minor(status.st_dev)
            return [f"-DPIDNS_DEV={device}", f"-DPIDNS_INO={status.st_ino}"]
    raise Refused(f"trace: no process is in {cgroup}", hint="it can be traced while it runs")


@contextlib.contextmanager
def _stub_headers() -> Iterator[None]:
    """bcc finds headers in a folder that an environment variable names."""
    with tempfile.TemporaryDirectory(prefix="dsec-trace-") as folder:
        for name, text in _STUBS.items():
            path = Path(folder, "include", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        before = os.environ.get("BCC_KERNEL_SOURCE")
        os.environ["BCC_KERNEL_SOURCE"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["BCC_KERNEL_SOURCE"]
            else:
                os.environ["BCC_KERNEL_SOURCE"] = before


@contextlib.contextmanager
def _set_aside() -> Iterator[BinaryIO]:
    """What the compiler and the kernel say goes to a file: of a first try nobody wants to know."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield aside
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _gist(aside: BinaryIO) -> str:
    """The line that says what was wrong."""
    aside.seek(0)
    lines = [line.strip() for line in aside.read().decode(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line or "Failed" in line), lines[-1] if lines else "")[:300]
