#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hostile code on a network: tries to get a packet past the host's end of its device.

Run in a sandbox, or by root outside in a sandbox's network namespace, who can do more there than root inside. Takes the
facts as JSON in argv, then names of attempts on standard input; for each it prints ``NAME OUTCOME``: "sent" or the
error's name. Whether anything got through is for others to see. What an attempt changes it changes back.
"""

import contextlib
import errno
import fcntl
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

FACTS: dict[str, str] = json.loads(sys.argv[1])
OWN4, OWN6 = FACTS["own4"], FACTS["own6"]
ALLOWED4, DENIED4, ALLOWED6, DENIED6 = FACTS["allowed4"], FACTS["denied4"], FACTS["allowed6"], FACTS["denied6"]
HOST4, OTHER4, OTHER6 = FACTS["host4"], FACTS["other4"], FACTS["other6"]
TCP, UDP, ICMP, ICMP6 = 6, 17, 1, 58
BODY = b"escaped" * 8
#: Where the policy allows TCP and UDP; every other port is denied.
OPEN, SHUT = 443, 80


def checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~int((total & 0xFFFF) + (total >> 16)) & 0xFFFF


def ip4(
    target: str, protocol: int, payload: bytes, *, source: str = OWN4, options: bytes = b"", fragment: int = 0,
    version: int = 4, words: int | None = None, length: int | None = None,
) -> bytes:  # fmt: skip
    count = 5 + len(options) // 4 if words is None else words
    total = 20 + len(options) + len(payload) if length is None else length
    head = struct.pack("!BBHHHBBH", version << 4 | count, 0, total, 7, fragment, 64, protocol, 0)
    addresses = socket.inet_aton(source) + socket.inet_aton(target)
    return head[:10] + struct.pack("!H", checksum(head + addresses + options)) + addresses + options + payload


def ip6(target: str, following: int, payload: bytes, *, source: str = OWN6, version: int = 6) -> bytes:
    addresses = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(socket.AF_INET6, target)
    return struct.pack("!IHBB", version << 28, len(payload), following, 64) + addresses + payload


def udp(port: int, body: bytes = BODY) -> bytes:
    return struct.pack("!HHHH", 4444, port, 8 + len(body), 0) + body


def tcp(port: int, flags: int = 2) -> bytes:
    return struct.pack("!HHIIBBHHH", 4444, port, 1, 0, 5 << 4, flags, 1024, 0, 0)


def echo(kind: int, body: bytes = BODY) -> bytes:
    head = struct.pack("!BBHHH", kind, 0, 0, 1, 1)
    return head[:2] + struct.pack("!H", checksum(head + body)) + head[4:] + body


def fragment6(following: int, offset: int, more: int, payload: bytes) -> bytes:
    return struct.pack("!BBHI", following, 0, offset | more, 99) + payload


def send4(packet: bytes) -> None:
    """By a raw socket, where the kernel takes it as it is, else by a packet socket."""
    if FACTS["frames"]:
        frame(0x0800, packet)
        return
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        sock.sendto(packet, (socket.inet_ntoa(packet[16:20]), 0))


def send6(packet: bytes) -> None:
    if FACTS["frames"]:
        frame(0x86DD, packet)
        return
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        sock.sendto(packet, (socket.inet_ntop(socket.AF_INET6, packet[24:40]), 0))


def macs() -> tuple[bytes, bytes]:
    """The host's end's address, as the kernel knows it for its neighbour, and our own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        own = fcntl.ioctl(sock, 0x8927, struct.pack("256s", b"eth0"))[18:24]
    return bytes.fromhex(FACTS["hostmac"].replace(":", "")), own


def frame(kind: int, payload: bytes, *, target: bytes | None = None, source: bytes | None = None) -> None:
    host, own = macs()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind(("eth0", 0))
        head = (host if target is None else target) + (own if source is None else source)
        sock.send((head + struct.pack("!H", kind) + payload).ljust(60, b"\0"))


