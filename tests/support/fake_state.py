# SPDX-License-Identifier: Apache-2.0
"""What the daemon in memory (``fake_daemon.py``) knows.

Here: its sandboxes, images and snapshots, and the faults it is to make. Not here: routes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from libdsec import snapshots as snap
from libdsec import types as t
from libdsec.errors import AlreadyExists, Conflict, DsecError, NotFound
from tests.support.fake_commands import Exec, run

NOW = datetime(2026, 3, 1, 10, 12, tzinfo=UTC)
EXTENTS = "application/x-dsec-extents"
IMAGE = t.ImageInfo(
    digest="sha256:" + "ab" * 32,
    names=("debian:trixie",),
    source="mmdebstrap trixie",
    created_at=NOW,
    entries=9000,
    size_bytes=180 << 20,
    metadata_bytes=2 << 20,
)


@dataclass
class Box:
    """One sandbox."""

    info: t.Sandbox
    execs: dict[str, Exec] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    parts: dict[str, bytearray] = field(default_factory=dict)


class State:
    """What the daemon knows and the faults it is to make."""

    def __init__(self) -> None:
        self.boxes: dict[str, Box] = {}
        self.keys: dict[str, tuple[t.CreateRequest, str]] = {}
        self.imports: list[t.ImportRequest] = []
        self.faults: defaultdict[str, list[str | DsecError | None]] = defaultdict(list)
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.started = 0
        #: After how many bytes of output each of the next exec connections breaks.
        self.stream_cuts: list[int] = []
        #: After how many bytes each of the next uploads or downloads breaks.
        self.body_cuts: list[int] = []
        self.acknowledge_stdin = False
        self.images: list[t.ImageInfo] = [IMAGE]
        self.events: list[t.Event] = []
        self.snapshots: dict[str, snap.Snapshot] = {}
        self.connections = 0

    @staticmethod
    def _break(request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    def _box(self, request: web.Request) -> Box:
        id = request.match_info["id"]
        if id not in self.boxes:
            raise NotFound(f"look up '{id}': no such sandbox")
        return self.boxes[id]

    def _operation(self, id: str, state: t.OperationState, result: Any = None) -> t.Operation:
        return t.Operation(
            id=id, kind="image-import", state=state, owner_uid=0, created_at=NOW, result=result,
            progress={"phase": "reading", "bytes_done": 50, "bytes_total": 100, "entries": 3},
        )  # fmt: skip

    def make(self, wanted: t.CreateRequest) -> t.Sandbox:
        if wanted.idempotency_key in self.keys:
            first, id = self.keys[wanted.idempotency_key]
            if first != wanted:
                raise Conflict(f"create with key '{wanted.idempotency_key}': the key was used with another request")
            return self.boxes[id].info
        if wanted.spec.image == "nothing":
            raise NotFound("create: no image 'nothing'")
        id = wanted.id or f"fake{len(self.boxes)}"
        if id in self.boxes:
            raise AlreadyExists(f"create '{id}': sandbox exists since 2026-03-01 10:12", hint=f"'dsecctl rm {id}'")
        info = t.Sandbox(
            id=id, state=t.State.RUNNING, spec=wanted.spec, owner_uid=0, created_at=NOW, started_at=NOW
        )
        self.boxes[id] = Box(info)
        self.boxes[id].files["/"] = {"type": "directory", "mode": 0o755}
        if wanted.spec.command is not None:
            main = t.ExecRequest(argv=wanted.spec.command, exec_id="main")
            self.boxes[id].execs["main"] = run(main, None)
        if wanted.idempotency_key:
            self.keys[wanted.idempotency_key] = (wanted, id)
        return info
