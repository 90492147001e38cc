# SPDX-License-Identifier: Apache-2.0
"""What the database holds of snapshots.

What belongs here: their table and the few statements on it. What does not: their files (``dsecd.backends``), when
they are made and removed (``snapshots.py``).

A row is there before any file of its snapshot, and goes after the last of them. Only one in state ``ready`` is seen.
"""

from __future__ import annotations

import sqlite3

from dsecd.core.images import records as image_records
from libdsec.snapshots import Snapshot

SCHEMA = """
CREATE TABLE snapshots (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL CHECK (state IN ('making', 'ready', 'removing')),
    body TEXT NOT NULL
) WITHOUT ROWID;
"""


def holder(snapshot_id: str) -> str:
    """The name under which it holds images; no sandbox can have it."""
    return f"snapshot:{snapshot_id}"


def enter(db: sqlite3.Connection, snapshot: Snapshot) -> None:
    """A snapshot that is being made, with its hold on its images, both or neither."""
    db.execute("INSERT INTO snapshots VALUES (?, 'making', ?)", (snapshot.id, snapshot.model_dump_json()))
    for digest in snapshot.layers:
        image_records.hold(db, digest, holder(snapshot.id))


def publish(db: sqlite3.Connection, snapshot: Snapshot) -> None:
    db.execute("UPDATE snapshots SET state = 'ready', body = ? WHERE id = ?", (snapshot.model_dump_json(), snapshot.id))


def begin_removal(db: sqlite3.Connection, snapshot_id: str) -> None:
    db.execute("UPDATE snapshots SET state = 'removing' WHERE id = ?", (snapshot_id,))


def forget(db: sqlite3.Connection, snapshot_id: str) -> None:
    """No file of it is left; already is fine."""
    db.execute("DELETE FROM snapshots WHERE id = ?", (snapshot_id,))
    image_records.release_all(db, holder(snapshot_id))


def load(db: sqlite3.Connection) -> list[tuple[str, Snapshot]]:
    """All, with their states."""
    rows = db.execute("SELECT state, body FROM snapshots ORDER BY id").fetchall()
    return [(str(state), Snapshot.model_validate_json(body)) for state, body in rows]