def runt(size: int) -> None:
    """No more of a frame than its head, and a little."""
    host, own = macs()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind(("eth0", 0))
        sock.send((host + own + b"\x08\x00" + ip4(ALLOWED4, UDP, udp(OPEN)))[:size])


def connect(family: int, address: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(0.3)
        with contextlib.suppress(TimeoutError, ConnectionRefusedError):
            sock.connect((address, port))


def sendto(family: int, address: str, port: int, *, first: Callable[[socket.socket], object] | None = None) -> None:
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        if first is not None:
            first(sock)
        sock.sendto(BODY, (address, port))


def connected(family: int, address: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))
        sock.send(BODY)


def fast_open() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.sendto(BODY, 0x20000000, (DENIED4, OPEN))
            time.sleep(0.1)


def bound_to(source: str) -> Callable[[socket.socket], object]:
    def bind(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_IP, 19, 1)  # IP_TRANSPARENT
        sock.bind((source, 0))

    return bind


@contextlib.contextmanager
def changed(*commands: str) -> Iterator[None]:
    """Pairs of commands for ip(8): one to change something, one to change it back."""
    done: list[str] = []
    try:
        for change, back in zip(commands[::2], commands[1::2], strict=True):
            ran = subprocess.run(["ip", *change.split()], capture_output=True, text=True, check=False)
            if ran.returncode:
                # What the kernel was built without proves nothing.
                absent = "Unknown device type" in ran.stderr or "not supported" in ran.stderr
                raise OSError(errno.EOPNOTSUPP if absent else errno.EPERM, ran.stderr)
            done.append(back)
        yield
    except FileNotFoundError:
        raise OSError(errno.EPERM, "no ip program") from None
    finally:
        for back in reversed(done):
            subprocess.run(["ip", *back.split()], capture_output=True, check=False)


def from_another_address() -> None:
    with changed(f"addr add {OTHER4}/32 dev eth0", f"addr del {OTHER4}/32 dev eth0"):
        sendto(socket.AF_INET, ALLOWED4, OPEN, first=bound_to(OTHER4))


def with_another_mac() -> None:
    own = ":".join(f"{byte:02x}" for byte in macs()[1])
    # With the address the kernel forgets the neighbours: they are made again, too.
    gateways = ("169.254.1.1", "fe80::1")
    neighbours = [f"neigh replace {gateway} dev eth0 lladdr {FACTS['hostmac']}" for gateway in gateways]
    with changed(neighbours[0], neighbours[0], neighbours[1], neighbours[1],
                 "link set eth0 address 02:00:00:00:00:99", f"link set eth0 address {own}",
                 neighbours[0], neighbours[0]):  # fmt: skip
        sendto(socket.AF_INET, ALLOWED4, OPEN)


def through_a_device(*commands: str) -> Callable[[], None]:
    def attempt() -> None:
        with changed(*commands):
            sendto(socket.AF_INET, "192.0.2.77", OPEN)
            time.sleep(0.1)

    return attempt


def by_another_neighbour() -> None:
    command = "neigh replace 169.254.1.1 dev eth0 lladdr"
    with changed(f"{command} ff:ff:ff:ff:ff:ff", f"{command} {FACTS['hostmac']}"):
        sendto(socket.AF_INET, ALLOWED4, OPEN)


