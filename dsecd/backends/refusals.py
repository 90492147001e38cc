# SPDX-License-Identifier: Apache-2.0
"""Telling of what was refused to sandboxes, while it happens, without letting them flood whoever listens.

What belongs here: when a sandbox's refusals are told, and how many at once. What does not: refusing and counting, which
the programs do (``ebpf/egress.bpf.c``), and what is made of it (``dsecd.core``).

A refusal wakes the daemon through a ring, for each sandbox once a second at most, and only the sandbox that it names
is looked at. What is told is the newest refusal and how many there were: once a second while a sandbox has credit, of
which each time takes one and half a minute gives one back; of all sandboxes together so many a second. What is not told
now is part of a later count.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dsecd.backends.egress import Denied, Egress
from dsecd.dns import frames

#: The first ones of a burst are told together.
_TOGETHER_S = 0.1
_LEAST_S = 1.0
_CREDIT, _CREDIT_EACH_S = 20.0, 30.0
#: Of all sandboxes together: pauses between two, and how many may come without.
_PAUSE_S, _AT_ONCE = 0.02, 50.0
_DEVICE = struct.Struct("=I")


@dataclass(frozen=True)
class Refused:
    """What was refused to a sandbox since it was told last."""

    count: int  # packets and connections
    newest: Denied | None
    names: int  # queries for names outside the policy, or that lead where a name may not
    name: str  # the newest of them


@dataclass
class _Bucket:
    """So much at once, and one more after each ``each_s``."""

    most: float
    each_s: float
    _left: float = field(init=False)
    _at: float = 0.0

    def __post_init__(self) -> None:
        self._left = self.most

    def wait_s(self, now: float) -> float:
        """How long until there is one."""
        self._left, self._at = min(self.most, self._left + (now - self._at) / self.each_s), now
        return max(0.0, (1.0 - self._left) * self.each_s)

    def take(self) -> None:
        self._left -= 1.0


@dataclass
class _Watched:
    device: int
    egress: Egress
    tell: Callable[[Refused], None]
    told: int
    credit: _Bucket = field(default_factory=lambda: _Bucket(_CREDIT, _CREDIT_EACH_S))
    names: int = 0
    name: str = ""
    timer: asyncio.TimerHandle | None = None


class Refusals:
    """All sandboxes with a network. For the event loop's thread."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Watched] = {}
        self._by_device: dict[int, _Watched] = {}
        self._reads: Egress | None = None
        self._all = _Bucket(_AT_ONCE, _PAUSE_S)
        self._waiting: deque[_Watched] = deque()

    def begin(self, sandbox: str, device: int, egress: Egress, tell: Callable[[Refused], None]) -> None:
        """Tell of a sandbox's refusals from now on, and of those that nobody was there to tell of."""
        if self._reads is None:
            self._reads = egress
            asyncio.get_running_loop().add_reader(egress.ring.fileno(), self._read)
        known = self._by_id.get(sandbox)
        if known is not None and known.device == device:
            return
        self.end(sandbox)
        watched = _Watched(device, egress, tell, egress.told(device))
        self._by_id[sandbox] = self._by_device[device] = watched
        self._later(watched, _TOGETHER_S)

    def end(self, sandbox: str) -> None:
        """Its device goes; one that has none is fine."""
        watched = self._by_id.pop(sandbox, None)
        if watched is not None:
            del self._by_device[watched.device]
            if watched.timer is not None:
                watched.timer.cancel()

    def names(self, sandbox: str, denied: frames.Denied) -> None:
        """dsec-dns has refused queries of a sandbox."""
        watched = self._by_id.get(sandbox)
        if watched is not None and (count := denied.names + denied.addresses):
            watched.names += count
            watched.name = denied.recent[-1] if denied.recent else watched.name
            self._later(watched, _TOGETHER_S)

    def _read(self) -> None:
        assert self._reads is not None
        for record in self._reads.ring.read():
            watched = self._by_device.get(_DEVICE.unpack(record)[0])
            if watched is not None:
                self._later(watched, _TOGETHER_S)

    def _later(self, watched: _Watched, delay_s: float) -> None:
        """Look at it then, unless that will be done anyhow."""
        if watched.timer is None:
            watched.timer = asyncio.get_running_loop().call_later(delay_s, self._look, watched)

    def _look(self, watched: _Watched) -> None:
        watched.timer = None
        if self._by_device.get(watched.device) is not watched:
            return
        # What was told a second and more ago is in the history by now: a daemon that comes need not tell it again.
        if watched.egress.told(watched.device) != watched.told:
            watched.egress.note_told(watched.device, watched.told)
        counts = watched.egress.counts(watched.device)
        if counts is None or (counts.denied_out <= watched.told and not watched.names):
            return
        now = asyncio.get_running_loop().time()
        if (wait_s := watched.credit.wait_s(now)) > 0:
            self._later(watched, wait_s)
        elif self._all.wait_s(now) > 0:
            self._queue(watched)
        else:
            self._tell(watched, counts.denied_out, counts.recent[0] if counts.recent else None)

    def _queue(self, watched: _Watched) -> None:
        """All have their turn, in the order in which they came."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(_PAUSE_S, self._next)
        self._waiting.append(watched)
        # Holds others off from looking at it; what comes meanwhile is part of its count.
        watched.timer = asyncio.get_running_loop().call_later(3600, self._look, watched)

    def _next(self) -> None:
        watched = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_later(_PAUSE_S, self._next)
        if watched.timer is not None:
            watched.timer.cancel()
        self._look(watched)

    def _tell(self, watched: _Watched, denied: int, newest: Denied | None) -> None:
        count = denied - watched.told
        watched.credit.take()
        self._all.take()
        refused = Refused(count, newest if count else None, watched.names, watched.name)
        watched.told, watched.names, watched.name = denied, 0, ""
        watched.tell(refused)
        self._later(watched, _LEAST_S)
