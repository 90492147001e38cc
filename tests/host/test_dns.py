# SPDX-License-Identifier: Apache-2.0
"""dsec-dns as a process, between sandboxes' ends of real devices and DNS servers of the tests' own."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address, ip_network
from pathlib import Path

import dns.flags
import dns.message
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
        asyncio.run_coroutine_threadsafe(self.link.put(policy, self), self._loop).result(60)

    def forget(self, box: Box) -> None:
        asyncio.run_coroutine_threadsafe(self.link.forget(box.name), self._loop).result(60)


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
        wait(lambda: daemon.link.pid == process.process.pid, process)
        yield process


def wait(condition: Callable[[], object], process: DnsProcess, limit_s: float = 60.0) -> None:
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


def test_only_addresses_are_told_and_other_types_are_empty(daemon: Daemon, process: DnsProcess) -> None:
    del process
    box = Box(1)
    daemon.policy(box, "*.example.org")
    zone = {
        ("a.example.org", "A"): ["a.example.org. 60 IN CNAME b.example.net.", "b.example.net. 60 IN A 203.0.113.7"],
        ("a.example.org", "TXT"): ['a.example.org. 60 IN TXT "secret"'],
        ("a.example.org", "HTTPS"): ["a.example.org. 60 IN HTTPS 1 . ipv4hint=203.0.113.9"],
    }
    with Server(zone=zone) as server:
        for kind in ("TXT", "HTTPS", "MX", "SRV", "ANY"):
            answer = box.ask("a.example.org", kind)
            assert (answer.rcode(), answer.answer) == (Rcode.NOERROR, []), kind
        assert server.asked == []
        assert box.ask("a.example.org", "AXFR", tcp=True).rcode() == Rcode.REFUSED
        for tcp in (False, True):
            answer = box.ask("A.Example.ORG.", tcp=tcp)
            assert [str(rrset.name) for rrset in answer.answer] == ["A.Example.ORG.", "b.example.net."]
            assert addresses(answer) == ["203.0.113.7"]
        assert box.ask("example.org").rcode() == Rcode.NXDOMAIN
        assert addresses(box.ask("a.example.org", family=socket.AF_INET6)) == ["203.0.113.7"]
        assert addresses(box.ask("a.example.org", tcp=True, family=socket.AF_INET6)) == ["203.0.113.7"]
        assert len(server.asked) == 1
    assert len(daemon.opened) == 1


def test_special_addresses_are_left_out_unless_named(daemon: Daemon, process: DnsProcess) -> None:
    del process
    one, two = Box(1), Box(2)
    daemon.policy(one, "x.example.org", "y.example.org")
    daemon.policy(two, "x.example.org", "y.example.org", named=("10.0.0.0/8", "169.254.0.0/16"))
    special = ["10.0.0.7", "127.0.0.1", "169.254.169.254", "192.168.1.1"]
    zone = {
        ("x.example.org", "A"): [f"x.example.org. 60 IN A {a}" for a in (*special, "203.0.113.7")],
        ("y.example.org", "AAAA"): [
            f"y.example.org. 60 IN AAAA {a}" for a in ("::ffff:10.0.0.7", "fd00:ec2::254", "64:ff9b::a00:7")
        ],
    }
    with Server(zone=zone):
        assert addresses(one.ask("x.example.org")) == ["203.0.113.7"]
        assert addresses(one.ask("y.example.org", "AAAA")) == []
        # A network that is wider than the metadata address names all of it but that.
        assert addresses(two.ask("x.example.org")) == ["10.0.0.7", "203.0.113.7"]
    assert {str(address) for request in daemon.opened for address in request.addresses} == {"203.0.113.7"}


def test_without_a_confirmed_opening_there_is_no_answer(daemon: Daemon, process: DnsProcess) -> None:
    box = Box(1)
    daemon.policy(box, "a.example.org", "b.example.org")
    zone = {(f"{n}.example.org", "A"): [f"{n}.example.org. 60 IN A 203.0.113.{7 + ord(n)}"] for n in "ab"}
    with Server(zone=zone):
        daemon.allow = lambda _address: False
        assert box.ask("a.example.org").rcode() == Rcode.SERVFAIL
        daemon.allow = lambda _address: True
        assert box.ask("a.example.org").rcode() == Rcode.NOERROR
        daemon.stop()
        try:
            assert box.ask("a.example.org").rcode() == Rcode.NOERROR  # it is open already
            began = time.monotonic()
            assert box.ask("b.example.org").rcode() == Rcode.SERVFAIL
            assert time.monotonic() - began < 20
        finally:
            daemon.start()
        wait(lambda: box.ask("b.example.org").rcode() == Rcode.NOERROR, process)


def test_who_asks_is_told_by_the_device_and_a_forged_source_gets_nothing(daemon: Daemon, process: DnsProcess) -> None:
    one, two = Box(1), Box(2)
    daemon.policy(one, "a.example.org")
    with Server(zone={("a.example.org", "A"): ["a.example.org. 60 IN A 203.0.113.7"]}) as server:
        assert two.ask("a.example.org").rcode() == Rcode.REFUSED
        daemon.policy(two, "b.example.org")
        # The second sandbox takes the address of the first: it comes in by another device.
        two.ip("addr", "add", f"{one.source}/32", "dev", "eth0")
        two.ip("route", "replace", two.server, "dev", "eth0", "src", one.source)
        with pytest.raises(TimeoutError):
            two.ask("a.example.org", timeout_s=1)
        with pytest.raises(OSError):
            two.ask("a.example.org", tcp=True, timeout_s=1)
        # The first sandbox with an address that is not its own.
        one.ip("addr", "add", "10.9.9.9/32", "dev", "eth0")
        one.ip("route", "replace", one.server, "dev", "eth0", "src", "10.9.9.9")
        ip("route", "add", "10.9.9.9/32", "dev", one.name)
        with pytest.raises(TimeoutError):
            one.ask("a.example.org", timeout_s=1)
        assert server.asked == []
    daemon.forget(one)
    one.ip("route", "replace", one.server, "dev", "eth0", "src", one.source)
    assert one.ask("a.example.org").rcode() == Rcode.REFUSED
    assert process.process.poll() is None


def test_forged_answers_are_not_taken_and_another_server_is_asked(daemon: Daemon, process: DnsProcess) -> None:
    del process
    daemon.path.with_name("resolv.conf").write_text("nameserver 127.0.0.52\nnameserver 127.0.0.53\n")
    box = Box(1)
    daemon.policy(box, "*.example.org")

    def forge(_query: object, answer: dns.message.Message, _by: str) -> bytes:
        name = answer.question[0].name
        wire = bytearray(answer.to_wire())
        if b"number" in name.labels[0].lower():
            wire[0] ^= 0xFF
        elif b"name" in name.labels[0].lower():
            wire[13] ^= 0x01
        return bytes(wire)

    zone = {
        (f"{n}.example.org", "A"): [f"{n}.example.org. 60 IN A 203.0.113.66"] for n in ("number", "name", "dead")
    }
    good = {key: [line[0].replace(".66", ".7")] for key, line in zone.items()}
    with Server("127.0.0.52", zone=zone, hook=forge), Server(zone=good) as second:
        assert addresses(box.ask("number.example.org")) == ["203.0.113.7"]
        assert addresses(box.ask("name.example.org")) == ["203.0.113.7"]
        assert any(name != name.lower() for name, _kind, _by in second.asked)  # random case
        assert len(second.asked) == 2


def test_a_server_that_is_just_restarted_is_waited_for(daemon: Daemon, process: DnsProcess) -> None:
    box = Box(1)
    daemon.policy(box, "*.example.org")
    names = [f"n{number}.example.org" for number in range(10)]
    zone = {(name, "A"): [f"{name}. 60 IN A 203.0.113.7"] for name in names}

    def asked_where_nobody_listens(name: str) -> list[str]:
        before = _refused_datagrams()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(box.ask, name, timeout_s=60)
            wait(lambda: _refused_datagrams() > before or answer.done(), process)
            with Server(zone=zone):
                return addresses(answer.result())

    # It waits for four seconds, for which we may stand still.
    assert any(asked_where_nobody_listens(name) == ["203.0.113.7"] for name in names)


def _refused_datagrams() -> int:
    """How many came to a port in our network where nobody listened, by the kernel's count (proc_pid_net(5))."""
    names, values = (line.split() for line in Path("/proc/thread-self/net/snmp").read_text().splitlines()
                     if line.startswith("Udp:"))  # fmt: skip
    return int(dict(zip(names, values, strict=True))["NoPorts"])


