# SPDX-License-Identifier: Apache-2.0
"""What the host itself needs before sandboxes can have a network: forwarding and one table of static rules.

What belongs here: settings that are made once and serve all sandboxes; nothing here grows with their number. What
does not: the devices of single sandboxes (``network.py``), what they may reach (``egress.py``).
"""

from __future__ import annotations

import logging
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from pathlib import Path

from dsecd.linux import proc
from dsecd.linux.netlink import Netlink

log = logging.getLogger(__name__)

TABLE = "dsec"
#: Names of the host's ends of all devices begin with it.
DEVICE_PREFIX = "dsec"
_NFT_TIMEOUT_S = 20.0
_SETTINGS = Path("/proc/sys/net")

# Rules are for address translation, for what is not an answer on its way in, and for the table of connections, which
# one sandbox must not fill for all. What a sandbox may send is the programs' business. nft(8); one transaction.
_RULES = """
table inet {table}
delete table inet {table}
table inet {table} {{
    set flows4 {{ type ipv4_addr; size 65535; flags dynamic; }}
    set flows6 {{ type ipv6_addr; size 65535; flags dynamic; }}
    chain forward {{
        type filter hook forward priority filter; policy accept;
        iifname "{prefix}*" ct state invalid drop
        iifname "{prefix}*" ct state new add @flows4 {{ ip saddr ct count over {flows} }} drop
        iifname "{prefix}*" ct state new add @flows6 {{ ip6 saddr ct count over {flows} }} drop
        iifname != "{prefix}*" oifname "{prefix}*" ct state != {{ established, related }} drop
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {ipv4} oifname != "{prefix}*" masquerade
        ip6 saddr {ipv6} oifname != "{prefix}*" masquerade
    }}
}}
"""


def prepare(ipv4: IPv4Network, ipv6: IPv6Network, flows: int) -> None:
    """Set it up, or again; connections that are open stay so. Blocks. Raises OSError, proc.ProcessFailed."""
    _forward()
    rules = _RULES.format(table=TABLE, prefix=DEVICE_PREFIX, ipv4=ipv4, ipv6=ipv6, flows=flows)
    proc.run_blocking(["nft", "-f", "-"], input=rules.encode(), timeout_s=_NFT_TIMEOUT_S)


def give_address(host: Netlink, address: IPv4Address) -> None:
    """Let the address be one of the host's own, on loopback, where dsec-dns answers; it may be already. Blocks."""
    loopback = host.link("lo")
    if loopback is not None:
        host.add_address(loopback.index, address, by_itself=False)


def remove(address: IPv4Address) -> None:
    """Undo all of it, but for forwarding, which others may have come to need. Blocks."""
    with Netlink() as host:
        loopback = host.link("lo")
        if loopback is not None:
            host.delete_address(loopback.index, address)
    commands = f"table inet {TABLE}\ndelete table inet {TABLE}\n"
    proc.run_blocking(["nft", "-f", "-"], input=commands.encode(), timeout_s=_NFT_TIMEOUT_S)


def has_ipv6() -> bool:
    """Whether the kernel has it, and has it on."""
    try:
        return (_SETTINGS / "ipv6/conf/all/disable_ipv6").read_text().strip() == "0"
    except FileNotFoundError:
        return False


def _forward() -> None:
    _set(_SETTINGS / "ipv4/ip_forward", "1")
    forwarding = _SETTINGS / "ipv6/conf/all/forwarding"
    if not has_ipv6() or forwarding.read_text().strip() != "0":
        return
    # A forwarding host would stop taking its own addresses and routes from the routers around it, unless told
    # otherwise: accept_ra in Documentation/networking/ip-sysctl.rst
    for accept in sorted((_SETTINGS / "ipv6/conf").glob("*/accept_ra")):
        if accept.read_text().strip() == "1":
            _set(accept, "2")
    _set(forwarding, "1")


def _set(path: Path, value: str) -> None:
    before = path.read_text().strip()
    if before != value:
        path.write_text(value)
        log.info("setting=%s before=%s now=%s", path, before, value)
