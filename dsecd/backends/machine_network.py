# SPDX-License-Identifier: Apache-2.0
"""The device of a microVM: a tap, with the same addresses, programs and policies as a container's pair of devices.

What belongs here: making the tap before the monitor starts, its policy, what the guest is told of it. What does not:
what all devices have in common (``network.py``).

A tap is there as long as somebody holds its descriptor: first this daemon, then the monitor alone. So it ends with the
machine, however that ends, and nobody has to be there to remove it. A device cannot come to a machine that runs, and
one whose policy becomes ``none`` keeps its device, which then passes nothing.
"""

from __future__ import annotations

import os
import socket

from dsecd.backends.base import Box, translated
from dsecd.backends.name_rules import name_rules
from dsecd.backends.network import HOST_MAC, INNER, OTHER_NAME, Network, configure, lead_to, watch
from dsecd.backends.plan import in_thread
from dsecd.linux import mechanisms, tun
from dsecd.linux.netlink import Netlink, Script
from dsecd.vmm.base import Nic
from libdsec import errors
from libdsec.network import Policy
from libdsec.types import NetworkState

#: Of a machine's network namespace there is none on this host, so connect(2) in there asks nobody here.
_NO_COOKIE = 0


class MachineNetwork:
    """One for all microVMs."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._taps: dict[str, int] = {}  # of boxes whose monitor has not been started yet

    def check(self, policy: Policy) -> None:
        self._network.check(policy)

    def names(self) -> set[str]:
        return self._network.names()

    # --- steps -------------------------------------------------------------------------------------------------------

    async def attach(self, box: Box, *, device: bool) -> None:
        """Make the tap, if there is to be one, and put the box's policy in force."""
        if device:
            with translated(f"connect '{box.id}' to the network"):
                await in_thread(self._make, box)
                await self._network.follow(box, box.spec.network)

    async def detach(self, box: Box) -> None:
        with translated(f"disconnect '{box.id}' from the network"):
            self.let_go(box)
            if self._network.in_use:
                await self._network.follow(box, "none")
                await in_thread(self._network.detach, box)

    def nics(self, box: Box) -> tuple[Nic, ...]:
        """What the monitor is started with."""
        fd = self._taps.get(box.id)
        if fd is None:
            return ()
        lease = self._network.lease(box)
        return (Nic(lease.name, lease.mac.hex(":"), fd),)

    def let_go(self, box: Box) -> None:
        """From now on the tap is the monitor's alone, or nobody's, and gone."""
        fd = self._taps.pop(box.id, None)
        if fd is not None:
            os.close(fd)

    async def tell_guest(self, box: Box) -> None:
        """Give the guest's end its addresses, also where it has those of the machine that it is a copy of."""
        assert box.link is not None
        await box.link.machine.configure_network(INNER, self._inside(box))

    def _inside(self, box: Box) -> bytes:
        lease = self._network.lease(box)
        with Script() as inner:
            inner.change_link(0, mac=lease.mac, mtu=self._network.mtu)
            inner.delete_any_address(0, socket.AF_INET)  # those of IPv6 went when it was taken down
            configure(inner, 0, lease)
            return bytes(inner.packed)

    def _make(self, box: Box) -> None:
        """Blocks. Runs in a thread."""
        mechanisms.by_name("tap").require()
        network, policy = self._network, box.spec.network
        egress, lease = network.prepared(), network.lease(box)
        fd = tun.open_tap(lease.name, lease.index)
        try:
            with Netlink() as host:
                host.name_link(lease.index, OTHER_NAME + box.id)
                host.change_link(lease.index, mac=HOST_MAC, mtu=network.mtu)
                watch(host, egress, lease)
                if policy != "none":
                    egress.admit(lease.index, lease.entry(_NO_COOKIE), network.compiled(policy))
                lead_to(host, lease)
        except BaseException:
            os.close(fd)
            raise
        self._taps[box.id] = fd

    # --- a machine that runs -----------------------------------------------------------------------------------------

    async def settle(self, box: Box) -> None:
        """Take over what an earlier daemon attached."""
        with translated(f"take over the network of '{box.id}'"):
            if self._network.in_use:
                await in_thread(self._settle, box)
                await self._network.follow(box, box.spec.network)

    def _settle(self, box: Box) -> None:
        """Blocks. Runs in a thread."""
        with Netlink() as host:
            if host.link(OTHER_NAME + box.id) is not None:
                self._put_in_force(box, box.spec.network)
                watch(host, self._network.prepared(), self._network.lease(box))

    async def change(self, box: Box, policy: Policy) -> None:
        """Put another policy in force, at once and as a whole. Raises FeatureMissing for a machine without a device."""
        with translated(f"change the network of '{box.id}'"):
            self._network.judge_names_by(box, policy)
            try:
                await in_thread(self._change, box, policy)
            except (OSError, errors.FeatureMissing):
                self._network.judge_names_by(box, box.spec.network)
                raise
            await self._network.follow(box, policy)

    def _change(self, box: Box, policy: Policy) -> None:
        """Blocks. Runs in a thread."""
        if not self._network.in_use and policy == "none":
            return
        with Netlink() as host:
            if host.link(OTHER_NAME + box.id) is not None:
                self._put_in_force(box, policy)
            elif policy != "none":
                raise errors.FeatureMissing(
                    f"change the network of '{box.id}': a microVM that was started without a network has no device",
                    hint="stop it, change its network, and start it", feature="microvm-network-hotplug",
                )  # fmt: skip

    def _put_in_force(self, box: Box, policy: Policy) -> None:
        egress, lease = self._network.prepared(), self._network.lease(box)
        if policy == "none":
            egress.remove(lease.index)
        elif egress.entry(lease.index) is None:
            egress.admit(lease.index, lease.entry(_NO_COOKIE), self._network.compiled(policy), anew=False)
        else:
            egress.set_policy(lease.index, self._network.compiled(policy))
        egress.openings.keep(lease.index, name_rules(policy).tags)

    def state(self, box: Box) -> NetworkState:
        with translated(f"read the network of '{box.id}'"):
            return self._network.state(box)
