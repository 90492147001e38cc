# SPDX-License-Identifier: Apache-2.0
"""A world for network tests: a host and everything around it, in network namespaces of their own.

Here: namespaces, devices, addresses and the servers behind them. Not here: what is sent. No packet leaves the machine:
the world ends behind its servers.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from tests.support.waiting import until

_PEERS = Path(__file__).with_name("peers.py")
#: The host's own addresses on its uplink.
HOST4, HOST6 = "203.0.113.1", "2001:db8:1::1"
#: A server on the same link, and one behind it, all with the same ports open.
NEAR4, NEAR6 = "203.0.113.10", "2001:db8:1::10"
FAR4, FAR6 = "198.51.100.5", "2001:db8:2::5"
PRIVATE4, PRIVATE6 = "10.66.0.5", "fd12:3456::5"
METADATA4, METADATA6 = "169.254.169.254", "fd00:ec2::254"
PORTS = (53, 80, 443, 8443)
_BEHIND = (FAR4, PRIVATE4, METADATA4, FAR6, PRIVATE6, METADATA6)


class Lab:
    """``host`` is where the daemon runs, ``world`` where the servers are; both are paths of network namespaces."""

    def __init__(self, host: Path | None = None) -> None:
        """``host``: the network namespace of a machine that has no network yet, instead of one made for the test."""
        self._own_host = host

    def __enter__(self) -> Self:
        self._place = tempfile.TemporaryDirectory(prefix="dsec-netlab-")
        self.log = Path(self._place.name) / "packets"
        count = 2 if self._own_host is None else 1
        self._holders = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in range(count)]
        made = [Path(f"/proc/{holder.pid}/ns/net") for holder in self._holders]
        own = Path("/proc/self/ns/net").stat().st_ino
        while any(path.stat().st_ino == own for path in made):
            time.sleep(0.01)
        self.host, self.world = self._own_host or made[0], made[-1]
        self._connect()
        self._peers = subprocess.Popen(
            ["nsenter", f"--net={self.world}", sys.executable, _PEERS, self.log, ",".join((NEAR4, NEAR6, *_BEHIND)),
             ",".join(map(str, PORTS))],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._peers.stdout is not None
        assert self._peers.stdout.readline() == "ready\n"
        with ThreadPoolExecutor(1) as pool:
            self._marker = pool.submit(_socket_in, self.host).result()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._marker.close()
        processes: list[subprocess.Popen[Any]] = [self._peers, *self._holders]
        for process in processes:
            process.kill()
            process.wait()
        assert self._peers.stdout is not None
        self._peers.stdout.close()
        self._place.cleanup()

    def _connect(self) -> None:
        host, world = self.host, self.world
        # A new namespace begins with what the machine has, where others may forward packets.
        for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            self.run(host, f"echo 0 > /proc/sys/net/{name}")
        up = "ip link set lo up"
        self.run(host, f"{up}; ip link add uplink type veth peer name world netns {self._holders[-1].pid}")
        self.run(host, f"ip addr add {HOST4}/24 dev uplink; ip addr add {HOST6}/64 dev uplink nodad")
        self.run(host, "ip link set uplink up")
        addresses = "".join(f"ip addr add {address} dev lo; " for address in _BEHIND)
        self.run(world, f"{up}; {addresses} ip addr add {NEAR4}/24 dev world; ip addr add {NEAR6}/64 dev world nodad")
        self.run(world, "ip link set world up")
        self.run(host, f"ip route add default via {NEAR4}; ip -6 route add default via {NEAR6}")

    def run(self, where: str | Path, script: str) -> str:
        """A shell script as root in one of the namespaces; what it prints."""
        return self.ask(where, "sh", "-ec", script)

    def ask(self, where: str | Path, *argv: str) -> str:
        """The same with one command, for what is asked often."""
        ours = os.stat("/proc/thread-self/ns/net").st_ino == os.stat(where).st_ino
        command = list(argv) if ours else ["nsenter", f"--net={where}", *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def packets(self) -> list[str]:
        """What has arrived in the world so far, a line each: all of what came before a datagram that is sent now."""
        mark = f"mark-{time.monotonic_ns()}"
        found = ""

        def marked() -> bool:
            nonlocal found
            # Again and again, since a datagram may be lost. Nobody answers at this port.
            self._marker.sendto(mark.encode(), (NEAR4, 9))
            found = self.log.read_text()
            return mark in found

        until(marked, 120)
        return found.splitlines()


def _socket_in(namespace: Path) -> socket.socket:
    """For datagrams, in a network namespace; the thread that makes it stays there."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.setns(fd, os.CLONE_NEWNET)
    finally:
        os.close(fd)
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