def sockets() -> dict[str, Callable[[], Any]]:
    """Ordinary sockets."""
    v4, v6 = socket.AF_INET, socket.AF_INET6
    return {
        "tcp to another address": lambda: connect(v4, DENIED4, OPEN),
        "tcp to another port": lambda: connect(v4, ALLOWED4, SHUT),
        "tcp over ipv6 to another address": lambda: connect(v6, DENIED6, OPEN),
        "tcp to a mapped address": lambda: connect(v6, f"::ffff:{DENIED4}", OPEN),
        "tcp to metadata": lambda: connect(v4, "169.254.169.254", 80),
        "tcp to metadata over ipv6": lambda: connect(v6, "fd00:ec2::254", 80),
        "tcp to a private address": lambda: connect(v4, "10.66.0.5", OPEN),
        "tcp to the host": lambda: connect(v4, HOST4, 22),
        "tcp to another sandbox": lambda: connect(v4, OTHER4, OPEN),
        "tcp to another sandbox over ipv6": lambda: connect(v6, OTHER6, OPEN),
        "dns over tcp": lambda: connect(v4, DENIED4, 53),
        "dns over tls": lambda: connect(v4, ALLOWED4, 853),
        "udp to another address": lambda: sendto(v4, DENIED4, OPEN),
        "udp to another port": lambda: sendto(v4, ALLOWED4, SHUT),
        "udp over ipv6": lambda: sendto(v6, DENIED6, OPEN),
        "udp to a mapped address": lambda: sendto(v6, f"::ffff:{DENIED4}", OPEN),
        "connected udp": lambda: connected(v4, DENIED4, OPEN),
        "tcp fast open": fast_open,
        "udp to all neighbours": lambda: sendto(
            v4, "255.255.255.255", OPEN, first=lambda sock: sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        ),
        "udp to a multicast group": lambda: sendto(v4, "224.0.0.251", 5353),
        "udp to a multicast group over ipv6": lambda: sendto(v6, "ff02::fb%eth0", 5353),
        "udp from an address that is not ours": lambda: sendto(v4, ALLOWED4, OPEN, first=bound_to(OTHER4)),
    }  # fmt: skip


def packets4() -> dict[str, Callable[[], Any]]:
    """IPv4 packets of our own making."""
    return {
        "raw udp": lambda: send4(ip4(DENIED4, UDP, udp(OPEN))),
        "raw syn": lambda: send4(ip4(ALLOWED4, TCP, tcp(SHUT))),
        "raw ack of no connection": lambda: send4(ip4(DENIED4, TCP, tcp(OPEN, 16))),
        "source of the host": lambda: send4(ip4(ALLOWED4, UDP, udp(OPEN), source=HOST4)),
        "source of another sandbox": lambda: send4(ip4(ALLOWED4, UDP, udp(OPEN), source=OTHER4)),
        "source of the target": lambda: send4(ip4(ALLOWED4, UDP, udp(OPEN), source=ALLOWED4)),
        "source of loopback": lambda: send4(ip4(ALLOWED4, UDP, udp(OPEN), source="127.0.0.1")),
        "loose source route": lambda: send4(
            ip4(ALLOWED4, UDP, udp(OPEN), options=b"\x83\x07\x04" + socket.inet_aton(DENIED4) + b"\0")
        ),
        "record route": lambda: send4(ip4(ALLOWED4, UDP, udp(OPEN), options=b"\x07\x07\x04" + bytes(5))),
        "gre": lambda: send4(ip4(ALLOWED4, 47, struct.pack("!HH", 0, 0x0800) + ip4(DENIED4, UDP, udp(OPEN)))),
        "ip in ip": lambda: send4(ip4(ALLOWED4, 4, ip4(DENIED4, UDP, udp(OPEN)))),
        "ipv6 in ip": lambda: send4(ip4(ALLOWED4, 41, ip6(DENIED6, UDP, udp(OPEN)))),
        "sctp": lambda: send4(ip4(ALLOWED4, 132, struct.pack("!HHII", 1, OPEN, 0, 0))),
        "esp": lambda: send4(ip4(ALLOWED4, 50, BODY)),
        "udp-lite": lambda: send4(ip4(ALLOWED4, 136, udp(OPEN))),
        "a protocol without a name": lambda: send4(ip4(ALLOWED4, 253, BODY)),
        "first fragment to another port": lambda: send4(ip4(ALLOWED4, UDP, udp(SHUT), fragment=0x2000)),
        "later fragment": lambda: send4(ip4(ALLOWED4, UDP, BODY, fragment=8)),
        "overlapping fragment": lambda: send4(ip4(ALLOWED4, TCP, tcp(SHUT), fragment=0x2001)),
        "fragment without ports": lambda: send4(ip4(ALLOWED4, UDP, b"\x11", fragment=0x2000)),
        "echo to another address": lambda: send4(ip4(DENIED4, ICMP, echo(8))),
        "echo reply": lambda: send4(ip4(ALLOWED4, ICMP, echo(0))),
        "timestamp request": lambda: send4(ip4(ALLOWED4, ICMP, echo(13))),
        "icmp redirect": lambda: send4(ip4(HOST4, ICMP, echo(5, ip4(ALLOWED4, UDP, udp(OPEN), source=HOST4)))),
        "icmp error with content": lambda: send4(
            ip4(ALLOWED4, ICMP, echo(3, ip4(OWN4, UDP, udp(OPEN), source=ALLOWED4)))
        ),
        "igmp": lambda: send4(ip4("224.0.0.22", 2, b"\x22" + bytes(15))),
        "header that is too short": lambda: send4(ip4(ALLOWED4, UDP, udp(OPEN), words=4)),
        "header that is too long": lambda: send4(ip4(ALLOWED4, UDP, b"", words=15)),
    }  # fmt: skip


