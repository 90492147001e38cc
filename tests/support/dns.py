# SPDX-License-Identifier: Apache-2.0
"""What tests of dsec-dns need around it: a network of their own, sandboxes' ends, DNS servers that say what one wants.

Here: real namespaces, devices and sockets, and a real dsec-dns process. Not here: what tests ask of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TextIO, TypeVar

import dns.flags
import dns.message
import dns.rrset
from dns.rcode import Rcode
from dns.rdatatype import RdataType

_CLONE_NEWNET = 0x40000000
_CHECKOUT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def ip(*words: str) -> None:
    """ip(8)."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """This thread, and every process it starts, has a network of its own, with nothing but loopback."""
    old = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert _libc().unshare(_CLONE_NEWNET) == 0
    try:
        ip("link", "set", "lo", "up")
        yield
    finally:
        assert _libc().setns(old, _CLONE_NEWNET) == 0
        os.close(old)


class Namespace:
    """Another network namespace: the inside of a sandbox, held by nothing but this object."""

    def __init__(self) -> None:
        self.fd = self._in_thread(self._make)

    def _make(self) -> int:
        assert _libc().unshare(_CLONE_NEWNET) == 0
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    @staticmethod
    def _in_thread(work: Callable[[], T]) -> T:
        results: list[T | BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:  # noqa: BLE001 - handed to who waits
                results.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    def run(self, work: Callable[[], T]) -> T:
        """Do it inside; sockets made there stay there."""

        def entered() -> T:
            assert _libc().setns(self.fd, _CLONE_NEWNET) == 0
            return work()

        return self._in_thread(entered)

    def ip(self, *words: str) -> None:
        self.run(lambda: ip(*words))

    def close(self) -> None:
        os.close(self.fd)


class Box(Namespace):
    """The network of one sandbox: a veth whose host end is in the test's network, and routes to DNS by it."""

    def __init__(self, number: int, server: str = "10.255.0.1", server6: str = "fd00:d5ec::1") -> None:
        super().__init__()
        self.name = f"veth{number}"
        self.source, self.source6 = f"10.1.{number // 250}.{number % 250 + 1}", f"fd00:d5ec:1::{number + 1:x}"
        inside = f"/proc/{os.getpid()}/fd/{self.fd}"
        ip("link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", inside)
        ip("link", "set", self.name, "up")
        ip("-6", "addr", "add", "fe80::1/64", "dev", self.name, "nodad")
        self.ip("link", "set", "lo", "up")
        self.ip("link", "set", "eth0", "up")
        self.ip("addr", "add", f"{self.source}/32", "dev", "eth0")
        self.ip("addr", "add", f"{self.source6}/128", "dev", "eth0", "nodad")
        self.ip("route", "add", server, "dev", "eth0", "src", self.source)
        self.ip("route", "add", server6, "via", "fe80::1", "dev", "eth0", "src", self.source6)
        ip("route", "add", f"{self.source}/32", "dev", self.name)
        ip("route", "add", f"{self.source6}/128", "dev", self.name)
        self.device = socket.if_nametoindex(self.name)
        self.server = server
        self.server6 = server6

    def connect(
        self, kind: socket.SocketKind, *, family: int = socket.AF_INET, timeout_s: float = 20.0
    ) -> socket.socket:
        """A socket inside, connected to DNS."""

        def make() -> socket.socket:
            sock = socket.socket(family, kind)
            sock.settimeout(timeout_s)
            try:
                sock.connect((self.server if family == socket.AF_INET else self.server6, 53))
            except OSError:
                sock.close()
                raise
            return sock

        return self.run(make)

    def ask(
        self, name: str, kind: str = "A", *, tcp: bool = False, family: int = socket.AF_INET, edns: int | None = 0,
        timeout_s: float = 20.0,
    ) -> dns.message.Message:  # fmt: skip
        """The answer to a query, by UDP or TCP.  Raises TimeoutError when there is none."""
        query = dns.message.make_query(name, kind, use_edns=edns, payload=None if edns is None else 1232)
        wire = self.exchange(query.to_wire(), tcp=tcp, family=family, timeout_s=timeout_s)
        answer = dns.message.from_wire(wire)
        assert query.is_response(answer) or not answer.question, (query, answer)
        return answer

    def exchange(
        self, data: bytes, *, tcp: bool = False, family: int = socket.AF_INET, timeout_s: float = 20.0
    ) -> bytes:
        """The bytes that come back for bytes sent."""
        if not tcp:
            with self.connect(socket.SOCK_DGRAM, family=family, timeout_s=timeout_s) as sock:
                sock.send(data)
                return sock.recv(65535)
        with self.connect(socket.SOCK_STREAM, family=family, timeout_s=timeout_s) as sock:
            sock.sendall(len(data).to_bytes(2) + data)
            return receive_stream(sock)


