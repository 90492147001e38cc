# SPDX-License-Identifier: Apache-2.0
"""Noticing an agent that has gone silent while its connection stays open.

What belongs here: when it is asked for a sign of life, and when it is given up. What does not: how long a request may
take: a sleeping command or the removal of a large tree says nothing for as long as it likes.
"""

import asyncio
from typing import Final

from dsecd.backends.agentlink.connection import Channel, Connection
from dsecd.backends.agentlink.frames import Type
from dsecd.backends.agentlink.records import AgentError, LinkLost

#: Seconds between two looks. Who was silent for one to two of these is asked, and has one more to answer: long enough
#: for a host under heavy load, where the agent waits for the processor as everybody does.
INTERVAL_S: Final = 30.0


class Pulse:
    """The watch over one connection; it ends with it."""

    def __init__(self, conn: Connection, interval_s: float = INTERVAL_S) -> None:
        self._conn = conn
        self._interval_s = interval_s
        self._heard = conn.heard
        self._asked = False
        self._later()

    def beat(self) -> None:
        """Once every interval: nothing to do while the agent says something, or nobody waits for it."""
        conn = self._conn
        silent, self._heard = conn.heard == self._heard, conn.heard
        # Channel 0 is always open; a paused connection is one whose agent does not read.
        waited_for = len(conn.channels) > 1 or conn.paused
        if not (silent and waited_for):
            self._asked = False
        elif self._asked:
            conn.end(LinkLost(f"the agent said nothing for {2 * self._interval_s:g} s"))
            return
        else:
            self._asked = self._ask()
        self._later()

    def _ask(self) -> bool:
        """Whether the agent owes an answer now."""
        if self._conn.paused:
            return True  # for what lies in our buffer already
        try:
            self._conn.open(_Echo(self._conn), Type.PING, [b""])
        except AgentError:
            return False  # as many channels as there may be
        return True

    def _later(self) -> None:
        self._conn.pulse = asyncio.get_running_loop().call_later(self._interval_s, self.beat)


class _Echo(Channel):
    """The question whether it lives."""

    __slots__ = ()

    def frame(self, kind: int, flags: int, payload: memoryview) -> bool:
        if kind != Type.OK:
            raise self.unexpected(kind)
        return True
