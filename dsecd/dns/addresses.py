# SPDX-License-Identifier: Apache-2.0
"""Addresses that a name may not lead to unless the policy names them itself.

Here: the question. Not here: which addresses are special (``libdsec.network``), and the host's own ones, which only
the kernel knows and the programs on each device ask it for.

The reason is rebinding: whoever owns an allowed name decides what it leads to, and could choose the host's
neighbours.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from typing import TypeGuard

from libdsec.network import SPECIAL, Network

Address = IPv4Address | IPv6Address


@lru_cache(maxsize=16_384)
def gaps(address: Address) -> tuple[Network, ...]:
    """The special networks that hold the address; none for an ordinary one."""
    return tuple(network for network in SPECIAL if address in network)


def is_named(address: Address, named: tuple[Network, ...]) -> bool:
    """Whether a policy's network opens this special address: it lies within each special one that does."""
    return any(address in network and all(_within(network, gap) for gap in gaps(address)) for network in named)


def _within(inner: Network, outer: Network) -> TypeGuard[Network]:
    return inner.version == outer.version and inner.prefixlen >= outer.prefixlen and inner.network_address in outer
