# SPDX-License-Identifier: Apache-2.0
"""Snapshots: sandboxes saved under a name, with memory and files, for others to begin as.

What belongs here: making, finding and removing them, and cloning them; each on behalf of a principal. What does not:
their files (``dsecd.backends``), their rows (``snapshot_records.py``), the clones once they are made (``copies.py``).

As with sandboxes, the row is there before anything else is and goes after everything else has gone, so what a daemon
that was killed left half-way, the next one finds and removes. A snapshot becomes visible as a whole, with the last
step. The clones that run from it are its references: they are records of sandboxes, so no crash can miscount them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dsecd.backends.base import Saves
from dsecd.backends.plan import Checkpoint, Step, no_checkpoint, nothing, perform
from dsecd.core import snapshot_records as rows
from dsecd.core.admission import Admission
from dsecd.core.copies import Copies, Model
from dsecd.core.events import Events
from dsecd.core.images.store import ImageStore
from dsecd.core.live import Live
from dsecd.core.principal import Principal
from dsecd.core.registry import Registry
from dsecd.core.store import Store
from dsecd.core.tasks import Tasks
from libdsec import errors
from libdsec.snapshots import CloneRequest, Snapshot, SnapshotList, SnapshotRequest
from libdsec.types import SandboxList, State

log = logging.getLogger(__name__)

_NAMED = 8  # users that a refusal names


@dataclass
class _Entry:
    """A snapshot in the daemon's memory. ``body`` is None until it is ready."""

    body: Snapshot | None = None
    removing: bool = False
    cloning: int = 0  # requests that are making clones


