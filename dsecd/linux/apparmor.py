# SPDX-License-Identifier: Apache-2.0
"""AppArmor: compiling profiles, and loading, listing and removing them through securityfs.

What belongs here: the kernel's interface and the compiler's. What does not: what a profile says, and who is confined by
which (``dsecd.backends``). Sources: the kernel's security/apparmor/apparmorfs.c, apparmor_parser(8).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsecd.linux import proc

_ENABLED = Path("/sys/module/apparmor/parameters/enabled")
_CONTROL = Path("/sys/kernel/security/apparmor")
#: A profile takes a few hundredths of a second. Patterns can be made for which it takes exponentially long.
_COMPILE_CPU_S, _COMPILE_MAX_BYTES, _COMPILE_TIMEOUT_S = 5, 1 << 30, 60.0
_PROFILE_MAX_BYTES = 16 << 20


def why_missing() -> str:
    """Why profiles cannot be loaded here; empty when they can, as far as can be told without loading one."""
    with contextlib.suppress(FileNotFoundError):
        if _ENABLED.read_text().strip() == "Y":
            return "" if _CONTROL.is_dir() else "securityfs is not mounted at /sys/kernel/security"
    return "AppArmor is not active in this kernel"


def loaded() -> Mapping[str, str]:
    """The mode ("enforce", ...) of every loaded profile by its name.  Blocks.  Raises OSError."""
    profiles = {}
    for line in (_CONTROL / "profiles").read_text().splitlines():
        name, _, mode = line.rpartition(" ")
        profiles[name] = mode.strip("()")
    return profiles


def load(compiled: bytes) -> None:
    """Load compiled profiles; one that is loaded already is replaced, for those that it confines, too.

    Blocks for milliseconds. Raises OSError: EPROTO, EINVAL or EPROTONOSUPPORT for what this kernel does not take.
    """
    _write(".replace", compiled)


def remove(name: str) -> bool:
    """Unload a profile; whoever it confines is then unconfined. False when it was not there.  Blocks."""
    try:
        _write(".remove", name.encode())
    except FileNotFoundError:
        return False
    return True


def _write(control: str, data: bytes) -> None:
    path = _CONTROL / control
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        # In one piece: each write is a policy of its own.
        if os.write(fd, data) != len(data):
            raise OSError(f"{path}: the kernel took only a part")
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(fd)


def label(pid: int) -> str:
    """The profile that confines a process, or "unconfined".  Raises OSError: EINVAL without AppArmor."""
    text = Path(f"/proc/{pid}/attr/apparmor/current").read_text()
    return text.strip("\0\n").partition(" (")[0]


def confine_next(name: str) -> None:
    """Have the next program that the calling thread, or a child it makes meanwhile, executes confined by a profile.

    Raises OSError: ENOENT when it is not loaded, EACCES when the caller's own profile forbids it.
    """
    fd = os.open("/proc/thread-self/attr/apparmor/exec", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, f"exec {name}".encode())
    finally:
        os.close(fd)


def compiler() -> str:
    """The compiler that there is, in a form that changes when it does.  Raises FileNotFoundError without one."""
    path = shutil.which("apparmor_parser", path=proc.MINIMAL_ENV["PATH"])
    if path is None:
        raise FileNotFoundError(errno.ENOENT, "apparmor_parser is not installed")
    status = os.stat(path)
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def compile_profile(text: str, base: Path, include: Sequence[Path] = ()) -> bytes:
    """Compile a profile for the running kernel; what it includes is looked for in ``base`` and ``include``.

    Blocks. Raises OSError without a compiler, ProcessFailed with its words, or when it needs too much time or memory.
    """
    argv = ["prlimit", f"--cpu={_COMPILE_CPU_S}", f"--as={_COMPILE_MAX_BYTES}", "--", "apparmor_parser"]
    argv += ["--quiet", "--skip-cache", "--skip-kernel-load", "--stdout", f"--base={base}"]
    argv += [f"--Include={path}" for path in include]
    done = proc.run_blocking(
        argv, input=text.encode(), timeout_s=_COMPILE_TIMEOUT_S, output_limit_bytes=_PROFILE_MAX_BYTES
    )
    if done.truncated or not done.stdout:
        raise proc.ProcessFailed(done.argv, done.returncode, b"no profile, or one of more than 16 MiB")
    return done.stdout
