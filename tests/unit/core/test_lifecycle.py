# SPDX-License-Identifier: Apache-2.0
"""Transitions when something else goes wrong at the same time: a full disk, a stuck kernel, another caller.

The store is real, on a disk that can be made full at will; the backend is a peer that we cannot have here.
"""

import asyncio
import sqlite3
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from dsecd.backends.agentlink import AgentLink
from dsecd.backends.base import Backend, Box
from dsecd.backends.plan import Step
from dsecd.core import reconcile, records
from dsecd.core.admission import Admission
from dsecd.core.events import Events
from dsecd.core.images.store import ImageStore
from dsecd.core.lifecycle import Lifecycle
from dsecd.core.live import Defaults, Live
from dsecd.core.pressure import Gauge, Thresholds
from dsecd.core.principal import from_peer
from dsecd.core.records import Record
from dsecd.core.registry import Registry
from dsecd.core.sandboxes import Sandboxes
from dsecd.core.schema import MIGRATIONS
from dsecd.core.store import Store
from dsecd.core.tasks import Tasks
from dsecd.linux import pidfd
from libdsec.errors import BackendFailed, NoCapacity, NotFound, SandboxLost, TimedOut, WrongState
from libdsec.types import SandboxSpec, State, UpdateRequest

ROOT = from_peer(0, 0, 1, frozenset(), admin_gid=None)


class Disk(Store):
    """The real store, on a disk that is ``full`` when a test says so."""

    full = False

    def submit(self, fn: Callable[[sqlite3.Connection], Any], *, durable: bool = False) -> asyncio.Future[Any]:
        if self.full:
            failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            failed.set_exception(NoCapacity("write the state database: no space left"))
            return failed
        return super().submit(fn, durable=durable)


def _sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "100"])


class FakeBackend:
    """Sandboxes that are a `sleep` each; its ends can be made to fail."""

    name = "container"
    needs: frozenset[str] = frozenset()
    ids = 65536

    def __init__(self) -> None:
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.end_error: Exception | None = None
        self.reconnect_error: Exception | None = None
        self.told: str | None = None
        self.more_steps: tuple[Step, ...] = ()
        self.reconnects: list[str] = []
        self.starts = 0

    def disk_steps(self, box: Box) -> Sequence[Step]:
        del box
        return ()

    def run_steps(self, box: Box) -> Sequence[Step]:
        async def start() -> None:
            child = self.children[box.id] = _sleeper()
            box.process = pidfd.identify(child.pid)
            self.starts += 1

        async def end() -> None:
            if self.end_error is not None:
                raise self.end_error
            self.kill(box)
            box.process = None

        return (Step("start", "start it", start, end), *self.more_steps)

    def residents(self) -> set[str]:
        return set()

    async def take_stock(self, boxes: Sequence[Box]) -> None:
        del boxes

    async def reconnect(self, box: Box) -> None:
        self.reconnects.append(box.id)
        if self.reconnect_error is not None:
            raise self.reconnect_error

    async def pause(self, box: Box) -> None:
        del box

    async def resume(self, box: Box) -> None:
        del box

    def kill(self, box: Box) -> None:
        child = self.children.pop(box.id, None)
        if child is not None:
            child.kill()
            child.wait()

    async def shut_down(self, box: Box, grace_s: float) -> None:
        del box
        await asyncio.sleep(grace_s)

    def death(self, box: Box) -> str | None:
        del box
        return self.told


class FakeImages:
    """Nothing to mount, nothing to remove."""

    async def remove_unused(self) -> None:
        """There are none."""


class Host:
    """What a test works on: one daemon's core, and the database read by another connection."""

    def __init__(self, path: Path) -> None:
        self.path = path / "db"
        self.store = cast(Disk, Disk.open(self.path, MIGRATIONS))
        self.tasks = Tasks()
        self.backend = FakeBackend()
        self.gone: list[str] = []
        self.deadlines: list[tuple[float, str]] = []
        self.lifecycle = Lifecycle(
            self.store, cast(ImageStore, FakeImages()), Events(self.store), self.tasks,
            gone=lambda live: self.gone.append(live.id), deadline=lambda at, name: self.deadlines.append((at, name)),
        )  # fmt: skip

    def live(self, name: str = "box", **more: Any) -> Live:
        spec = SandboxSpec(image="none")
        record = Record(id=name, owner_uid=0, spec=spec, layers=(), range_index=0, created_at=1.0, **more)
        box = Box(id=name, spec=spec, uid_base=0, layers=())
        return Live(record, box, cast(Backend, self.backend), Defaults({}, "", ""))

    def rows(self) -> dict[str, tuple[str, str]]:
        """State and intent of each row."""
        with closing(sqlite3.connect(self.path)) as db:
            return {row[0]: row[1:] for row in db.execute("SELECT id, state, intent FROM sandboxes")}


