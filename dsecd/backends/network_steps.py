# SPDX-License-Identifier: Apache-2.0
"""What the network's step of a plan does and undoes, away from the event loop.

What belongs here: which thread it is done on, that dsec-dns is told, that it costs nothing where no sandbox has a
network. What does not:
how it is done (``network.py``).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from dsecd.backends.base import Box, translated
from dsecd.backends.network import Network, dial
from dsecd.backends.plan import in_thread
from dsecd.linux import mountns
from libdsec import errors
from libdsec.network import Policy
from libdsec.types import NetworkState

#: A process that listens and never accepts lets a connection wait.
_DIAL_TIMEOUT_S = 5.0


class NetworkSteps:
    """One for all boxes of a backend; ``pid`` tells the init of a box that was just started."""

    def __init__(self, network: Network, pid: Callable[[Box], int]) -> None:
        self._network = network
        self._pid = pid
        # Each call enters the network namespace of a box, and its thread ends there.
        self._threads = mountns.FreshThreads()

    def check(self, policy: Policy) -> None:
        self._network.check(policy)

    def names(self) -> set[str]:
        return self._network.names()

    async def attach(self, box: Box) -> None:
        if box.spec.network != "none":
            with translated(f"connect '{box.id}' to the network"):
                await in_thread(
                    self._network.attach, box, self._pid(box), box.spec.network, executor=self._threads
                )
                await self._network.follow(box, box.spec.network)

    async def detach(self, box: Box) -> None:
        with translated(f"disconnect '{box.id}' from the network"):
            if self._network.in_use:
                await self._network.follow(box, "none")
                await in_thread(self._network.detach, box)

    async def settle(self, box: Box) -> None:
        """Take over what an earlier daemon attached."""
        assert box.process is not None
        with translated(f"take over the network of '{box.id}'"):
            if self._network.in_use or box.spec.network != "none":
                await in_thread(self._network.settle, box, box.process.pid, executor=self._threads)
                await self._network.follow(box, box.spec.network)

    async def change(self, box: Box, policy: Policy) -> None:
        assert box.process is not None
        with translated(f"change the network of '{box.id}'"):
            # Nothing more is opened by the old rules from here on; those of the new policy follow what it closes.
            self._network.judge_names_by(box, policy)
            try:
                await in_thread(self._network.change, box, box.process.pid, policy, executor=self._threads)
            except (OSError, errors.FeatureMissing):
                self._network.judge_names_by(box, box.spec.network)
                raise
            await self._network.follow(box, policy)

    async def dial(self, box: Box, port: int) -> socket.socket:
        """A connection to a port on the loopback of a box that runs."""
        assert box.process is not None
        doing = f"connect to port {port} of '{box.id}'"
        with translated(doing, but=ConnectionRefusedError):
            ns_fd = self._network.namespace(box, box.process.pid)
            try:
                return await in_thread(dial, ns_fd, port, _DIAL_TIMEOUT_S, executor=self._threads)
            except ConnectionRefusedError:
                raise errors.Refused(f"{doing}: nobody listens there", port=port, retryable=True) from None
            finally:
                os.close(ns_fd)

    def state(self, box: Box) -> NetworkState:
        with translated(f"read the network of '{box.id}'"):
            return self._network.state(box)
