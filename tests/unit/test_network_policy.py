# SPDX-License-Identifier: Apache-2.0
"""Network policies: the language, and what is made of it for the programs, against an evaluator that takes each rule
as it is written."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from dsecd.backends import egress_policy
from dsecd.backends.egress_policy import Range, TooManyRanges, compiled, prefixes
from libdsec.network import (
    ANYWHERE,
    PORT_MAX,
    PROTOCOLS,
    RULES_MAX,
    SPECIAL,
    Network,
    Rule,
    normal,
    parse_rule,
    rules,
)
from libdsec.types import SandboxSpec, UpdateRequest


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("all", Rule(PROTOCOLS, ANYWHERE)),
        ("tcp:203.0.113.0/24:443", Rule(("tcp",), (ip_network("203.0.113.0/24"),), "", 443, 443)),
        ("udp:*:53", Rule(("udp",), ANYWHERE, "", 53, 53)),
        ("[2001:db8::]/32", Rule(PROTOCOLS, (ip_network("2001:db8::/32"),))),
        ("[2001:db8::/32]:80-90", Rule(("tcp", "udp"), (ip_network("2001:db8::/32"),), "", 80, 90)),
        ("icmp:192.0.2.1", Rule(("icmp",), (ip_network("192.0.2.1/32"),))),
        ("192.0.2.1:22", Rule(("tcp", "udp"), (ip_network("192.0.2.1/32"),), "", 22, 22)),
        ("host:example.org:443", Rule(("tcp", "udp"), (), "example.org", 443, 443)),
        ("host:*.Example.org.:80-443", Rule(("tcp", "udp"), (), "*.example.org", 80, 443)),
    ],
)
def test_rules_are_read_as_they_are_meant(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "column", "word"),
    [
        ("upd:*:53", 1, "must begin with"), ("tcp:", 5, "must be an address"),
        ("tcp:203.0.113.5/24", 5, "203.0.113.0/24"),
        ("tcp:*:0", 7, "1 to 65535"), ("tcp:*:443-80", 7, "lower one first"), ("tcp:*:65536", 7, "1 to 65535"),
        ("tcp:*:http", 6, ":PORT"), ("icmp:*:8", 7, "no ports"), ("[2001:db8::1", 1, "not closed"),
        ("tcp:[1.2.3.4]", 5, "in brackets"), ("tcp:[::ffff:10.0.0.1]", 5, "write it as one"), ("", 1, "empty"),
        ("host:ex ample", 6, "must be a name"), ("host:1.2.3.4", 6, "not an address"),
        ("host:*.*.org", 6, "must be a name"),
        ("tcp:1.2.3.4/33", 5, "no address"), ("tcp:1.2.3.4:80x", 12, ":PORT"),
        ("host:" + "a." * 127 + "org", 6, "name"),
        ("tcp:0x7f.1:80", 5, "no address"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_refused_with_its_place(text: str, column: int, word: str) -> None:
    with pytest.raises(ValueError, match=f"column {column}: .*{word.replace('*', '.')}"):
        normal([text])


def test_all_faults_come_at_once_with_their_columns_in_the_whole_text() -> None:
    with pytest.raises(ValueError) as caught:
        normal("tcp:*:443, upd:*:5,tcp:1.2.3.4:9-3 ,all")
    faults = str(caught.value).split("; ")
    assert [fault.partition(":")[0] for fault in faults] == ["rule 2 'upd", "rule 3 'tcp"]
    assert "column 12" in faults[0]
    assert "column 32" in faults[1]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("none", "none"), ([], "none"), ("all", "all"), (["all"], "all"), ("*", "all"), ("all,all", "all"),
        ("tcp:*:443,udp:*:53", ("tcp:*:443", "udp:*:53")),
        ([{"protocol": "tcp", "to": "203.0.113.0/24", "ports": 443}], ("tcp:203.0.113.0/24:443",)),
        ([{"to": "2001:db8::/32"}, {"to": "*.example.org", "ports": "80-90"}, {"to": "example.org"}],
         ("[2001:db8::]/32", "host:*.example.org:80-90", "host:example.org")),
    ],
)  # fmt: skip
def test_text_and_json_lead_to_one_normal_form(value: Any, wanted: Any) -> None:
    assert normal(value) == wanted
    spec = SandboxSpec(image="x", network=value)
    assert spec.network == wanted
    assert SandboxSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize("value", [3, [3], [{"a": 1}], [{"to": 4}], {"to": "x"}, ["all"] * (RULES_MAX + 1), ["none"]])
def test_what_is_no_policy_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError):
        SandboxSpec(image="x", network=value)


def test_an_update_without_a_network_changes_none() -> None:
    assert UpdateRequest().network is None
    assert UpdateRequest.model_validate({"network": None}).network is None
    assert UpdateRequest.model_validate({"network": "none"}).network == "none"


# --- compiling -------------------------------------------------------------------------------------------------------


def naive(policy: list[Rule], address: IPv4Address | IPv6Address, protocol: str, port: int) -> bool:
    """Whether any rule, read as it is written, allows it: see libdsec.network."""
    for rule in policy:
        for network in rule.networks:
            if address.version != network.version or address not in network or protocol not in rule.protocols:
                continue
            around = [net for net in SPECIAL if net.version == address.version and address in net]
            shut = [net for net in around if net.prefixlen > network.prefixlen]
            if not shut and rule.first <= port <= rule.last:
                return True
    return False


def looked_up(
    found: dict[Network, tuple[Range, ...]], address: IPv4Address | IPv6Address, protocol: str, port: int
) -> bool:
    """As the kernel does it: the longest prefix alone."""
    fits = [net for net in found if net.version == address.version and address in net]
    if not fits:
        return False
    number = egress_policy.PROTOCOL_NUMBERS[protocol]
    ranges = found[max(fits, key=lambda net: net.prefixlen)]
    return any(item.protocol == number and item.first <= port <= item.last for item in ranges)


# Networks from a few values, so that they lie within each other; special ones among them.
_ADDRESSES = [
    *map(ip_address, ("10.0.0.0", "10.1.2.3", "203.0.113.7", "169.254.169.254", "192.0.2.128", "100.100.100.200")),
    *map(ip_address, ("2001:db8::1", "fd00:ec2::254", "fe80::1", "2a00::5", "64:ff9b::a00:1", "2002::1", "8.8.8.8")),
]  # fmt: skip


@st.composite
def _rules(draw: st.DrawFn) -> Rule:
    protocols = draw(st.sampled_from([("tcp",), ("udp",), ("icmp",), PROTOCOLS, ("tcp", "udp")]))
    ports = (0, PORT_MAX)
    if "icmp" not in protocols:
        ports = draw(st.sampled_from([(0, PORT_MAX), (1, 1), (80, 90), (85, 443), (444, 500), (65535, 65535)]))
    if draw(st.booleans()) and draw(st.booleans()):
        return Rule(protocols, ANYWHERE, "", *ports)
    address = draw(st.sampled_from(_ADDRESSES))
    length = draw(st.integers(0, address.max_prefixlen) | st.just(address.max_prefixlen))
    return Rule(protocols, (ip_network((address, length), strict=False),), "", *ports)


@st.composite
def _near(draw: st.DrawFn) -> IPv4Address | IPv6Address:
    """An address that differs from a known one in one bit or in none."""
    address = draw(st.sampled_from([*_ADDRESSES, *(net.network_address for net in SPECIAL)]))
    flip = draw(st.sampled_from([0, *(1 << bit for bit in range(address.max_prefixlen))]))
    return type(address)(int(address) ^ flip)


_PORTS = st.sampled_from([0, 1, 80, 86, 443, 450, 65535])


@given(st.lists(_rules(), max_size=6), _near(), st.sampled_from(PROTOCOLS), _PORTS)
@example([Rule(PROTOCOLS, ANYWHERE)], ip_address("169.254.169.254"), "tcp", 80)
@example([Rule(("tcp",), (ip_network("169.254.0.0/16"),))], ip_address("169.254.169.254"), "tcp", 80)
@example([Rule(PROTOCOLS, (ip_network("::/0"),))], ip_address("fd00:ec2::254"), "tcp", 80)
def test_a_compiled_policy_allows_what_its_rules_allow(
    policy: list[Rule], address: IPv4Address | IPv6Address, protocol: str, port: int
) -> None:
    if protocol == "icmp":
        port = 0
    assert looked_up(prefixes(policy), address, protocol, port) == naive(policy, address, protocol, port)


@pytest.mark.parametrize("text", [
    "10.0.0.1", "172.16.5.5", "192.168.1.1", "169.254.169.254", "127.0.0.1", "0.0.0.1", "224.0.0.1", "255.255.255.255",
    "100.64.0.1", "198.18.0.9", "168.63.129.16", "::1", "::", "fd00:ec2::254", "fe80::1", "ff02::1", "::ffff:8.8.8.8",
    "64:ff9b::808:808", "2002:808:808::1", "fd64:7365:6300::9", "2001::1",
])  # fmt: skip
def test_all_leaves_special_addresses_closed_and_a_rule_within_opens_them(text: str) -> None:
    address = ip_address(text)
    assert not looked_up(prefixes(rules("all")), address, "tcp", 80)
    assert not looked_up(prefixes(rules(("0.0.0.0/0", "[::]/0"))), address, "tcp", 80)
    exact = Rule(PROTOCOLS, (ip_network(address),))
    assert looked_up(prefixes([*rules("all"), exact]), address, "tcp", 80)


def test_only_single_addresses_are_named() -> None:
    found = prefixes(rules(("203.0.113.0/24:443", "tcp:203.0.113.7:80")))
    assert {item.named for item in found[ip_network("203.0.113.0/24")]} == {False}
    seven = found[ip_network("203.0.113.7/32")]
    assert [(item.named, item.first) for item in seven if item.protocol == 6] == [(False, 443), (True, 80)]


def test_ranges_that_touch_are_one_and_too_many_are_refused() -> None:
    touching = rules(tuple(f"tcp:1.2.3.4:{port}" for port in range(100, 200)))
    assert prefixes(touching)[ip_network("1.2.3.4/32")] == (Range(6, True, 100, 199),)
    with pytest.raises(TooManyRanges, match="17 separate port ranges apply to 1.2.3.4/32, 16 are possible"):
        compiled(rules(tuple(f"tcp:1.2.3.4:{port}" for port in range(100, 134, 2))))


def test_equal_policies_share_an_id_and_others_do_not() -> None:
    one, same = compiled(rules(("tcp:*:1", "tcp:*:2"))), compiled(rules(("tcp:*:2", "tcp:*:1", "tcp:*:1-2")))
    assert one == same
    assert one.id != compiled(rules(("tcp:*:1",))).id
    assert all(key[4:19] == one.id for key in one.entries)