def run(path: Path, body: Callable[[Host], Awaitable[None]]) -> None:
    async def main() -> None:
        host = Host(path)
        try:
            await body(host)
        finally:
            await host.tasks.close()
            host.store.close()
            for child in host.backend.children.values():
                child.kill()
                child.wait()

    asyncio.run(main())


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_row_that_was_deleted_does_not_come_back(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        live = host.live()
        await host.lifecycle.create(live)
        await host.lifecycle.delete(live, "user")
        await host.store.write(lambda db: records.save(db, records.frozen(live.record)))
        assert host.rows() == {}

    run(tmp_path, body)


def test_an_update_that_waited_for_a_deletion_finds_nothing(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        live = host.live()
        await host.lifecycle.create(live)
        registry = cast(Registry, _Only(live))
        door = Admission(Gauge(Thresholds()), host.tasks, mode="off", max_waiting=0, tell=lambda _short: None)
        sandboxes = Sandboxes(registry, host.lifecycle, host.tasks, door, parallel=1)
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def nothing() -> None:
            """There is none to be made."""

        async def slow() -> None:
            begun.set()
            await go_on.wait()

        host.backend.more_steps = (Step("slow", "take long", nothing, slow),)
        deletion = asyncio.ensure_future(host.lifecycle.delete(live, "user"))
        await begun.wait()
        update = asyncio.ensure_future(sandboxes.update(ROOT, "box", UpdateRequest(labels={"a": "b"})))
        await asyncio.sleep(0.05)
        assert not update.done()
        go_on.set()
        await deletion
        with pytest.raises(NotFound):
            await update
        assert host.rows() == {}

    run(tmp_path, body)


class _Only:
    def __init__(self, live: Live) -> None:
        self._live = live

    def find(self, *_args: object) -> Live:
        return self._live


def test_a_creation_whose_last_write_fails_leaves_nothing_to_come_back(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        live = host.live()

        async def fill() -> None:
            host.store.full = True

        async def free() -> None:
            host.store.full = False

        last = Step("fill", "fill the disk", fill, free)
        host.backend.more_steps = (last,)
        with pytest.raises(NoCapacity):
            await host.lifecycle.create(live)
        await eventually(lambda: (live.gone, live.watch_fd, host.gone, host.rows()) == (True, None, ["box"], {}))

    run(tmp_path, body)


def test_a_full_disk_does_not_keep_a_sandbox_from_being_deleted(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        live = host.live()
        await host.lifecycle.create(live)
        host.store.full = True
        with pytest.raises(NoCapacity):
            await host.lifecycle.delete(live, "user")
        # What takes room is gone, and the rest is tried again.
        assert host.backend.children == {}
        assert (live.record.state, host.gone, [name for _, name in host.deadlines]) == (State.DELETING, [], ["box"])
        host.store.full = False
        await host.lifecycle.delete(live, "retry")
        assert (host.gone, host.rows()) == (["box"], {})

    run(tmp_path, body)


def test_a_stop_that_was_never_begun_is_not_finished_by_the_next_daemon(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        live = host.live()
        await host.lifecycle.create(live)
        host.store.full = True
        with pytest.raises(NoCapacity):
            await host.lifecycle.stop(live, 0)
        host.store.full = False
        await host.lifecycle.change(live)
        assert host.rows() == {"box": ("running", "")}

    run(tmp_path, body)


def test_what_is_acknowledged_is_recorded_also_after_a_full_disk(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        live = host.live()
        await host.lifecycle.create(live)
        host.store.full = True
        with pytest.raises(NoCapacity):
            await host.lifecycle.pause(live)
        with pytest.raises(NoCapacity):
            await host.lifecycle.pause(live)
        host.store.full = False
        await host.lifecycle.pause(live)
        assert host.rows() == {"box": ("paused", "")}

    run(tmp_path, body)


def test_a_death_on_a_full_disk_is_told_to_those_who_wait(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        live = host.live()
        await host.lifecycle.create(live)
        waiter = asyncio.ensure_future(live.wait_change())
        await asyncio.sleep(0)
        host.store.full = True
        host.backend.children["box"].kill()
        async with asyncio.timeout(60):
            await waiter
        assert live.record.state == State.FAILED

    run(tmp_path, body)


def test_the_death_of_an_earlier_run_does_not_end_the_next_one(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        live = host.live()
        await host.lifecycle.create(live)
        first = live.box.process
        await host.lifecycle.stop(live, 0)
        await host.lifecycle.start(live)
        await host.lifecycle.watch._died(live, first)
        assert (live.record.state, host.backend.starts) == (State.RUNNING, 2)

    run(tmp_path, body)


def test_a_link_that_was_lost_before_anybody_watched_is_made_again(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        await host.lifecycle.create(host.live())  # whose steps make no link, as if it had broken at once
        await eventually(lambda: host.backend.reconnects == ["box"])

    run(tmp_path, body)


@pytest.mark.parametrize("end", ["stop", "death"])
def test_time_goes_on_when_a_pause_ends_otherwise_than_by_resume(tmp_path: Path, end: str) -> None:
    async def body(host: Host) -> None:
        live = host.live(expires_at=4e9)
        await host.lifecycle.create(live)
        await host.lifecycle.pause(live)
        paused = live.record.to_wire()
        assert paused.expires_at is None
        if end == "stop":
            await host.lifecycle.stop(live, 0)
        else:
            host.backend.children["box"].kill()
            await eventually(lambda: live.record.state == State.FAILED)
        ended = live.record.to_wire()
        assert ended.expires_at is not None
        assert ended.expires_at.timestamp() == pytest.approx(4e9, abs=60)
        assert live.record.ttl_left_s is None
        assert host.deadlines[-1] == (live.record.expires_at, "box")

    run(tmp_path, body)


def _adopting(host: Host, names: Sequence[str]) -> tuple[list[Record], Registry]:
    """Records of sandboxes that run, and a registry that makes them live."""
    found = [host.live(name, state=State.RUNNING, boot_id=host.lifecycle._boot_id).record for name in names]
    for record in found:
        box = Box(id=record.id, spec=record.spec, uid_base=0, layers=())
        child = host.backend.children[record.id] = _sleeper()
        record.process = box.process = pidfd.identify(child.pid)
    lives = {record.id: host.live(record.id) for record in found}
    for record in found:
        lives[record.id].record = record

    class Entering:
        def enter(self, record: Record) -> Live:
            return lives[record.id]

    return found, cast(Registry, Entering())


async def _reconcile(host: Host, found: Sequence[Record], registry: Registry) -> None:
    backends = {"container": cast(Backend, host.backend)}
    await reconcile.reconcile(found, registry, host.lifecycle, backends, host.tasks)


def test_one_sandbox_that_cannot_be_taken_over_does_not_keep_the_daemon_from_starting(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        found, registry = _adopting(host, ["a", "b"])
        found[0].intent = "delete"
        host.backend.end_error = OSError(16, "busy")
        await _reconcile(host, found, registry)
        assert [record.state for record in found] == [State.DELETING, State.RUNNING]
        assert [name for _, name in host.deadlines] == ["a"]

    run(tmp_path, body)


def test_a_daemon_that_has_too_little_does_not_start_and_ends_nothing(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        found, registry = _adopting(host, ["a"])
        host.backend.reconnect_error = NoCapacity("connect to the agent of 'a': Too many open files")
        with pytest.raises(NoCapacity):
            await _reconcile(host, found, registry)
        assert host.backend.children["a"].poll() is None

    run(tmp_path, body)


@pytest.mark.parametrize("error", [TimedOut("no answer"), BackendFailed("the agent refused: stale-generation")])
def test_an_agent_that_does_not_answer_makes_its_sandbox_failed(tmp_path: Path, error: Exception) -> None:
    async def body(host: Host) -> None:
        found, registry = _adopting(host, ["a"])
        host.backend.reconnect_error = error
        await _reconcile(host, found, registry)
        assert found[0].state == State.FAILED
        assert "agent lost" in (found[0].reason or "")

    run(tmp_path, body)


@pytest.mark.parametrize("gone", [True, False])
def test_what_the_kernel_tells_of_a_death_outranks_what_a_new_daemon_finds(tmp_path: Path, *, gone: bool) -> None:
    async def body(host: Host) -> None:
        found, registry = _adopting(host, ["a", "b"])
        host.backend.reconnect_error = TimedOut("no answer")
        host.backend.told = "oom"
        if gone:
            for child in host.backend.children.values():
                child.kill()
                child.wait()
        found[1].boot_id = "another"
        await _reconcile(host, found, registry)
        # What counts now says nothing of another boot's.
        assert [record.reason for record in found] == ["oom", "host restarted"]

    run(tmp_path, body)


def test_a_deletion_cuts_a_stop_short_and_gives_the_lock_back(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        live = host.live()
        await host.lifecycle.create(live)
        stop = asyncio.ensure_future(host.lifecycle.stop(live, 0.3))
        await asyncio.sleep(0.05)
        await asyncio.gather(stop, host.lifecycle.delete(live, "user"))
        assert (host.rows(), live.lock.locked()) == ({}, False)

    run(tmp_path, body)


@pytest.mark.parametrize("promised", [False, True])
def test_a_deletion_that_cuts_another_call_short_is_recorded_before_anything_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, promised: bool
) -> None:
    """Also when the lock looks free, and is ``promised`` to a call that waited for it."""

    async def body(host: Host) -> None:
        live = host.live()
        await host.lifecycle.create(live)
        seen: list[tuple[str, str]] = []
        kill = host.backend.kill

        def seeing(box: Box) -> None:
            if box.id in host.backend.children:
                seen.append(host.rows()[box.id])
            kill(box)

        async def until_killed(box: Box) -> None:
            await eventually(lambda: box.id not in host.backend.children)

        monkeypatch.setattr(host.backend, "kill", seeing)
        monkeypatch.setattr(host.backend, "pause", until_killed)
        if promised:
            await live.lock.acquire()
        pause = asyncio.ensure_future(host.lifecycle.pause(live))
        await asyncio.sleep(0)
        live.deletion = host.tasks.spawn("delete", host.lifecycle.delete(live, "user"))
        if promised:
            # The deletion looks next, and then the other one has it.
            live.lock.release()
        await asyncio.gather(pause, live.deletion)
        assert seen == [("running", "delete")]
        assert host.rows() == {}

    run(tmp_path, body)


def test_a_creation_that_was_cut_short_by_its_deletion_says_so(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        live = host.live()

        async def killed() -> None:
            while live.id in host.backend.children:
                await asyncio.sleep(0.01)
            raise BackendFailed("start 'box': crun was killed")

        host.backend.more_steps = (Step("wait", "wait for the end", killed),)
        creation = asyncio.ensure_future(host.lifecycle.create(live))
        await eventually(lambda: live.id in host.backend.children)
        live.deletion = host.tasks.spawn("delete", host.lifecycle.delete(live, "user"))
        with pytest.raises(WrongState, match="deleted while"):
            await creation
        await live.deletion
        assert host.rows() == {}

    run(tmp_path, body)


def test_a_sandbox_that_hangs_does_not_delay_the_start_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(host: Host) -> None:
        found, registry = _adopting(host, ["a", "b"])

        async def hang(box: Box) -> None:
            await asyncio.sleep(0 if box.id == "b" else 100)

        monkeypatch.setattr(host.backend, "reconnect", hang)
        monkeypatch.setattr(reconcile, "_PATIENCE_S", 2.0)
        await asyncio.wait_for(_reconcile(host, found, registry), 60)
        lives = {record.id: registry.enter(record) for record in found}
        assert [(live.watch_fd is not None, live.lock.locked()) for live in lives.values()] == [
            (False, True), (True, False),
        ]  # fmt: skip

    run(tmp_path, body)


def test_a_call_to_what_is_being_taken_over_waits_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands ran all the time: that another daemon is there by now is no reason to refuse anybody."""

    async def body(host: Host) -> None:
        found, registry = _adopting(host, ["a", "b"])
        reached, link = asyncio.Event(), cast(AgentLink, object())

        async def late(box: Box) -> None:
            await reached.wait()
            if box.id == "b":
                raise SandboxLost("connect to the agent of 'b': it is silent")
            box.link = link

        monkeypatch.setattr(host.backend, "reconnect", late)
        monkeypatch.setattr(reconcile, "_PATIENCE_S", 0.0)
        await _reconcile(host, found, registry)
        lives = [registry.enter(record) for record in found]
        calls = [asyncio.create_task(live.link("exec in")) for live in lives]
        _, waiting = await asyncio.wait(calls, timeout=0.1)
        assert waiting == set(calls)
        reached.set()
        assert await calls[0] is link
        with pytest.raises(WrongState, match=r"exec in 'b': it is failed \(agent lost: .* it is silent\)"):
            await calls[1]
        # An agent that was lost afterwards is nobody's to wait for.
        lives[0].box.link = None
        with pytest.raises(SandboxLost, match="its agent does not answer"):
            await lives[0].link("exec in")

    run(tmp_path, body)
