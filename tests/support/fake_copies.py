# SPDX-License-Identifier: Apache-2.0
"""Forks and snapshots of the daemon in memory (``fake_daemon.py``): rows and names, no memory and no files.

Here: their routes. Not here: what it knows (``fake_state.py``).
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from libdsec import snapshots as snap
from libdsec import types as t
from libdsec.errors import Conflict, NotFound
from tests.support.fake_state import NOW, State


class Copies(State):
    """Routes about copies."""

    async def on_fork(self, request: web.Request) -> t.SandboxList:
        copy = self._box(request).info.model_copy(update={"id": "copy"})
        return t.SandboxList(sandboxes=(copy,))

    async def on_snapshot_create(self, request: web.Request) -> snap.Snapshot:
        box = self._box(request)
        wanted = snap.SnapshotRequest.model_validate_json(await request.read())
        made = snap.Snapshot(
            id=wanted.id, source=box.info.id, owner_uid=0, created_at=NOW, spec=box.info.spec, memory_bytes=256 << 20,
            state_bytes=400 << 10, used_bytes=90 << 20,
        )  # fmt: skip
        self.snapshots[made.id] = made
        return made

    def _snapshot(self, request: web.Request) -> snap.Snapshot:
        id = request.match_info["id"]
        if id not in self.snapshots:
            raise NotFound(f"inspect snapshot '{id}': no such snapshot")
        users = tuple(box.info.id for box in self.boxes.values() if box.info.snapshot == id)
        return self.snapshots[id].model_copy(update={"used_by": users})

    async def on_snapshots(self, request: web.Request) -> snap.SnapshotList:
        return snap.SnapshotList(snapshots=tuple(self.snapshots.values()))

    async def on_snapshot_inspect(self, request: web.Request) -> snap.Snapshot:
        return self._snapshot(request)

    async def on_snapshot_remove(self, request: web.Request) -> dict[str, Any]:
        found = self._snapshot(request)
        if found.used_by:
            raise Conflict(f"remove snapshot '{found.id}': used by {', '.join(found.used_by)}")
        del self.snapshots[found.id]
        return {}

    async def on_clone(self, request: web.Request) -> t.SandboxList:
        found = self._snapshot(request)
        wanted = snap.CloneRequest.model_validate_json(await request.read())
        spec = found.spec.model_copy(update={"ttl_s": wanted.ttl_s, "labels": wanted.labels or found.spec.labels})
        made = [self.make(t.CreateRequest(spec=spec, id=id)) for id in wanted.ids or [None] * wanted.count]
        for info in made:
            self.boxes[info.id].info = info.model_copy(update={"snapshot": found.id})
        return t.SandboxList(sandboxes=tuple(self.boxes[info.id].info for info in made))
