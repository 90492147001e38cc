# SPDX-License-Identifier: Apache-2.0
"""What happened, in order: a bounded history in the state database and those who follow it.

Here: numbering, storing, waiting and following. Not here: which events there are (whoever makes something
happen says so).

An event is shown only once it is committed, so no one sees a number that a crash takes back. A follower is a
position in the history, not a queue: one that is slow costs nothing, delays nobody, and is told by an
``events.gap`` event what it missed when the history has moved past it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dsecd.core.principal import Principal
from dsecd.core.store import Store
from libdsec.types import Event, EventList

log = logging.getLogger(__name__)

HISTORY = 10_000
#: The newest events, kept in memory so that followers who keep up cause no reads.
RECENT = 1_024
#: Old events are removed once this many new ones have come.
TRIM_EVERY = 256
#: A power loss may take back this many numbers at most; the first start after a boot skips them.
BOOT_SKIP = HISTORY

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # random(4)


class Events:
    """The event log. Used on the event loop's thread only."""

    def __init__(self, store: Store, *, boot_id: str | None = None) -> None:
        """Blocks for one short transaction.  ``boot_id`` is for tests."""
        self._store = store
        self._recent: deque[tuple[Event, int | None]] = deque(maxlen=RECENT)
        self._waiters: set[asyncio.Future[None]] = set()
        self._closed = False
        boot = boot_id if boot_id is not None else _BOOT_ID.read_text().strip()
        newest, oldest, before = store.read(_bounds)
        self._given = newest + (BOOT_SKIP if before not in (None, boot) else 0)
        #: events up to here have left the history
        self._floor = (oldest - 1) if oldest is not None else self._given
        self._shown = self._recent_after = self._given
        self._boot: str | None = boot if before != boot else None

    @property
    def last(self) -> int:
        """The newest number that can be seen."""
        return self._shown

    def emit(self, kind: str, subject: str = "", /, *, owner_uid: int | None = None, **details: Any) -> None:
        """Record an event; never waits.  Only administrators and ``owner_uid`` see it; None: everybody.

        ``details`` must be JSON. Needs a running event loop.
        """
        self._given += 1
        event = Event(seq=self._given, at=datetime.now(UTC), kind=kind, subject=subject, details=details)
        row = (event.seq, event.at.isoformat(), kind, subject, owner_uid, json.dumps(details))
        trim = event.seq % TRIM_EVERY == 0
        boot, self._boot = self._boot, None

        def insert(db: sqlite3.Connection) -> int | None:
            db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", row)
            if boot is not None:
                db.execute("INSERT OR REPLACE INTO meta VALUES ('events.boot_id', ?)", (boot,))
            return _trim(db) if trim else None

        if self._store.closed:
            log.warning("event lost, the store is closed kind=%s subject=%s", kind, subject)
            return
        future = self._store.submit(insert)
        future.add_done_callback(lambda done: self._written(event, owner_uid, done))

    async def stored(self) -> None:
        """Wait until every event so far is in the history, where no kill can lose it."""
        await self._store.write(lambda _db: None)

    def _written(self, event: Event, owner_uid: int | None, done: asyncio.Future[int | None]) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            # Followers still learn of it; only the history lacks it.
            log.warning("event not stored seq=%d kind=%s: %s", event.seq, event.kind, error)
        elif (floor := done.result()) is not None:
            self._floor = max(self._floor, floor)
        if len(self._recent) == RECENT:
            self._recent_after = self._recent[0][0].seq
        self._recent.append((event, owner_uid))
        self._shown = event.seq
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def after(self, since: int, limit: int = 1000, principal: Principal | None = None) -> EventList:
        """The oldest events newer than ``since`` that ``principal`` sees, at most ``limit``.

        ``last`` of the answer is where to go on: events beyond it have not been looked at.
        """
        found, position = self.page(since, limit, principal)
        return EventList(events=tuple(found), last=position)

    async def wait(
        self, since: int, timeout_s: float, limit: int = 1000, principal: Principal | None = None
    ) -> EventList:
        """As ``after``, but block up to ``timeout_s`` seconds until there is one."""
        follower = Follower(self, since, principal)
        found = await follower.next(limit=limit, timeout_s=timeout_s)
        return EventList(events=tuple(found), last=follower.position)

    def follow(self, since: int | None = None, principal: Principal | None = None) -> Follower:
        """A position in the history: after ``since``, 0 for all there is, None for only what comes."""
        return Follower(self, self._shown if since is None else since, principal)

    def close(self) -> None:
        """Let every follower and waiter end."""
        self._closed = True
        self._wake()

    # --- for followers
    # -------------------------------------------------------------------------------------------

    def page(self, since: int, limit: int, principal: Principal | None) -> tuple[list[Event], int]:
        """Up to ``limit`` events after ``since``, and the position they lead to."""
        if since >= self._shown:
            # A number from the future (another state directory, perhaps) must not silence its holder for
            # ever.
            return [], self._shown
        found: list[Event] = []
        position = since
        if 0 < since < self._floor:
            found.append(_gap(since, self._floor))
            position = self._floor
        for event, owner_uid in self._rows(position, limit):
            if len(found) >= limit:
                return found, position
            position = event.seq
            if principal is None or principal.sees(owner_uid):
                found.append(event)
        return found, position

    def _rows(self, since: int, limit: int) -> Sequence[tuple[Event, int | None]]:
        if since >= self._recent_after:
            newer = []
            for pair in reversed(self._recent):
                if pair[0].seq <= since:
                    break
                newer.append(pair)
            return newer[::-1]
        shown = self._shown
        return self._store.read(lambda db: _select(db, since, shown, limit))

    async def changed(self, position: int, timeout_s: float | None) -> bool:
        """Wait until something newer than ``position`` can be seen; False at the time limit or when closed."""
        if self._shown > position:
            return True
        if self._closed:
            return False
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return self._shown > position

    @property
    def closed(self) -> bool:
        return self._closed