def packets6() -> dict[str, Callable[[], Any]]:
    """IPv6 packets of our own making."""
    v6 = socket.AF_INET6
    return {
        "raw udp over ipv6": lambda: send6(ip6(DENIED6, UDP, udp(OPEN))),
        "ipv6 source of another sandbox": lambda: send6(ip6(ALLOWED6, UDP, udp(OPEN), source=OTHER6)),
        "link-local source": lambda: send6(ip6(ALLOWED6, UDP, udp(OPEN), source="fe80::9")),
        "unspecified source": lambda: send6(ip6(ALLOWED6, UDP, udp(OPEN), source="::")),
        "hop-by-hop options": lambda: send6(ip6(ALLOWED6, 0, bytes((UDP, 0, 1, 4, 0, 0, 0, 0)) + udp(OPEN))),
        "routing header": lambda: send6(ip6(
            ALLOWED6, 43, bytes((UDP, 2, 0, 1)) + bytes(4) + socket.inet_pton(v6, DENIED6) + udp(OPEN)
        )),
        "segment routing header": lambda: send6(ip6(
            ALLOWED6, 43, bytes((UDP, 2, 4, 1, 0, 0, 0, 0)) + socket.inet_pton(v6, DENIED6) + udp(OPEN)
        )),
        "destination options": lambda: send6(ip6(ALLOWED6, 60, bytes((UDP, 0, 1, 4, 0, 0, 0, 0)) + udp(OPEN))),
        "authentication header": lambda: send6(ip6(ALLOWED6, 51, bytes((UDP, 4)) + bytes(22) + udp(OPEN))),
        "ipv6 fragment to another port": lambda: send6(ip6(ALLOWED6, 44, fragment6(UDP, 0, 1, udp(SHUT)))),
        "ipv6 later fragment": lambda: send6(ip6(ALLOWED6, 44, fragment6(UDP, 8, 0, BODY))),
        "atomic fragment to another port": lambda: send6(ip6(ALLOWED6, 44, fragment6(UDP, 0, 0, udp(SHUT)))),
        "fragment in a fragment": lambda: send6(
            ip6(ALLOWED6, 44, fragment6(44, 0, 0, fragment6(UDP, 0, 0, udp(OPEN))))
        ),
        "options in a fragment": lambda: send6(
            ip6(ALLOWED6, 44, fragment6(60, 0, 0, bytes((UDP, 0, 1, 4, 0, 0, 0, 0)) + udp(OPEN)))
        ),
        "echo over ipv6": lambda: send6(ip6(DENIED6, ICMP6, echo(128))),
        "router advertisement": lambda: send6(ip6("ff02::1", ICMP6, echo(134), source="fe80::9")),
        "neighbour advertisement": lambda: send6(ip6("ff02::1", ICMP6, echo(136))),
        "ip in ipv6": lambda: send6(ip6(ALLOWED6, 4, ip4(DENIED4, UDP, udp(OPEN)))),
        "mapped target": lambda: send6(ip6(f"::ffff:{ALLOWED4}", UDP, udp(OPEN))),
    }  # fmt: skip


