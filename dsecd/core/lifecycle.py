# SPDX-License-Identifier: Apache-2.0
"""Moving a sandbox from state to state.

What belongs here: create, start, stop, pause, resume, delete and adopt; each under
the sandbox's lock, each recording its intent before the first effect and the result after the last. What
does not: who may ask (``sandboxes.py``), how a kind of sandbox is made (``dsecd.backends``), what to do
with what an earlier daemon left (``reconcile.py``).

Order that makes SIGKILL harmless: the row is there before anything else is; the row goes after everything
else has gone. Between the two a new daemon finds the row with its intent and finishes the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from dsecd.backends.base import translated
from dsecd.backends.plan import Checkpoint, no_checkpoint, perform, undo
from dsecd.core import records, translate
from dsecd.core.events import Events
from dsecd.core.images import records as image_records
from dsecd.core.images.store import ImageStore
from dsecd.core.live import Live
from dsecd.core.store import Store
from dsecd.core.tasks import Tasks
from dsecd.core.watch import Watch
from dsecd.linux import pidfd
from libdsec import errors
from libdsec.types import ExecRequest, State

log = logging.getLogger(__name__)

MAIN_EXEC = "main"


def boot_id() -> str:
    """Changes with every boot of the host. random(4)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Lifecycle:
    """Transitions. ``gone`` is called when nothing of a sandbox is left."""

    def __init__(
        self, store: Store, images: ImageStore, events: Events, tasks: Tasks, *, gone: Callable[[Live], None],
        deadline: Callable[[float, str], None], checkpoint: Checkpoint = no_checkpoint,
    ) -> None:
        self._store = store
        self._images = images
        self._events = events
        self.watch = Watch(tasks, self._ended)
        self._gone = gone
        self.deadline = deadline
        self._checkpoint = checkpoint
        self._boot_id = boot_id()

    # --- transitions that callers ask for --------------------------------------------------------------------------

    async def create(self, live: Live) -> None:
        """From nothing to running. On failure nothing is left, and the error comes out."""
        async with live.lock:
            record, box = live.record, live.box
            await self._insert(live)
            self._emit("sandbox.created", live)
            try:
                await self._mount_layers(live)
                steps = (*live.backend.disk_steps(box), *live.backend.run_steps(box))
                await perform("create", steps, self._checkpoint)
                await self._run(live)
            except BaseException as error:
                # Also for a cancelled task: half a sandbox is nobody's.
                record.reason = str(error)
                await asyncio.shield(self._remove(live, plan="create-failed"))
                raise
            if record.expires_at is not None:
                self.deadline(record.expires_at, record.id)

    async def start(self, live: Live) -> None:
        """From stopped or failed to running; running already is fine."""
        async with live.lock:
            if live.record.state in (State.RUNNING, State.PAUSED):
                return
            live.require("start", State.STOPPED, State.FAILED)
            await self._intend(live, "start")
            try:
                await self._mount_layers(live)
                await perform("start", live.backend.run_steps(live.box), self._checkpoint)
                await self._run(live)
            except BaseException as error:
                await asyncio.shield(self._end_run(live, State.FAILED, f"start failed: {error}", "start-failed"))
                raise

    async def stop(self, live: Live, grace_s: float) -> None:
        """From running or paused to stopped; stopped or failed already is fine."""
        async with live.lock:
            if live.record.state in (State.STOPPED, State.FAILED):
                return
            live.require("stop", State.RUNNING, State.PAUSED)
            await self._intend(live, "stop")
            self.watch.stop(live)
            await live.backend.shut_down(live.box, grace_s)
            failures = await self._end_run(live, State.STOPPED, "user", "stop")
            if failures:
                raise failures[0]

    async def pause(self, live: Live) -> None:
        async with live.lock:
            if live.record.state is State.PAUSED:
                return
            live.require("pause", State.RUNNING)
            await live.backend.pause(live.box)
            record = live.record
            if record.expires_at is not None:
                record.ttl_left_s, record.expires_at = max(0.0, record.expires_at - time.time()), None
            await self._to(live, State.PAUSED, "sandbox.paused")

    async def resume(self, live: Live) -> None:
        async with live.lock:
            if live.record.state is State.RUNNING:
                return
            live.require("resume", State.PAUSED)
            await live.backend.resume(live.box)
            record = live.record
            if record.ttl_left_s is not None:
                record.expires_at, record.ttl_left_s = time.time() + record.ttl_left_s, None
                self.deadline(record.expires_at, record.id)
            await self._to(live, State.RUNNING, "sandbox.resumed")

    async def delete(self, live: Live, reason: str) -> None:
        """From any state to nothing. Whatever holds the lock is cut short by killing the sandbox's processes first."""
        while live.lock.locked():
            with contextlib.suppress(OSError):
                await asyncio.to_thread(live.backend.kill, live.box)
            # A creation may not have got to its processes yet: look again.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2), live.lock:
                    break
        async with live.lock:
            if live.gone:
                return
            self.watch.stop(live)
            live.record.reason = reason
            live.record.intent = "delete"
            await self._to(live, State.DELETING, "sandbox.deleting")
            await self._remove(live, plan="delete")

    async def change(self, live: Live) -> None:
        """Save what the caller changed in the record."""
        if live.record.expires_at is not None:
            self.deadline(live.record.expires_at, live.id)
        await self._save(live, durable=True)
        live.changed()

    # --- taking over from an earlier daemon --------------------------------------------------------------------------

    async def adopt(self, live: Live) -> None:
        """Take over a sandbox whose record says that it runs. One that does not any more becomes failed."""
        async with live.lock:
            record, box = live.record, live.box
            reason = "host restarted" if record.boot_id != self._boot_id else "its processes ended"
            box.process = record.process
            alive = record.boot_id == self._boot_id and record.process is not None and pidfd.is_alive(record.process)
            if alive:
                try:
                    await live.backend.reconnect(box)
                    await (live.backend.pause(box) if record.state is State.PAUSED else live.backend.resume(box))
                    self.watch.start(live)
                    return
                except errors.DsecError as error:
                    reason = f"agent lost: {error.message}"
            await self._end_run(live, State.FAILED, reason, "adopt-failed")

    async def finish_stop(self, live: Live) -> None:
        """Complete a start or stop that an earlier daemon did not: either way it ends stopped."""
        async with live.lock:
            await self._end_run(live, State.STOPPED, "interrupted by a restart of the daemon", "finish-stop")

    # --- parts -----------------------------------------------------------------------------------------------------

    async def _mount_layers(self, live: Live) -> None:
        with translated(f"mount the layers of '{live.id}'"):
            live.box.layers = tuple([await self._images.mount_layer(digest) for digest in live.record.layers])

    async def _run(self, live: Live) -> None:
        """The backend's steps are done: start the main command, record that it runs."""
        record = live.record
        if record.spec.command is not None:
            await _start_main(live)
        record.process, record.boot_id, record.started_at = live.box.process, self._boot_id, time.time()
        record.intent, record.reason = "", None
        self.watch.start(live)
        await self._to(live, State.RUNNING, "sandbox.running")

    async def _ended(self, live: Live, reason: str) -> None:
        await self._end_run(live, State.FAILED, reason, "died")

    async def _end_run(self, live: Live, state: State, reason: str, plan: str) -> list[Exception]:
        failures = await undo(plan, live.backend.run_steps(live.box), self._checkpoint)
        record = live.record
        record.reason = "; ".join([reason, *map(str, failures)])
        record.intent, record.process = "", None
        if failures:
            state = State.FAILED
        await self._to(live, state, f"sandbox.{state}")
        return failures

    async def _remove(self, live: Live, plan: str) -> None:
        """Undo everything; the row goes last. What cannot be undone now keeps the row, for another try later."""
        steps = (*live.backend.disk_steps(live.box), *live.backend.run_steps(live.box))
        failures = await undo(plan, steps, self._checkpoint)
        if failures:
            live.record.reason = f"could not be removed yet: {failures[0]}"
            live.record.intent = "delete"
            await self._to(live, State.DELETING, "sandbox.stuck")
            self.deadline(time.time() + 30, live.id)
            raise failures[0]

        # Not durable: should a loss of power bring the row back, the next daemon finds it deleting, or without
        # processes, and nobody is misled by that.
        await self._store.write(functools.partial(_forget, live.id))
        live.gone = True
        self._gone(live)
        if not all(self._images.get(digest).names for digest in live.record.layers):
            await self._images.remove_unused()
        self._emit("sandbox.deleted", live)
        live.changed()

    async def _insert(self, live: Live) -> None:
        remember = functools.partial(_remember, records.frozen(live.record), live.id, live.record.layers)
        try:
            await self._store.write(remember, durable=True)
        except BaseException:
            self._gone(live)
            raise

    async def _intend(self, live: Live, intent: str) -> None:
        live.record.intent = intent
        await self._save(live, durable=False)

    async def _to(self, live: Live, state: State, event: str) -> None:
        live.record.state = state
        await self._save(live, durable=False)
        self._emit(event, live)
        live.changed()

    async def _save(self, live: Live, *, durable: bool) -> None:
        row = records.frozen(live.record)
        await self._store.write(functools.partial(records.save, row=row), durable=durable)

    def _emit(self, kind: str, live: Live) -> None:
        details = {"state": str(live.record.state)} | ({"reason": live.record.reason} if live.record.reason else {})
        self._events.emit(kind, live.id, owner_uid=live.record.owner_uid, **details)


async def _start_main(live: Live) -> None:
    assert live.record.spec.command is not None
    assert live.box.link is not None
    request = ExecRequest(argv=live.record.spec.command)
    with translate.starting(f"start the command of '{live.id}'"):
        channel = await live.box.link.start(
            live.start_request(request, MAIN_EXEC, stdin_open=False), attach=False
        )
        await channel.detach()


def _remember(row: tuple[object, ...], sandbox_id: str, layers: tuple[str, ...], db: sqlite3.Connection) -> None:
    """The row and its hold on the images, both or neither."""
    records.save(db, row)
    for digest in layers:
        image_records.hold(db, digest, sandbox_id)


def _forget(sandbox_id: str, db: sqlite3.Connection) -> None:
    records.delete(db, sandbox_id)
    image_records.release_all(db, sandbox_id)
