# SPDX-License-Identifier: Apache-2.0
"""What the database, the event log and those who wait are told of a sandbox.

What belongs here: writing its record, and saying that it has changed. What does not: what changes
(``lifecycle.py``), the row itself (``records.py``).

A record that cannot be written, on a full disk say, does not change what is true of the sandbox. So the memory says
the truth, the caller hears of the failure, and the record is written with the next call that relies on it.
"""

from __future__ import annotations

import functools
import logging
import sqlite3
from dataclasses import replace

from dsecd.core import records
from dsecd.core.events import Events
from dsecd.core.images import records as image_records
from dsecd.core.live import Live
from dsecd.core.store import Store
from libdsec.types import State

log = logging.getLogger(__name__)

#: Steps on the way are for whoever looks closely, and ends that nobody asked for are warnings.
_LEVELS = {
    "sandbox.created": logging.DEBUG, "sandbox.deleting": logging.DEBUG, "network.refused": logging.DEBUG,
    "sandbox.failed": logging.WARNING, "sandbox.stuck": logging.WARNING, "sandbox.oom": logging.WARNING,
    "sandbox.unpublished": logging.DEBUG,  # the log tells it with its reason
}  # fmt: skip


class Ledger:
    """Every method but ``tell`` raises NoCapacity on a full disk, and Refused when the kernel says no."""

    def __init__(self, store: Store, events: Events) -> None:
        self._store = store
        self._events = events

    async def insert(self, live: Live) -> None:
        """Enter a new sandbox, with its hold on its images."""
        remember = functools.partial(_remember, records.frozen(live.record), live.id, live.record.layers)
        await self._store.write(remember, durable=True)

    async def forget(self, live: Live) -> None:
        """Nothing of it is left: drop its row, and its hold on its images."""
        await self._store.write(functools.partial(_forget, live.id), durable=True)

    async def intend(self, live: Live, intent: str) -> None:
        """Record what is about to be done, for the daemon that may have to finish it."""
        live.record.intent = intent
        try:
            await self.save(live, durable=False)
        except BaseException:
            # Nothing was begun. A later save must not tell the next daemon otherwise.
            live.record.intent = ""
            raise

    async def holds(self, live: Live, *states: State) -> bool:
        """Whether it is in one of the states already, and recorded so."""
        if live.record.state not in states:
            return False
        if live.unsaved:
            await self.save(live, durable=False)
        return True

    async def to(self, live: Live, state: State, event: str) -> None:
        """Say that it is in ``state`` now, which it is also when that cannot be recorded."""
        live.record.state = state
        try:
            await self.save(live, durable=False)
        finally:
            self.tell(event, live)
            live.changed()

    async def save(self, live: Live, *, durable: bool) -> None:
        """Bring its row up to date."""
        # Whatever was under way when its deletion was asked for, the next daemon is to go on with the deletion.
        record = live.record if live.deletion is None else replace(live.record, intent="delete")
        row = records.frozen(record)
        live.unsaved = True
        await self._store.write(functools.partial(records.save, row=row), durable=durable)
        live.unsaved = False

    def tell(self, kind: str, live: Live, **more: object) -> None:
        """Emit an event about it, and log those that change what a user has of it."""
        level = _LEVELS.get(kind, logging.INFO)
        log.log(level, "event=%s sandbox=%s reason=%s", kind, live.id, live.record.reason or "none")
        details = {"state": str(live.record.state)} | ({"reason": live.record.reason} if live.record.reason else {})
        self._events.emit(kind, live.id, owner_uid=live.record.owner_uid, **{**details, **more})


def _remember(row: tuple[object, ...], sandbox_id: str, layers: tuple[str, ...], db: sqlite3.Connection) -> None:
    """The row and its hold on the images, both or neither."""
    records.insert(db, row)
    for digest in layers:
        image_records.hold(db, digest, sandbox_id)


def _forget(sandbox_id: str, db: sqlite3.Connection) -> None:
    records.delete(db, sandbox_id)
    image_records.release_all(db, sandbox_id)
