# SPDX-License-Identifier: Apache-2.0
"""What a policy says about names, in the form that queries and requests are judged by.

What belongs here: compiling rules for names. What does not: the language (``libdsec.network``), rules for addresses
(``egress_policy.py``), judging anything (``name_service.py``).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address

from dsecd.backends.egress_policy import PROTOCOL_NUMBERS
from dsecd.backends.openings import OPENED_MAX, RULE_BYTES, Opening
from dsecd.dns.addresses import gaps
from dsecd.dns.names import Names
from libdsec.network import ANYWHERE, Network, Policy, Rule, rules

_PORT = 53


@dataclass(frozen=True)
class NameRules:
    """What a policy says about names."""

    names: Names
    by_pattern: Mapping[str, tuple[Opening, ...]]
    any_name: bool
    named: tuple[Network, ...]

    def __bool__(self) -> bool:
        """Whether it lets resolve any name at all."""
        return bool(self.by_pattern) or self.any_name

    @property
    def tags(self) -> frozenset[bytes]:
        """Of all its rules."""
        return frozenset(opening.rule for openings in self.by_pattern.values() for opening in openings)

    def openings(self, name: str) -> tuple[Opening, ...]:
        """What is opened at the addresses of a name, by all rules that cover it."""
        return tuple(
            dict.fromkeys(what for pattern in self.names.covering(name) for what in self.by_pattern[pattern])
        )


    def crowded(self) -> str | None:
        """A pattern with more port ranges than an address can have open, if there is one."""
        for pattern in self.by_pattern:
            if len(self.openings(pattern.replace("*", "x", 1))) > OPENED_MAX:
                return pattern
        return None


@functools.lru_cache(maxsize=64)
def name_rules(policy: Policy) -> NameRules:
    """Who may reach any public address by TCP or UDP may resolve any name: it can ask others than us as well."""
    by_pattern: dict[str, tuple[Opening, ...]] = {}
    any_name, named = False, []
    for rule in rules(policy):
        if rule.name:
            by_pattern[rule.name] = (*by_pattern.get(rule.name, ()), *_opened_by(rule))
        elif rule.networks == ANYWHERE:
            any_name = any_name or "tcp" in rule.protocols or "udp" in rule.protocols
        else:
            named += [network for network in rule.networks if gaps(network.network_address)]
    return NameRules(Names(by_pattern), by_pattern, any_name, tuple(dict.fromkeys(named)))


def _opened_by(rule: Rule) -> tuple[Opening, ...]:
    tag = hashlib.sha256(str(rule).encode()).digest()[:RULE_BYTES]
    return tuple(Opening(tag, PROTOCOL_NUMBERS[protocol], rule.first, rule.last) for protocol in rule.protocols)


def rule_for_dns(server: IPv4Address) -> Rule:
    """What a sandbox that may resolve names may reach besides what its policy says."""
    return rules((f"{server}:{_PORT}",))[0]
