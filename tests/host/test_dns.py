# SPDX-License-Identifier: Apache-2.0
"""dsec-dns as a process, between sandboxes' ends of real devices and DNS servers of the tests' own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from dns.rcode import Rcode

from dsecd.backends.dns_link import DnsLink
from dsecd.dns import frames
from tests.support.dns import Box, DnsProcess, Server, addresses, ip, own_network

LISTEN = ("10.255.0.1", "fd00:d5ec::1")


class Daemon:
    """The daemon's side of the link, on a thread of its own; opens what ``allow`` says and notes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: list[frames.Open] = []
        self.denied: list[frames.Denied] = []
        self.allow: Callable[[frames.Address], bool] = lambda _address: True
        settings = frames.Settings(listen=tuple(frames.Endpoint(address=ip_address(a)) for a in LISTEN))
        self.link = DnsLink(settings, {0, 65534})

    def open(self, request: frames.Open) -> list[frames.Address]:
        self.opened.append(request)
        return [address for address in request.addresses if self.allow(address)]

    def refused(self, denied: frames.Denied) -> None:
        self.denied.append(denied)

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(self.path))
        self.path.chmod(0o666)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(listening,))
        self._thread.start()

    def _run(self, listening: socket.socket) -> None:
        self._task = self._loop.create_task(self.link.serve(listening))
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task]))
            self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def policy(self, box: Box, *patterns: str, named: tuple[str, ...] = (), any_name: bool = False) -> None:
        policy = frames.Policy(
            sandbox=box.name, device=box.device, patterns=patterns, any_name=any_name,
            sources=(ip_address(box.source), ip_address(box.source6)),
            named=tuple(ip_network(network) for network in named),
        )  # fmt: skip
        asyncio.run_coroutine_threadsafe(self.link.put(policy, self), self._loop).result(10)

    def forget(self, box: Box) -> None:
        asyncio.run_coroutine_threadsafe(self.link.forget(box.name), self._loop).result(10)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with own_network():
        for address in LISTEN:
            ip("addr", "add", address, "dev", "lo")
        path = tmp_path / "dns.sock"
        for directory in (tmp_path, *tmp_path.parents[:-1]):
            directory.chmod(directory.stat().st_mode | 0o011)
        (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\noptions edns0\n")
        daemon = Daemon(path)
        daemon.start()
        try:
            yield daemon
        finally:
            daemon.stop()


@pytest.fixture
def process(daemon: Daemon) -> Iterator[DnsProcess]:
    with DnsProcess(daemon.path, "--resolv-conf", str(daemon.path.with_name("resolv.conf")), user="nobody") as process:
        wait(lambda: daemon.link.connected, process)
        yield process


def wait(condition: Callable[[], object], process: DnsProcess, limit_s: float = 15.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, process.tail()
        time.sleep(0.02)


def test_an_allowed_name_is_answered_once_its_addresses_are_open(daemon: Daemon, process: DnsProcess) -> None:
    del process
    box = Box(1)
    daemon.policy(box, "www.example.org")
    with Server(zone={("www.example.org", "A"): ["www.example.org. 30 IN A 203.0.113.7"]}) as server:
        answer = box.ask("www.example.org")
        assert (answer.rcode(), addresses(answer)) == (Rcode.NOERROR, ["203.0.113.7"])
        (opened,) = daemon.opened
        assert (opened.sandbox, opened.name, opened.addresses) == (
            box.name, "www.example.org", (ip_address("203.0.113.7"),)
        )  # fmt: skip
        assert 85 <= opened.seconds <= 95
        assert server.names() == ["www.example.org"]


def test_a_name_outside_the_policy_is_nxdomain_and_nobody_is_asked(daemon: Daemon, process: DnsProcess) -> None:
    box = Box(1)
    daemon.policy(box, "www.example.org")
    with Server() as server:
        for name in ("example.org", "a.www.example.org", "secret.exfil.example", "."):
            assert box.ask(name).rcode() == Rcode.NXDOMAIN
        assert server.asked == []
    wait(lambda: sum(denied.names for denied in daemon.denied) == 4, process)
    assert daemon.opened == []
