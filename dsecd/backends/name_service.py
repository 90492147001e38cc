# SPDX-License-Identifier: Apache-2.0
"""Names for sandboxes: what dsec-dns is told of each, and what it is given when it asks.

What belongs here: one sandbox's rules for names, the decision to open an address, counts of what was refused. What
does not: the connection (``dns_link.py``), the map (``openings.py``), devices (``network.py``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime

from dsecd.backends.dns_link import DnsLink
from dsecd.backends.name_rules import NameRules
from dsecd.backends.openings import Openings, boot_ns
from dsecd.dns import frames
from dsecd.dns.addresses import gaps

log = logging.getLogger(__name__)

_SWEEP_S = 5.0
#: What taking over the devices of sandboxes may keep dsec-dns waiting, which answers by what it knows meanwhile.
_AWAITED_S = 30.0


@dataclass(frozen=True)
class RefusedNames:
    """What was refused to a sandbox when it resolved names."""

    names: int = 0
    addresses: int = 0
    dropped: int = 0
    recent: tuple[tuple[datetime, str], ...] = ()  # newest first


class SandboxNames:
    """One sandbox: opens addresses for it, and counts."""

    def __init__(
        self, device: int, rules: NameRules, openings: Openings, tell: Callable[[frames.Denied], None]
    ) -> None:
        self.rules = rules
        self.device = device
        self.openings = openings
        self._tell = tell
        self._counts = [0, 0, 0]
        self._recent: deque[tuple[datetime, str]] = deque(maxlen=frames.RECENT_MAX)

    def open(self, request: frames.Open) -> Collection[frames.Address]:
        """Open what the policy allows of a request, however it came about."""
        what = self.rules.openings(request.name)
        public = [address for address in request.addresses if not gaps(address)]
        if not what or not public:
            return ()
        return self.openings.open(self.device, public, what, boot_ns() + request.seconds * 10**9)

    def refused(self, denied: frames.Denied) -> None:
        for at, count in enumerate((denied.names, denied.addresses, denied.dropped)):
            self._counts[at] += count
        now = datetime.now(UTC)
        self._recent.extendleft((now, name) for name in denied.recent)
        self._tell(denied)

    def counts(self) -> RefusedNames:
        names, addresses, dropped = self._counts
        return RefusedNames(names, addresses, dropped, tuple(self._recent))


class NameService:
    """All sandboxes that may resolve names. For the event loop's thread, but for ``counts``."""

    def __init__(self, link: DnsLink) -> None:
        self.link = link
        self._sandboxes: dict[str, SandboxNames] = {}
        self._awaited: set[str] = set()
        self._none_awaited = asyncio.Event()

    async def serve(self, listening: socket.socket, awaited: Collection[str]) -> None:
        """Until cancelled. Whoever dsec-dns is not told of when it connects may resolve no name from then on: so it may
        not, for a while, before each of ``awaited`` was put or forgotten."""
        self._awaited = set(awaited) - self._sandboxes.keys()
        self._none_awaited.clear()
        if self._awaited:
            try:
                async with asyncio.timeout(_AWAITED_S):
                    await self._none_awaited.wait()
            except TimeoutError:
                log.warning("dsec-dns is told of %d sandboxes later than of the others", len(self._awaited))
        await self.link.serve(listening)

    def judge_by(self, sandbox: str, rules: NameRules) -> None:
        """From now on nothing is opened but by these rules; what other rules have opened stays open."""
        if (known := self._sandboxes.get(sandbox)) is not None:
            known.rules = rules

    async def put(
        self, sandbox: str, device: int, sources: Collection[frames.Address], rules: NameRules, openings: Openings,
        refused: Callable[[frames.Denied], None],
    ) -> None:  # fmt: skip
        """Let a sandbox resolve the names of these rules; returns once dsec-dns knows, if it is there."""
        if not rules:
            await self.forget(sandbox)
            return
        known = self._sandboxes.get(sandbox)
        if known is None or known.device != device:
            known = self._sandboxes[sandbox] = SandboxNames(device, rules, openings, refused)
        known.rules, known.openings = rules, openings
        policy = frames.Policy(
            sandbox=sandbox, device=device, sources=tuple(sources), patterns=tuple(rules.by_pattern),
            any_name=rules.any_name, named=rules.named,
        )  # fmt: skip
        await self.link.put(policy, known)
        self._no_longer_await(sandbox)

    async def forget(self, sandbox: str) -> None:
        """Let it resolve none."""
        if self._sandboxes.pop(sandbox, None) is not None:
            await self.link.forget(sandbox)
        self._no_longer_await(sandbox)

    def _no_longer_await(self, sandbox: str) -> None:
        self._awaited.discard(sandbox)
        if not self._awaited:
            self._none_awaited.set()

    def counts(self, sandbox: str) -> RefusedNames:
        known = self._sandboxes.get(sandbox)
        return RefusedNames() if known is None else known.counts()

    async def sweep(self) -> None:
        """Remove openings that had their time, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            for openings in {known.openings for known in self._sandboxes.values()}:
                openings.sweep()
