# SPDX-License-Identifier: Apache-2.0
"""What one query of a sandbox is answered, and what has to be true before it is.

Here: the order of the decisions. Not here: bytes (``wire``), sockets (``listeners``), other servers
(``lookup``), the daemon (``link``).

| asked for | answer |
|---|---|
| by a device no policy is known of | REFUSED |
| from a source address that is not the sandbox's, or above its rate | none |
| a name outside the policy | NXDOMAIN, without asking anybody |
| a name that a rule covers, A or AAAA | its addresses, once the daemon has opened them |
| any other, of a sandbox that may reach any public address | its addresses; nothing is opened |
| … that lead to special addresses which no rule for addresses names | without those; empty if there are no others |
| … and the daemon does not open them in time | SERVFAIL |
| CNAME | what it is another name of |
| any other type | empty: only addresses are of use, and HTTPS or SRV could lead around them |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import dns.rrset
from dns.edns import EDECode
from dns.rcode import Rcode
from dns.rdatatype import RdataType

from dsecd.dns import wire
from dsecd.dns.addresses import Address, gaps, is_named
from dsecd.dns.frames import GRACE_S, Open
from dsecd.dns.link import Link
from dsecd.dns.lookup import Found, Lookup
from dsecd.dns.table import WAITING_MAX, Sandbox, Table

log = logging.getLogger(__name__)

_KINDS = frozenset({RdataType.A, RdataType.AAAA, RdataType.CNAME})
_NOT_NAMED = (EDECode.BLOCKED, "the sandbox's policy does not name it")
_SPECIAL = (EDECode.FILTERED, "it leads to an address that the sandbox's policy does not name")
_NOT_OPENED = (EDECode.NOT_READY, "its addresses could not be opened")


class Proxy:
    """Answers queries by what the table knows."""

    def __init__(self, table: Table, lookup: Lookup, link: Link) -> None:
        self._table = table
        self._lookup = lookup
        self._link = link
        #: How long addresses are open after the answer that told them has gone stale.
        self.grace_s = GRACE_S

    def sender(self, device: int, source: Address) -> Sandbox | None:
        """The sandbox that speaks: the one of the device, if the address is its own as well."""
        sandbox = self._table.at(device)
        if sandbox is not None and source not in sandbox.sources:
            sandbox.usage.dropped += 1
            return None
        return sandbox

    def known(self, device: int) -> bool:
        return self._table.at(device) is not None

    async def answer(self, sandbox: Sandbox, data: bytes, *, udp: bool) -> bytes | None:
        """The answer to the bytes of a query; None for none."""
        usage = sandbox.usage
        if usage.waiting >= WAITING_MAX or not usage.may_ask(time.monotonic()):
            usage.dropped += 1
            return None
        usage.waiting += 1
        try:
            query = wire.parse(data)
            if not isinstance(query, wire.Query):
                usage.dropped += 1
                return query
            return await self._judge(sandbox, query, udp=udp)
        except Exception:
            # The last line of defence: whatever one query finds ends that query alone.
            log.exception("sandbox=%s query of %d bytes", sandbox.id, len(data))
            return None
        finally:
            usage.waiting -= 1

    async def _judge(self, sandbox: Sandbox, query: wire.Query, *, udp: bool) -> bytes:
        covered = query.name is not None and sandbox.names.covers(query.name)
        if query.name is None or not (covered or sandbox.any_name):
            sandbox.usage.names += 1
            sandbox.usage.recent.append(query.name or query.qname.to_text()[:255])
            return wire.answer(query, Rcode.NXDOMAIN, why=_NOT_NAMED, udp=udp)
        if query.kind not in _KINDS:
            return wire.answer(query, Rcode.NOERROR, udp=udp)
        # Names in memory and in answers have small letters, however they were asked for.
        found = await self._lookup.find(query.qname.canonicalize(), query.kind)
        public = tuple(address for address in found.addresses if not gaps(address))
        told = {address for address in found.addresses if gaps(address) and is_named(address, sandbox.named)}
        if len(public) + len(told) < len(found.addresses):
            sandbox.usage.addresses += 1
            sandbox.usage.recent.append(query.name)
            if not public and not told:
                return wire.answer(query, Rcode.NOERROR, why=_SPECIAL, udp=udp)
        told.update(await self._opened(sandbox, query.name, public, found) if covered else public)
        if found.addresses and not told:
            return wire.answer(query, Rcode.SERVFAIL, why=_NOT_OPENED, udp=udp)
        return wire.answer(query, found.rcode, _records(found, told, time.monotonic()), udp=udp)

    async def _opened(
        self, sandbox: Sandbox, name: str, addresses: tuple[Address, ...], found: Found
    ) -> tuple[Address, ...]:
        """Those of the addresses that are open for as long as they will be remembered."""
        now = time.monotonic()
        closed = sandbox.not_open(addresses, found.until)
        if not closed:
            return addresses
        seconds = found.ttl(now) + self.grace_s
        request = Open(number=0, sandbox=sandbox.id, name=name, addresses=closed, seconds=seconds)
        opened = await self._link.open(request)
        # Counted from before the daemon did it, so that we never believe it open longer than it is.
        sandbox.opened(opened, now + seconds, now)
        return tuple(address for address in addresses if address in opened or address not in closed)


def _records(found: Found, told: set[Address], now: float) -> Iterator[dns.rrset.RRset]:
    ttl = found.ttl(now)
    for link in found.chain:
        yield dns.rrset.from_rdata_list(link.name, ttl, list(link))
    if records := [record for address, record in found.addresses.items() if address in told]:
        yield dns.rrset.from_rdata_list(found.owner, ttl, records)