def frames() -> dict[str, Callable[[], Any]]:
    """What is no IP packet, or not in an ordinary frame."""
    return {
        "arp request": lambda: frame(0x0806, struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + bytes(20), target=b"\xff" * 6),
        "arp reply": lambda: frame(0x0806, struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2) + bytes(20)),
        "vlan tag": lambda: frame(0x8100, struct.pack("!HH", 5, 0x0800) + ip4(ALLOWED4, UDP, udp(OPEN))),
        "priority tag": lambda: frame(0x8100, struct.pack("!HH", 0, 0x0800) + ip4(ALLOWED4, UDP, udp(OPEN))),
        "two vlan tags": lambda: frame(
            0x88A8, struct.pack("!HHHH", 5, 0x8100, 6, 0x0800) + ip4(ALLOWED4, UDP, udp(OPEN))
        ),
        "hardware address of another": lambda: frame(
            0x0800, ip4(ALLOWED4, UDP, udp(OPEN)), source=b"\x06ds\0\x01\x02"
        ),
        "frame to all": lambda: frame(0x0800, ip4(ALLOWED4, UDP, udp(OPEN)), target=b"\xff" * 6),
        "datagram to the readers of group reports": lambda: frame(
            0x86DD, ip6("ff02::16", UDP, udp(OPEN)), target=bytes.fromhex("333300000016")
        ),
        "datagram with a group report's header": lambda: frame(
            0x86DD, ip6("ff02::16", 0, bytes((UDP, 0, 5, 2, 0, 0, 1, 0)) + udp(OPEN)),
            target=bytes.fromhex("333300000016"),
        ),
        "mpls": lambda: frame(0x8847, struct.pack("!I", 0x140) + ip4(ALLOWED4, UDP, udp(OPEN))),
        "pppoe": lambda: frame(0x8864, b"\x11\0\0\1\0\x60\0\x21" + ip4(ALLOWED4, UDP, udp(OPEN))),
        "lldp": lambda: frame(0x88CC, BODY, target=bytes.fromhex("0180c200000e")),
        "an experiment's ethertype": lambda: frame(0x88B5, BODY),
        "frame without content": lambda: runt(14),
        "frame that ends in its header": lambda: runt(30),
        "ipv4 that says it is ipv6": lambda: frame(0x86DD, ip4(ALLOWED4, UDP, udp(OPEN))),
        "ipv6 that says it is ipv4": lambda: frame(0x0800, ip6(ALLOWED6, UDP, udp(OPEN))),
        "ieee 802.3 frame": lambda: frame(46, b"\xaa\xaa\x03\0\0\0\x08\0" + ip4(ALLOWED4, UDP, udp(OPEN))),
    }  # fmt: skip


def settings() -> dict[str, Callable[[], Any]]:
    """Other addresses, neighbours and devices."""
    return {
        "another address": from_another_address,
        "another hardware address": with_another_mac,
        "another neighbour": by_another_neighbour,
        **{
            f"a device of type {kind.split()[0]}": through_a_device(
                f"link add name x0 {link} type {kind}", "link del x0", "link set x0 up", "link set x0 down",
                "route add 192.0.2.77 dev x0 src " + OWN4, "route del 192.0.2.77",
            )
            for kind, link in (
                ("vlan id 5", "link eth0"), ("macvlan mode bridge", "link eth0"), ("ipip remote " + ALLOWED4, ""),
                ("gre remote " + ALLOWED4, ""), ("sit remote " + ALLOWED4, ""),
                ("vxlan id 1 remote " + DENIED4 + " dstport 4789", ""),
            )
        },
    }  # fmt: skip


def main() -> None:
    known = {**sockets(), **packets4(), **packets6(), **frames(), **settings()}
    print(json.dumps(list(known)), flush=True)
    for line in sys.stdin:
        name = line.strip()
        try:
            known[name]()
            outcome = "sent"
        except OSError as error:
            outcome = errno.errorcode.get(error.errno or 0, str(error))
        print(f"{name}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
