# SPDX-License-Identifier: Apache-2.0
"""Connecting to a Unix socket that somebody hostile made, in a directory that he may change at any moment.

What belongs here: reaching the socket itself and nothing that it could be replaced by.  What does not: what is
said over the connection.

connect(2) follows symbolic links, so in somebody else's directory a path may lead to another service, which
would take us for a client with our rights.  openat2(2), unix(7), proc_pid_fd(5).
"""

import asyncio
import errno
import os
import socket
import stat

from dsecd.linux import syscalls

_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.001, 0.05


async def connect_beneath(directory_fd: int, path: str, *, timeout_s: float) -> socket.socket:
    """A non-blocking stream socket connected to the one at `path` below a directory, through no link.

    Waits while its backlog is full.  Raises OSError: ENOTSOCK for what is no socket, such as a link, ELOOP and EXDEV
    for a way that leads elsewhere; TimeoutError.
    """
    fd = syscalls.openat2(directory_fd, path, os.O_PATH | os.O_NOFOLLOW, resolve=_BENEATH)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise OSError(errno.ENOTSOCK, "connect: no socket", path)
        return await _connect(f"/proc/self/fd/{fd}", path, timeout_s)
    finally:
        os.close(fd)


async def _connect(magic_link: str, path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    wait_s, deadline = _FIRST_RETRY_S, asyncio.get_running_loop().time() + timeout_s
    try:
        while True:
            try:
                sock.connect(magic_link)
            except BlockingIOError:
                # The backlog is full; a Unix socket has no connection under way that could be waited for.
                if asyncio.get_running_loop().time() + wait_s > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "connect: nobody accepts", path) from None
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
            else:
                return sock
    except OSError as error:
        sock.close()
        raise type(error)(error.errno, error.strerror, path) from None
    except BaseException:
        sock.close()
        raise