def receive_stream(sock: socket.socket) -> bytes:
    """One message of DNS over TCP.  Raises EOFError at the end."""
    data = b""
    while len(data) < 2 or len(data) < 2 + int.from_bytes(data[:2]):
        part = sock.recv(65535)
        if not part:
            raise EOFError
        data += part
    return data[2:]


def addresses(answer: dns.message.Message) -> list[str]:
    """All addresses in an answer, sorted."""
    return sorted(
        record.address for rrset in answer.answer for record in rrset if rrset.rdtype in (RdataType.A, RdataType.AAAA)
    )


@dataclass
class Server:
    """A DNS server of the test's own, that answers from ``zone`` and notes what it was asked.

    ``zone``: from (name, type) to lines of an answer section; ``hook`` may change the bytes of an answer, or
    take them away.
    """

    address: str = "127.0.0.53"
    port: int = 53
    zone: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # name as it came, type, "udp" or "tcp"
    hook: Callable[[dns.message.Message, dns.message.Message, str], bytes | None] | None = None
    log: TextIO | None = None

    def __enter__(self) -> Self:
        """Listens in the network of the thread that calls."""
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._udp.bind((self.address, self.port))
        self._tcp.bind((self.address, self.port))
        self._tcp.listen(64)
        self._ends = os.pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self._ends[1])
        self._thread.join()
        os.close(self._ends[0])
        self._udp.close()
        self._tcp.close()

    def names(self) -> list[str]:
        """Names it was asked for, in small letters."""
        return [name.lower() for name, _kind, _by in self.asked]

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._udp, self._tcp, self._ends[0]], [], [])
            if self._ends[0] in ready:
                return
            if self._udp in ready:
                data, sender = self._udp.recvfrom(65535)
                if (answer := self._answer(data, "udp")) is not None:
                    self._udp.sendto(answer, sender)
            if self._tcp in ready:
                connection, _ = self._tcp.accept()
                with connection, contextlib.suppress(OSError, EOFError):
                    connection.settimeout(5)
                    if (answer := self._answer(receive_stream(connection), "tcp")) is not None:
                        connection.sendall(len(answer).to_bytes(2) + answer)

    def _answer(self, data: bytes, by: str) -> bytes | None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), RdataType.to_text(question.rdtype)
        self.asked.append((name, kind, by))
        if self.log is not None:
            print(name.lower(), file=self.log)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        lines = self.zone.get((name.lower(), kind))
        if lines is None:
            known = any(known == name.lower() for known, _kind in self.zone)
            answer.set_rcode(Rcode.NOERROR if known else Rcode.NXDOMAIN)
            lines = []
        for line in lines:
            owner, ttl, _class, type_, *rest = line.split(maxsplit=4)
            rrset = dns.rrset.from_text(owner, int(ttl), "IN", type_, " ".join(rest))
            known_set = answer.get_rrset(answer.answer, rrset.name, rrset.rdclass, rrset.rdtype)
            if known_set is None:
                answer.answer.append(rrset)
                answer.index = {}
            else:
                for record in rrset:
                    known_set.add(record)
        if self.hook is not None:
            return self.hook(query, answer, by)
        return answer.to_wire(max_size=65535 if by == "tcp" else 1232, prefer_truncation=True)


class DnsProcess:
    """A real dsec-dns in the test's network."""

    def __init__(self, link: Path, *arguments: str, user: str | None = None) -> None:
        self._link = link
        self._arguments = arguments
        self._user = user
        self.log = link.with_suffix(".log")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        print(self.tail())  # pytest shows it with a failure
        if self.process.poll() is None:
            self.process.terminate()
            assert self.process.wait(60) == 0, self.tail()

    def start(self) -> None:
        command = [sys.executable, "-m", "dsecd.dns", "--link", str(self._link), *self._arguments]
        if self._user is not None:
            command = ["setpriv", f"--reuid={self._user}", "--clear-groups", "--inh-caps=+net_bind_service",
                       "--ambient-caps=+net_bind_service", "--", *command]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=_CHECKOUT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]
