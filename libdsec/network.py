# SPDX-License-Identifier: Apache-2.0
"""The network policy of a sandbox: its language, read and checked.

Here: text and JSON to rules, all faults with their positions, and back to the one way of writing each rule. Not here:
how a policy is enforced (``dsecd.backends.egress``).

    none                     nothing; the default
    all                      everything public
    tcp:203.0.113.0/24:443   a protocol (tcp, udp, icmp), addresses, a port or a range of them
    udp:*:53                 any public address
    [2001:db8::]/32          TCP, UDP and ICMP echo; with ports, TCP and UDP
    host:example.org:443     a name; its addresses are open while DNS says that they are its
    host:*.example.org:443   all names below it, at any depth, and not example.org itself

A rule opens a special range of addresses (private, link-local, of cloud metadata …) only if it lies within that range:
``all``, ``*`` and other rules that are wider leave it closed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

Network = IPv4Network | IPv6Network
#: A policy in its normal form: "none", "all", or rules as texts.
Policy = str | tuple[str, ...]

RULES_MAX = 256
PORT_MAX = 65535
ANYWHERE: tuple[Network, ...] = (IPv4Network("0.0.0.0/0"), IPv6Network("::/0"))
PROTOCOLS = ("tcp", "udp", "icmp")

#: Addresses that are somebody's own network or nobody's, opened only by a rule within them. The registries of special
#: addresses at IANA, RFC 6890; and what clouds keep their metadata and control services at.
SPECIAL: tuple[Network, ...] = tuple(map(ip_network, (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4",
    "169.254.169.254/32", "169.254.170.2/32", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32",
    "::/8", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/32", "2002::/16", "fc00::/7", "fe80::/10",
    "fec0::/10", "ff00::/8", "fd00:ec2::254/128", "fd20:ce::254/128",
)))  # fmt: skip

_WITH_PORTS = ("tcp", "udp")
#: The letters of host names (RFC 1123), and the underscore that names of services begin with (RFC 8552).
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
#: 255 bytes on the wire (RFC 1035).
NAME_MAX = 253

#: A policy in JSON, as ``normal`` takes it.
SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "description": "none, all, or rules with commas between them"},
        {"type": "array", "maxItems": RULES_MAX, "items": {"anyOf": [
            {"type": "string", "examples": ["tcp:203.0.113.0/24:443", "udp:*:53", "host:*.example.org:443"]},
            {"type": "object", "required": ["to"], "additionalProperties": False, "properties": {
                "protocol": {"enum": list(PROTOCOLS)}, "to": {"type": "string"},
                "ports": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            }},
        ]}},
    ]
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """What may be reached: ``networks`` or a ``name``, by each of ``protocols`` on ports ``first`` to ``last``."""

    protocols: tuple[str, ...]
    networks: tuple[Network, ...]
    name: str = ""
    first: int = 0
    last: int = PORT_MAX

    def __str__(self) -> str:
        """The rule as it would be written."""
        whole = (self.first, self.last) == (0, PORT_MAX)
        ports = "" if whole else f":{self.first}" + (f"-{self.last}" if self.last != self.first else "")
        if self.name:
            return f"host:{self.name}{ports}"
        protocol = f"{self.protocols[0]}:" if len(self.protocols) == 1 else ""
        if self.networks == ANYWHERE:
            return "all" if not protocol and whole else f"{protocol}*{ports}"
        network = self.networks[0]
        length = "" if network.prefixlen == network.max_prefixlen else f"/{network.prefixlen}"
        address = str(network.network_address)
        return f"{protocol}{f'[{address}]' if network.version == 6 else address}{length}{ports}"


class BadRule(ValueError):
    """What is wrong with one rule, and where: columns count from 1."""

    def __init__(self, column: int, what: str) -> None:
        super().__init__(what)
        self.column = column
        self.what = what


def parse_rule(text: str) -> Rule:
    """Raises BadRule."""
    if text == "all":
        return Rule(PROTOCOLS, ANYWHERE)
    if not text:
        raise BadRule(1, "must not be empty")
    head, colon, _rest = text.partition(":")
    at = 0
    protocols: tuple[str, ...] = ()
    if colon and head == "host":
        return _named(text, len("host:"))
    if colon and head in PROTOCOLS:
        protocols, at = (head,), len(head) + 1
    elif re.fullmatch(r"[a-z]+", head):
        raise BadRule(1, f"must begin with tcp:, udp:, icmp:, host: or an address, not '{head}'")
    networks, at = _target(text, at)
    first, last = _ports(text, at)
    whole = (first, last) == (0, PORT_MAX)
    if protocols == ("icmp",) and not whole:
        raise BadRule(at + 1, "icmp has no ports")
    return Rule(protocols or (PROTOCOLS if whole else _WITH_PORTS), networks, "", first, last)


def _named(text: str, at: int) -> Rule:
    name, colon, _ports_text = text[at:].partition(":")
    first, last = _ports(text, at + len(name) if colon else len(text))
    wildcard = name.startswith("*.")
    known = _in_dns(name[2:] if wildcard else name)
    if not all(_LABEL.fullmatch(label) for label in known.split(".")) or len(known) > NAME_MAX:
        raise BadRule(at + 1, "must be a name like example.org or *.example.org")
    if known.rpartition(".")[2].isdecimal():
        raise BadRule(at + 1, "must be a name, not an address: write it without 'host:'")
    return Rule(_WITH_PORTS, (), f"*.{known}" if wildcard else known, first, last)


def _in_dns(name: str) -> str:
    """The name as it travels in DNS: IDNA 2008 after the mapping of UTS 46, small letters, no dot at the end."""
    if not name.isascii():
        import idna  # its tables are large

        try:
            labels = idna.uts46_remap(name).split(".")
            name = ".".join(label if label.isascii() else idna.alabel(label).decode() for label in labels)
        except idna.IDNAError:
            return ""
    return name.lower().removesuffix(".")


def _target(text: str, at: int) -> tuple[tuple[Network, ...], int]:
    """The addresses that begin at ``at``, and where they end."""
    if text[at : at + 1] == "*":
        return ANYWHERE, at + 1
    found = re.compile(r"\[([^\]]*)\](/\d+)?|([0-9./]+)").match(text, at)
    if found is None:
        unclosed = text[at : at + 1] == "["
        raise BadRule(at + 1, "the bracket is not closed" if unclosed else "must be an address, [IPv6 address] or *")
    in_brackets = found[1] is not None
    # Both [2001:db8::]/32 and [2001:db8::/32] are in use.
    written = found[1] + (found[2] or "") if in_brackets else found[3]
    try:
        network = ip_network(written, strict=False)
    except ValueError:
        raise BadRule(at + 1, f"'{written}' is no address or network") from None
    if in_brackets != (network.version == 6):
        raise BadRule(at + 1, "IPv6 addresses, and only they, are in brackets")
    if str(network.network_address) != str(ip_network(written.partition("/")[0]).network_address):
        raise BadRule(at + 1, f"has bits set beyond its length: {network} is meant, or a single address")
    if network.version == 6 and network.overlaps(IPv6Network("::ffff:0:0/96")) and network.prefixlen >= 96:
        raise BadRule(at + 1, "is an IPv4 address: write it as one")
    return (network,), found.end()


def _ports(text: str, at: int) -> tuple[int, int]:
    """From the colon at ``at`` to the end; all of them when nothing is there."""
    if at == len(text):
        return 0, PORT_MAX
    found = re.fullmatch(r":(\d{1,5})(?:-(\d{1,5}))?", text[at:])
    if found is None:
        raise BadRule(at + 1, "must end, or go on with :PORT or :FIRST-LAST")
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last <= PORT_MAX:
        raise BadRule(at + 2, f"ports are 1 to {PORT_MAX}, the lower one first")
    return first, last


def rules(policy: Policy) -> tuple[Rule, ...]:
    """The rules of a policy that ``normal`` has seen."""
    if policy == "none":
        return ()
    return tuple(parse_rule(text) for text in ([policy] if isinstance(policy, str) else policy))


def normal(value: Any) -> Policy:
    """A policy in its normal form: "none", "all" or rules. Raises ValueError with all faults at once.

    Takes text, with commas between rules, or a list of texts and objects like
    ``{"protocol": "tcp", "to": "203.0.113.0/24", "ports": "443"}``.
    """
    if value == "none" or value == () or value == []:
        return "none"
    entries, starts = _entries(value)
    if len(entries) > RULES_MAX:
        raise ValueError(f"must be at most {RULES_MAX} rules, got {len(entries)}")
    found: list[str] = []
    faults: list[str] = []
    for number, (entry, start) in enumerate(zip(entries, starts, strict=True), 1):
        try:
            text = _of_object(entry) if isinstance(entry, Mapping) else entry
            if not isinstance(text, str):
                raise BadRule(1, "must be a text or an object")
            found.append(str(parse_rule(text.strip())))
        except BadRule as fault:
            shown = str(entry).strip()[:60]
            faults.append(f"rule {number} '{shown}', column {start + fault.column}: {fault.what}")
    if faults:
        raise ValueError("; ".join(faults))
    texts = tuple(dict.fromkeys(found))
    return "all" if texts == ("all",) else texts


def _entries(value: Any) -> tuple[list[Any], list[int]]:
    """Rules, and how many columns of the whole text are before each."""
    if isinstance(value, str):
        entries = value.split(",")
        starts, at = [], 0
        for entry in entries:
            starts.append(at + len(entry) - len(entry.lstrip()))
            at += len(entry) + 1
        return list(entries), starts
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return list(value), [0] * len(value)
    raise ValueError("must be 'none', 'all' or a list of rules")


def _of_object(entry: Mapping[str, Any]) -> str:
    """The text that says what an object says."""
    unknown = sorted(set(entry) - {"protocol", "to", "ports"})
    if unknown or not isinstance(entry.get("to"), str):
        what = f"unknown field '{unknown[0]}'" if unknown else "needs 'to', a text"
        raise BadRule(1, f"{what} (an object has 'protocol', 'to' and 'ports')")
    protocol, ports = entry.get("protocol"), entry.get("ports")
    to = str(entry["to"])
    if ":" in to and not to.startswith("["):
        address, slash, length = to.partition("/")
        to = f"[{address}]{slash}{length}"
    elif to.startswith("*.") or to[:1].isalpha():
        to = f"host:{to}"
    return (f"{protocol}:" if protocol else "") + to + (f":{ports}" if ports is not None else "")
