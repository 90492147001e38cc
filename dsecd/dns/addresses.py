# SPDX-License-Identifier: Apache-2.0
"""Addresses that a name may not lead to, and ``all`` does not mean, unless the policy names them.

Here: the table and the question. Not here: the host's own addresses, which only the kernel knows and the
packet filter asks it for.

The reason is rebinding: whoever owns an allowed name decides what it leads to, and could choose the host's
neighbours. The table is short on purpose: IANA's special-purpose registries, without what is routed nowhere
and so needs no protection (documentation).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

#: https://www.iana.org/assignments/iana-ipv4-special-registry and -ipv6-special-registry
SPECIAL: tuple[tuple[Network, str], ...] = tuple(
    (ip_network(text), what)
    for text, what in (
        ("0.0.0.0/8", "this host"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared by a provider's customers"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local, where clouds keep metadata"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "protocol assignments"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmarks"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved, broadcast"),
        ("::/96", "unspecified, loopback, IPv4 in IPv6"),
        ("::ffff:0:0/96", "IPv4 in IPv6"),
        ("64:ff9b:1::/48", "translation within a site"),
        ("100::/64", "discard"),
        ("fc00::/7", "private, where clouds keep metadata"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "private, of old"),
        ("ff00::/8", "multicast"),
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")


def special(address: Address) -> str | None:
    """What kind of special address this is, or None; an IPv6 address that carries an IPv4 one is what that is."""
    carried = _carried(address) if isinstance(address, IPv6Address) else None
    return _special(address) or (_special(carried) if carried else None)


def _special(address: Address) -> str | None:
    return next((what for network, what in SPECIAL if address in network), None)


def _carried(address: IPv6Address) -> IPv4Address | None:
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.sixtofour or (address.teredo[1] if address.teredo else None)


@lru_cache(maxsize=4096)
def refused(address: Address, named: tuple[Network, ...]) -> str | None:
    """Why a name may not lead here under a policy whose rules name these networks; None when it may.

    A network names an address when it contains it and is itself special: ``0.0.0.0/0`` names nobody's neighbour.
    """
    what = special(address)
    if what is None or any(address in network for network in names_special(named)):
        return None
    return what


def names_special(networks: Iterable[Network]) -> tuple[Network, ...]:
    """Those of a policy's networks that lie within a special one."""
    return tuple(
        network for network in networks
        if any(network.version == wide.version and network.subnet_of(wide) for wide, _what in SPECIAL)  # type: ignore[arg-type]
        or (network.version == 6 and network.num_addresses == 1 and special(network.network_address))
    )  # fmt: skip
