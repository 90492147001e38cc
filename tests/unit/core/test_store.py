# SPDX-License-Identifier: Apache-2.0
"""The state database: group commit, savepoints, order, survival of SIGKILL, and what it says about bad files."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from dsecd.core.store import Store
from libdsec.errors import Internal, NoCapacity, Refused

SCHEMA = ("CREATE TABLE t (k INTEGER PRIMARY KEY, v TEXT NOT NULL)",)


def rows(path: Path) -> list[tuple[int, str]]:
    """What another connection sees."""
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT k, v FROM t ORDER BY k").fetchall()


def put(k: int, v: str = "x"):
    return lambda db: db.execute("INSERT INTO t VALUES (?, ?)", (k, v)).rowcount


def fail(db: sqlite3.Connection) -> None:
    db.execute("INSERT INTO t VALUES (1000, 'half')")
    raise ValueError("mine")


def test_a_write_is_seen_by_others_once_its_caller_resumes(tmp_path: Path):
    async def main() -> None:
        store = Store.open(tmp_path / "db", SCHEMA)
        for k in range(20):
            assert await store.write(put(k), durable=k % 2 == 0) == 1
            assert rows(tmp_path / "db")[-1] == (k, "x")
            assert store.read(lambda db: db.execute("SELECT max(k) FROM t").fetchone()) == (k,)
        store.close()

    asyncio.run(main())


def held(store: Store) -> threading.Event:
    """Keep the writer busy until the event is set, so that what follows lands in one transaction."""
    go, started = threading.Event(), threading.Event()

    def hold(_db: sqlite3.Connection) -> None:
        started.set()
        go.wait(10)

    store.submit(hold)
    assert started.wait(10)
    return go


def test_one_failing_write_does_not_undo_its_neighbours(tmp_path: Path):
    async def main() -> list[object]:
        store = Store.open(tmp_path / "db", SCHEMA)
        go = held(store)
        writes = [store.submit(f) for f in (put(1), fail, put(2), put(1, "again"), put(3))]
        go.set()
        results = await asyncio.gather(*writes, return_exceptions=True)
        store.close()
        return results

    results = asyncio.run(main())
    assert [type(r) for r in results] == [int, ValueError, int, sqlite3.IntegrityError, int]
    assert [k for k, _ in rows(tmp_path / "db")] == [1, 2, 3]


def test_a_failing_write_alone_is_undone(tmp_path: Path):
    async def main() -> None:
        store = Store.open(tmp_path / "db", SCHEMA)
        with pytest.raises(ValueError, match="mine"):
            await store.write(fail)
        await store.write(put(1))
        store.close()

    asyncio.run(main())
    assert rows(tmp_path / "db") == [(1, "x")]


def test_many_writes_share_a_transaction(tmp_path: Path):
    async def main() -> int:
        store = Store.open(tmp_path / "db", SCHEMA)
        store._writer.set_trace_callback(statements.append)
        go = held(store)
        writes = [store.submit(put(k), durable=True) for k in range(100)]
        go.set()
        await asyncio.gather(*writes)
        store.close()
        return sum(s == "COMMIT" for s in statements)

    statements: list[str] = []
    assert asyncio.run(main()) == 2  # the one that held the writer, and all the others


@pytest.mark.parametrize("durable", [True, False])
def test_durable_sets_how_a_commit_is_synced(tmp_path: Path, durable: bool):
    async def main() -> int:
        store = Store.open(tmp_path / "db", SCHEMA)
        await store.write(put(1), durable=not durable)
        level = await store.write(lambda db: db.execute("PRAGMA synchronous").fetchone()[0], durable=durable)
        store.close()
        return int(level)

    assert asyncio.run(main()) == (2 if durable else 1)  # FULL, NORMAL


def test_a_cancelled_caller_does_not_cancel_the_write(tmp_path: Path):
    async def main() -> None:
        store = Store.open(tmp_path / "db", SCHEMA)
        go = held(store)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(store.write(put(7)))
            await asyncio.sleep(0)
            task.cancel()
        go.set()
        assert task.cancelled()
        store.close()

    asyncio.run(main())
    assert rows(tmp_path / "db") == [(7, "x")]


def test_close_finishes_what_was_handed_over(tmp_path: Path):
    async def main() -> None:
        store = Store.open(tmp_path / "db", SCHEMA)
        for k in range(2000):
            store.submit(put(k))
        store.close()
        with pytest.raises(RuntimeError, match="closed"):
            await store.write(put(1))

    asyncio.run(main())
    assert len(rows(tmp_path / "db")) == 2000


def test_a_full_disk_is_no_capacity_and_loses_nothing_acknowledged(tmp_path: Path):
    async def main() -> int:
        store = Store.open(tmp_path / "db", SCHEMA)
        await store.write(lambda db: db.execute("PRAGMA max_page_count = 20"))
        done = 0

        async def fill() -> None:
            nonlocal done
            for done in range(1000):
                await store.write(put(done, "y" * 5000))

        with pytest.raises(NoCapacity, match="no space left"):
            await fill()
        go = held(store)
        later = [store.submit(put(k, "y" * 5000)) for k in range(2000, 2003)]
        go.set()
        answers = await asyncio.gather(*later, return_exceptions=True)
        assert [type(a) for a in answers] == [NoCapacity] * 3
        await store.write(lambda db: db.execute("PRAGMA max_page_count = 100000"))
        await store.write(put(5000))
        store.close()
        return done

    done = asyncio.run(main())
    assert done > 2
    assert [k for k, _ in rows(tmp_path / "db")] == [*range(done), 5000]


_WRITES_UNTIL_KILLED = """
import asyncio, sys
from pathlib import Path
from dsecd.core.store import Store

