# SPDX-License-Identifier: Apache-2.0
"""Addresses that are open to a sandbox because a name that it may reach leads there, each for its time.

What belongs here: the entries of the map ``opened``, which is where all of it is kept: an index of it is made anew at
each start. What does not: whether an address may be opened (``name_rules.py``).

The programs themselves let nothing begin after an opening's time, whether the daemon lives or not. What is under way
then goes on as long as the far end answers (``ebpf/egress.h`` has the limits); once that is over, the entry is removed.
"""

from __future__ import annotations

import heapq
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from dsecd.linux import bpf

Address = IPv4Address | IPv6Address

#: ebpf/egress.h
RULE_BYTES, OPENED_MAX = 8, 16
LINGER_S = {6: 3600, 17: 180}
_KEY = struct.Struct("=IB3x16s")
_OPENING = struct.Struct(f"=QQ{RULE_BYTES}sHHB3x")
KEY_BYTES, VALUE_BYTES = _KEY.size, OPENED_MAX * _OPENING.size
#: Addresses of one sandbox at a time. 3,200 sandboxes that open all of theirs fit into the map.
ADDRESSES_MAX = 256


@dataclass(frozen=True)
class Opening:
    """Ports of a protocol that a rule for names opens; ``rule`` tells rules apart."""

    rule: bytes
    protocol: int
    first: int
    last: int


@dataclass
class _State:
    until_ns: int  # since the host's boot, as used_ns
    used_ns: int


_Entry = dict[Opening, _State]


class Openings:
    """The map by what is in it. Methods block for microseconds; any thread may call."""

    def __init__(self, opened: bpf.Map) -> None:
        self._map = opened
        self._lock = threading.Lock()
        self._keys: defaultdict[int, set[bytes]] = defaultdict(set)  # of each device
        self._due: list[tuple[int, bytes]] = []
        for key in list(opened.keys()):
            self._note(key, 0)

    def open(
        self, device: int, addresses: Iterable[Address], what: Collection[Opening], until_ns: int
    ) -> list[Address]:
        """Open them until then at least, and return those that are: an address too many is left closed."""
        done = []
        with self._lock:
            for address in addresses:
                key = _key(device, address)
                entry = self._read(key)
                if not entry and len(self._keys[device]) >= ADDRESSES_MAX:
                    continue
                for opening in what:
                    state = entry.setdefault(opening, _State(until_ns, 0))
                    state.until_ns = max(state.until_ns, until_ns)
                if len(entry) > OPENED_MAX:
                    continue
                self._write(key, entry)
                self._note(key, until_ns)
                done.append(address)
        return done

    def keep(self, device: int, rules: Collection[bytes]) -> None:
        """Close at once what other rules than these have opened."""
        with self._lock:
            for key in list(self._keys.get(device, ())):
                entry = self._read(key)
                self._write(key, {what: state for what, state in entry.items() if what.rule in rules})

    def forget(self, device: int) -> None:
        """Close everything."""
        with self._lock:
            for key in self._keys.pop(device, ()):
                self._map.delete(key)

    def sweep_devices(self, alive: Collection[int]) -> None:
        """Close everything that devices which are gone have left."""
        for device in [device for device in self._keys if device not in alive]:
            self.forget(device)

    def count(self, device: int) -> int:
        """How many addresses are open."""
        return len(self._keys.get(device, ()))

    def sweep(self, now_ns: int | None = None) -> None:
        """Remove what has had its time and is not used any more. Looks at what is due only."""
        now = now_ns if now_ns is not None else boot_ns()
        with self._lock:
            while self._due and self._due[0][0] <= now:
                _at, key = heapq.heappop(self._due)
                if key not in self._keys.get(_KEY.unpack(key)[0], ()):
                    continue
                entry = {what: state for what, state in self._read(key).items() if _end(what, state) > now}
                self._write(key, entry)
                if entry:
                    heapq.heappush(self._due, (min(_end(what, state) for what, state in entry.items()), key))

    # --- parts -------------------------------------------------------------------------------------------------------

    def _note(self, key: bytes, due_ns: int) -> None:
        self._keys[_KEY.unpack(key)[0]].add(key)
        heapq.heappush(self._due, (due_ns, key))

    def _read(self, key: bytes) -> _Entry:
        data = self._map.get(key)
        entry: _Entry = {}
        for until_ns, used_ns, rule, first, last, protocol in _OPENING.iter_unpack(data or b""):
            if until_ns:
                entry[Opening(rule, protocol, first, last)] = _State(until_ns, used_ns)
        return entry

    def _write(self, key: bytes, entry: _Entry) -> None:
        if not entry:
            device = _KEY.unpack(key)[0]
            self._map.delete(key)
            self._keys[device].discard(key)
            if not self._keys[device]:
                del self._keys[device]
            return
        packed = b"".join(
            _OPENING.pack(state.until_ns, state.used_ns, what.rule, what.first, what.last, what.protocol)
            for what, state in entry.items()
        )
        self._map.set(key, packed.ljust(VALUE_BYTES, b"\0"))


def boot_ns() -> int:
    """Now, on the clock of the programs."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _end(what: Opening, state: _State) -> int:
    """When it is over if nothing comes any more."""
    return max(state.until_ns, state.used_ns + LINGER_S[what.protocol] * 10**9 if state.used_ns else 0)


def _key(device: int, address: Address) -> bytes:
    return _KEY.pack(device, address.version, address.packed)
