# SPDX-License-Identifier: Apache-2.0
"""The state database: SQLite in WAL mode with one writer thread and group commit.

Here: opening, migrating, handing functions to the writer, reading on the loop's thread. Not here: tables
(``schema.py``) and queries (beside the code that asks them).

Durability. A write whose caller has resumed survives the death of the daemon by any signal. With
``durable=True`` it also survives a loss of power; without, power loss may undo the newest writes, always in
order and never half of one. Source: https://www.sqlite.org/wal.html and
https://www.sqlite.org/pragma.html#pragma_synchronous
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from libdsec.errors import DsecError, Internal, NoCapacity, Refused

log = logging.getLogger(__name__)

T = TypeVar("T")

#: A transaction takes at most this many writes, so that the first of a long queue does not wait for the last.
BATCH_MAX = 512


@dataclass(slots=True)
class _Write:
    fn: Callable[[sqlite3.Connection], Any]
    durable: bool
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    result: Any = None
    error: BaseException | None = None


class Store:
    """One database file. ``write`` from the event loop, ``read`` from the thread that opened it."""

    def __init__(self, path: Path, writer: sqlite3.Connection, reader: sqlite3.Connection) -> None:
        self.path = path
        self._writer = writer
        self._reader = reader
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._closed = False
        self._full_sync: bool | None = None
        self._thread = threading.Thread(target=self._run, name="dsec-store", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path, schemas: Sequence[str]) -> Store:
        """Open or create the database and bring it to version ``len(schemas)``.  Blocks.

        Raises Internal when the file is damaged or newer than this daemon, NoCapacity on a full disk, Refused
        when the kernel says no.
        """
        try:
            # SQLite gives -wal and -shm the mode of the database; nobody else may read what users asked for.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise Refused(f"open the state database {str(path)!r}: {error.strerror}") from error
        writer: sqlite3.Connection | None = None
        try:
            writer = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
            _prepare(writer, path, schemas)
            reader = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=10
            )
        except sqlite3.Error as error:
            if writer is not None:
                writer.close()
            raise _translated(error, path, "open") from error
        except DsecError:
            if writer is not None:
                writer.close()
            raise
        return cls(path, writer, reader)

    async def write(self, fn: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        """Run ``fn`` in the writer thread and return its result after the commit.

        ``fn`` may be one of many in a transaction, under a savepoint of its own: what it raises is raised
        here and undoes only itself. It must not commit, and must not use ``executescript``, which commits. It
        runs and is committed even when the caller is cancelled meanwhile. Raises NoCapacity on a full disk.
        """
        return await self.submit(fn, durable=durable)

    def submit(self, fn: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> asyncio.Future[T]:
        """As ``write``, without waiting; writes are made in the order of the calls.

        asyncio logs a failure that nobody awaits.
        """
        if self._closed:
            raise RuntimeError(f"the store {self.path} is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put(_Write(fn, durable, future, loop))
        return future

    def read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``fn`` at once on a read-only connection: for quick, indexed queries, since the event loop waits.

        Each statement sees the newest commit.
        """
        try:
            return fn(self._reader)
        except sqlite3.DatabaseError as error:
            raise _translated(error, self.path, "read") from error

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Finish what was handed over, then close.  Blocks for as long as that takes; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._reader.close()
        self._writer.close()

    # --- the writer thread
    # ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            stop = False
            with suppress(queue.Empty):
                while len(batch) < BATCH_MAX:
                    item = self._queue.get_nowait()
                    if item is None:
                        stop = True
                        break
                    batch.append(item)
            try:
                self._commit(batch)
            except sqlite3.Error as error:
                self._fail(batch, error)
            self._hand_back(batch)
            if stop:
                return

    def _commit(self, batch: Sequence[_Write]) -> None:
        connection = self._writer
        self._set_sync(full=any(item.durable for item in batch))
        connection.execute("BEGIN IMMEDIATE")
        alone = len(batch) == 1
        for item in batch:
            if not alone:
                connection.execute("SAVEPOINT item")
            try:
                item.result = item.fn(connection)
            # Broad: the error belongs to the caller that awaits it, and the thread goes on.
            except BaseException as error:  # noqa: BLE001
                # A full disk or an I/O error makes SQLite roll back everything on its own.
                if not connection.in_transaction:
                    self._fail(batch, error)
                    return
                item.error = _translated(error, self.path, "write")
                connection.execute("ROLLBACK" if alone else "ROLLBACK TO item")
                if alone:
                    return
            if not alone:
                connection.execute("RELEASE item")
        connection.execute("COMMIT")

    def _fail(self, batch: Sequence[_Write], error: BaseException) -> None:
        """The transaction is lost, so none of the batch was written."""
        if self._writer.in_transaction:
            with suppress(sqlite3.Error):
                self._writer.execute("ROLLBACK")
        for item in batch:
            item.error = item.error or _translated(error, self.path, "write")

    def _set_sync(self, *, full: bool) -> None:
        if full is not self._full_sync:
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
            self._full_sync = full

    def _hand_back(self, batch: list[_Write]) -> None:
        # Nearly always one loop; tests may use several after each other.
        for loop in {item.loop for item in batch}:
            # RuntimeError: that loop is closed, so nobody waits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, [item for item in batch if item.loop is loop])


def _resolve(batch: Sequence[_Write]) -> None:
    for item in batch:
        if item.future.done():  # its awaiter was cancelled
            if item.error is not None:
                log.warning("a write that nobody waits for any more failed: %s", item.error)
        elif item.error is not None:
            item.future.set_exception(item.error)
        else:
            item.future.set_result(item.result)


def _prepare(connection: sqlite3.Connection, path: Path, schemas: Sequence[str]) -> None:
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise Refused(
            f"open the state database {str(path)!r}: its file system has no shared memory, needed for WAL"
        )
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise _damaged(path, verdict)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(schemas):
        raise Internal(
            f"open the state database {str(path)!r}: it has version {version}, this dsecd knows up to {len(schemas)}",
            hint="install the dsecd that wrote it, or a newer one",
        )
    connection.execute("PRAGMA synchronous = FULL")
    for number, script in enumerate(schemas[version:], start=version + 1):
        try:
            connection.executescript(f"BEGIN IMMEDIATE;\n{script};\nPRAGMA user_version = {number};\nCOMMIT;")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _damaged(path: Path, verdict: str) -> Internal:
    return Internal(
        f"open the state database {str(path)!r}: it is damaged: {verdict.splitlines()[0]}",
        hint=f"keep a copy, then restore {path} from a backup, or move it and its -wal and -shm away to start empty, "
        "which removes every sandbox with its files",
    )


def _translated(error: BaseException, path: Path, doing: str) -> BaseException:
    """What SQLite says about the disk, in our words; everything else (constraints, bugs) as it is."""
    if isinstance(error, StopIteration):
        return RuntimeError(f"a write raised StopIteration({error})")  # which a future cannot carry
    if not isinstance(error, sqlite3.Error):
        return error
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    name = getattr(error, "sqlite_errorname", "")
    if code == sqlite3.SQLITE_FULL:
        return NoCapacity(f"{doing} the state database {str(path)!r}: no space left on its file system")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _damaged(path, str(error))
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return Refused(f"{doing} the state database {str(path)!r}: {error} ({name})")
    return error
