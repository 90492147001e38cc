# SPDX-License-Identifier: Apache-2.0
"""Asking the servers that the host asks: one question, its answer or none, in bounded time.

Here: which servers, the order they are tried in, and that an answer is the answer to what was asked. Not here:
remembering answers, and questions asked twice at once (``lookup``).

Against forged answers each question has a socket of its own, connected (so that the kernel passes on what comes
from that server only) and with a port that the kernel draws, a random number, and letters of random case that
have to come back. A server that does not keep the case is asked again by TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
from dns.rdatatype import RdataType

from dsecd.dns.frames import Endpoint
from dsecd.dns.wire import UDP_MAX

log = logging.getLogger(__name__)

RESOLV_CONF = Path("/etc/resolv.conf")
#: resolv.conf(5) reads no more.
_SERVERS_MAX = 3
#: Each server is asked for so long, first once all around, then again; clients wait five seconds (resolv.conf(5)).
_TRIES_S = (1.0, 1.5)
#: Where nobody listens, for a moment or for good: how long until it is asked again.
_REFUSED_S = 0.25
#: For all of a question, TCP included.
TOTAL_S = 4.5


class NoAnswer(Exception):
    """No server gave one that could be used."""


class _MixedUp(Exception):
    """The server answered what was asked, with letters of another case."""


class Upstream:
    """The servers to ask, and the last one that answered."""

    def __init__(self, resolv_conf: Path = RESOLV_CONF) -> None:
        self._resolv_conf = resolv_conf
        self._read: tuple[int, int, int] | None = None
        self._found: tuple[Endpoint, ...] = ()
        self._first = 0
        #: Instead of those of resolv.conf(5), when there are any.
        self.configured: tuple[Endpoint, ...] = ()

    def servers(self) -> tuple[Endpoint, ...]:
        """Those to ask, the one that answered last time first."""
        servers = self.configured or self._of_the_host()
        first = self._first % len(servers) if servers else 0
        return servers[first:] + servers[:first]

    def _of_the_host(self) -> tuple[Endpoint, ...]:
        try:
            status = os.stat(self._resolv_conf)
            key = (status.st_mtime_ns, status.st_ino, status.st_size)
            if key != self._read:
                self._found = read_resolv_conf(self._resolv_conf.read_text(errors="replace"))
                self._read, self._first = key, 0
        except OSError as error:
            log.warning("servers of the host: %s: %s", self._resolv_conf, error.strerror)
        return self._found

    async def ask(self, name: dns.name.Name, kind: RdataType) -> dns.message.Message:
        """The answer of the first server that gives one.  Raises NoAnswer.

        One that refuses is asked on: the resolver of this host may just be restarted.
        """
        servers = self.servers()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOTAL_S):
                for limit_s in itertools.chain(_TRIES_S, itertools.repeat(_TRIES_S[-1])):
                    refused = False
                    for server in servers:
                        try:
                            answer = await _try(server, name, kind, limit_s)
                        except ConnectionRefusedError:
                            answer, refused = None, True
                        if answer is not None:
                            self._answered(server)
                            return answer
                    if refused:
                        await asyncio.sleep(_REFUSED_S)
                    elif limit_s == _TRIES_S[-1]:
                        break
        raise NoAnswer(f"no usable answer of {', '.join(map(str, servers)) or 'any server: none is known'}")

    def _answered(self, server: Endpoint) -> None:
        servers = self.configured or self._found
        if server in servers:
            self._first = servers.index(server)


def read_resolv_conf(text: str) -> tuple[Endpoint, ...]:
    """The servers in a resolv.conf(5)."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            with contextlib.suppress(ValueError):
                found.append(Endpoint(address=ip_address(words[1])))
    return tuple(found[:_SERVERS_MAX])


async def _try(server: Endpoint, name: dns.name.Name, kind: RdataType, limit_s: float) -> dns.message.Message | None:
    """One server once, by TCP where UDP does not do; None when it gives nothing to use in time.

    Raises ConnectionRefusedError where nobody listens.
    """
    query = dns.message.make_query(_mixed(name), kind, use_edns=0, payload=UDP_MAX)
    query.id = secrets.randbelow(1 << 16)
    try:
        async with asyncio.timeout(limit_s):
            try:
                answer = await _by_udp(server, query)
                if not answer.flags & dns.flags.TC:
                    return answer if _usable(answer) else None
            except _MixedUp:
                pass
            answer = await _by_tcp(server, query)
            return answer if _usable(answer) else None
    except ConnectionRefusedError:
        log.debug("server=%s name=%s: refused", server, name)
        raise
    except (OSError, TimeoutError, EOFError, dns.exception.DNSException, ValueError) as error:
        log.debug("server=%s name=%s: %s", server, name, repr(error))
        return None


def _usable(answer: dns.message.Message) -> bool:
    return answer.rcode() in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN)


def _mixed(name: dns.name.Name) -> dns.name.Name:
    """The name with letters of random case."""
    bits = secrets.randbits(256)
    labels = []
    for label in name.labels:
        letters = bytearray(label.lower())
        for at, letter in enumerate(letters):
            bits, upper = bits >> 1, bits & 1
            if upper and 97 <= letter <= 122:
                letters[at] = letter - 32
        labels.append(bytes(letters))
    return dns.name.Name(labels)


def _check(query: dns.message.Message, wire: bytes, *, case: bool) -> dns.message.Message | None:
    """The message, if it answers the query; None if it does not.  Raises _MixedUp."""
    try:
        answer = dns.message.from_wire(wire, ignore_trailing=False, raise_on_truncation=False)
    except Exception:  # noqa: BLE001 - whatever bytes from outside make a parser raise, they are no answer
        return None
    if not query.is_response(answer) or not answer.question:
        return None
    if case and answer.question[0].name.labels != query.question[0].name.labels:
        raise _MixedUp
    return answer


class _Datagrams(asyncio.DatagramProtocol):
    """Waits on a connected socket for the datagram that ``accept`` takes."""

    def __init__(self, accept: Callable[[bytes], dns.message.Message | None]) -> None:
        self._accept = accept
        self.answer: asyncio.Future[dns.message.Message] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: object) -> None:
        del addr  # the socket is connected
        if self.answer.done():
            return
        try:
            if (answer := self._accept(data)) is not None:
                self.answer.set_result(answer)
        except _MixedUp as error:
            self.answer.set_exception(error)

    def error_received(self, exc: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(exc)


async def _by_udp(server: Endpoint, query: dns.message.Message) -> dns.message.Message:
    transport, protocol = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Datagrams(lambda data: _check(query, data, case=True)), remote_addr=(str(server.address), server.port)
    )
    try:
        transport.sendto(query.to_wire())
        return await protocol.answer
    finally:
        transport.close()


async def _by_tcp(server: Endpoint, query: dns.message.Message) -> dns.message.Message:
    reader, writer = await asyncio.open_connection(str(server.address), server.port)
    try:
        writer.write(query.to_wire(prepend_length=True))
        size = int.from_bytes(await reader.readexactly(2))
        answer = _check(query, await reader.readexactly(size), case=False)
        if answer is None:
            raise ValueError("the answer belongs to another question")
        return answer
    finally:
        writer.close()


