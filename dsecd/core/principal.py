# SPDX-License-Identifier: Apache-2.0
"""Who asks: the principal of a request, its scopes, and what it may touch.

Here: turning a peer's credentials into a principal, and the two checks that core and api make. A principal
made from a capability token (control from inside a sandbox) will be another constructor beside ``from_peer``;
nothing else changes. Not here: connections (``dsecd.api``).
"""

from __future__ import annotations

import grp
import socket
from dataclasses import dataclass

from dsecd.linux import peercred
from libdsec.errors import Denied
from libdsec.routes import Scope

_USER: frozenset[Scope] = frozenset({Scope.READ, Scope.SANDBOX})
_ALL: frozenset[Scope] = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. ``pid`` is as the daemon sees it and for the log only: it may be reused, or 0 when not visible."""

    uid: int
    gid: int
    groups: frozenset[int]
    pid: int
    scopes: frozenset[Scope]

    @property
    def is_admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    def require(self, scope: Scope, doing: str = "") -> None:
        """Raise Denied unless the principal holds ``scope``."""
        if scope not in self.scopes:
            raise Denied(
                f"{doing or 'this request'}: needs scope {scope.value!r}, uid {self.uid} has "
                f"{', '.join(sorted(s.value for s in self.scopes)) or 'none'}",
                hint="ask an administrator to add you to group 'dsec-admin'",
                scope=scope.value,
            )

    def sees(self, owner_uid: int | None) -> bool:
        """Whether things of ``owner_uid`` are shown to the principal; None means nobody's, shown to all."""
        return owner_uid is None or owner_uid == self.uid or self.is_admin

    def may_touch(self, owner_uid: int, doing: str = "") -> None:
        """Raise Denied unless the thing is the principal's own or it is an administrator."""
        if not self.sees(owner_uid):
            raise Denied(f"{doing or 'this request'}: it belongs to uid {owner_uid}, you are uid {self.uid}")


def from_peer(uid: int, gid: int, pid: int, groups: frozenset[int], *, admin_gid: int | None) -> Principal:
    """The principal behind a connection, from what the kernel says about its other end.

    Root holds every scope. Whoever else the socket's mode lets in may use sandboxes; members of the group
    ``admin_gid`` (None: there is no such group) also change images and see everybody's sandboxes.
    """
    admin = uid == 0 or (admin_gid is not None and (admin_gid == gid or admin_gid in groups))
    return Principal(uid, gid, groups, pid, _ALL if admin else _USER)


def of_socket(sock: socket.socket, *, admin_gid: int | None) -> Principal:
    """The principal behind a connected Unix socket.  Raises OSError when the kernel knows no peer."""
    peer = peercred.peer(sock)
    return from_peer(peer.uid, peer.gid, peer.pid, frozenset(peer.groups), admin_gid=admin_gid)


def group_id(name: str) -> int | None:
    """The id of a group, None when there is none.  Blocks: it may ask a directory service."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


#: The daemon itself, for what it does on its own account (reconcile, expiry).
DAEMON = Principal(0, 0, frozenset(), 0, _ALL)
