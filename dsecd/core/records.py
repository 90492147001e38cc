# SPDX-License-Identifier: Apache-2.0
"""Records: what the database holds of a sandbox.

What belongs here: the row, its conversion to the wire type, and the few statements on its table
(``schema.py`` has the SQL that makes it). What does not: what is running (the kernel knows), what may
happen next (``lifecycle.py``).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from dsecd.linux.pidfd import Process
from libdsec.types import Sandbox, SandboxSpec, State


@dataclass
class Record:
    """One row. ``intent`` is the call that was under way: a daemon that finds it set finishes or undoes that call."""

    id: str
    owner_uid: int
    spec: SandboxSpec
    layers: tuple[str, ...]  # digests, top first
    range_index: int
    created_at: float
    state: State = State.CREATING
    intent: str = ""
    reason: str | None = None
    idempotency_key: str | None = None
    request_digest: str | None = None
    started_at: float | None = None
    expires_at: float | None = None
    ttl_left_s: float | None = None  # while paused
    process: Process | None = None
    boot_id: str = ""
    off: tuple[str, ...] = ()
    profile: str = ""
    snapshot: str = ""  # whose memory it runs from, until that run ends
    unpublished: str | None = None  # this daemon's own trouble: in no database

    def to_wire(self) -> Sandbox:
        return Sandbox.model_construct(
            id=self.id, state=self.state, reason=self.reason, spec=self.spec, layers=self.layers,
            owner_uid=self.owner_uid, created_at=datetime.fromtimestamp(self.created_at, UTC),
            started_at=_utc(self.started_at), expires_at=_utc(self.expires_at), off=self.off,
            apparmor_profile=self.profile or "unconfined", snapshot=self.snapshot or None,
            unpublished=self.unpublished,
        )  # fmt: skip


def _utc(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


_COLUMNS = (
    "id", "owner_uid", "spec", "layers", "range_index", "created_at", "state", "intent", "reason", "idempotency_key",
    "request_digest", "started_at", "expires_at", "ttl_left_s", "pid", "pid_started", "boot_id", "off",
    "profile", "snapshot",
)  # fmt: skip

_INSERT = f"INSERT INTO sandboxes ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_UPDATE = f"UPDATE sandboxes SET {', '.join(f'{name} = ?' for name in _COLUMNS[1:])} WHERE id = ?"


def frozen(record: Record) -> tuple[object, ...]:
    """The record as it is now, for ``insert`` and ``save`` in another thread."""
    process = record.process
    return (
        record.id, record.owner_uid, record.spec.model_dump_json(), json.dumps(record.layers), record.range_index,
        record.created_at, str(record.state), record.intent, record.reason, record.idempotency_key,
        record.request_digest, record.started_at, record.expires_at, record.ttl_left_s,
        process.pid if process else None, process.started if process else None, record.boot_id, json.dumps(record.off),
        record.profile, record.snapshot,
    )  # fmt: skip


def insert(db: sqlite3.Connection, row: tuple[object, ...]) -> None:
    """Enter the row that ``frozen`` made."""
    db.execute(_INSERT, row)


def save(db: sqlite3.Connection, row: tuple[object, ...]) -> None:
    """Bring the row with this id up to date. One that has been deleted stays so, however late this comes."""
    db.execute(_UPDATE, (*row[1:], row[0]))


def delete(db: sqlite3.Connection, sandbox_id: str) -> None:
    db.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,))


def load(db: sqlite3.Connection) -> list[Record]:
    """All records, oldest first."""
    query = f"SELECT {', '.join(_COLUMNS)} FROM sandboxes ORDER BY created_at, id"
    rows: Iterable[tuple[object, ...]] = db.execute(query)
    return [_record(dict(zip(_COLUMNS, row, strict=True))) for row in rows]


def _record(row: dict[str, object]) -> Record:
    def text(name: str) -> str:
        return str(row[name])

    def optional(name: str) -> float | None:
        return None if row[name] is None else float(text(name))

    process = None if row["pid"] is None else Process(int(text("pid")), int(text("pid_started")))
    return Record(
        id=text("id"), owner_uid=int(text("owner_uid")), spec=SandboxSpec.model_validate_json(text("spec")),
        layers=tuple(json.loads(text("layers"))), range_index=int(text("range_index")),
        created_at=float(text("created_at")), state=State(text("state")), intent=text("intent"),
        reason=None if row["reason"] is None else text("reason"),
        idempotency_key=None if row["idempotency_key"] is None else text("idempotency_key"),
        request_digest=None if row["request_digest"] is None else text("request_digest"),
        started_at=optional("started_at"), expires_at=optional("expires_at"), ttl_left_s=optional("ttl_left_s"),
        process=process, boot_id=text("boot_id"), off=tuple(json.loads(text("off"))),
        profile=text("profile"), snapshot=text("snapshot"),
    )  # fmt: skip
