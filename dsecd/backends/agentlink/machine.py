# SPDX-License-Identifier: Apache-2.0
"""Requests about a whole virtual machine. An agent in a container refuses them: its host does these things itself."""

import os
import socket
import time

from dsecd.backends.agentlink.calls import request
from dsecd.backends.agentlink.connection import Connection
from dsecd.backends.agentlink.frames import Tag, Type, raw, u64
from dsecd.backends.agentlink.tunnel import Tunnel

_ENTROPY_BYTES = 64
_SETTLE = 2


class MachineRequests:
    """What the agent of a virtual machine can be asked beside what all agents can. All raise AgentError, LinkLost."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    async def freeze(self, *, frozen: bool, settle: bool = False) -> None:
        """Stops all commands, or lets them go on; returns when all of them do. ``settle``: and when what they wrote is
        on the disk, and what they deleted is not."""
        flags = int(frozen) | (_SETTLE if frozen and settle else 0)
        await request(self._conn, Type.FREEZE, u64(Tag.FLAGS, flags))

    async def renew(self, hostname: str) -> None:
        """Makes a copy of a machine one of its own: new random numbers, the time, a host name, a machine id."""
        payload = u64(Tag.TIME_NS, time.time_ns()) + raw(Tag.TARGET, os.urandom(_ENTROPY_BYTES))
        await request(self._conn, Type.RENEW, payload + raw(Tag.NAME, hostname.encode("ascii")))

    async def configure_network(self, device: str, requests: bytes) -> None:
        """Sends rtnetlink requests to the machine's kernel, about one of its devices; see `linux.netlink.Script`."""
        await request(self._conn, Type.NETWORK, raw(Tag.NAME, device.encode("ascii")) + raw(Tag.TARGET, requests))

    async def limit_pids(self, most: int) -> None:
        """Sets how many processes and threads all commands together may have."""
        await request(self._conn, Type.LIMIT, u64(Tag.PID_COUNT, most))

    async def dial(self, port: int) -> socket.socket:
        """Connects to a port on the guest's loopback; a socket that does not block. AgentError is `refused` when nobody
        listens there."""
        return await Tunnel(self._conn).open(port)
