# SPDX-License-Identifier: Apache-2.0
"""Network devices, addresses, routes, neighbours and packet filters' programs through rtnetlink.

What belongs here: one function for each request, in the network namespace where the socket was opened.  What
does not: which devices there are for whom.  rtnetlink(7), netlink(7), include/uapi/linux/rtnetlink.h.

The few requests that are needed are packed here: the Python library for all of netlink takes 28 MiB of memory
and most of a second to import, more than everything else of the daemon together.
"""

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Literal, Self

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# include/uapi/linux/netlink.h
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_REPLACE, _EXCL, _CREATE = 0x100, 0x200, 0x400
_ERROR, _DONE = 2, 3
_NESTED = 0x8000
_EXT_ACK, _CAP_ACK, _STRICT = 11, 10, 12
_EXT_ACK_MESSAGE = 1
# include/uapi/linux/rtnetlink.h
_NEWLINK, _DELLINK, _GETLINK, _SETLINK = 16, 17, 18, 19
_NEWADDR, _DELADDR, _NEWROUTE, _GETROUTE, _NEWNEIGH = 20, 21, 24, 26, 28
_NEWQDISC, _NEWTFILTER, _NEWLINKPROP = 36, 44, 108
# include/uapi/linux/if_link.h
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 1, 3, 4, 18, 28
_IFLA_AF_SPEC, _IFLA_PROP_LIST, _IFLA_ALT_IFNAME = 26, 52, 53
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_INET6_ADDR_GEN_MODE, _ADDR_GEN_NONE = 8, 1
_IFF_UP = 1
# include/uapi/linux/if_addr.h
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS, _IFA_F_NODAD = 1, 2, 8, 0x2
# include/uapi/linux/rtnetlink.h
_RTA_DST, _RTA_OIF, _RTA_GATEWAY = 1, 4, 5
_RT_TABLE_MAIN, _RTPROT_STATIC, _RTN_UNICAST = 254, 4, 1
_SCOPE_UNIVERSE, _SCOPE_LINK, _SCOPE_HOST = 0, 253, 254
_RTNH_F_ONLINK = 4
# include/uapi/linux/neighbour.h
_NDA_DST, _NDA_LLADDR, _NUD_PERMANENT = 1, 2, 0x80
# include/uapi/linux/pkt_sched.h, pkt_cls.h
_TCA_KIND, _TCA_OPTIONS = 1, 2
_CLSACT = 0xFFFFFFF1
_CLSACT_PARENT = 0xFFFF0000
INGRESS, EGRESS = 0xFFFFFFF2, 0xFFFFFFF3
_BPF_FD, _BPF_NAME, _BPF_FLAGS, _BPF_DIRECT = 6, 7, 8, 1
_ETH_P_ALL = 0x0003
# include/uapi/asm-generic/socket.h
_SO_NETNS_COOKIE = 71

_SOL_NETLINK = 270
_BUFFER_BYTES = 1 << 16
_ACK_TLVS = 0x200
_ORDER: Literal["little", "big"] = sys.byteorder
#: What a device's first name may be; another one may have 127 bytes.
_NAME_BYTES = 15


@dataclass(frozen=True)
class Link:
    """One network device."""

    index: int
    name: str
    mtu: int
    up: bool
    other_names: tuple[str, ...]


