# SPDX-License-Identifier: Apache-2.0
"""What a name leads to: from memory, or from an upstream, asked once however many want to know.

Here: following chains in an answer, how long it may be remembered, bounds on memory and on questions at a time.
Not here: sockets (``upstream``), and whether a sandbox may know (``proxy``).

Memory is shared by all sandboxes. One can so tell, by time, that another has lately resolved a name that both
may: docs/threat-model.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

import dns.exception
import dns.message
import dns.name
import dns.rcode
import dns.rdata
import dns.rrset
from dns.rcode import Rcode
from dns.rdatatype import RdataType

from dsecd.dns.addresses import Address
from dsecd.dns.frames import ADDRESSES_MAX
from dsecd.dns.upstream import NoAnswer, Upstream

log = logging.getLogger(__name__)

#: Answers are believed for so long at least, whatever their TTL says, and so long at most.
TTL_MIN_S = 5
TTL_MAX_S = 3600
#: That there is nothing is believed for so long at most; that nobody answered, so long.
NOTHING_MAX_S = 60
FAILURE_S = 1
#: Answers that are remembered.
REMEMBERED_MAX = 16_384
#: Questions to upstreams at a time, of all sandboxes.
QUESTIONS_MAX = 4096


@dataclass(frozen=True)
class Found:
    """What is known of a name: the chain of its CNAMEs, and the addresses at its end."""

    rcode: Rcode
    chain: tuple[dns.rrset.RRset, ...]
    owner: dns.name.Name
    addresses: Mapping[Address, dns.rdata.Rdata]
    until: float  # on the monotonic clock

    def ttl(self, now: float) -> int:
        """Seconds that a client may remember it."""
        return max(1, int(self.until - now))


class Lookup:
    """Remembered answers, and the questions under way."""

    def __init__(self, upstream: Upstream, group: asyncio.TaskGroup) -> None:
        self._upstream = upstream
        self._group = group
        self._known: OrderedDict[tuple[dns.name.Name, RdataType], Found] = OrderedDict()
        self._asking: dict[tuple[dns.name.Name, RdataType], asyncio.Task[Found]] = {}

    def remembered(self, name: dns.name.Name, kind: RdataType) -> Found | None:
        """A fresh answer, without asking anybody."""
        key = name, kind
        found = self._known.get(key)
        if found is None:
            return None
        if found.until <= time.monotonic():
            del self._known[key]
            return None
        self._known.move_to_end(key)
        return found

    async def find(self, name: dns.name.Name, kind: RdataType) -> Found:
        """What a name leads to; SERVFAIL when nobody says, or too much is being asked."""
        key = name, kind
        if (found := self.remembered(name, kind)) is not None:
            return found
        if (asking := self._asking.get(key)) is None:
            if len(self._asking) >= QUESTIONS_MAX:
                return _failure(name)
            asking = self._asking[key] = self._group.create_task(self._ask(name, kind))
        # Others may wait for the same answer: who gives up does not end it.
        return await asyncio.shield(asking)

    async def _ask(self, name: dns.name.Name, kind: RdataType) -> Found:
        try:
            found = read(await self._upstream.ask(name, kind), name, kind)
        except NoAnswer as error:
            log.info("name=%s: %s", name, error)
            found = _failure(name)
        except Exception:
            # A bug that one answer finds must not end the process for all.
            log.exception("name=%s", name)
            found = _failure(name)
        finally:
            del self._asking[name, kind]
        self._known[name, kind] = found
        if len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
        return found


def read(answer: dns.message.Message, name: dns.name.Name, kind: RdataType) -> Found:
    """What an answer says about the name that it was asked for: nothing else in it counts."""
    assert isinstance(answer, dns.message.QueryMessage)
    try:
        chaining = answer.resolve_chaining()
    except dns.exception.DNSException:  # a chain that is too long, or contradicts itself
        return _failure(name)
    now = time.monotonic()
    rcode = Rcode.NXDOMAIN if answer.rcode() == dns.rcode.NXDOMAIN else Rcode.NOERROR
    chain = tuple(dns.rrset.from_rdata_list(link.name, 0, list(link)[:1]) for link in chaining.cnames)
    addresses: dict[Address, dns.rdata.Rdata] = {}
    if chaining.answer is not None and kind in (RdataType.A, RdataType.AAAA):
        addresses = {ip_address(record.address): record for record in list(chaining.answer)[:ADDRESSES_MAX]}
    elif chaining.answer is not None and kind == RdataType.CNAME:
        chain = (dns.rrset.from_rdata_list(chaining.answer.name, 0, list(chaining.answer)[:1]),)
    longest = TTL_MAX_S if addresses or kind == RdataType.CNAME else NOTHING_MAX_S
    ttl = min(max(chaining.minimum_ttl, TTL_MIN_S), longest)
    return Found(rcode, chain, chaining.canonical_name, addresses, now + ttl)


def _failure(name: dns.name.Name) -> Found:
    return Found(Rcode.SERVFAIL, (), name, {}, time.monotonic() + FAILURE_S)
