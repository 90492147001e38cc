# SPDX-License-Identifier: Apache-2.0
"""Network namespaces: open one, tell whose it is, and work inside one from a throw-away thread.

What belongs here: namespaces as file descriptors.  What does not: the devices in them (netlink).
network_namespaces(7), ioctl_ns(2).
"""

import fcntl
import os
import struct

from dsecd.linux import syscalls

# include/uapi/linux/nsfs.h
_NS_GET_USERNS, _NS_GET_OWNER_UID = 0xB701, 0xB704


def open_process(pid: int) -> int:
    """fd of the network namespace of a process.  The pid may be another's by now: see `owner`."""
    return os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def owner(fd: int) -> int:
    """The user id to whom the user namespace belongs that a network namespace was made in."""
    userns = fcntl.ioctl(fd, _NS_GET_USERNS)
    try:
        buffer = bytearray(4)
        fcntl.ioctl(userns, _NS_GET_OWNER_UID, buffer)
        return int(struct.unpack("=I", buffer)[0])
    finally:
        os.close(userns)


def enter(fd: int) -> None:
    """Move the calling thread into a network namespace: sockets that it makes from now on belong there.

    Only on a thread of its own, such as mountns.FreshThreads gives.
    """
    syscalls.setns(fd, syscalls.CLONE_NEWNET)


def enter_new() -> None:
    """Move the calling thread into a network namespace that was not there before."""
    syscalls.unshare(syscalls.CLONE_NEWNET)