async def worker(store, first):
    for k in range(first, 10**9, 16):
        await store.write(lambda db: db.execute("INSERT INTO t VALUES (?, 'x')", (k,)), durable=k % 7 == 0)
        print(k, flush=True)

async def main():
    store = Store.open(Path(sys.argv[1]), ("CREATE TABLE t (k INTEGER PRIMARY KEY, v TEXT NOT NULL)",))
    async with asyncio.TaskGroup() as group:
        for first in range(16):
            group.create_task(worker(store, first))

asyncio.run(main())
"""


def test_every_acknowledged_write_survives_sigkill(tmp_path: Path):
    path = tmp_path / "db"
    with subprocess.Popen(
        [sys.executable, "-c", _WRITES_UNTIL_KILLED, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        acknowledged = [int(child.stdout.readline()) for _ in range(500)]
        child.send_signal(signal.SIGKILL)
        acknowledged += [
            int(line) for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")
        ]
        assert child.wait() == -signal.SIGKILL
    store = Store.open(path, SCHEMA)
    kept = {k for (k,) in store.read(lambda db: db.execute("SELECT k FROM t").fetchall())}
    store.close()
    assert set(acknowledged) <= kept
    assert len(kept) < len(acknowledged) + 16 + 1


def test_migrations_run_once_and_in_order(tmp_path: Path):
    first = ("CREATE TABLE a (x)", "INSERT INTO a VALUES (1)")
    Store.open(tmp_path / "db", first).close()
    store = Store.open(tmp_path / "db", (*first, "INSERT INTO a VALUES (2); CREATE TABLE b (y)"))
    assert store.read(lambda db: db.execute("SELECT x FROM a").fetchall()) == [(1,), (2,)]
    store.close()


def test_a_failing_migration_leaves_the_version_before_it(tmp_path: Path):
    with pytest.raises(sqlite3.OperationalError, match="nonsense"):
        Store.open(tmp_path / "db", ("CREATE TABLE a (x)", "INSERT INTO a VALUES (1); nonsense"))
    store = Store.open(tmp_path / "db", ("CREATE TABLE a (x)",))
    assert store.read(lambda db: db.execute("SELECT x FROM a").fetchall()) == []
    store.close()


def test_a_newer_database_is_refused(tmp_path: Path):
    Store.open(tmp_path / "db", (*SCHEMA, "SELECT 1")).close()
    with pytest.raises(Internal, match="it has version 2, this dsecd knows up to 1"):
        Store.open(tmp_path / "db", SCHEMA)


def test_a_damaged_database_is_named(tmp_path: Path):
    path = tmp_path / "db"
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(Internal, match="it is damaged") as caught:
        Store.open(path, SCHEMA)
    assert str(path) in caught.value.message
    assert str(path) in (caught.value.hint or "")


def test_a_missing_directory_is_refused_with_its_path(tmp_path: Path):
    with pytest.raises(Refused, match=r"no-such/db.*No such file"):
        Store.open(tmp_path / "no-such" / "db", SCHEMA)


def test_only_the_owner_can_read_the_files(tmp_path: Path):
    store = Store.open(tmp_path / "db", SCHEMA)
    modes = {p.name: p.stat().st_mode & 0o777 for p in tmp_path.iterdir()}
    store.close()
    assert modes == {"db": 0o600, "db-wal": 0o600, "db-shm": 0o600}


def test_reading_cannot_write(tmp_path: Path):
    store = Store.open(tmp_path / "db", SCHEMA)
    with pytest.raises(Refused, match="readonly"):
        store.read(put(1))
    store.close()
