# SPDX-License-Identifier: Apache-2.0
"""Jobs that may take longer than a second: started, watched, cancelled, and remembered for an hour.

Here: their life and record. Not here: what they do; a job is a coroutine function that is given a way to
report progress.

A job ends with the daemon. One that a restart interrupted is found as failed, retryable, with ``interrupted``
in the error's details; whatever it left half done is reconcile's business.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from dsecd.core.principal import Principal
from dsecd.core.store import Store
from dsecd.core.tasks import Tasks
from libdsec.errors import BackendFailed, DsecError, Internal, NotFound, WrongState
from libdsec.types import ErrorBody, Operation, OperationState

log = logging.getLogger(__name__)

KEEP_S = 3600.0
KEEP_MAX = 1000
#: How long a cancelled job may take to undo before ``cancel`` answers without waiting for the rest.
CANCEL_WAIT_S = 30.0

#: A job reports where it stands by calling this; the newest report replaces the one before.
Report = Callable[[BaseModel | dict[str, Any]], None]


class _Job:
    """An operation that is known, running or finished."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.ended = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.cancel_asked = False
        self.finished_at = 0.0

    def report(self, progress: BaseModel | dict[str, Any]) -> None:
        data = progress.model_dump(mode="json") if isinstance(progress, BaseModel) else dict(progress)
        self.operation = self.operation.model_copy(update={"progress": data})


class Operations:
    """All operations; the running ones belong to ``tasks``. Used on the event loop's thread only."""

    def __init__(self, store: Store, tasks: Tasks) -> None:
        self._store = store
        self._tasks = tasks
        self._jobs: dict[str, _Job] = {}

    async def recover(self) -> None:
        """Load what an earlier daemon left; those it did not finish become failed.  Call once, before serving."""
        for body, finished_at in self._store.read(_select):
            operation = Operation.model_validate_json(body)
            job = _Job(operation)
            self._jobs[operation.id] = job
            if finished_at is None:
                error = _interrupted(operation)
                await self._finish(job, OperationState.FAILED, error=error)
            else:
                job.finished_at = finished_at
                job.ended.set()
        await self._prune()

    async def start(
        self, kind: str, principal: Principal, coro_fn: Callable[[Report], Awaitable[Any]]
    ) -> Operation:
        """Record a job, then run it; returns as soon as the record is committed."""
        operation = Operation(
            id=f"op-{secrets.token_hex(8)}", kind=kind, state=OperationState.RUNNING,
            owner_uid=principal.uid, created_at=datetime.now(UTC),
        )  # fmt: skip
        await self._save(operation, None)
        job = _Job(operation)
        self._jobs[operation.id] = job
        job.task = self._tasks.spawn(f"operation {operation.id} {kind}", self._run(job, coro_fn))
        await self._prune()
        return job.operation

    async def _run(self, job: _Job, coro_fn: Callable[[Report], Awaitable[Any]]) -> None:
        operation = job.operation
        try:
            result = to_jsonable_python(await coro_fn(job.report), bytes_mode="base64")
        except DsecError as error:
            await self._finish(job, OperationState.FAILED, error=_body(error))
        except asyncio.CancelledError:
            if job.cancel_asked:
                await self._finish(job, OperationState.CANCELLED)
            else:
                await self._finish(job, OperationState.FAILED, error=_interrupted(operation))
                raise
        except Exception:  # a boundary: a bug in a job is that job's failure
            log.exception("operation failed operation=%s kind=%s", operation.id, operation.kind)
            bug = Internal(f"{operation.kind}: internal error", request_id=operation.id)
            await self._finish(job, OperationState.FAILED, error=_body(bug))
        else:
            await self._finish(job, OperationState.DONE, result=result)

    async def _finish(
        self, job: _Job, state: OperationState, *, result: Any = None, error: ErrorBody | None = None
    ) -> None:
        now = datetime.now(UTC)
        job.finished_at = now.timestamp()
        finished = job.operation.model_copy(
            update={"state": state, "finished_at": now, "result": result, "error": error}
        )
        try:
            await self._save(finished, job.finished_at)
        except DsecError as failure:
            # Those who wait must still hear; after a restart it will look interrupted.
            log.warning("operation's end not stored operation=%s: %s", finished.id, failure)
        finally:
            job.operation = finished
            job.ended.set()
        log.info("operation ended operation=%s kind=%s state=%s", finished.id, finished.kind, state.value)

    def get(self, principal: Principal, operation_id: str) -> Operation:
        """One operation.  Raises NotFound, Denied."""
        return self._job(principal, operation_id, "inspect").operation

    async def wait(self, principal: Principal, operation_id: str, wait_s: float) -> Operation:
        """As ``get``, but block up to ``wait_s`` seconds until it has ended."""
        job = self._job(principal, operation_id, "wait for")
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await job.ended.wait()
        return job.operation

    def list(self, principal: Principal) -> list[Operation]:
        """Those the principal sees, oldest first, without their results (which may be large)."""
        return [
            job.operation.model_copy(update={"result": None})
            for job in self._jobs.values()
            if principal.sees(job.operation.owner_uid)
        ]

    async def cancel(self, principal: Principal, operation_id: str) -> Operation:
        """Ask a running job to stop and wait, bounded, until it has undone its work.

        Raises WrongState when it has already ended otherwise; cancelling twice is fine.
        """
        job = self._job(principal, operation_id, "cancel")
        state = job.operation.state
        if state not in (OperationState.RUNNING, OperationState.CANCELLED):
            raise WrongState(
                f"cancel {operation_id!r}: it is {state.value}, not running",
                state=state.value,
                required="running",
            )
        if job.task is not None and not job.ended.is_set() and not job.cancel_asked:
            job.cancel_asked = True
            job.task.cancel()
        return await self.wait(principal, operation_id, CANCEL_WAIT_S)

    def _job(self, principal: Principal, operation_id: str, doing: str) -> _Job:
        job = self._jobs.get(operation_id)
        if job is None:
            raise NotFound(f"{doing} {operation_id!r}: no such operation")
        principal.may_touch(job.operation.owner_uid, f"{doing} {operation_id!r}")
        return job

    async def _save(self, operation: Operation, finished_at: float | None) -> None:
        row = (operation.id, operation.owner_uid, finished_at, operation.model_dump_json())
        await self._store.write(
            lambda db: db.execute("INSERT OR REPLACE INTO operations VALUES (?, ?, ?, ?)", row)
        )

    async def _prune(self) -> None:
        """Forget finished operations that are too old or too many."""
        ended = sorted((j for j in self._jobs.values() if j.ended.is_set()), key=lambda j: j.finished_at)
        oldest = time.time() - KEEP_S
        excess = len(ended) - KEEP_MAX
        gone = [(job.operation.id,) for i, job in enumerate(ended) if i < excess or job.finished_at < oldest]
        if not gone:
            return
        for (operation_id,) in gone:
            del self._jobs[operation_id]
        await self._store.write(lambda db: db.executemany("DELETE FROM operations WHERE id = ?", gone))


def _select(db: sqlite3.Connection) -> list[tuple[str, float | None]]:
    return db.execute("SELECT body, finished_at FROM operations").fetchall()


def _body(error: DsecError) -> ErrorBody:
    return ErrorBody.model_validate(error.to_wire())


def _interrupted(operation: Operation) -> ErrorBody:
    message = f"{operation.kind}: the daemon was restarted before it was done"
    return _body(BackendFailed(message, hint="start it again", retryable=True, interrupted=True))
