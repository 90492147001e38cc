# SPDX-License-Identifier: Apache-2.0
"""One daemon per directory: of state, of runtime files, of cgroups.

Here: the locks that say so. Not here: what the daemon does with them.

A record lock (fcntl(2)) and not flock(2): it belongs to the process alone, so a child that still holds a copy
of the descriptor when the daemon is killed does not keep the next one out, and the kernel tells who holds it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

from libdsec.errors import Conflict, Refused

# struct flock, as fcntl(2) has it: type, whence, start, length, pid
_FLOCK = struct.Struct("hhqqi4x")
#: A child without a program (proc.sleeper) ends by itself within two seconds, also when the daemon is killed.
_COPIES_S = 4.0


def hold(directory: Path) -> int:
    """Lock ``directory`` for this process until it ends; the descriptor must stay open and the file unopened by others.

    Raises Conflict naming the process that holds it, Refused when the kernel says no.
    """
    path = directory / "dsecd.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Refused(f"lock {str(path)!r}: {error.strerror}") from error
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(fd)
        os.close(fd)
        raise Conflict(
            f"start in {str(directory)!r}: another dsecd runs there, pid {holder or 'unknown'}",
            hint="stop it, or set another 'runtime_dir' and 'state_dir'",
        ) from error
    return fd


def hold_cgroup(directory: Path) -> int:
    """As ``hold``, for a cgroup: two daemons would take each other's sandboxes there for what nobody asked for.

    No file can be made there, so this is flock(2) on the directory itself, of which a child of a killed daemon may have
    a copy, as it has of sockets that it listened on. It is waited for, so that they are free, too. Blocks for seconds.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + _COPIES_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError as error:
            if time.monotonic() > deadline:
                os.close(fd)
                raise Conflict(
                    f"start with the cgroup {str(directory)!r}: another dsecd has its sandboxes there",
                    hint="stop it, or set another 'cgroup_root'",
                ) from error
        time.sleep(0.02)


def _holder(fd: int) -> int:
    """The pid that holds the lock; 0 when it has just gone, or is not visible from here."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else int(pid)
