# SPDX-License-Identifier: Apache-2.0
"""The sandboxes that may resolve names, as the daemon told, each found by the device its queries come in by.

Here: what is known of each, what it has used up, and what is open for it. Not here: judging a query
(``proxy``), hearing from the daemon (``link``).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator

from dsecd.dns import frames
from dsecd.dns.addresses import Address
from dsecd.dns.names import Names

#: Queries a second of one sandbox, and how many it may save up.
RATE_PER_S = 50.0
BURST = 200.0
#: Queries of one sandbox that may wait for an upstream or the daemon at a time.
WAITING_MAX = 64
#: Addresses noted as open for one sandbox; the daemon's own limit is not above it.
OPEN_MAX = 512


class Usage:
    """What a sandbox has used up and what it was refused; a change of its policy changes nothing about it."""

    def __init__(self) -> None:
        self.waiting = 0
        self.connections = 0
        self.names = 0
        self.addresses = 0
        self.dropped = 0
        self.recent: deque[str] = deque(maxlen=frames.RECENT_MAX)
        self._saved = BURST
        self._saved_at = 0.0

    def may_ask(self, now: float) -> bool:
        """Take one query from its budget."""
        self._saved = min(BURST, self._saved + (now - self._saved_at) * RATE_PER_S)
        self._saved_at = now
        if self._saved < 1:
            return False
        self._saved -= 1
        return True

    def refused(self, sandbox: str) -> frames.Denied | None:
        """What was refused since the last call, if anything."""
        if not (self.names or self.addresses or self.dropped):
            return None
        told = frames.Denied(
            sandbox=sandbox, names=self.names, addresses=self.addresses, dropped=self.dropped,
            recent=tuple(self.recent),
        )  # fmt: skip
        self.names = self.addresses = self.dropped = 0
        self.recent.clear()
        return told


class Sandbox:
    """One sandbox under one policy. With another policy it is another one, that has nothing open yet."""

    def __init__(self, policy: frames.Policy, names: Names, usage: Usage) -> None:
        self.id = policy.sandbox
        self.device = policy.device
        self.sources = frozenset(policy.sources)
        self.names = names
        self.any_name = policy.any_name
        self.named = policy.named
        self.usage = usage
        self._open_until: dict[Address, float] = {}

    def not_open(self, addresses: Iterable[Address], until: float) -> tuple[Address, ...]:
        """Those of the addresses that are not known to stay open until then."""
        return tuple(address for address in addresses if self._open_until.get(address, 0.0) < until)

    def opened(self, addresses: Iterable[Address], until: float, now: float) -> None:
        """Note what the daemon has opened."""
        for address in addresses:
            self._open_until[address] = max(until, self._open_until.get(address, 0.0))
        if len(self._open_until) > OPEN_MAX:
            # Forgetting one that is open costs a question to the daemon, no more.
            live = {address: end for address, end in self._open_until.items() if end > now}
            self._open_until = live if len(live) <= OPEN_MAX else {}


class Table:
    """All sandboxes. Nothing that one query needs looks at more than one of them."""

    def __init__(self) -> None:
        self._by_device: dict[int, Sandbox] = {}
        self._by_id: dict[str, Sandbox] = {}
        # Thousands of sandboxes may have the same patterns: they share them.
        self._names: weakref.WeakValueDictionary[tuple[str, ...], Names] = weakref.WeakValueDictionary()
        self._unconfirmed: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(self._by_id.values())

    def at(self, device: int) -> Sandbox | None:
        return self._by_device.get(device)

    def begin(self) -> None:
        """The daemon begins to tell everything: what it does not repeat until ``end`` is gone."""
        self._unconfirmed = set(self._by_id)

    def end(self) -> None:
        for sandbox in self._unconfirmed:
            self.forget(sandbox)
        self._unconfirmed = set()

    def put(self, policy: frames.Policy) -> None:
        """Add a sandbox or change its policy."""
        self._unconfirmed.discard(policy.sandbox)
        previous = self._by_id.get(policy.sandbox)
        names = self._names.get(policy.patterns)
        if names is None:
            names = self._names[policy.patterns] = Names(policy.patterns)
        sandbox = Sandbox(policy, names, previous.usage if previous else Usage())
        self.forget(policy.sandbox)
        if (holder := self._by_device.get(policy.device)) is not None:
            self.forget(holder.id)  # the device's index has been given to another one
        self._by_id[sandbox.id] = self._by_device[sandbox.device] = sandbox

    def forget(self, sandbox: str) -> None:
        if (known := self._by_id.pop(sandbox, None)) is not None:
            self._by_device.pop(known.device, None)
