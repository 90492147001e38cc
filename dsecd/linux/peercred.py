# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of a Unix socket, as the kernel recorded it when the connection was made.

What belongs here: reading the credentials.  What does not: what they permit.
unix(7) SO_PEERCRED, SO_PEERGROUPS; include/uapi/asm-generic/socket.h.
"""

import errno
import socket
import struct
from dataclasses import dataclass

from dsecd.linux import syscalls

SO_PEERGROUPS = 59

_UCRED = struct.Struct("iII")
_FIRST_GROUPS = 64
# The kernel allows a process 65,536 supplementary groups.
_MOST_GROUPS = 65536


@dataclass(frozen=True)
class Peer:
    """Credentials of the process that called connect(2); `groups` are its supplementary groups only.

    Ids are as this process's user namespace sees them: an id not mapped here shows as 65534.
    """

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...]


def peer(sock: socket.socket) -> Peer:
    """Credentials of the other end of a connected Unix stream socket.

    The pid is only good for a log: the process may be gone and its pid reused.  Raises OSError (ENOTCONN,
    or EOPNOTSUPP and EINVAL for a socket of another family).
    """
    if sock.family != socket.AF_UNIX:
        raise OSError(errno.EOPNOTSUPP, "read peer credentials: not a Unix socket")
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid == 0xFFFFFFFF:
        # What the kernel answers for a socket that never had a peer.
        raise OSError(errno.ENOTCONN, "read peer credentials: not connected")
    return Peer(pid, uid, gid, _groups(sock))


def _groups(sock: socket.socket) -> tuple[int, ...]:
    for count in (_FIRST_GROUPS, _MOST_GROUPS):
        try:
            raw = syscalls.getsockopt(sock.fileno(), socket.SOL_SOCKET, SO_PEERGROUPS, 4 * count)
        except OSError as error:
            if error.errno != errno.ERANGE or count == _MOST_GROUPS:
                raise
            continue
        return struct.unpack(f"{len(raw) // 4}I", raw)
    raise AssertionError("unreachable: the largest size is answered or raises")
