# SPDX-License-Identifier: Apache-2.0
"""Operations: their record survives the daemon, waiting ends with them, cancelling waits for the undo."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from dsecd.core import operations as module
from dsecd.core.operations import Operations, Report
from dsecd.core.principal import from_peer
from dsecd.core.schema import MIGRATIONS
from dsecd.core.store import Store
from dsecd.core.tasks import Tasks
from libdsec.errors import Denied, NoCapacity, NotFound, WrongState
from libdsec.types import ErrorBody, ImportProgress, Operation, OperationState

ALICE = from_peer(1000, 1000, 1, frozenset(), admin_gid=None)
BOB = from_peer(1001, 1001, 1, frozenset(), admin_gid=None)
ROOT = from_peer(0, 0, 1, frozenset(), admin_gid=None)


def run(path: Path, body: Callable[[Operations], Awaitable[None]]) -> None:
    async def main() -> None:
        store, tasks = Store.open(path / "db", MIGRATIONS), Tasks()
        try:
            operations = Operations(store, tasks)
            await operations.recover()
            await body(operations)
        finally:
            await tasks.close()
            store.close()

    asyncio.run(main())


def stored(path: Path) -> int:
    with closing(sqlite3.connect(path / "db")) as db:
        return int(db.execute("SELECT count(*) FROM operations").fetchone()[0])


async def never(_report: Report) -> None:
    await asyncio.Event().wait()


def test_a_job_reports_progress_and_its_result_survives_a_restart(tmp_path: Path):
    async def job(report: Report) -> list[ErrorBody]:
        report(ImportProgress(phase="unpack", entries=3))
        reported.set()
        await go.wait()
        return [ErrorBody(code="c", message="m")]

    async def first(operations: Operations) -> None:
        started = await operations.start("test", ALICE, job)
        assert (started.state, started.owner_uid) == (OperationState.RUNNING, 1000)
        assert stored(tmp_path) == 1
        await reported.wait()
        assert operations.get(ALICE, started.id).progress["entries"] == 3
        assert (await operations.wait(ALICE, started.id, 0.01)).state is OperationState.RUNNING
        go.set()
        done = await operations.wait(ALICE, started.id, 30)
        assert done.state is OperationState.DONE
        ids.append(done)

    async def second(operations: Operations) -> None:
        assert operations.get(ALICE, ids[0].id) == ids[0]
        (listed,) = operations.list(ALICE)
        assert (listed.id, listed.result) == (ids[0].id, None)

    go, reported = asyncio.Event(), asyncio.Event()
    ids: list[Operation] = []
    run(tmp_path, first)
    assert ids[0].result[0]["code"] == "c"
    run(tmp_path, second)


def test_a_failing_job_keeps_the_error_of_the_tree(tmp_path: Path):
    async def job(_report: Report) -> None:
        raise NoCapacity("import 'x': no space left", needed=5)

    async def body(operations: Operations) -> None:
        done = await operations.wait(ALICE, (await operations.start("import", ALICE, job)).id, 30)
        assert done.state is OperationState.FAILED
        assert done.error == ErrorBody(
            code="no-capacity", message="import 'x': no space left", retryable=True, details={"needed": 5}
        )

    run(tmp_path, body)


def test_a_bug_in_a_job_is_not_told_to_the_client(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async def job(_report: Report) -> None:
        raise KeyError("secret")

    async def body(operations: Operations) -> None:
        done = await operations.wait(ALICE, (await operations.start("import", ALICE, job)).id, 30)
        assert done.error is not None
        assert done.error.code == "internal"
        assert "secret" not in done.error.model_dump_json()

    run(tmp_path, body)
    assert "KeyError: 'secret'" in caplog.text


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_job_that_a_restart_interrupted_is_failed_and_says_so(tmp_path: Path, how: str):
    async def first(operations: Operations) -> None:
        ids.append((await operations.start("import", ALICE, never)).id)
        if how == "killed":
            with closing(sqlite3.connect(tmp_path / "db")) as db:
                rows.extend(db.execute("SELECT * FROM operations").fetchall())
        else:
            await asyncio.sleep(0)

    async def second(operations: Operations) -> None:
        operation = operations.get(ALICE, ids[0])
        assert operation.state is OperationState.FAILED
        assert operation.finished_at is not None
        assert operation.error is not None
        assert operation.error.retryable
        assert operation.error.details == {"interrupted": True}

    ids: list[str] = []
    rows: list[tuple[object, ...]] = []
    run(tmp_path, first)
    if how == "killed":  # what a SIGKILL leaves is the record as it was while the job ran
        with closing(sqlite3.connect(tmp_path / "db")) as db:
            db.executemany("INSERT OR REPLACE INTO operations VALUES (?, ?, ?, ?)", rows)
            db.commit()
    run(tmp_path, second)
    run(tmp_path, second)


def test_cancel_waits_until_the_job_has_undone_its_work(tmp_path: Path):
    async def job(_report: Report) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            undone.append(True)

    async def body(operations: Operations) -> None:
        operation = await operations.start("import", ALICE, job)
        await asyncio.sleep(0)
        with pytest.raises(Denied):
            await operations.cancel(BOB, operation.id)
        assert (await operations.cancel(ROOT, operation.id)).state is OperationState.CANCELLED
        assert undone == [True]
        assert (await operations.cancel(ALICE, operation.id)).state is OperationState.CANCELLED

    undone: list[bool] = []
    run(tmp_path, body)


def test_cancel_of_a_finished_job_is_wrong_state(tmp_path: Path):
    async def job(_report: Report) -> None:
        return None

    async def body(operations: Operations) -> None:
        operation = await operations.start("import", ALICE, job)
        await operations.wait(ALICE, operation.id, 30)
        with pytest.raises(WrongState, match="it is done, not running"):
            await operations.cancel(ALICE, operation.id)

    run(tmp_path, body)


def test_others_operations_are_denied_and_unknown_ones_not_found(tmp_path: Path):
    async def body(operations: Operations) -> None:
        operation = await operations.start("import", ALICE, never)
        with pytest.raises(Denied, match="it belongs to uid 1000, you are uid 1001"):
            operations.get(BOB, operation.id)
        assert operations.list(BOB) == []
        assert [o.id for o in operations.list(ROOT)] == [operation.id]
        with pytest.raises(NotFound):
            operations.get(ROOT, "op-none")

    run(tmp_path, body)


def test_finished_ones_are_kept_for_a_time_and_up_to_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def job(_report: Report) -> None:
        return None

    async def body(operations: Operations) -> None:
        monkeypatch.setattr(module, "KEEP_MAX", 3)
        for _ in range(6):
            operation = await operations.start("import", ALICE, job)
            await operations.wait(ALICE, operation.id, 30)
        await operations.start("import", ALICE, never)
        assert len(operations.list(ALICE)) == stored(tmp_path) == 4
        monkeypatch.setattr(module, "KEEP_S", -1.0)
        running = await operations.start("import", ALICE, never)
        assert len(operations.list(ALICE)) == stored(tmp_path) == 2
        assert operations.get(ALICE, running.id).state is OperationState.RUNNING

    run(tmp_path, body)
