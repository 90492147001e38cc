# SPDX-License-Identifier: Apache-2.0
"""A sandbox's device, its addresses and its policy.

What belongs here: attaching a running container to the network and taking it off again, by its box alone; what the
devices of all kinds of sandboxes have in common. What does not: taps (``machine_network.py``), the programs and maps
(``egress.py``), compiling policies (``egress_policy.py``), the host's own settings (``network_host.py``).

Each container has a pair of devices: one end in its network namespace, the other here, with a route to its addresses
and with the programs, which are there before the device is up. Nobody asks for anybody's hardware address: both ends
know their only neighbour. Addresses, index and name derive from the box's range of ids, of which each has one until
nothing of it is left; the device's second name derives from the box's id.

A host where no sandbox ever had a network is left as it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv6Address, ip_network

from dsecd.backends import network_host
from dsecd.backends.base import Box, Site
from dsecd.backends.egress import Denied, Egress, Entry, protocol_name
from dsecd.backends.egress_policy import POLICY_BYTES, TooManyRanges, compiled
from dsecd.backends.egress_policy import Policy as CompiledPolicy
from dsecd.backends.files import closing
from dsecd.backends.name_rules import name_rules, rule_for_dns
from dsecd.backends.openings import OPENED_MAX
from dsecd.backends.refusals import Refusals
from dsecd.linux import mechanisms, netlink, netns
from dsecd.linux.netlink import Address, Netlink
from libdsec import errors, network
from libdsec.network import Policy
from libdsec.types import NameDenial, NetworkDenial, NetworkState

#: Features without which there is none, but for the kind of device.
NEEDED = ("bpf", "nftables")
_IDS = 65_536
# Far above the indexes that the kernel gives by itself, which begin at 1.
_FIRST_INDEX = 1 << 20
INNER = "eth0"
OTHER_NAME = "dsec."
# Locally administered addresses; the host's end is the same for all, since none of them shares a link with another.
HOST_MAC = b"\x02dsec\x01"
_MAC_PREFIX = b"\x06ds"
# Link-local: nothing behind them, they only name the neighbour.
_GATEWAYS: tuple[Address, ...] = (IPv4Address("169.254.1.1"), IPv6Address("fe80::1"))
_DEFAULTS = (ip_network("0.0.0.0/0"), ip_network("::/0"))
_MTU = 1500
_LOOPBACK = ("127.0.0.1", "::1")
_making = threading.Lock()


@dataclass(frozen=True)
class Lease:
    """What belongs to one box by its range of ids."""

    index: int
    name: str
    ipv4: IPv4Address
    ipv6: IPv6Address | None
    mac: bytes

    def entry(self, cookie: int) -> Entry:
        return Entry(bytes(POLICY_BYTES), self.ipv4, self.ipv6, self.mac, HOST_MAC, cookie)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return (self.ipv4,) if self.ipv6 is None else (self.ipv4, self.ipv6)


def shared(site: Site) -> Network:
    """The one of all backends: who holds which policy is counted in it."""
    with _making:
        found = site.network.made.get("network")
        if not isinstance(found, Network):
            found = site.network.made["network"] = Network(site)
        return found


class Network:
    """Everything of the network that sandboxes have on this host. Methods block; any thread may call them."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._pins = site.runtime_dir / "bpf"
        self._lock = threading.Lock()
        self._egress: Egress | None = None
        self.mtu = _MTU
        self._refusals = Refusals()

    @property
    def in_use(self) -> bool:
        """Whether any sandbox had a network since the host started."""
        return self._egress is not None or self._pins.exists()

    def check(self, policy: Policy) -> None:
        """Raises InvalidSpec for a policy that is too large to be enforced."""
        try:
            self.compiled(policy)
        except TooManyRanges as error:
            raise errors.InvalidSpec(f"spec.network: {error}", hint="merge ranges of ports") from error
        if (name := name_rules(policy).crowded()) is not None:
            # TCP and UDP count apart.
            what = f"more than {OPENED_MAX // 2} port ranges apply to 'host:{name}'"
            raise errors.InvalidSpec(f"spec.network: {what}", hint="merge ranges of ports")

    def names(self) -> set[str]:
        """Ids of all boxes that have a device here."""
        if not self.in_use:
            return set()
        with Netlink() as host:
            names = [name for link in host.links() for name in link.other_names]
        return {name.removeprefix(OTHER_NAME) for name in names if name.startswith(OTHER_NAME)}

    def attach(self, box: Box, pid: int, policy: Policy) -> None:
        """Give a box whose init is ``pid`` its device. Runs in one of mountns.FreshThreads, which it changes."""
        mechanisms.by_name("veth").require()
        egress, lease = self.prepared(), self.lease(box)
        with Netlink() as host, closing(self.namespace(box, pid)) as ns_fd:
            host.add_veth(
                lease.name, index=lease.index, mac=HOST_MAC, peer=INNER, peer_ns_fd=ns_fd, peer_mac=lease.mac,
                mtu=self.mtu,
            )  # fmt: skip
            host.name_link(lease.index, OTHER_NAME + box.id)
            watch(host, egress, lease)
            netns.enter(ns_fd)
            with Netlink() as inner:
                egress.admit(lease.index, lease.entry(inner.namespace_cookie()), self.compiled(policy))
                _configure_inside(inner, lease)
            lead_to(host, lease)

    def settle(self, box: Box, pid: int) -> None:
        """Bring what an earlier daemon attached in line with the box. Runs in one of mountns.FreshThreads."""
        policy = box.spec.network
        with Netlink() as host:
            link = host.link(OTHER_NAME + box.id)
            if policy == "none":
                if link is not None:
                    self.detach(box)
                return
            egress, lease = self.prepared(), self.lease(box)
            if link is None:
                self.change(box, pid, policy)
                return
            if egress.entry(lease.index) is None:
                # The maps are new, and what is attached still looks into those of the earlier daemon.
                with closing(self.namespace(box, pid)) as ns_fd:
                    netns.enter(ns_fd)
                with Netlink() as inner:
                    cookie = inner.namespace_cookie()
                egress.admit(lease.index, lease.entry(cookie), self.compiled(policy), anew=False)
            egress.set_policy(lease.index, self.compiled(policy))
            egress.openings.keep(lease.index, name_rules(policy).tags)
            watch(host, egress, lease)

    def change(self, box: Box, pid: int, policy: Policy) -> None:
        """Put another policy in force, at once and as a whole. Runs in one of mountns.FreshThreads."""
        if policy == "none":
            self.detach(box)
        elif (egress := self.prepared()).entry(self.lease(box).index) is not None:
            egress.set_policy(self.lease(box).index, self.compiled(policy))
            egress.openings.keep(self.lease(box).index, name_rules(policy).tags)
        else:
            self.attach(box, pid, policy)

    def detach(self, box: Box) -> None:
        """Take its device away, wherever attaching got to."""
        with Netlink() as host:
            if box.uid_base:
                index = self.lease(box).index
            elif (link := host.link(OTHER_NAME + box.id)) is not None:
                index = link.index
            else:
                return
            host.delete_link(index)
        # Without programs it has no entries that count for anything: the next daemon that has them sweeps up.
        with contextlib.suppress(errors.FeatureMissing):
            self.prepared().remove(index)

    def state(self, box: Box) -> NetworkState:
        """What it may reach, and what came of its tries."""
        policy = box.spec.network
        lease = self.lease(box)
        egress = None if policy == "none" else self.prepared()
        counts = None if egress is None else egress.counts(lease.index)
        if egress is None or counts is None:
            return NetworkState(id=box.id, policy=policy)
        refused = self._site.network.names.counts(box.id)
        return NetworkState(
            id=box.id, policy=policy, addresses=tuple(map(str, lease.addresses)), device=lease.name,
            sent_packets=counts.out_packets, sent_bytes=counts.out_bytes, received_packets=counts.in_packets,
            received_bytes=counts.in_bytes, denied=counts.denied_out, denied_inbound=counts.denied_in,
            recent=tuple(map(_shown, counts.recent)),
            dns=str(self._site.network.dns_server) if name_rules(policy) else "",
            opened_addresses=egress.openings.count(lease.index), denied_names=refused.names,
            denied_answers=refused.addresses, dropped_queries=refused.dropped,
            recent_names=tuple(NameDenial(at=at, name=name) for at, name in refused.recent),
        )  # fmt: skip

    def namespace(self, box: Box, pid: int) -> int:
        """fd of the box's network namespace. Raises ProcessLookupError when the process is not the box's any more."""
        fd = netns.open_process(pid)
        if netns.owner(fd) != box.uid_base:
            os.close(fd)
            raise ProcessLookupError(f"process {pid} is not of '{box.id}'")
        return fd

    def judge_names_by(self, box: Box, policy: Policy) -> None:
        """From now on names open nothing but by this policy. Does not block; for the event loop's thread."""
        self._site.network.names.judge_by(box.id, name_rules(policy))

    async def follow(self, box: Box, policy: Policy) -> None:
        """Let dsec-dns know which names the box may resolve, and tell of what is refused to it, from now on or no more;
        it is attached, or has no policy. For the event loop's thread."""
        names = self._site.network.names
        if policy == "none" or self._egress is None:
            self._refusals.end(box.id)
            await names.forget(box.id)
            return
        lease = self.lease(box)
        self._refusals.begin(box.id, lease.index, self._egress, box.on_refused)
        await names.put(
            box.id, lease.index, lease.addresses, name_rules(policy), self._egress.openings,
            refused=functools.partial(self._refusals.names, box.id),
        )  # fmt: skip

    # --- parts -------------------------------------------------------------------------------------------------------

    def prepared(self) -> Egress:
        """The programs; with the first call the host is made ready for them. Raises FeatureMissing, OSError."""
        with self._lock:
            if self._egress is None:
                for name in NEEDED:
                    mechanisms.by_name(name).require()
                site = self._site.network
                with Netlink() as host:
                    links = {link.index: link for link in host.links()}
                    defaults = [links[index].mtu for index in host.default_devices() if index in links]
                    network_host.give_address(host, site.dns_server)
                self.mtu = min(defaults, default=_MTU)
                network_host.prepare(site.ipv4_pool, site.ipv6_pool, site.flows_per_sandbox)
                egress = Egress(self._pins, site.program, self._site.cgroup_dir)
                egress.sweep(links)
                self._egress = egress
            return self._egress

    def compiled(self, policy: Policy) -> CompiledPolicy:
        site = self._site.network
        return _compiled(policy, site.dns_server, (site.ipv4_pool, site.ipv6_pool))

    def lease(self, box: Box) -> Lease:
        site = self._site.network
        number = (box.uid_base - site.uid_base) // _IDS
        return Lease(
            index=_FIRST_INDEX + box.uid_base // _IDS, name=f"{network_host.DEVICE_PREFIX}{box.uid_base // _IDS:x}",
            ipv4=site.ipv4_pool[number + 1], mac=_MAC_PREFIX + (number + 1).to_bytes(3, "big"),
            ipv6=site.ipv6_pool[number + 1] if network_host.has_ipv6() else None,
        )  # fmt: skip


