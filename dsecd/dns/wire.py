# SPDX-License-Identifier: Apache-2.0
"""DNS messages of sandboxes: what a query asks, and the bytes of answers.

Here: the only place where bytes of a sandbox are parsed, by dnspython, and everything about the form of
answers. Not here: what is answered (``proxy``).

What is no query is dropped; what is a query and cannot be read is FORMERR; what we do not do (other operations,
other classes, zone transfers) is said so. RFC 1035, 6891 (EDNS), 8914 (extended errors), 9619 (one question).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset
from dns.edns import EDECode
from dns.rcode import Rcode
from dns.rdatatype import RdataType

from dsecd.dns import names

#: No query with one question is longer, but one that carries something else.
QUERY_MAX = 512
#: What fits through any path without fragments (DNS flag day 2020); also what we say that we take.
UDP_MAX = 1232
_PLAIN_UDP_MAX = 512
_TRANSFERS = frozenset({RdataType.AXFR, RdataType.IXFR})
_HEADER = struct.Struct(">HHHHHH")


@dataclass(frozen=True)
class Query:
    """One question of a sandbox; ``name`` is None when no pattern can cover what was asked."""

    message: dns.message.Message
    qname: dns.name.Name
    name: str | None
    kind: RdataType


def parse(wire: bytes) -> Query | bytes | None:
    """The query; or the answer to one that is refused for its form; or None for what deserves none."""
    if len(wire) < _HEADER.size or len(wire) > QUERY_MAX:
        return None
    number, flags, *_counts = _HEADER.unpack_from(wire)
    if flags & dns.flags.QR:
        return None
    if dns.opcode.from_flags(flags) != dns.opcode.QUERY:
        return _bare(number, flags, Rcode.NOTIMP)
    try:
        message = dns.message.from_wire(wire)
    except Exception:  # noqa: BLE001 - whatever bytes of a sandbox make a parser raise is their fault
        return _bare(number, flags, Rcode.FORMERR)
    if len(message.question) != 1 or message.answer or message.authority:
        return _bare(number, flags, Rcode.FORMERR)
    question = message.question[0]
    query = Query(message, question.name, names.asked(question.name.labels[:-1]), question.rdtype)
    if message.edns > 0:
        return answer(query, Rcode.BADVERS)
    if question.rdclass != dns.rdataclass.IN or question.rdtype in _TRANSFERS:
        return answer(query, Rcode.REFUSED)
    return query


def answer(
    query: Query, rcode: Rcode, records: Iterable[dns.rrset.RRset] = (), *,
    why: tuple[EDECode, str] | None = None, udp: bool = True,
) -> bytes:  # fmt: skip
    """The bytes of an answer, truncated if it comes by UDP and is too long; ``why`` is told to who speaks EDNS."""
    message = dns.message.make_response(query.message, recursion_available=True, our_payload=UDP_MAX, pad=0)
    message.set_rcode(rcode)
    message.answer = list(records)
    if why is not None and query.message.edns >= 0:
        message.use_edns(0, message.ednsflags, UDP_MAX, options=[dns.edns.EDEOption(*why)])
    size = 0xFFFF
    if udp:
        size = min(max(query.message.payload, _PLAIN_UDP_MAX), UDP_MAX) if query.message.edns >= 0 else _PLAIN_UDP_MAX
    return message.to_wire(max_size=size, prefer_truncation=True)


def refusal(wire: bytes) -> bytes | None:
    """REFUSED, for what is not even read; None for what is no query."""
    if len(wire) < _HEADER.size:
        return None
    number, flags, *_counts = _HEADER.unpack_from(wire)
    return None if flags & dns.flags.QR else _bare(number, flags, Rcode.REFUSED)


def _bare(number: int, flags: int, rcode: Rcode) -> bytes:
    kept = flags & (0x7800 | dns.flags.RD)  # the operation
    return _HEADER.pack(number, dns.flags.QR | dns.flags.RA | kept | rcode, 0, 0, 0, 0)