class Netlink:
    """A socket to the network namespace that the thread which makes it is in; it stays with that namespace.

    Requests wait for the kernel's answer, and for other changes of devices that hold its lock: they block.
    All raise OSError with the kernel's own explanation, where there is one.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        for option in (_EXT_ACK, _CAP_ACK, _STRICT):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        self._socket.bind((0, 0))
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._socket.close()

    def namespace_cookie(self) -> int:
        """A number that no other network namespace has until the host restarts."""
        return int.from_bytes(self._socket.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8), _ORDER)

    # --- devices -----------------------------------------------------------------------------------------------------

    def add_veth(
        self, name: str, *, index: int, mac: bytes, peer: str, peer_ns_fd: int, peer_mac: bytes, mtu: int
    ) -> None:
        """A pair of devices, both down: one here, under an index of our choice, its peer in another namespace."""
        far = [
            _attr(_IFLA_IFNAME, peer.encode() + b"\0"), _attr(_IFLA_NET_NS_FD, _u32(peer_ns_fd)),
            _attr(_IFLA_ADDRESS, peer_mac), _attr(_IFLA_MTU, _u32(mtu)),
        ]  # fmt: skip
        data = _attr(_INFO_DATA | _NESTED, _attr(_VETH_PEER | _NESTED, _ifinfo() + b"".join(far)))
        self._change(
            _NEWLINK, _CREATE | _EXCL, _ifinfo(index), _attr(_IFLA_IFNAME, name.encode() + b"\0"),
            _attr(_IFLA_ADDRESS, mac), _attr(_IFLA_MTU, _u32(mtu)),
            _attr(_IFLA_LINKINFO | _NESTED, _attr(_INFO_KIND, b"veth") + data),
        )  # fmt: skip

    def change_link(self, index: int, *, mac: bytes, mtu: int) -> None:
        """Take a device down, and give it another hardware address and MTU."""
        self._change(
            _NEWLINK, 0, _ifinfo(index, 0, _IFF_UP), _attr(_IFLA_ADDRESS, mac), _attr(_IFLA_MTU, _u32(mtu))
        )

    def name_link(self, index: int, other_name: str) -> None:
        """Give a device one more name, of up to 127 bytes."""
        names = _attr(_IFLA_PROP_LIST | _NESTED, _attr(_IFLA_ALT_IFNAME, other_name.encode() + b"\0"))
        self._change(_NEWLINKPROP, _CREATE | _EXCL, _ifinfo(index), names)

    def set_up(self, index: int) -> None:
        """Bring a device up, without an IPv6 address made by the kernel."""
        mode = _attr(_INET6_ADDR_GEN_MODE, bytes((_ADDR_GEN_NONE,)))
        try:
            self._change(
                _SETLINK, 0, _ifinfo(index), _attr(_IFLA_AF_SPEC | _NESTED, _attr(socket.AF_INET6 | _NESTED, mode))
            )
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:  # a kernel without IPv6
                raise
        self._change(_NEWLINK, 0, _ifinfo(index, _IFF_UP, _IFF_UP))

    def delete_link(self, index: int) -> bool:
        """Remove a device, and its peer with it; False when there is none."""
        try:
            self._change(_DELLINK, 0, _ifinfo(index))
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return False
        return True

    def link(self, name: str) -> Link | None:
        """The device with this name, be it its first or another one."""
        kind = _IFLA_IFNAME if len(name) <= _NAME_BYTES else _IFLA_ALT_IFNAME
        try:
            found = list(self._ask(_GETLINK, 0, _ifinfo(), _attr(kind, name.encode() + b"\0")))
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return None
        return _link(found[0])

    def links(self) -> list[Link]:
        """All devices."""
        return [_link(body) for body in self._ask(_GETLINK, _DUMP, _ifinfo())]

    # --- addresses and routes ----------------------------------------------------------------------------------------

    def add_address(self, index: int, address: Address, *, by_itself: bool = True) -> None:
        """An address of its own network; usable at once, since nobody else could have it.

        Not ``by_itself``: the host never chooses it as the source of what it sends, unless somebody is bound to it.
        """
        scope = _SCOPE_UNIVERSE if by_itself else _SCOPE_HOST
        body = struct.pack("=BBBBI", _family(address), address.max_prefixlen, 0, scope, index)
        flags = _attr(_IFA_FLAGS, _u32(_IFA_F_NODAD)) if address.version == 6 else b""
        packed = address.packed
        self._change(
            _NEWADDR, _CREATE | _REPLACE, body, _attr(_IFA_LOCAL, packed), _attr(_IFA_ADDRESS, packed), flags
        )

    def delete_address(self, index: int, address: Address) -> bool:
        """Take it away; False when it is not there."""
        body = struct.pack("=BBBBI", _family(address), address.max_prefixlen, 0, _SCOPE_UNIVERSE, index)
        try:
            self._change(_DELADDR, 0, body, _attr(_IFA_LOCAL, address.packed), _attr(_IFA_ADDRESS, address.packed))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return False
        return True

    def add_neighbour(self, index: int, address: Address, mac: bytes) -> None:
        """What is at an address, for good: nobody is ever asked for it."""
        body = struct.pack("=BxHiHBB", _family(address), 0, index, _NUD_PERMANENT, 0, 0)
        self._change(
            _NEWNEIGH, _CREATE | _REPLACE, body, _attr(_NDA_DST, address.packed), _attr(_NDA_LLADDR, mac)
        )

    def add_route(self, target: Network, index: int, via: Address | None = None) -> None:
        """A route through a device; ``via`` is taken for a neighbour on it."""
        scope = _SCOPE_LINK if via is None and target.version == 4 else _SCOPE_UNIVERSE
        body = struct.pack(
            "=BBBBBBBBI", _family(target.network_address), target.prefixlen, 0, 0, _RT_TABLE_MAIN, _RTPROT_STATIC,
            scope, _RTN_UNICAST, 0 if via is None else _RTNH_F_ONLINK,
        )  # fmt: skip
        gateway = b"" if via is None else _attr(_RTA_GATEWAY, via.packed)
        self._change(
            _NEWROUTE, _CREATE | _REPLACE, body, _attr(_RTA_OIF, _u32(index)),
            _attr(_RTA_DST, target.network_address.packed), gateway,
        )  # fmt: skip

    def default_devices(self) -> set[int]:
        """Indexes of the devices that default routes lead through."""
        found = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            body = struct.pack("=BBBBBBBBI", family, 0, 0, 0, 0, 0, 0, 0, 0)
            for answer in self._ask(_GETROUTE, _DUMP, body):
                prefix_length, table = answer[1], answer[4]
                attributes = dict(_attributes(answer[12:]))
                if prefix_length == 0 and table == _RT_TABLE_MAIN and _RTA_OIF in attributes:
                    found.add(int.from_bytes(attributes[_RTA_OIF], _ORDER))
        return found

    # --- programs on devices -----------------------------------------------------------------------------------------

    def add_clsact(self, index: int) -> None:
        """Make the places where programs can be attached; tc-bpf(8)."""
        body = struct.pack("=BxxxiIII", 0, index, _CLSACT_PARENT, _CLSACT, 0)
        try:
            self._change(_NEWQDISC, _CREATE | _EXCL, body, _attr(_TCA_KIND, b"clsact\0"))
        except OSError as error:
            if error.errno != errno.EEXIST:
                raise

    def set_program(self, index: int, place: int, program: int, name: str) -> None:
        """Let a program judge what comes in from (INGRESS) or goes out to (EGRESS) a device; replaces one at once."""
        # tcm_info: priority 1 in the upper half, the protocol in network order in the lower one.
        body = struct.pack("=BxxxiIII", 0, index, 1, place, 1 << 16 | socket.htons(_ETH_P_ALL))
        options = (
            _attr(_BPF_FD, _u32(program)) + _attr(_BPF_NAME, name.encode() + b"\0")
            + _attr(_BPF_FLAGS, _u32(_BPF_DIRECT))
        )  # fmt: skip
        self._change(
            _NEWTFILTER, _CREATE | _REPLACE, body, _attr(_TCA_KIND, b"bpf\0"), _attr(_TCA_OPTIONS | _NESTED, options)
        )

    # --- messages ----------------------------------------------------------------------------------------------------

    def _change(self, kind: int, flags: int, body: bytes, *attributes: bytes) -> None:
        for _answer in self._ask(kind, flags | _ACK, body, *attributes):
            pass

    def _ask(self, kind: int, flags: int, body: bytes, *attributes: bytes) -> Iterator[bytes]:
        """Send a request; the bodies of the answers until the kernel says that there are no more."""
        self._sequence += 1
        self._socket.send(_packed(kind, flags, self._sequence, body, *attributes))
        ends_with_message = not flags & (_ACK | _DUMP)
        while True:
            for answer_kind, answer_flags, sequence, answer in _messages(self._socket.recv(_BUFFER_BYTES)):
                if sequence != self._sequence:
                    continue
                if answer_kind == _ERROR:
                    _raise_unless_done(answer, answer_flags)
                    return
                if answer_kind == _DONE:
                    return
                yield answer
                if ends_with_message:
                    return


class Script(Netlink):
    """Requests for the kernel of another machine, packed one behind the other: nothing is done here.

    Whoever sends them there puts the index of the one device that they are about where it stands: behind the header and
    the first four bytes of a request, in one for a route in its first attribute.
    """

    def __init__(self) -> None:
        self.packed = bytearray()

    def __exit__(self, *_exc: object) -> None:
        pass

    def delete_any_address(self, index: int, family: int) -> None:
        """Take the first address of a family away."""
        self._change(_DELADDR, 0, struct.pack("=BBBBI", family, 0, 0, 0, index))

    def _change(self, kind: int, flags: int, body: bytes, *attributes: bytes) -> None:
        self.packed += _packed(kind, flags | _ACK, 0, body, *attributes)


def _packed(kind: int, flags: int, sequence: int, body: bytes, *attributes: bytes) -> bytes:
    """struct nlmsghdr with what follows it; the parts are padded already."""
    content = body + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(content), kind, _REQUEST | flags, sequence, 0) + content


def _u32(value: int) -> bytes:
    return value.to_bytes(4, _ORDER)


def _ifinfo(index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    """struct ifinfomsg"""
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, change)


def _family(address: Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _attr(kind: int, value: bytes) -> bytes:
    """struct nlattr with its value, padded."""
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if size < 4:
            return
        yield kind & 0x3FFF, data[at + 4 : at + size]
        at += size + -size % 4


def _messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Kind, flags, sequence number and body of each message in a datagram."""
    at = 0
    while at + 16 <= len(data):
        size, kind, flags, sequence, _port = struct.unpack_from("=IHHII", data, at)
        if size < 16:
            return
        yield kind, flags, sequence, data[at + 16 : at + size]
        at += size + -size % 4


