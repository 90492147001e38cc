# SPDX-License-Identifier: Apache-2.0
"""Sandboxes: finding them, and who may ask what of them.

What belongs here: the table of all sandboxes, admission of new ones (ids, keys, id ranges, layers),
ownership, listing and waiting. What does not: the transitions (``lifecycle.py``), commands and files inside
(``execs.py``, ``files.py``).

A transition runs as a task of the daemon: a client that goes away does not stop it half-way.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from dsecd.backends.base import Backend, Box
from dsecd.core.expiry import Expiry
from dsecd.core.images.compose import compose
from dsecd.core.images.store import ImageStore
from dsecd.core.lifecycle import Lifecycle
from dsecd.core.live import Defaults, Live
from dsecd.core.operations import Report
from dsecd.core.principal import Principal
from dsecd.core.ranges import Ranges
from dsecd.core.records import Record
from dsecd.core.tasks import Tasks
from dsecd.linux.userns import SIZE as RANGE_SIZE
from libdsec import errors
from libdsec.types import (
    BatchCreateRequest,
    BatchItem,
    CreateRequest,
    ErrorBody,
    Sandbox,
    SandboxList,
    SandboxSpec,
    State,
    StopRequest,
    UpdateRequest,
)

_ID_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_BATCH_REPORT_S = 0.5


class Sandboxes:
    """All sandboxes of this host."""

    def __init__(
        self, backends: Mapping[str, Backend], images: ImageStore, tasks: Tasks, ranges: Ranges, *, uid_base: int,
        parallel: int,
    ) -> None:
        self._backends = backends
        self._images = images
        self._tasks = tasks
        self._ranges = ranges
        self._uid_base = uid_base
        self._parallel = parallel
        self._lives: dict[str, Live] = {}
        self._by_key: dict[tuple[int, str], Live] = {}
        self._expiry = Expiry(self._expired)
        self.lifecycle: Lifecycle

    # --- for the rest of the core ----------------------------------------------------------------------------------

    def all(self) -> list[Live]:
        return list(self._lives.values())

    def find(self, principal: Principal, sandbox_id: str, doing: str) -> Live:
        """Raises NotFound; Denied for another owner's. Both say what was being done."""
        live = self._lives.get(sandbox_id)
        if live is None:
            raise errors.NotFound(f"{doing} '{sandbox_id}': no such sandbox")
        principal.may_touch(live.record.owner_uid, f"{doing} '{sandbox_id}'")
        return live

    def counts(self) -> dict[str, int]:
        """How many sandboxes are in each state."""
        counts = {str(state): 0 for state in State}
        for live in self._lives.values():
            counts[str(live.record.state)] += 1
        return counts

    def enter(self, record: Record) -> Live:
        """Make the live form of a record and find it from now on."""
        spec = record.spec
        box = Box(id=record.id, spec=spec, uid_base=self._uid_base + record.range_index * RANGE_SIZE, layers=())
        live = Live(record, box, self._backends[spec.backend], self._defaults(record))
        box.on_link_lost = lambda lost: self.lifecycle.link_lost(live, lost)
        self._lives[record.id] = live
        if record.idempotency_key is not None:
            self._by_key[record.owner_uid, record.idempotency_key] = live
        return live

    def leave(self, live: Live) -> None:
        """Nothing of it is left."""
        self._lives.pop(live.id, None)
        if live.record.idempotency_key is not None:
            self._by_key.pop((live.record.owner_uid, live.record.idempotency_key), None)
        self._ranges.give(live.record.range_index)

    def deadline(self, when: float, sandbox_id: str) -> None:
        self._expiry.at(when, sandbox_id)

    async def run_expiry(self) -> None:
        """Runs until cancelled."""
        await self._expiry.run()

    # --- the API -----------------------------------------------------------------------------------------------------

    async def create(self, principal: Principal, request: CreateRequest) -> Sandbox:
        live = self._by_key.get((principal.uid, request.idempotency_key or ""))
        if live is not None:
            self._same_request(live, request)
        else:
            live = self._admit(principal, request)
            live.creation = self._tasks.spawn(f"create {live.id}", self.lifecycle.create(live))
        if live.creation is not None:
            await asyncio.shield(live.creation)
        return live.record.to_wire()

    async def create_batch(self, principal: Principal, request: BatchCreateRequest, report: Report) -> list[BatchItem]:
        """Create all, at most ``parallel`` at once; one that fails does not concern the others."""
        gate = asyncio.Semaphore(request.parallel or self._parallel)
        done = failed = 0
        reported = 0.0

        async def one(item: CreateRequest) -> BatchItem:
            nonlocal done, failed, reported
            async with gate:
                try:
                    result = BatchItem(sandbox=await self.create(principal, item))
                except errors.DsecError as error:
                    result = BatchItem(error=ErrorBody.model_validate(error.to_wire()))
                    failed += 1
            done += 1
            if time.monotonic() - reported > _BATCH_REPORT_S:
                reported = time.monotonic()
                report({"done": done, "failed": failed, "total": len(request.items)})
            return result

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in request.items]
        report({"done": done, "failed": failed, "total": len(request.items)})
        return [task.result() for task in tasks]

    def list(
        self, principal: Principal, *, labels: Sequence[str], states: Sequence[State], after: str | None, limit: int
    ) -> SandboxList:
        """In the order of their ids; ``after`` is the last id of the page before."""
        wanted = [label.partition("=") for label in labels]

        def matches(live: Live) -> bool:
            has = live.record.spec.labels
            return (
                principal.sees(live.record.owner_uid)
                and (not states or live.record.state in states)
                and all(name in has and (not equals or has[name] == value) for name, equals, value in wanted)
            )

        ids = sorted(sandbox_id for sandbox_id, live in self._lives.items() if matches(live))
        page = [sandbox_id for sandbox_id in ids if after is None or sandbox_id > after]
        cut = page[:limit]
        return SandboxList(
            sandboxes=tuple(self._lives[sandbox_id].record.to_wire() for sandbox_id in cut),
            next=cut[-1] if len(page) > limit else None,
        )

    def get(self, principal: Principal, sandbox_id: str) -> Sandbox:
        return self.find(principal, sandbox_id, "inspect").record.to_wire()

    async def update(self, principal: Principal, sandbox_id: str, request: UpdateRequest) -> Sandbox:
        live = self.find(principal, sandbox_id, "update")
        if request.limits is not None:
            live.backend.check(live.record.spec.model_copy(update={"limits": request.limits}))
        await self._shielded(f"update {sandbox_id}", self._update(live, request))
        return live.record.to_wire()

    async def delete(self, principal: Principal, sandbox_id: str) -> None:
        """One that is not there is deleted already: a client that lost the answer asks again."""
        if sandbox_id not in self._lives:
            return
        live = self.find(principal, sandbox_id, "delete")
        await asyncio.shield(self._start_delete(live, "user"))

    async def stop(self, principal: Principal, sandbox_id: str, request: StopRequest) -> Sandbox:
        live = self.find(principal, sandbox_id, "stop")
        await self._shielded(f"stop {sandbox_id}", self.lifecycle.stop(live, request.grace_s))
        return live.record.to_wire()

    async def start(self, principal: Principal, sandbox_id: str) -> Sandbox:
        live = self.find(principal, sandbox_id, "start")
        await self._shielded(f"start {sandbox_id}", self.lifecycle.start(live))
        return live.record.to_wire()

    async def pause(self, principal: Principal, sandbox_id: str) -> Sandbox:
        live = self.find(principal, sandbox_id, "pause")
        await self._shielded(f"pause {sandbox_id}", self.lifecycle.pause(live))
        return live.record.to_wire()

    async def resume(self, principal: Principal, sandbox_id: str) -> Sandbox:
        live = self.find(principal, sandbox_id, "resume")
        await self._shielded(f"resume {sandbox_id}", self.lifecycle.resume(live))
        return live.record.to_wire()

    async def wait(self, principal: Principal, sandbox_id: str, states: Sequence[State], wait_s: float) -> Sandbox:
        """Until it is in one of the states. Raises TimedOut, and NotFound when it is deleted meanwhile."""
        live = self.find(principal, sandbox_id, "wait for")
        try:
            async with asyncio.timeout(wait_s):
                while live.record.state not in states:
                    await live.wait_change()
                    self.find(principal, sandbox_id, "wait for")
        except TimeoutError as error:
            raise errors.TimedOut(
                f"wait for '{sandbox_id}': it is {live.record.state} after {wait_s:g} s, not {' or '.join(states)}",
                state=str(live.record.state),
            ) from error
        return live.record.to_wire()

    # --- parts -------------------------------------------------------------------------------------------------------

    async def _shielded(self, name: str, transition: Coroutine[Any, Any, None]) -> None:
        await asyncio.shield(self._tasks.spawn(name, transition))

    def _start_delete(self, live: Live, reason: str) -> asyncio.Task[None]:
        """One deletion at a time; a second caller waits for the first."""
        if live.deletion is None or live.deletion.done():
            live.deletion = self._tasks.spawn(f"delete {live.id}", self.lifecycle.delete(live, reason))
        return live.deletion

    async def _expired(self, sandbox_id: str) -> None:
        live = self._lives.get(sandbox_id)
        if live is None:
            return
        record = live.record
        if record.state is State.DELETING:
            self._start_delete(live, record.reason or "retry")
        elif record.expires_at is not None and record.expires_at <= time.time():
            self._start_delete(live, "ttl")

    async def _update(self, live: Live, request: UpdateRequest) -> None:
        async with live.lock:
            record = live.record
            changes: dict[str, Any] = {}
            if request.labels is not None:
                changes["labels"] = request.labels
            if request.limits is not None:
                if record.state in (State.RUNNING, State.PAUSED):
                    await live.backend.set_limits(live.box, request.limits)
                changes["limits"] = request.limits
            if request.ttl_s is not None:
                changes["ttl_s"] = request.ttl_s
                if record.state is State.PAUSED:
                    record.ttl_left_s = request.ttl_s
                else:
                    record.expires_at = time.time() + request.ttl_s
            record.spec = live.box.spec = record.spec.model_copy(update=changes)
            await self.lifecycle.change(live)

    def _same_request(self, live: Live, request: CreateRequest) -> None:
        if live.record.request_digest != _digest(request):
            raise errors.Conflict(
                f"create with key '{request.idempotency_key}': the key was used with another request", sandbox=live.id
            )

    def _admit(self, principal: Principal, request: CreateRequest) -> Live:
        """Reserve id, key and id range; no waiting in here, so equal requests at the same time meet the first one."""
        spec = request.spec
        backend = self._backends.get(spec.backend)
        if backend is None:
            raise errors.FeatureMissing(
                f"create with backend '{spec.backend}': this daemon has {', '.join(sorted(self._backends))}",
                hint="run 'dsecctl host' to see what this host offers", feature=f"backend-{spec.backend}",
            )  # fmt: skip
        sandbox_id = request.id or self._new_id()
        if sandbox_id in self._lives:
            since = self._lives[sandbox_id].record.to_wire().created_at
            raise errors.AlreadyExists(
                f"create '{sandbox_id}': sandbox exists since {since:%Y-%m-%d %H:%M}",
                hint=f"choose another id or 'dsecctl rm {sandbox_id}'",
            )
        off = backend.check(spec)
        layers = self._compose(spec)
        now = time.time()
        record = Record(
            id=sandbox_id, owner_uid=principal.uid, spec=spec, layers=layers, range_index=self._ranges.take(),
            created_at=now, intent="create", idempotency_key=request.idempotency_key, request_digest=_digest(request),
            expires_at=None if spec.ttl_s is None else now + spec.ttl_s, off=tuple(off),
        )  # fmt: skip
        return self.enter(record)

    def _new_id(self) -> str:
        while True:
            sandbox_id = "sb-" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(10))
            if sandbox_id not in self._lives:
                return sandbox_id

    def _compose(self, spec: SandboxSpec) -> tuple[str, ...]:
        resolve = self._images.resolve
        workspace = None if spec.workspace is None else resolve(spec.workspace)
        return compose(resolve(spec.image), workspace, [resolve(toolkit) for toolkit in spec.toolkits])

    def _defaults(self, record: Record) -> Defaults:
        images = [self._images.get(digest) for digest in reversed(record.layers)]
        # An image given twice lies in the stack once: then there may be no second one.
        workspace = images[1] if record.spec.workspace is not None and len(images) > 1 else None
        return Defaults.of(record.spec, images, workspace)


def _digest(request: CreateRequest) -> str:
    return hashlib.sha256(request.model_dump_json(exclude={"idempotency_key"}).encode()).hexdigest()
