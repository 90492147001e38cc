# SPDX-License-Identifier: Apache-2.0
"""Policies in the form that the programs look up: prefixes of addresses, each with its whole set of port ranges.

What belongs here: compiling rules, and packing the result for the maps. What does not: the language
(``libdsec.network``), the maps (``egress.py``), the programs (``ebpf/``).

The kernel takes the longest prefix that fits and looks no further, so each prefix holds what all wider ones allow
there, too. A rule says nothing about special ranges that lie inside it: those become prefixes of their own, without
that rule.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from libdsec.network import SPECIAL, Network, Rule

#: ebpf/egress.h
POLICY_BYTES, RANGES_MAX = 15, 16
KEY_BYTES, VALUE_BYTES = 36, 4 + 6 * RANGES_MAX
PROTOCOL_NUMBERS = {"tcp": 6, "udp": 17, "icmp": 1}

class TooManyRanges(ValueError):
    """More port ranges meet at one address than a program can go through."""


@dataclass(frozen=True, order=True)
class Range:
    """Ports of one protocol; ``named`` by a rule for a single address, which may be one of the host's own."""

    protocol: int
    named: bool
    first: int
    last: int


@dataclass(frozen=True)
class Policy:
    """A compiled policy. Equal ones have the same ``id``, and so share what is in the maps."""

    id: bytes
    entries: Mapping[bytes, bytes]  # of the map `policies`


def compiled(rules: Sequence[Rule], special: Sequence[Network] = SPECIAL) -> Policy:
    """Raises TooManyRanges."""
    found = prefixes(rules, special)
    digest = hashlib.sha256()
    for prefix, ranges in sorted(found.items(), key=lambda item: (item[0].version, item[0])):
        digest.update(repr((str(prefix), ranges)).encode())
    policy_id = digest.digest()[:POLICY_BYTES]
    return Policy(policy_id, {_key(policy_id, prefix): _value(ranges) for prefix, ranges in found.items()})


def prefixes(rules: Sequence[Rule], special: Sequence[Network] = SPECIAL) -> dict[Network, tuple[Range, ...]]:
    """What is allowed at the addresses for which each prefix is the longest that fits."""
    opened = [(_Prefix(network), rule) for rule in rules for network in rule.networks]
    closed = [_Prefix(network) for network in special]
    nets = {net for net, _rule in opened}
    inside = {gap for gap in closed if any(net.holds(gap) and net != gap for net in nets)}
    found: dict[Network, tuple[Range, ...]] = {}
    for prefix in nets | inside:
        gaps = [gap for gap in inside if gap.holds(prefix)]
        found[prefix.network] = _merged(
            Range(PROTOCOL_NUMBERS[protocol], net.length == net.bits, rule.first, rule.last)
            for net, rule in opened
            if net.holds(prefix) and not any(net.holds(gap) and net != gap for gap in gaps)
            for protocol in rule.protocols
        )
        if len(found[prefix.network]) > RANGES_MAX:
            count = len(found[prefix.network])
            raise TooManyRanges(f"{count} separate port ranges apply to {prefix.network}, {RANGES_MAX} are possible")
    return found


class _Prefix:
    """A network as numbers: ipaddress's own comparisons take a hundred times as long."""

    __slots__ = ("_hash", "bits", "length", "network", "value")

    def __init__(self, network: Network) -> None:
        self.network = network
        self.bits, self.length = network.max_prefixlen, network.prefixlen
        self.value = int(network.network_address)
        self._hash = hash((self.bits, self.length, self.value))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Prefix) and (self.bits, self.length, self.value) == (
            other.bits, other.length, other.value,
        )  # fmt: skip

    def holds(self, other: _Prefix) -> bool:
        shift = self.bits - self.length
        return self.bits == other.bits and self.length <= other.length and self.value >> shift == other.value >> shift


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same ports in as few ranges as possible."""
    merged: list[Range] = []
    for item in sorted(ranges):
        last = merged[-1] if merged else None
        if last and (last.protocol, last.named) == (item.protocol, item.named) and item.first <= last.last + 1:
            merged[-1] = Range(last.protocol, last.named, last.first, max(last.last, item.last))
        else:
            merged.append(item)
    return tuple(merged)


def _key(policy_id: bytes, prefix: Network) -> bytes:
    """struct policy_key"""
    address = prefix.network_address.packed
    return struct.pack("=I", 8 * (POLICY_BYTES + 1) + prefix.prefixlen) + policy_id + struct.pack(
        "=B16s", prefix.version, address
    )  # fmt: skip


def _value(ranges: Sequence[Range]) -> bytes:
    """struct ranges"""
    packed = b"".join(struct.pack("=BBHH", r.protocol, r.named, r.first, r.last) for r in ranges)
    return struct.pack("=I", len(ranges)) + packed.ljust(VALUE_BYTES - 4, b"\0")
