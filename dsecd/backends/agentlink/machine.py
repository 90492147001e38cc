# SPDX-License-Identifier: Apache-2.0
"""Requests about a whole virtual machine. An agent in a container refuses them: its host does these things itself."""

from dsecd.backends.agentlink.calls import request
from dsecd.backends.agentlink.connection import Connection
from dsecd.backends.agentlink.frames import Tag, Type, u64


class MachineRequests:
    """What the agent of a virtual machine can be asked beside what all agents can. All raise AgentError, LinkLost."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    async def freeze(self, *, frozen: bool) -> None:
        """Stops all commands, or lets them go on; returns when all of them do."""
        await request(self._conn, Type.FREEZE, u64(Tag.FLAGS, int(frozen)))

    async def limit_pids(self, most: int) -> None:
        """Sets how many processes and threads all commands together may have."""
        await request(self._conn, Type.LIMIT, u64(Tag.PID_COUNT, most))
