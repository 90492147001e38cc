# SPDX-License-Identifier: Apache-2.0
"""The sockets that sandboxes talk to, by UDP and by TCP.

Here: which device a query came in by, and sending the answer back there. Not here: what the answer is
(``proxy``).

The kernel tells the device: for datagrams with each of them (ip(7) IP_PKTINFO, RFC 3542 IPV6_PKTINFO), for
connections as the device that the handshake came in by (IP_PKTOPTIONS, RFC 2292's IPV6_PKTOPTIONS). Answers to
datagrams name the device as well, so that a forged source address sends them to nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Iterable
from ipaddress import ip_address

from dsecd.dns import wire
from dsecd.dns.addresses import Address
from dsecd.dns.frames import Endpoint
from dsecd.dns.proxy import Proxy
from dsecd.dns.table import Sandbox

log = logging.getLogger(__name__)

# include/uapi/linux/in.h, in6.h; those of the socket module where it has them
_IP_PKTINFO = 8
_IP_PKTOPTIONS = 9
_IP_FREEBIND = 15
_IPV6_2292PKTOPTIONS = 6
_IPV6_FREEBIND = 78
# struct in_pktinfo: index, address of ours, destination. struct in6_pktinfo: address, index.
_PKTINFO = struct.Struct("@i4s4s")
_PKTINFO6 = struct.Struct("@16si")
# struct cmsghdr
_CMSG = struct.Struct("@Nii")

#: Datagrams that are taken before anything else gets its turn.
_AT_ONCE = 64
_RECEIVE_BYTES = 4 << 20  # as much of it as net.core.rmem_max allows
_BACKLOG = 1024
#: Connections of one sandbox at a time, and how long one may say nothing (RFC 7766).
CONNECTIONS_MAX = 16
_IDLE_S = 10.0


class Listeners:
    """The open sockets, and the tasks that answer."""

    def __init__(self, proxy: Proxy, group: asyncio.TaskGroup) -> None:
        self._proxy = proxy
        self._group = group
        self._endpoints: tuple[Endpoint, ...] = ()
        self._sockets: list[socket.socket] = []

    def listen(self, endpoints: Iterable[Endpoint]) -> None:
        """Listen there from now on, and nowhere else.  Raises OSError, and then listens nowhere."""
        wanted = tuple(endpoints)
        if wanted == self._endpoints:
            return
        self.close()
        loop = asyncio.get_running_loop()
        try:
            for endpoint in wanted:
                datagrams = self._bound(endpoint, socket.SOCK_DGRAM)
                loop.add_reader(datagrams, self._received, datagrams)
                stream = self._bound(endpoint, socket.SOCK_STREAM)
                stream.listen(_BACKLOG)
                loop.add_reader(stream, self._accepted, stream)
        except OSError:
            self.close()
            raise
        self._endpoints = wanted
        log.info("listening on %s", ", ".join(map(str, wanted)) or "nothing")

    def close(self) -> None:
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        self._sockets, self._endpoints = [], ()

    def _bound(self, endpoint: Endpoint, kind: socket.SocketKind) -> socket.socket:
        ipv4 = endpoint.address.version == 4
        sock = socket.socket(socket.AF_INET if ipv4 else socket.AF_INET6, kind | socket.SOCK_NONBLOCK)
        self._sockets.append(sock)
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        if ipv4:
            sock.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        try:
            sock.bind((str(endpoint.address), endpoint.port))
        except OSError as error:
            raise OSError(error.errno, f"listen on {endpoint}: {error.strerror}") from error
        return sock

    # --- datagrams

    def _received(self, sock: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                # One byte more than a query may have, to see that it has.
                data, ancillary, _flags, sender = sock.recvmsg(wire.QUERY_MAX + 1, socket.CMSG_SPACE(_PKTINFO6.size))
            except BlockingIOError:
                return
            except OSError as error:  # an ICMP error that an earlier answer met
                log.debug("receive: %s", error)
                continue
            device = _device(ancillary)
            sandbox = self._proxy.sender(device, _address(sender[0]))
            if sandbox is not None:
                self._group.create_task(self._reply(sock, sandbox, data, sender))
            elif not self._proxy.known(device) and (refusal := wire.refusal(data)) is not None:
                _send(sock, refusal, device, sender)

    async def _reply(self, sock: socket.socket, sandbox: Sandbox, data: bytes, sender: tuple[object, ...]) -> None:
        answer = await self._proxy.answer(sandbox, data, udp=True)
        if answer is not None:
            _send(sock, answer, sandbox.device, sender)

    # --- connections

    def _accepted(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, sender = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the client is gone already, or there are too many: accept(2)
                log.warning("accept: %s", error)
                return
            sock.setblocking(False)
            sandbox = self._proxy.sender(_device_of(sock), _address(sender[0]))
            if sandbox is None or sandbox.usage.connections >= CONNECTIONS_MAX:
                sock.close()
                continue
            sandbox.usage.connections += 1
            self._group.create_task(self._converse(sock, sandbox))

    async def _converse(self, sock: socket.socket, sandbox: Sandbox) -> None:
        """Answer one query after the other until the client has none for a while."""
        usage = sandbox.usage
        try:
            loop = asyncio.get_running_loop()
            while True:
                async with asyncio.timeout(_IDLE_S):
                    size = int.from_bytes(await _exactly(sock, 2))
                    if size > wire.QUERY_MAX:
                        return
                    data = await _exactly(sock, size)
                # Its policy may have changed since it connected, or be gone.
                current = self._proxy.sender(sandbox.device, _address(sock.getpeername()[0]))
                if current is None or current.id != sandbox.id:
                    return
                answer = await self._proxy.answer(current, data, udp=False)
                if answer is None:
                    return
                async with asyncio.timeout(_IDLE_S):
                    await loop.sock_sendall(sock, len(answer).to_bytes(2) + answer)
        except (OSError, TimeoutError, EOFError):
            return
        finally:
            usage.connections -= 1
            sock.close()


async def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await asyncio.get_running_loop().sock_recv(sock, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _address(text: str) -> Address:
    return ip_address(text.partition("%")[0])


def _device(ancillary: list[tuple[int, int, bytes]]) -> int:
    """The index of the device that a datagram came in by; 0 for none."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO):
            return int(_PKTINFO.unpack(data)[0])
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO):
            return int(_PKTINFO6.unpack(data)[1])
    return 0