def test_a_long_answer_comes_truncated_and_whole_by_tcp(daemon: Daemon, process: DnsProcess) -> None:
    del process
    box = Box(1)
    daemon.policy(box, "many.example.org")
    lines = [f"many.example.org. 60 IN A 203.0.113.{n}" for n in range(1, 101)]
    with Server(zone={("many.example.org", "A"): lines}) as server:
        answer = box.ask("many.example.org", edns=None)
        assert answer.flags & dns.flags.TC
        assert len(addresses(box.ask("many.example.org", edns=None, tcp=True))) == frames.ADDRESSES_MAX
        assert [by for _name, _kind, by in server.asked] == ["udp", "tcp"]


def test_a_flood_of_one_sandbox_is_cut_and_does_not_keep_others_waiting(daemon: Daemon, process: DnsProcess) -> None:
    one, two = Box(1), Box(2)
    daemon.policy(one, "a.example.org")
    daemon.policy(two, "a.example.org")
    query = dns.message.make_query("x.exfil.example", "A").to_wire()
    with Server(zone={("a.example.org", "A"): ["a.example.org. 60 IN A 203.0.113.7"]}):
        begun = time.monotonic()
        with one.connect(socket.SOCK_DGRAM) as sock:
            for _ in range(3000):
                sock.send(query)
        began = time.monotonic()
        assert two.ask("a.example.org").rcode() == Rcode.NOERROR
        assert time.monotonic() - began < 20
        # The kernel drops some, too, where the process gets no time to read them.
        with one.connect(socket.SOCK_DGRAM) as sock:
            wait(lambda: sock.send(query) and sum(denied.dropped for denied in daemon.denied) > 300, process)
        # 200 at once, then 50 a second.
        assert sum(denied.names for denied in daemon.denied) < 300 + 50 * (time.monotonic() - begun)