def dial(ns_fd: int, port: int, timeout_s: float) -> socket.socket:
    """A connection to a port on the loopback of a network namespace. Runs in one of mountns.FreshThreads.

    Whoever listens there sees a connection of its own machine's; nothing has to be open to the outside for it.
    """
    netns.enter(ns_fd)
    try:
        connection = socket.create_connection((_LOOPBACK[0], port), timeout_s)
    except ConnectionRefusedError:
        connection = socket.create_connection((_LOOPBACK[1], port), timeout_s)
    connection.setblocking(False)
    return connection


def _shown(denied: Denied) -> NetworkDenial:
    ago_s = (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - denied.at_ns) / 1e9
    return NetworkDenial(
        at=datetime.fromtimestamp(time.time() - ago_s, UTC), address=denied.address, port=denied.port,
        protocol=protocol_name(denied.protocol), reason=denied.reason,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _compiled(policy: Policy, dns_server: IPv4Address, pools: tuple[network.Network, ...]) -> CompiledPolicy:
    """Most sandboxes have one of few policies. The pools are special, too: sandboxes are nobody's public."""
    asking = (rule_for_dns(dns_server),) if name_rules(policy) else ()
    return compiled((*network.rules(policy), *asking), (*network.SPECIAL, *pools))


def watch(host: Netlink, egress: Egress, lease: Lease) -> None:
    """Put the programs on the host's end. One that another program was on is never without."""
    host.add_clsact(lease.index)
    host.set_program(lease.index, netlink.INGRESS, egress.from_sandbox, "from_sandbox")
    host.set_program(lease.index, netlink.EGRESS, egress.to_sandbox, "to_sandbox")


def _configure_inside(inner: Netlink, lease: Lease) -> None:
    """Addresses and the way out, in the sandbox's namespace. Nobody in there may change them: CAP_NET_ADMIN."""
    link = inner.link(INNER)
    if link is None:
        raise FileNotFoundError(f"device {INNER} is not there")
    configure(inner, link.index, lease)


def configure(inner: Netlink, index: int, lease: Lease) -> None:
    """What a sandbox's end of its device needs."""
    inner.set_up(index)
    for address, gateway, target in zip(lease.addresses, _GATEWAYS, _DEFAULTS, strict=False):
        inner.add_address(index, address)
        inner.add_neighbour(index, gateway, HOST_MAC)
        inner.add_route(target, index, gateway)


def lead_to(host: Netlink, lease: Lease) -> None:
    """Bring the host's end up, with the only way to the sandbox's addresses."""
    for address in lease.addresses:
        host.add_neighbour(lease.index, address, lease.mac)
    host.set_up(lease.index)
    for address in lease.addresses:
        host.add_route(ip_network(address), lease.index)
