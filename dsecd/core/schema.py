# SPDX-License-Identifier: Apache-2.0
"""The tables of the state database, as the list of steps that lead to them.

Here: SQL only. A step that has been released is never edited: append a new one. ``PRAGMA user_version``
counts the steps a database has taken. Not here: queries, which live beside the code that asks them.
"""

from dsecd.core import snapshot_records
from dsecd.core.images import records as images

_BASE = """
CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE events (
    seq INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    owner_uid INTEGER,
    details TEXT NOT NULL
);

CREATE TABLE operations (
    id TEXT PRIMARY KEY,
    owner_uid INTEGER NOT NULL,
    finished_at REAL,
    body TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    owner_uid INTEGER NOT NULL,
    spec TEXT NOT NULL,
    layers TEXT NOT NULL,
    range_index INTEGER NOT NULL UNIQUE,
    created_at REAL NOT NULL,
    state TEXT NOT NULL,
    intent TEXT NOT NULL,
    reason TEXT,
    idempotency_key TEXT,
    request_digest TEXT,
    started_at REAL,
    expires_at REAL,
    ttl_left_s REAL,
    pid INTEGER,
    pid_started INTEGER,
    boot_id TEXT NOT NULL,
    off TEXT NOT NULL,
    UNIQUE (owner_uid, idempotency_key)
) WITHOUT ROWID;
"""

#: Step i brings a database from version i to version i + 1.
MIGRATIONS: tuple[str, ...] = (
    _BASE + images.SCHEMA,
    "ALTER TABLE sandboxes ADD COLUMN profile TEXT NOT NULL DEFAULT '';",
    "ALTER TABLE sandboxes ADD COLUMN snapshot TEXT NOT NULL DEFAULT '';" + snapshot_records.SCHEMA,
)