def _raise_unless_done(body: bytes, flags: int) -> None:
    """struct nlmsgerr: 0 for success; the kernel's words may follow the header of our request."""
    number = -int.from_bytes(body[:4], _ORDER, signed=True)
    if number == 0:
        return
    said = dict(_attributes(body[20:])).get(_EXT_ACK_MESSAGE, b"") if flags & _ACK_TLVS else b""
    words = f" ({said.rstrip(bytes(1)).decode('ascii', 'replace')})" if said else ""
    raise OSError(number, f"netlink: {os.strerror(number)}{words}")


def _link(body: bytes) -> Link:
    _unspecified, _kind, index, flags, _change = struct.unpack_from("=BxHiII", body)
    attributes = dict(_attributes(body[16:]))
    others = [value for kind, value in _attributes(attributes.get(_IFLA_PROP_LIST, b"")) if kind == _IFLA_ALT_IFNAME]
    return Link(
        index=index, name=_text(attributes.get(_IFLA_IFNAME, b"")), up=bool(flags & _IFF_UP),
        mtu=int.from_bytes(attributes.get(_IFLA_MTU, b""), _ORDER), other_names=tuple(map(_text, others)),
    )  # fmt: skip


def _text(value: bytes) -> str:
    return os.fsdecode(value.rstrip(b"\0"))
