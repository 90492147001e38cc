# SPDX-License-Identifier: Apache-2.0
"""Sandboxes as the API sees them.

What belongs here: one method for each call, on behalf of a principal. What does not: finding and admitting
(``registry.py``), the transitions (``lifecycle.py``), commands and files inside (``execs.py``, ``files.py``).

A transition runs as a task of the daemon: a client that goes away does not stop it half-way.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from pydantic import ValidationError

from dsecd.core import translate
from dsecd.core.admission import Admission
from dsecd.core.lifecycle import Lifecycle
from dsecd.core.live import Live
from dsecd.core.operations import Report
from dsecd.core.principal import Principal
from dsecd.core.registry import Registry
from dsecd.core.tasks import Tasks
from libdsec import errors
from libdsec.types import (
    BatchCreateRequest,
    BatchItem,
    CreateRequest,
    ErrorBody,
    Limits,
    NetworkState,
    Sandbox,
    SandboxList,
    SandboxSpec,
    SandboxUsage,
    State,
    StopRequest,
    UpdateRequest,
    explain,
)

_BATCH_REPORT_S = 0.5


class Sandboxes:
    """All sandboxes of this host."""

    def __init__(
        self, registry: Registry, lifecycle: Lifecycle, tasks: Tasks, admission: Admission, *, parallel: int,
        wait_s: float = 30.0, batch_wait_s: float = 600.0,
    ) -> None:  # fmt: skip
        """``wait_s``: how long one waits for the host to have room that does not say, alone and in a batch."""
        self._registry = registry
        self._lifecycle = lifecycle
        self._tasks = tasks
        self._admission = admission
        self._parallel = parallel
        self._wait_s, self._batch_wait_s = wait_s, batch_wait_s

    def counts(self) -> dict[str, int]:
        """How many there are in each state."""
        return self._registry.counts()

    def let_go(self) -> None:
        """The daemon ends: they go on, and their ends are the next daemon's business."""
        self._lifecycle.watch.stop_all(self._registry.all())
        self._lifecycle.ports.close_all()

    async def create(self, principal: Principal, request: CreateRequest, *, wait_s: float | None = None) -> Sandbox:
        live = self._registry.of_key(principal, request)
        if live is None and not self._admission.is_open():
            self._registry.examine(request)  # what cannot be made need not wait
            patience_s = self._wait_s if wait_s is None else wait_s
            await self._admission.enter(
                f"create '{request.id or request.spec.image}'", patience_s if request.wait_s is None else request.wait_s
            )
            live = self._registry.of_key(principal, request)
        if live is None:
            live = self._registry.admit(principal, request)
            live.creation = self._tasks.spawn(f"create {live.id}", self._lifecycle.create(live))
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
                    result = BatchItem(sandbox=await self.create(principal, item, wait_s=self._batch_wait_s))
                except errors.DsecError as error:
                    result = BatchItem(error=ErrorBody.model_validate(error.to_wire()))
                    failed += 1
            done += 1
            if time.monotonic() - reported > _BATCH_REPORT_S:
                reported = time.monotonic()
                report({"done": done, "failed": failed, "total": len(request.items)})
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(item)) for item in request.items]
        finally:
            # Cancelled too: what is there by then stays, and the caller should know how much.
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

        found = [live for live in self._registry.all() if (after is None or live.id > after) and matches(live)]
        page = sorted(found, key=lambda live: live.id)[:limit]
        return SandboxList(
            sandboxes=tuple(live.record.to_wire() for live in page),
            next=page[-1].id if len(found) > limit else None,
        )

    def get(self, principal: Principal, sandbox_id: str) -> Sandbox:
        return self._registry.find(principal, sandbox_id, "inspect").record.to_wire()

    async def usage(self, principal: Principal, sandbox_id: str) -> SandboxUsage:
        """Raises WrongState unless it runs or is paused, SandboxLost when its agent does not answer."""
        live = self._registry.find(principal, sandbox_id, "read the usage of")
        link = await live.file_link("read the usage of")
        with translate.execs(f"read the usage of '{sandbox_id}'"):
            told = await link.usage()
        counted = await asyncio.to_thread(live.backend.usage, live.box)
        return SandboxUsage(
            id=sandbox_id, cgroup=str(live.backend.cgroup(live.box)), processes=told.pid_count,
            execs_running=told.execs_running, execs_total=told.execs_total,
            cpu_user_us=told.cpu_user_us, cpu_system_us=told.cpu_system_us, max_rss_kib=told.max_rss_kib,
            cpu_usage_us=counted.get("cpu.usage_usec"), memory_current_bytes=counted.get("memory.current"),
            pids_current=counted.get("pids.current"),
            cpu_forced_idle_us=counted.get("cpu.core_sched.force_idle_usec"),
        )  # fmt: skip

    async def network(self, principal: Principal, sandbox_id: str) -> NetworkState:
        """Counters are there while it runs or is paused."""
        live = self._registry.find(principal, sandbox_id, "read the network of")
        return live.backend.network(live.box)

    async def dial(self, principal: Principal, sandbox_id: str, port: int) -> socket.socket:
        """A connection to a port on its loopback, as a socket that does not block."""
        live = self._registry.find(principal, sandbox_id, "connect to")
        live.require("connect to", State.RUNNING)
        return await live.backend.dial(live.box, port)

    async def update(self, principal: Principal, sandbox_id: str, request: UpdateRequest) -> Sandbox:
        live = self._registry.find(principal, sandbox_id, "update")
        changes: dict[str, Any] = {}
        if request.limits is not None:
            changes["limits"] = _limits(live.record.spec, request)
        if request.network is not None:
            changes["network"] = request.network
        if changes:
            live.backend.check(live.record.spec.model_copy(update=changes))
        await _to_its_end(self._tasks, f"update {sandbox_id}", self._update(live, request))
        return live.record.to_wire()

    async def delete(self, principal: Principal, sandbox_id: str) -> None:
        """One that is not there is deleted already: a client that lost the answer asks again."""
        if self._registry.get(sandbox_id) is None:
            return
        live = self._registry.find(principal, sandbox_id, "delete")
        await asyncio.shield(self._start_delete(live, "user"))

    async def stop(self, principal: Principal, sandbox_id: str, request: StopRequest) -> Sandbox:
        live = self._registry.find(principal, sandbox_id, "stop")
        await _to_its_end(self._tasks, f"stop {sandbox_id}", self._lifecycle.stop(live, request.grace_s))
        return live.record.to_wire()

    async def start(self, principal: Principal, sandbox_id: str, wait_s: float | None = None) -> Sandbox:
        live = self._registry.find(principal, sandbox_id, "start")
        if live.record.state not in (State.RUNNING, State.PAUSED):
            await self._admission.enter(f"start '{sandbox_id}'", self._wait_s if wait_s is None else wait_s)
        await _to_its_end(self._tasks, f"start {sandbox_id}", self._lifecycle.start(live))
        return live.record.to_wire()

    async def pause(self, principal: Principal, sandbox_id: str) -> Sandbox:
        live = self._registry.find(principal, sandbox_id, "pause")
        await _to_its_end(self._tasks, f"pause {sandbox_id}", self._lifecycle.pause(live))
        return live.record.to_wire()

    async def resume(self, principal: Principal, sandbox_id: str) -> Sandbox:
        live = self._registry.find(principal, sandbox_id, "resume")
        await _to_its_end(self._tasks, f"resume {sandbox_id}", self._lifecycle.resume(live))
        return live.record.to_wire()

    async def wait(self, principal: Principal, sandbox_id: str, states: Sequence[State], wait_s: float) -> Sandbox:
        """Until it is in one of the states. Raises TimedOut, and NotFound when it is deleted meanwhile."""
        live = self._registry.find(principal, sandbox_id, "wait for")
        try:
            async with asyncio.timeout(wait_s):
                while live.record.state not in states:
                    await live.wait_change()
                    self._registry.find(principal, sandbox_id, "wait for")
        except TimeoutError as error:
            raise errors.TimedOut(
                f"wait for '{sandbox_id}': it is {live.record.state} after {wait_s:g} s, not {' or '.join(states)}",
                state=str(live.record.state),
            ) from error
        return live.record.to_wire()

    # --- parts -------------------------------------------------------------------------------------------------------

    def _start_delete(self, live: Live, reason: str) -> asyncio.Task[None]:
        """One deletion at a time; a second caller waits for the first."""
        if live.deletion is None or live.deletion.done():
            live.deletion = self._tasks.spawn(f"delete {live.id}", self._lifecycle.delete(live, reason))
        return live.deletion

    async def expired(self, sandbox_id: str) -> None:
        live = self._registry.get(sandbox_id)
        if live is None:
            return
        record = live.record
        if record.state is State.DELETING:
            self._start_delete(live, record.reason or "retry")
        elif record.expires_at is not None and record.expires_at <= time.time():
            self._start_delete(live, "ttl")

    async def _update(self, live: Live, request: UpdateRequest) -> None:
        async with live.lock:
            if live.gone:
                raise errors.NotFound(f"update '{live.id}': no such sandbox")
            record = live.record
            changes: dict[str, Any] = {}
            if request.labels is not None:
                changes["labels"] = request.labels
            if request.limits is not None or request.lift:
                limits = _limits(record.spec, request)
                if record.state in (State.RUNNING, State.PAUSED):
                    await live.backend.set_limits(live.box, limits)
                changes["limits"] = limits
            if request.network is not None:
                if record.state in (State.RUNNING, State.PAUSED):
                    await live.backend.set_network(live.box, request.network)
                changes["network"] = request.network
            if request.ttl_s is not None:
                changes["ttl_s"] = request.ttl_s
                if record.state is State.PAUSED:
                    record.ttl_left_s = request.ttl_s
                else:
                    record.expires_at = time.time() + request.ttl_s
            record.spec = live.box.spec = record.spec.model_copy(update=changes)
            await self._lifecycle.change(live)


def _limits(spec: SandboxSpec, request: UpdateRequest) -> Limits:
    """The limits after an update. Raises InvalidSpec when those that stay and those that are new contradict."""
    try:
        return spec.limits.merged(request.limits or Limits(), request.lift)
    except ValidationError as error:
        found = [{"path": "limits", "message": explain(item)} for item in error.errors()]
        raise errors.InvalidSpec(f"update: {found[0]['message']}", errors=found) from error


async def _to_its_end(tasks: Tasks, name: str, transition: Coroutine[Any, Any, None]) -> None:
    """Wait for a transition that goes on when the waiter is cancelled."""
    await asyncio.shield(tasks.spawn(name, transition))
