# SPDX-License-Identifier: Apache-2.0
"""Moving a sandbox from state to state.

What belongs here: create, start, stop, pause, resume, delete and adopt; each under
the sandbox's lock, each recording its intent before the first effect and the result after the last. What
does not: who may ask (``sandboxes.py``), how a kind of sandbox is made (``dsecd.backends``), what to do
with what an earlier daemon left (``reconcile.py``), what is written where (``ledger.py``).

Order that makes SIGKILL harmless: the row is there before anything else is; the row goes after everything
else has gone. Between the two a new daemon finds the row with its intent and finishes the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from dsecd.backends.base import translated
from dsecd.backends.plan import Checkpoint, no_checkpoint, perform, undo
from dsecd.core import translate
from dsecd.core.events import Events
from dsecd.core.images.store import ImageStore
from dsecd.core.ledger import Ledger
from dsecd.core.live import Live
from dsecd.core.publishing import Publishing
from dsecd.core.store import Store
from dsecd.core.tasks import Tasks
from dsecd.core.watch import Watch, cause
from dsecd.linux import pidfd
from libdsec import errors
from libdsec.types import ExecRequest, State

log = logging.getLogger(__name__)

MAIN_EXEC = "main"
#: A deletion that could not be completed is tried again after so long.
_RETRY_DELETE_S = 30.0


def boot_id() -> str:
    """Changes with every boot of the host. random(4)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Lifecycle:
    """Transitions. ``gone`` is called when nothing of a sandbox is left."""

    def __init__(
        self, store: Store, images: ImageStore, events: Events, tasks: Tasks, *, gone: Callable[[Live], None],
        deadline: Callable[[float, str], None], checkpoint: Checkpoint = no_checkpoint,
    ) -> None:
        self._ledger = Ledger(store, events)
        self.ports = Publishing(tasks, self._ledger)
        self._images = images
        self.watch = Watch(tasks, self._ended, self._ledger)
        self._gone = gone
        self.deadline = deadline
        self._checkpoint = checkpoint
        self._boot_id = boot_id()

    # --- transitions that callers ask for --------------------------------------------------------------------------

    async def create(self, live: Live) -> None:
        """From nothing to running. On failure nothing is left, and the error comes out."""
        async with live.lock:
            record, box = live.record, live.box
            try:
                self.ports.bind(live)
                await self._ledger.insert(live)
            except BaseException:
                self.ports.close(live.id)
                live.gone = True
                self._gone(live)
                raise
            self._ledger.tell("sandbox.created", live)
            try:
                await self._mount_layers(live)
                steps = (*live.backend.disk_steps(box), *live.backend.run_steps(box))
                await perform("create", steps, self._checkpoint)
                copied, box.origin = box.origin is not None, None
                await self._run(live, copied=copied)
                await self.ports.serve(live)
            except BaseException as error:
                # Also for a cancelled task: half a sandbox is nobody's. What is left of it is tried again later.
                record.reason = str(error)
                await asyncio.shield(self._remove(live, plan="create-failed"))
                if live.deletion is not None and not isinstance(error, asyncio.CancelledError):
                    # How a start ends whose processes are killed under it is nobody's concern.
                    raise errors.WrongState(f"create '{live.id}': deleted while it was being created") from error
                raise
            if record.expires_at is not None:
                self.deadline(record.expires_at, record.id)

    async def start(self, live: Live) -> None:
        """From stopped or failed to running; running already is fine."""
        async with live.lock:
            if await self._ledger.holds(live, State.RUNNING, State.PAUSED):
                return
            live.require("start", State.STOPPED, State.FAILED)
            await self._ledger.intend(live, "start")
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
            if await self._ledger.holds(live, State.STOPPED, State.FAILED):
                return
            live.require("stop", State.RUNNING, State.PAUSED)
            await self._ledger.intend(live, "stop")
            self.watch.stop(live)
            await live.backend.shut_down(live.box, grace_s)
            failures = await self._end_run(live, State.STOPPED, "user", "stop")
            _raise_first(failures, f"stop '{live.id}'")

    async def pause(self, live: Live) -> None:
        async with live.lock:
            if await self._ledger.holds(live, State.PAUSED):
                return
            live.require("pause", State.RUNNING)
            await live.backend.pause(live.box)
            record = live.record
            if record.expires_at is not None:
                record.ttl_left_s, record.expires_at = max(0.0, record.expires_at - time.time()), None
            await self._ledger.to(live, State.PAUSED, "sandbox.paused")

    async def resume(self, live: Live) -> None:
        async with live.lock:
            if await self._ledger.holds(live, State.RUNNING):
                return
            live.require("resume", State.PAUSED)
            await live.backend.resume(live.box)
            self._resume_ttl(live)
            await self._ledger.to(live, State.RUNNING, "sandbox.resumed")

    async def delete(self, live: Live, reason: str) -> None:
        """From any state to nothing. Whatever holds the lock is cut short by killing the sandbox's processes first."""
        await self._seize(live)
        try:
            if live.gone:
                return
            self.watch.stop(live)
            live.record.reason = reason
            live.record.intent = "delete"
            await self._record_deletion(live, self._ledger.to(live, State.DELETING, "sandbox.deleting"))
            await self._kill(live)
            _raise_first(await self._remove(live, plan="delete"), f"delete '{live.id}'")
        finally:
            live.lock.release()

    async def _record_deletion(self, live: Live, writing: Awaitable[None]) -> None:
        """To be done before anything of it ends: else a daemon that is killed now leaves what looks failed."""
        try:
            await writing
        except errors.DsecError as error:
            # On a full disk too: removing is what makes room.
            log.warning("sandbox=%s deletion not recorded before it begins: %s", live.id, error)

    async def _kill(self, live: Live) -> None:
        # What cannot be killed now is told by the step that waits for its end.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(live.backend.kill, live.box)

    async def _seize(self, live: Live) -> None:
        """Take the lock from whatever holds it or waits for it to be free."""
        recorded = False
        while True:
            # Not only at first: it may be free, and already promised to somebody who waited longer.
            if live.lock.locked() and not recorded:
                await self._record_deletion(live, self._ledger.save(live, durable=False))
                recorded = True
            if live.lock.locked():
                await self._kill(live)
            # A creation may not have got to its processes yet: look again.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await live.lock.acquire()
                    return

    async def change(self, live: Live) -> None:
        """Save what the caller changed in the record."""
        if live.record.expires_at is not None:
            self.deadline(live.record.expires_at, live.id)
        await self._ledger.save(live, durable=True)
        live.changed()

    # --- taking over from an earlier daemon --------------------------------------------------------------------------

    async def adopt(self, live: Live) -> None:
        """Take over a sandbox whose record says that it runs. One that does not any more becomes failed.

        Raises NoCapacity when this daemon has no descriptor or memory left for it: then it is left as it is.
        """
        async with live.lock:
            record, box = live.record, live.box
            box.process = record.process
            if record.boot_id != self._boot_id:
                reason = "host restarted"
            elif record.process is None or not pidfd.is_alive(record.process):
                reason = live.backend.death(box) or "its processes ended"
            else:
                try:
                    await live.backend.reconnect(box)
                    await (live.backend.pause(box) if record.state is State.PAUSED else live.backend.resume(box))
                    self.watch.start(live)
                    return
                except errors.NoCapacity:
                    raise
                except errors.DsecError as error:
                    reason = cause(live, f"agent lost: {error.message}")
            await self._end_run(live, State.FAILED, reason, "adopt-failed")

    async def finish_stop(self, live: Live) -> None:
        """Complete a start or stop that an earlier daemon did not: either way it ends stopped."""
        async with live.lock:
            await self._end_run(live, State.STOPPED, "interrupted by a restart of the daemon", "finish-stop")

    # --- parts -----------------------------------------------------------------------------------------------------

    async def _mount_layers(self, live: Live) -> None:
        with translated(f"mount the layers of '{live.id}'"):
            live.box.layers = tuple([await self._images.mount_layer(digest) for digest in live.record.layers])

    async def _run(self, live: Live, *, copied: bool = False) -> None:
        """The backend's steps are done: start the main command, which a copy has already, record that it runs."""
        record = live.record
        if record.spec.command is not None and not copied:
            await _start_main(live)
        record.process, record.boot_id, record.started_at = live.box.process, self._boot_id, time.time()
        record.intent, record.reason, record.profile = "", None, live.box.profile
        self.watch.start(live)
        await self._ledger.to(live, State.RUNNING, "sandbox.running")

    async def _ended(self, live: Live, reason: str) -> None:
        await self._end_run(live, State.FAILED, reason, "died")

    async def _end_run(self, live: Live, state: State, reason: str, plan: str) -> list[Exception]:
        """Undo what a stop undoes and remember why; what went wrong is returned, and makes the sandbox failed."""
        self.watch.stop(live)
        failures = await undo(plan, live.backend.run_steps(live.box), self._checkpoint)
        record = live.record
        record.reason = "; ".join([reason, *map(str, failures)])
        record.intent, record.process = "", None
        if failures:
            state = State.FAILED
        else:
            record.snapshot = ""  # from now on it boots from its own disk
        # Only a pause stops its time.
        self._resume_ttl(live)
        try:
            await self._ledger.to(live, state, f"sandbox.{state}")
        except errors.DsecError as error:
            # It has ended all the same. A daemon that reads the old record finds that out by itself.
            log.warning("sandbox=%s state=%s not recorded: %s", live.id, state, error)
            failures.append(error)
        return failures

    def _resume_ttl(self, live: Live) -> None:
        record = live.record
        if record.ttl_left_s is not None:
            record.expires_at, record.ttl_left_s = time.time() + record.ttl_left_s, None
            self.deadline(record.expires_at, record.id)

    async def _remove(self, live: Live, plan: str) -> list[Exception]:
        """Undo everything; the row goes last. What cannot be undone now is returned, and keeps the row for another
        try later."""
        self.watch.stop(live)
        self.ports.close(live.id)
        steps = (*live.backend.disk_steps(live.box), *live.backend.run_steps(live.box))
        failures = await undo(plan, steps, self._checkpoint)
        try:
            if not failures:
                await self._ledger.forget(live)
        except errors.DsecError as error:
            failures.append(error)
        if failures:
            await self._stuck(live, failures[0])
            return failures

        live.gone = True
        self._gone(live)
        self._ledger.tell("sandbox.deleted", live)
        live.changed()
        try:
            if not all(self._images.get(digest).names for digest in live.record.layers):
                await self._images.remove_unused()
        except errors.DsecError as error:
            # The sandbox has gone; the image is looked at again with the next one, or at the next start.
            log.warning("sandbox=%s images that it alone held are not removed: %s", live.id, error)
        return failures

    async def _stuck(self, live: Live, failure: Exception) -> None:
        live.record.reason = f"could not be removed yet: {failure}"
        live.record.intent = "delete"
        self.deadline(time.time() + _RETRY_DELETE_S, live.id)
        try:
            await self._ledger.to(live, State.DELETING, "sandbox.stuck")
        except errors.DsecError as error:
            log.warning("sandbox=%s is stuck, and that is not recorded: %s", live.id, error)


def _raise_first(failures: Sequence[Exception], doing: str) -> None:
    if failures:
        with translated(doing):
            raise failures[0]


async def _start_main(live: Live) -> None:
    assert live.record.spec.command is not None
    if live.box.link is None:
        raise errors.SandboxLost(f"start the command of '{live.id}': its agent is gone")
    request = ExecRequest(argv=live.record.spec.command)
    with translate.starting(f"start the command of '{live.id}'", request.argv):
        channel = await live.box.link.start(
            live.start_request(request, MAIN_EXEC, stdin_open=False), attach=False
        )
        await channel.detach()
