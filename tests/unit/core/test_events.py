# SPDX-License-Identifier: Apache-2.0
"""The event log: numbers that rise across restarts, a bounded history, followers that cannot hold anybody back."""

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from dsecd.core import events as module
from dsecd.core.events import Events
from dsecd.core.principal import from_peer
from dsecd.core.schema import MIGRATIONS
from dsecd.core.store import Store

ALICE = from_peer(1000, 1000, 1, frozenset(), admin_gid=50)
BOB = from_peer(1001, 1001, 1, frozenset(), admin_gid=50)
CAROL = from_peer(1002, 1002, 1, frozenset({50}), admin_gid=50)


def run(path: Path, body: Callable[[Events, Store], Awaitable[None]], *, boot_id: str = "boot-1") -> None:
    async def main() -> None:
        store = Store.open(path / "db", MIGRATIONS)
        try:
            await body(Events(store, boot_id=boot_id), store)
        finally:
            store.close()

    asyncio.run(main())


async def settle(store: Store) -> None:
    await store.write(lambda _db: None)
    await asyncio.sleep(0)


def test_numbers_rise_by_one_and_go_on_after_a_restart(tmp_path: Path):
    async def emit_three(events: Events, _store: Store) -> None:
        start = events.last
        for name in ("a", "b", "c"):
            events.emit("sandbox.created", name, image="base")
        found = await events.follow(start).next()
        while len(found) < 3:
            found += await events.follow(found[-1].seq).next()
        seen.extend((e.seq, e.subject, e.details) for e in found)

    seen: list[tuple[int, str, dict[str, str]]] = []
    run(tmp_path, emit_three)
    run(tmp_path, emit_three)
    assert [(seq, subject) for seq, subject, _ in seen] == list(zip(range(1, 7), "abcabc", strict=True))
    assert seen[0][2] == {"image": "base"}
    with closing(sqlite3.connect(tmp_path / "db")) as db:
        stored = db.execute("SELECT seq, kind, subject, details FROM events ORDER BY seq").fetchall()
    assert [(seq, subject) for seq, _, subject, _ in stored] == [(s, n) for s, n, _ in seen]
    assert json.loads(stored[0][3]) == {"image": "base"}


def test_a_reboot_skips_numbers_that_a_power_loss_may_have_taken(tmp_path: Path):
    async def emit_one(events: Events, store: Store) -> None:
        events.emit("daemon.started")
        await settle(store)
        last.append(events.last)

    last: list[int] = []
    for boot in ("boot-1", "boot-1", "boot-2", "boot-2"):
        run(tmp_path, emit_one, boot_id=boot)
    assert last == [1, 2, 3 + module.BOOT_SKIP, 4 + module.BOOT_SKIP]


def test_an_event_is_shown_only_after_its_commit(tmp_path: Path):
    async def body(events: Events, store: Store) -> None:
        events.emit("x")
        assert events.after(0).events == ()
        await settle(store)
        assert [e.seq for e in events.after(0).events] == [1]

    run(tmp_path, body)


def test_history_is_bounded_and_a_slow_follower_is_told_of_the_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "HISTORY", 100)
    monkeypatch.setattr(module, "TRIM_EVERY", 10)
    monkeypatch.setattr(module, "RECENT", 50)

    async def body(events: Events, store: Store) -> None:
        slow = events.follow(5)
        for _ in range(500):
            events.emit("tick")
        await settle(store)
        first = await slow.next(limit=1000)
        assert first[0].kind == "events.gap"
        assert first[0].details == {"missed_at_most": 395, "after": 5, "up_to": 400}
        assert [e.seq for e in first[1:]] == list(range(401, 501))
        # Asking for all there is, is not a gap.
        assert events.after(0, 3).events[0].seq == 401

    run(tmp_path, body)
    with closing(sqlite3.connect(tmp_path / "db")) as db:
        assert db.execute("SELECT count(*), min(seq) FROM events").fetchone() == (100, 401)


def test_the_newest_come_from_memory_and_older_ones_from_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "RECENT", 10)

    async def body(events: Events, store: Store) -> None:
        reads: list[str] = []
        for _ in range(50):
            events.emit("tick")
        await settle(store)
        store._reader.set_trace_callback(reads.append)
        assert [e.seq for e in events.after(40).events] == list(range(41, 51))
        assert reads == []
        assert [e.seq for e in events.after(39).events] == list(range(40, 51))
        assert len(reads) == 1

    run(tmp_path, body)


def test_wait_blocks_until_there_is_one_and_ends_at_its_limit(tmp_path: Path):
    async def body(events: Events, store: Store) -> None:
        assert (await events.wait(0, 0.01)).events == ()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(events.wait(0, 30))
            await asyncio.sleep(0)
            assert not waiting.done()
            events.emit("x")
        assert [e.kind for e in waiting.result().events] == ["x"]
        assert waiting.result().last == 1
        assert not events._waiters
        await settle(store)

    run(tmp_path, body)


def test_others_events_are_not_shown_but_passed_over(tmp_path: Path):
    async def body(events: Events, store: Store) -> None:
        events.emit("sandbox.created", "a", owner_uid=1000)
        events.emit("sandbox.created", "b", owner_uid=1001)
        events.emit("image.imported", "i")
        await settle(store)
        seen = {p.uid: [e.subject for e in events.after(0, principal=p).events] for p in (ALICE, BOB, CAROL)}
        assert seen == {1000: ["a", "i"], 1001: ["b", "i"], 1002: ["a", "b", "i"]}
        # Paging by one passes over what is hidden.
        page = events.after(1, 1, BOB)
        assert [e.subject for e in page.events] == ["b"]
        page = events.after(0, 1, BOB)
        assert ([e.subject for e in page.events], page.last) == (["b"], 2)
        async with asyncio.timeout(60):
            assert [e.subject for e in await events.follow(0, BOB).next(limit=1)] == ["b"]

    run(tmp_path, body)


def test_a_number_from_the_future_does_not_silence_its_holder(tmp_path: Path):
    async def body(events: Events, store: Store) -> None:
        events.emit("x")
        await settle(store)
        assert events.after(10**9).last == 1

    run(tmp_path, body)


def test_close_ends_followers_and_waiters(tmp_path: Path):
    async def body(events: Events, _store: Store) -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            following = group.create_task(events.follow().next())
            waiting = group.create_task(events.wait(0, 100))
            await asyncio.sleep(0)
            events.close()
        assert following.result() == []
        assert waiting.result().events == ()

    run(tmp_path, body)
