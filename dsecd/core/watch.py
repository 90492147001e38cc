# SPDX-License-Identifier: Apache-2.0
"""What happens to a running sandbox by itself: its init dies, its agent cannot be reached any more, it lacks memory.

What belongs here: noticing all of it, and trying to reach the agent again. What does not: what becomes of the sandbox
then (``lifecycle.py``).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable

from dsecd.backends.agentlink.link import LinkLost
from dsecd.backends.base import translated
from dsecd.backends.egress import protocol_name
from dsecd.backends.refusals import Refused
from dsecd.core.ledger import Ledger
from dsecd.core.live import Live
from dsecd.core.tasks import Tasks
from dsecd.linux import pidfd
from libdsec import errors
from libdsec.types import State

_RECONNECTS = 3
_RUNNING = (State.RUNNING, State.PAUSED)

#: Called under the sandbox's lock with the reason.
Ended = Callable[[Live, str], Awaitable[object]]


class Watch:
    """One descriptor in the event loop for each running sandbox; no polling."""

    def __init__(self, tasks: Tasks, ended: Ended, ledger: Ledger) -> None:
        self._tasks = tasks
        self._ended = ended
        self._ledger = ledger

    def start(self, live: Live) -> None:
        """Notice the end of its init process from now on."""
        try:
            if live.box.process is None:
                raise ProcessLookupError
            with translated(f"watch '{live.id}'", but=ProcessLookupError):
                live.watch_fd = pidfd.open(live.box.process)
        except ProcessLookupError:
            self._tasks.spawn(f"end {live.id}", self._died(live, live.box.process))
            return
        asyncio.get_running_loop().add_reader(live.watch_fd, self._on_exit, live)
        if live.box.link is None:
            # Lost after it was made and before this; `link_lost` left that to us.
            self._tasks.spawn(f"reconnect {live.id}", self._reconnect(live))

    def stop(self, live: Live) -> None:
        """Its end is somebody's intention now, or has been noticed."""
        if live.watch_fd is not None:
            asyncio.get_running_loop().remove_reader(live.watch_fd)
            os.close(live.watch_fd)
            live.watch_fd = None

    def stop_all(self, lives: Iterable[Live]) -> None:
        """At the daemon's end: what happens to sandboxes from now on is for the next daemon to find."""
        for live in lives:
            self.stop(live)

    def link_lost(self, live: Live, lost: LinkLost) -> None:
        """Called by the link when it broke: reconnect, or give up a sandbox whose agent breaks the protocol."""
        live.box.link = None
        if live.record.state not in _RUNNING or live.watch_fd is None or self._tasks.closed:
            return
        if lost.violation is not None:
            reason = f"agent broke the protocol: {lost.violation}"
            self._tasks.spawn(f"give up {live.id}", self._give_up(live, reason))
        else:
            self._tasks.spawn(f"reconnect {live.id}", self._reconnect(live))

    def out_of_memory(self, live: Live, kills: int) -> None:
        """Called when the kernel killed in it for want of memory, by now ``kills`` processes since its start."""
        if not live.gone:
            self._ledger.tell("sandbox.oom", live, oom_kills=kills)

    def refused(self, live: Live, refused: Refused) -> None:
        """Called now and then, when its network policy has refused something."""
        if live.gone:
            return
        more: dict[str, object] = {"count": refused.count}
        if (denied := refused.newest) is not None:
            more |= {
                "address": denied.address, "port": denied.port, "protocol": protocol_name(denied.protocol),
                "reason": denied.reason,
            }  # fmt: skip
        if refused.names:
            more |= {"names": refused.names, "name": refused.name}
        self._ledger.tell("network.refused", live, **more)

    async def _reconnect(self, live: Live) -> None:
        failed = 0
        while failed < _RECONNECTS:
            async with live.lock:
                if live.watch_fd is None or live.box.link is not None:
                    return
                try:
                    await live.backend.reconnect(live.box)
                    return
                except errors.NoCapacity:
                    failed = 0  # the host's or the daemon's lack, not a fault of this sandbox: wait for better times
                except errors.DsecError:
                    failed += 1
            await asyncio.sleep(0.1 * (failed or 10))
        await self._give_up(live, "agent lost")

    async def _give_up(self, live: Live, reason: str) -> None:
        async with live.lock:
            if live.watch_fd is not None:
                self.stop(live)
                await self._ended(live, cause(live, reason))

    def _on_exit(self, live: Live) -> None:
        self.stop(live)
        if not self._tasks.closed:
            self._tasks.spawn(f"end {live.id}", self._died(live, live.box.process))

    async def _died(self, live: Live, process: pidfd.Process | None) -> None:
        async with live.lock:
            # Stopped and started again while this waited, it is another process's turn.
            if live.record.state in _RUNNING and live.box.process == process and not live.gone:
                await self._ended(live, cause(live, "crash"))


def cause(live: Live, noticed: str) -> str:
    """Why a sandbox ended, given what was noticed of it first.

    The connection of an agent that is killed breaks before its process has exited, by as long as all that is in its
    pid namespace takes to end: so a broken connection is the reason only while the process lives, and never where the
    kernel tells another.
    """
    if told := live.backend.death(live.box):
        return told
    process = live.box.process
    return "crash" if process is None or pidfd.is_ending(process) else noticed