def _device_of(connection: socket.socket) -> int:
    """The index of the device that a connection came in by; 0 for none."""
    if connection.family == socket.AF_INET:
        level, option = socket.IPPROTO_IP, _IP_PKTOPTIONS
    else:
        level, option = socket.IPPROTO_IPV6, _IPV6_2292PKTOPTIONS
    data = connection.getsockopt(level, option, socket.CMSG_SPACE(_PKTINFO6.size))
    if len(data) < _CMSG.size:
        return 0
    length, found_level, found_kind = _CMSG.unpack_from(data)
    return _device([(found_level, found_kind, data[socket.CMSG_LEN(0) : length])])


def _send(sock: socket.socket, data: bytes, device: int, to: tuple[object, ...]) -> None:
    """Through that device, or not at all; an answer that cannot be sent is asked for again."""
    if sock.family == socket.AF_INET:
        # Without an address in it, the kernel would choose another than the one that was asked: ip(7).
        own = socket.inet_aton(sock.getsockname()[0])
        through = (socket.IPPROTO_IP, _IP_PKTINFO, _PKTINFO.pack(device, own, bytes(4)))
    else:
        through = (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, _PKTINFO6.pack(bytes(16), device))
    try:
        sock.sendmsg([data], [through], 0, to)
    except OSError as error:
        log.debug("answer through device %d: %s", device, error)