class Snapshots:
    """All snapshots of this host; used on the event loop's thread only."""

    def __init__(
        self, store: Store, registry: Registry, images: ImageStore, events: Events, tasks: Tasks, copies: Copies,
        admission: Admission, *, wait_s: float, checkpoint: Checkpoint = no_checkpoint,
    ) -> None:  # fmt: skip
        self._store = store
        self._registry = registry
        self._images = images
        self._events = events
        self._tasks = tasks
        self._copies = copies
        self._admission = admission
        self._wait_s = wait_s
        self._checkpoint = checkpoint
        self._entries: dict[str, _Entry] = {}

    async def recover(self, saves: Sequence[Saves], *, first_start: bool) -> None:
        """Take over from an earlier daemon: what it had not finished goes. Call once, before the first request.

        Raises Refused when the database is new and snapshots are there: then it is the database that was lost.
        """
        found = self._store.read(rows.load)
        ready = {body.id for state, body in found if state == "ready"}
        on_disk = {name: one for one in saves for name in one.residents()}
        if first_start and on_disk:
            raise errors.Refused(
                f"start with a new state database: it knows nothing of {len(on_disk)} snapshots here, such as "
                f"'{min(on_disk)}'", hint="restore the database, or remove 'snapshots' in the state directory",
            )  # fmt: skip
        for name in sorted(on_disk.keys() - ready):
            log.warning("snapshot=%s was not finished: removing what is left of it", name)
            await on_disk[name].remove(name)
        for state, body in found:
            if state == "ready":
                self._entries[body.id] = _Entry(body)
            else:
                await self._forget(body.id)
        if len(ready) < len(found):
            await self._images.remove_unused()

    def list(self, principal: Principal) -> SnapshotList:
        """Those the principal sees, by name."""
        users = self._users()
        found = [entry.body for _name, entry in sorted(self._entries.items()) if not entry.removing]
        seen = [body for body in found if body is not None and principal.sees(body.owner_uid)]
        return SnapshotList(snapshots=tuple(_with(body, users.get(body.id, ())) for body in seen))

    def get(self, principal: Principal, name: str) -> Snapshot:
        """Raises NotFound, Denied."""
        _entry, body = self._find(principal, name, "inspect snapshot")
        return _with(body, self._users().get(name, ()))

    async def create(self, principal: Principal, sandbox_id: str, request: SnapshotRequest) -> Snapshot:
        """Save a sandbox that runs or is paused. Raises AlreadyExists, FeatureMissing, WrongState, NoCapacity …; then
        nothing is left."""
        live = self._registry.find(principal, sandbox_id, "snapshot")
        saves = self._registry.saves("snapshot", live)
        if request.id in self._entries:
            raise errors.AlreadyExists(
                f"snapshot '{sandbox_id}': there is a snapshot '{request.id}' already, or one that is being made",
                hint=f"choose another name or 'dsecctl snapshot rm {request.id}'",
            )
        entry = self._entries[request.id] = _Entry()
        making = self._create(live, saves, entry, request.id)
        return await asyncio.shield(self._tasks.spawn(f"snapshot {request.id}", making))

    async def remove(self, principal: Principal, name: str) -> None:
        """Raises NotFound, and Conflict with their names while sandboxes run from it."""
        entry, body = self._find(principal, name, "remove snapshot", also_removing=True)
        users = self._users().get(name, ())
        if users or entry.cloning:
            more = f" and {len(users) - _NAMED} more" if len(users) > _NAMED else ""
            who = ", ".join(users[:_NAMED]) + more if users else "clones that are being made"
            raise errors.Conflict(
                f"remove snapshot '{name}': used by {who}", hint="stop or remove what runs from it first",
                sandboxes=list(users),
            )  # fmt: skip
        entry.removing = True
        await asyncio.shield(self._tasks.spawn(f"remove snapshot {name}", self._remove(name, body)))

    async def clone(self, principal: Principal, name: str, request: CloneRequest) -> SandboxList:
        """Sandboxes that begin as it is. Raises what kept one from being made; then there are none."""
        self._find(principal, name, "clone")
        await self._admission.enter(f"clone '{name}'", self._wait_s)
        entry, body = self._find(principal, name, "clone")
        entry.cloning += 1
        making = self._clone(principal, entry, body, request)
        return await asyncio.shield(self._tasks.spawn(f"clone {name}", making))

    # --- parts -------------------------------------------------------------------------------------------------------

    def _find(
        self, principal: Principal, name: str, doing: str, *, also_removing: bool = False
    ) -> tuple[_Entry, Snapshot]:
        entry = self._entries.get(name)
        if entry is None or entry.body is None or (entry.removing and not also_removing):
            raise errors.NotFound(f"{doing} '{name}': no such snapshot", hint="see 'dsecctl snapshot ls'")
        principal.may_touch(entry.body.owner_uid, f"{doing} '{name}'")
        return entry, entry.body

    def _users(self) -> dict[str, tuple[str, ...]]:
        """Which sandboxes run from which."""
        users: dict[str, tuple[str, ...]] = {}
        for live in self._registry.all():
            if live.record.snapshot:
                users[live.record.snapshot] = (*users.get(live.record.snapshot, ()), live.id)
        return users

    async def _create(self, live: Live, saves: Saves, entry: _Entry, name: str) -> Snapshot:
        making = _Making(live, saves, name)
        on = functools.partial
        steps = (
            Step("row", "its row, and its hold on its images", on(self._enter, making), on(self._forget, name)),
            Step("save", "what it is, while it stands still", making.save, making.discard),
            Step("publish", "its files on the disk, by its name", making.publish, on(saves.remove, name)),
            Step("ready", "for all to see", on(self._publish, making)),
        )
        try:
            async with live.lock:
                live.require("snapshot", State.RUNNING, State.PAUSED)
                await perform("snapshot", steps, self._checkpoint)
        except BaseException:
            del self._entries[name]
            raise
        entry.body = making.body
        log.info("event=snapshot.created snapshot=%s sandbox=%s", name, live.id)
        self._events.emit("snapshot.created", name, owner_uid=making.body.owner_uid, source=live.id)
        return making.body

    async def _enter(self, making: _Making) -> None:
        await self._store.write(functools.partial(rows.enter, snapshot=making.body), durable=True)

    async def _publish(self, making: _Making) -> None:
        await self._store.write(functools.partial(rows.publish, snapshot=making.body), durable=True)

    async def _begin_removal(self, name: str) -> None:
        await self._store.write(functools.partial(rows.begin_removal, snapshot_id=name), durable=True)

    async def _forget(self, name: str) -> None:
        await self._store.write(functools.partial(rows.forget, snapshot_id=name), durable=True)

    async def _remove(self, name: str, body: Snapshot) -> None:
        saves = self._registry.saves_of(body.spec.backend)
        files = nothing if saves is None else functools.partial(saves.remove, name)
        steps = (
            Step("row", "so that no daemon shows it again", functools.partial(self._begin_removal, name)),
            Step("files", "its files", files),
            Step("forget", "its row, and its hold on its images", functools.partial(self._forget, name)),
        )
        await perform("snapshot-rm", steps, self._checkpoint)
        del self._entries[name]
        log.info("event=snapshot.removed snapshot=%s", name)
        self._events.emit("snapshot.removed", name, owner_uid=body.owner_uid)
        await self._images.remove_unused()

    async def _clone(
        self, principal: Principal, entry: _Entry, body: Snapshot, request: CloneRequest
    ) -> SandboxList:
        try:
            saves = self._registry.saves_of(body.spec.backend)
            if saves is None:
                raise errors.FeatureMissing(
                    f"clone '{body.id}': this daemon has no backend '{body.spec.backend}'",
                    feature=f"backend-{body.spec.backend}",
                )
            origin = await saves.open(body.id, needs=body.needs, digests=body.digests)
            changes = {} if request.labels is None else {"labels": request.labels}
            spec = body.spec.model_copy(update={**changes, "ttl_s": request.ttl_s})
            ids: Sequence[str | None] = request.ids or [None] * request.count
            return await self._copies.make(principal, Model(spec, body.layers, origin, body.id), ids)
        finally:
            entry.cloning -= 1


class _Making:
    """A snapshot on its way: what its steps hand on to each other."""

    def __init__(self, live: Live, saves: Saves, name: str) -> None:
        self._live = live
        self._saves = saves
        self._origin: Path | None = None
        record = live.record
        self.body = Snapshot(
            id=name, source=live.id, owner_uid=record.owner_uid, created_at=datetime.now(UTC), spec=record.spec,
            layers=record.layers,
        )  # fmt: skip

    async def save(self) -> None:
        paused = self._live.record.state is State.PAUSED
        self._origin = await self._saves.save(self._live.box, "snapshot", paused=paused)

    async def discard(self) -> None:
        if self._origin is not None:
            await self._saves.discard(self._origin)

    async def publish(self) -> None:
        assert self._origin is not None
        saved = await self._saves.publish(self._origin, self.body.id)
        self.body = self.body.model_copy(update=dataclasses.asdict(saved))


def _with(body: Snapshot, users: tuple[str, ...]) -> Snapshot:
    return body.model_copy(update={"used_by": users})
