# SPDX-License-Identifier: Apache-2.0
"""User namespaces: a range of ids inside mapped to a range of ids outside.

What belongs here: making one and reading its mapping.  What does not: who owns which range.
user_namespaces(7).
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dsecd.linux import proc, syscalls

#: How many ids a sandbox sees: 0 to 65535, the whole range of 16-bit uids that images use.
SIZE = 65536


def create(base: int, size: int = SIZE) -> int:
    """fd of a new user namespace in which user and group N, N below `size`, are base+N outside.

    Only a process can be in a namespace that was just made, so one lives for a moment to be mapped from
    outside; the fd keeps the namespace.  Needs CAP_SETUID and CAP_SETGID.  Raises OSError (ENOSPC: the limit
    in /proc/sys/user/max_user_namespaces; EPERM: the host forbids them).

    It belongs to `base`, not to us: what the kernel counts per user (inotify instances, bytes in message queues,
    pending signals) is counted inside and once more for the owner outside, so namespaces with one owner take
    each other's share, and the owner's.  kernel/ucount.c, inc_ucount().
    """
    if base < 0 or size <= 0 or base + size > 1 << 32:
        raise ValueError(f"id range {base}+{size}: outside 0 to {(1 << 32) - 1}")
    with contextlib.ExitStack() as stack:
        with _effective(base):
            pid = stack.enter_context(proc.sleeper(syscalls.CLONE_NEWUSER))
        for name in ("uid_map", "gid_map"):
            _write(Path(f"/proc/{pid}/{name}"), f"0 {base} {size}")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def _effective(uid: int) -> Iterator[None]:
    """The calling thread's effective uid is `uid`, with its capabilities, until the block ends."""
    before = syscalls.prctl(syscalls.PR_GET_SECUREBITS)
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, before | syscalls.SECBIT_NO_SETUID_FIXUP)
    try:
        old = os.geteuid()
        syscalls.seteuid(uid)
        try:
            yield
        finally:
            syscalls.seteuid(old)
    finally:
        syscalls.prctl(syscalls.PR_SET_SECUREBITS, before)


def _write(path: Path, value: str) -> None:
    # One write(2): the kernel accepts a mapping once and as a whole.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    except OSError as error:
        raise OSError(error.errno, f"write '{value}': {os.strerror(error.errno or 0)}", str(path)) from error
    finally:
        os.close(fd)
