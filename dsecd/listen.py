# SPDX-License-Identifier: Apache-2.0
"""The listening socket: systemd's, or one of our own.

Here: taking it over, or putting it in its place with the right mode from the first moment. Not here: serving
it (``dsecd.api.server``).
"""

from __future__ import annotations

import errno
import grp
import logging
import os
import socket
import stat
from collections.abc import MutableMapping
from pathlib import Path

from libdsec.errors import Refused

log = logging.getLogger(__name__)

# sd_listen_fds(3)
_FIRST_FD = 3
_BACKLOG = 4096
# unix(7): no client waits longer than this to be told that a socket is alive.
_PROBE_TIMEOUT_S = 2.0


def adopted(environ: MutableMapping[str, str]) -> socket.socket | None:
    """The socket that systemd hands over, if it does.  Raises Refused when it is not one we can use."""
    mine = environ.pop("LISTEN_PID", None) == str(os.getpid())
    count = environ.pop("LISTEN_FDS", "0")
    environ.pop("LISTEN_FDNAMES", None)
    if not mine or count == "0":
        return None
    if count != "1":
        raise Refused(f"take over the socket from systemd: expected 1, got {count}")
    sock = socket.socket(fileno=_FIRST_FD)
    os.set_inheritable(_FIRST_FD, False)
    listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM or not listening:
        raise Refused("take over the socket from systemd: it is no listening Unix stream socket")
    sock.setblocking(False)
    return sock


def bound(path: Path, mode: int, group: str) -> socket.socket:
    """A new listening socket at ``path``, in place of one that nobody serves any more.  Blocks.

    It appears for its owner only, whatever the umask, and is opened to others once it has its group. Raises
    Refused when somebody serves ``path``, or something else than a socket is there.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    _check_free(path)
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # The kernel makes the file with the mode of the socket's own inode (unix_bind in net/unix/af_unix.c).
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(os.fspath(path))
        gid = _group(group)
        if gid is not None:
            os.chown(path, -1, gid)
        path.chmod(mode)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise Refused(f"listen on {str(path)!r}: {error.strerror}") from error
    return sock


def _check_free(path: Path) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise Refused(f"listen on {str(path)!r}: something else than a socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                return  # left behind by one that was killed
            raise Refused(f"listen on {str(path)!r}: {error.strerror or error}") from error
    raise Refused(
        f"listen on {str(path)!r}: another process serves it", hint="stop it, or set another 'socket'"
    )


def _group(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        log.info("group=%s does not exist: the socket keeps the daemon's group", name)
        return None


def remove(path: Path) -> None:
    """Take away the file of a socket of ``bound`` that is closed, unless somebody serves it again."""
    try:
        _check_free(path)
        path.unlink(missing_ok=True)
    except (OSError, Refused) as error:
        log.warning("socket not removed: %s", error)