class Follower:
    """One reader's position; needs no closing."""

    def __init__(self, events: Events, since: int, principal: Principal | None) -> None:
        self._events = events
        self._principal = principal
        self.position = since

    async def next(self, *, limit: int = 256, timeout_s: float | None = None) -> list[Event]:
        """The next events, at least one; an empty list at the time limit or when the daemon is stopping."""
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while True:
            found, self.position = self._events.page(self.position, limit, self._principal)
            if found:
                return found
            if self.position < self._events.last:
                await asyncio.sleep(0)  # a page of other people's events: let others run, then look on
                continue
            left = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
            if not await self._events.changed(self.position, left):
                return []


def _gap(since: int, floor: int) -> Event:
    details = {"missed_at_most": floor - since, "after": since, "up_to": floor}
    return Event(seq=floor, at=datetime.now(UTC), kind="events.gap", details=details)


def _bounds(db: sqlite3.Connection) -> tuple[int, int | None, str | None]:
    newest, oldest = db.execute("SELECT max(seq), min(seq) FROM events").fetchone()
    row = db.execute("SELECT value FROM meta WHERE name = 'events.boot_id'").fetchone()
    return newest or 0, oldest, row[0] if row else None


def _trim(db: sqlite3.Connection) -> int | None:
    """Remove all but the newest HISTORY events; the newest number removed."""
    row = db.execute("SELECT seq FROM events ORDER BY seq DESC LIMIT 1 OFFSET ?", (HISTORY,)).fetchone()
    if row is None:
        return None
    db.execute("DELETE FROM events WHERE seq <= ?", row)
    return int(row[0])


def _select(db: sqlite3.Connection, since: int, up_to: int, limit: int) -> list[tuple[Event, int | None]]:
    rows = db.execute(
        "SELECT seq, at, kind, subject, details, owner_uid FROM events"
        " WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?",
        (since, up_to, limit),
    )
    return [
        (
            Event(
                seq=seq,
                at=datetime.fromisoformat(at),
                kind=kind,
                subject=subject,
                details=json.loads(details),
            ),
            owner,
        )
        for seq, at, kind, subject, details, owner in rows
    ]


#: What core's services are given: they tell, they do not listen.
Emit = Callable[..., None]
