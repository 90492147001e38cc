# SPDX-License-Identifier: Apache-2.0
"""inotify: one descriptor that tells which of many files the kernel has changed.

What belongs here: the three calls and the form of events.  What does not: which files, and what a change means.
inotify(7).  The kernel also signals changes of cgroup event files this way (admin-guide/cgroup-v2, "Basic Operations"),
unlike POLLPRI in a form that asyncio can wait for.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from dsecd.linux import syscalls

# include/uapi/linux/inotify.h
IN_MODIFY, IN_Q_OVERFLOW, IN_IGNORED = 0x2, 0x4000, 0x8000
#: Watch descriptor of an overflow: events were lost.
OVERFLOW = -1

_EVENT = struct.Struct("iIII")
_READ_BYTES = 64 * 1024


def create() -> int:
    """A non-blocking descriptor that is readable when there are events."""
    return syscalls.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)


def watch(fd: int, path: Path) -> int:
    """Tell changes of a file's content from now on; gives its watch descriptor.  Raises OSError (ENOSPC: too many)."""
    return syscalls.inotify_add_watch(fd, path, IN_MODIFY)


def unwatch(fd: int, descriptor: int) -> None:
    """The opposite; a file that has gone is fine."""
    syscalls.inotify_rm_watch(fd, descriptor)


def changes(fd: int) -> Iterator[int]:
    """Watch descriptors of the files that have changed, each as often as told, or OVERFLOW; what is there by now."""
    try:
        data = os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return
    at = 0
    while at + _EVENT.size <= len(data):
        descriptor, mask, _cookie, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size + length
        if mask & IN_Q_OVERFLOW:
            yield OVERFLOW
        elif not mask & IN_IGNORED:
            yield descriptor