def test_no_bytes_of_a_sandbox_end_the_process(daemon: Daemon, process: DnsProcess) -> None:
    box = Box(1)
    daemon.policy(box, "a.example.org")
    rng = random.Random(1)
    whole = dns.message.make_query("a.example.org", "A", use_edns=0).to_wire()
    with Server(zone={("a.example.org", "A"): ["a.example.org. 60 IN A 203.0.113.7"]}):
        with box.connect(socket.SOCK_DGRAM) as sock:
            for number in range(600):
                data = bytearray(whole)
                for _ in range(rng.randrange(1, 6)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                sock.send(rng.randbytes(rng.randrange(600)) if number % 3 == 0 else bytes(data[: rng.randrange(1, 60)]))
                if number % 40 == 39:
                    time.sleep(0.8)  # within its rate, so that all of it is read
        for sent in (b"", b"\xff\xff" + bytes(65535), b"\x00\x05abc", b"\x00"):
            with box.connect(socket.SOCK_STREAM) as stream:
                stream.sendall(sent)
        time.sleep(2)
        assert box.ask("a.example.org").rcode() == Rcode.NOERROR
    assert process.process.poll() is None
    assert "Traceback" not in process.tail()


def test_thousands_of_policies_are_taken_in_seconds_and_queries_stay_fast(
    daemon: Daemon, process: DnsProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    box = Box(1)
    count = 3200
    source = (ip_address("10.77.0.1"),)
    for number in range(count):
        policy = frames.Policy(sandbox=f"sb{number}", device=100_000 + number, sources=source,
                               patterns=tuple(f"n{number}-{n}.example.org" for n in range(20)))  # fmt: skip
        daemon.link._known[policy.sandbox] = policy, daemon  # as if they had been there before dsec-dns came
    daemon.policy(box, "a.example.org")
    with Server(zone={("a.example.org", "A"): ["a.example.org. 3600 IN A 203.0.113.7"]}):
        process.kill()
        began = time.monotonic()
        process.start()
        wait(lambda: _answers(box), process)
        started_s = time.monotonic() - began
        times = []
        for _ in range(100):
            began = time.monotonic()
            assert box.ask("a.example.org").rcode() == Rcode.NOERROR
            times.append(time.monotonic() - began)
            time.sleep(0.01)
    times.sort()
    resident_kib = int(Path(f"/proc/{process.process.pid}/status").read_text().split("VmRSS:")[1].split()[0])
    with capsys.disabled():
        print(f"\n{count} policies of 20 names: first answer after {started_s:.2f} s, {resident_kib / 1024:.0f} MiB; "
              f"100 queries p50 {times[50] * 1e3:.2f} ms, p99 {times[99] * 1e3:.2f} ms")  # fmt: skip
    assert started_s < 30
    assert times[50] < 0.2


def _answers(box: Box) -> bool:
    try:
        return box.ask("a.example.org", timeout_s=1).rcode() == Rcode.NOERROR
    except OSError:
        return False
