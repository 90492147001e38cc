# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around a daemon: full disks, hosts that restart, hostile agents, operators' mistakes.

SIGKILL at every step of a plan is in test_crash.py. What is left over is read by tests/support/residue.py.
"""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from libdsec import AsyncClient, Client
from libdsec.errors import (
    BackendFailed,
    ConnectionFailed,
    DsecError,
    NoCapacity,
    NotFound,
    SandboxLost,
    WrongState,
)
from libdsec.types import CreateRequest, ExecRequest, SandboxSpec
from tests.support import cgroups
from tests.support.daemon import Daemon
from tests.support.processes import descendants
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

IMAGE = "debian:trixie"


def import_image(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.finish(client.image_import(name=IMAGE, source=str(debian_tar()), kind="rootfs-tar"))


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        import_image(running)
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client(retry_s=0) as connected:
        yield connected
        for sandbox in connected.list_all():
            connected.delete(sandbox.id)
    assert daemon.residue() == []


def spec(**more: object) -> SandboxSpec:
    return SandboxSpec.model_validate({"image": IMAGE, **more})


def sh(client: Client, sandbox_id: str, script: str) -> str:
    return client.exec(sandbox_id, ExecRequest(argv=("sh", "-c", script))).text


def init_pid(daemon: Daemon, sandbox_id: str) -> int:
    return int((daemon.runtime_dir / "sandboxes" / sandbox_id / "pid").read_text())


def change_database(daemon: Daemon, statement: str) -> None:
    with closing(sqlite3.connect(daemon.state_dir / "state.db")) as db:
        db.execute(statement)
        db.commit()


def fill(daemon: Daemon) -> Path:
    """Take every byte of the daemon's disk."""
    path = daemon.state_dir / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(b"\0" * size):
                    continue
            except OSError:
                continue
    return path


def test_a_full_disk_is_told_and_deleting_makes_room() -> None:
    with Daemon(disk_bytes=24 << 20) as daemon:
        import_image(daemon)
        with daemon.client(retry_s=0) as client:
            client.create(spec(), id="big")
            client.create(spec(), id="idle")
            sh(client, "big", "head -c 8000000 /dev/zero > /root/file")
            filler = fill(daemon)
            for number in range(20):
                # What the database still has room for, it may take.
                with pytest.raises(NoCapacity, match="no space left|No space left"):
                    for attempt in range(20):
                        client.create(spec(), id=f"n{number}-{attempt}")
            assert sh(client, "idle", "head -c 100000 /dev/zero > /root/x || echo full") == "full\n"
            with pytest.raises(NoCapacity):
                client.stop("idle", grace_s=0)
            assert client.inspect("idle").state == "running"
            client.delete("big")
            assert client.stop("idle", grace_s=0).state == "stopped"
            filler.unlink()
            for sandbox in client.list_all():
                client.delete(sandbox.id)
            client.create(spec(), id="after")
            client.delete("after")
        assert daemon.residue() == []


def test_sandboxes_survive_a_restart_of_the_host_stopped_and_whole(daemon: Daemon, client: Client) -> None:
    client.create(spec(), id="kept")
    client.create(spec(ttl_s=1000), id="held")
    sh(client, "kept", "echo kept > /root/file")
    client.pause("held")
    daemon.kill()
    reboot(daemon)
    daemon.start()
    assert {(s.id, str(s.state), s.reason) for s in client.list().sandboxes} == {
        ("kept", "failed", "host restarted"), ("held", "failed", "host restarted"),
    }  # fmt: skip
    assert client.inspect("held").expires_at is not None
    client.start("kept")
    assert sh(client, "kept", "cat /root/file") == "kept\n"


def reboot(daemon: Daemon) -> None:
    """What a restart of the host does to what a dead daemon left."""
    for group in daemon.cgroup_dir.glob("*/cgroup.kill"):
        group.write_text("1")
    subprocess.run(["umount", "--lazy", str(daemon.runtime_dir / "mnt")], check=True)
    for path in daemon.runtime_dir.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    change_database(daemon, "UPDATE sandboxes SET boot_id = 'another'")
    cgroups.remove_tree(daemon.cgroup_dir, 60)


def test_an_agent_that_stands_still_delays_nobody(daemon: Daemon, client: Client) -> None:
    """SIGSTOP of process 1: what a hostile agent would do."""
    for number in range(3):
        client.create(spec(), id=f"still{number}")
        os.kill(init_pid(daemon, f"still{number}"), signal.SIGSTOP)
    client.create(spec(), id="good")
    began = time.monotonic()
    assert client.stop("still0", grace_s=1).state == "stopped"
    client.delete("still1")
    assert time.monotonic() - began < 60

    daemon.kill()
    began = time.monotonic()
    daemon.start(settle=False)
    until(lambda: answers(client, "good"), 60)
    # It is given up some time later.
    with pytest.raises((SandboxLost, WrongState)):
        sh(client, "still2", "true")
    client.delete("still2")
    assert time.monotonic() - began < 240


def answers(client: Client, sandbox_id: str) -> bool:
    try:
        return sh(client, sandbox_id, "echo alive") == "alive\n"
    except SandboxLost:  # it is being taken over
        return False


def test_an_exec_on_an_agent_that_stands_still_ends_with_its_sandbox(daemon: Daemon, client: Client) -> None:
    client.create(spec(), id="still")
    os.kill(init_pid(daemon, "still"), signal.SIGSTOP)

    async def main() -> None:
        async with AsyncClient(socket=daemon.socket, retry_s=0) as concurrent:
            task = asyncio.create_task(concurrent.exec("still", ExecRequest(argv=("true",))))
            await asyncio.sleep(0.3)
            async with asyncio.timeout(60):
                await concurrent.delete("still")
                with pytest.raises((SandboxLost, WrongState, NotFound)):
                    await task

    asyncio.run(main())


def test_a_database_from_a_backup_does_not_keep_the_daemon_from_starting(daemon: Daemon, client: Client) -> None:
    client.create(spec(), id="old")
    daemon.kill()
    change_database(daemon, "UPDATE meta SET value = '0' WHERE name = 'generation'")
    daemon.start()
    until(lambda: client.inspect("old").state == "failed", 60)
    assert "stale-generation" in (client.inspect("old").reason or "")
    assert client.start("old").state == "running"


@pytest.mark.parametrize("shared", ["state_dir", "cgroup_root"])
def test_two_daemons_never_share(daemon: Daemon, client: Client, tmp_path: Path, shared: str) -> None:
    client.create(spec(), id="mine")
    settings = {
        "socket": f"{tmp_path}/other.sock", "state_dir": f"{tmp_path}/state", "runtime_dir": f"{tmp_path}/run",
        "cache_dir": f"{tmp_path}/cache", "cgroup_root": f"{daemon.name}-other",
    }  # fmt: skip
    settings[shared] = {"state_dir": str(daemon.state_dir), "cgroup_root": daemon.name}[shared]
    config = tmp_path / "dsecd.toml"
    config.write_text("".join(f'{name} = "{value}"\n' for name, value in settings.items()))
    done = subprocess.run(
        [sys.executable, "-m", "dsecd", "--config", str(config)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "another dsecd" in done.stderr
    assert sh(client, "mine", "echo alive") == "alive\n"


def test_sigterm_while_sandboxes_are_made_leaves_none_without_a_record(daemon: Daemon, client: Client) -> None:
    async def main() -> None:
        async with AsyncClient(socket=daemon.socket, retry_s=0) as concurrent:
            calls = [asyncio.create_task(concurrent.create(spec(), id=f"c{number}")) for number in range(24)]
            await asyncio.sleep(0.15)
            await asyncio.to_thread(daemon.stop)
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(main())
    with closing(sqlite3.connect(daemon.state_dir / "state.db")) as db:
        known = {name for (name,) in db.execute("SELECT id FROM sandboxes")}
    groups = {path.name.removeprefix("sandbox-") for path in daemon.cgroup_dir.glob("sandbox-*")}
    disks = {path.name for path in (daemon.state_dir / "sandboxes").iterdir()}
    daemon.start()
    assert (groups - known, disks - known) == (set(), set())


def test_deletion_meets_creation_at_any_moment(daemon: Daemon, client: Client) -> None:
    async def main() -> None:
        async with AsyncClient(socket=daemon.socket, retry_s=0) as concurrent:
            for number in range(30):
                creation = asyncio.create_task(concurrent.create(spec(), id="brief"))
                await asyncio.sleep(number / 1000)
                async with asyncio.timeout(60):
                    await concurrent.delete("brief")
                (ended,) = await asyncio.gather(creation, return_exceptions=True)
                assert not isinstance(ended, BaseException) or "deleted while" in str(ended)
                await concurrent.delete("brief")

    asyncio.run(main())


def test_a_process_from_outside_in_the_tree_keeps_nothing_from_going(daemon: Daemon, client: Client) -> None:
    """FL-33: a foreign process whose working directory is in the sandbox's tree."""
    mounts = Path(f"/proc/{daemon.pid}/mountinfo")
    client.create(spec(), id="warm")
    before = len(mounts.read_text().splitlines())
    for _number in range(30):
        sandbox = client.create(spec())
        inside = ["sh", "-c", "cd /root; echo; exec sleep 100"]
        command = ["nsenter", f"--target={init_pid(daemon, sandbox.id)}", "--mount", *inside]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as foreign:
            assert foreign.stdout is not None
            foreign.stdout.readline()
            client.delete(sandbox.id)
            foreign.kill()
    assert len(mounts.read_text().splitlines()) == before
    until(lambda: not list((daemon.state_dir / "trash").iterdir()))


def test_what_is_killed_under_an_import_fails_it_and_leaves_nothing(daemon: Daemon, client: Client) -> None:
    source = daemon.state_dir / "half.tar"
    os.mkfifo(source)
    operation = client.image_import(name="killed:1", source=str(source), kind="rootfs-tar")
    # Its reader, which has some of the archive and waits for more.
    with source.open("wb", buffering=0) as file:
        file.write(debian_tar().read_bytes()[: 1 << 20])
        os.kill(descendants(daemon.pid, b"dsecd.core.images.worker")[-1], signal.SIGKILL)
        with pytest.raises(BackendFailed, match="its process ended with status"):
            client.finish(operation)
    source.unlink()
    assert daemon.residue() == []
    assert "killed:1" not in {name for image in client.images().images for name in image.names}


def test_too_few_descriptors_are_told_and_end_no_sandbox(daemon: Daemon, client: Client) -> None:
    for number in range(4):
        client.create(spec(), id=f"f{number}")
    in_use = settled(daemon.pid)
    subprocess.run(["prlimit", f"--pid={daemon.pid}", f"--nofile={in_use + 2}:"], check=True)
    with pytest.raises(NoCapacity, match="Too many open files"):
        client.create(spec(), id="toomuch")
    assert sh(client, "f0", "echo alive") == "alive\n"
    client.delete("f3")
    daemon.restart()
    assert {s.state for s in client.list().sandboxes} == {"running"}


def settled(pid: int) -> int:
    """How many descriptors a process has once they stay as many: what was just done holds some for a moment."""
    counts = [-1, -2, -3]
    while len(set(counts)) > 1:
        time.sleep(0.3)
        counts = [*counts[1:], len(os.listdir(f"/proc/{pid}/fd"))]
    return counts[0]


@contextmanager
def stuck_runtime(daemon: Daemon) -> Iterator[None]:
    """While the block lasts, a daemon that is started again finds a runtime that does not get on."""
    program = shutil.which("crun")
    assert program is not None
    stuck = daemon.state_dir / "stuck-crun"
    stuck.write_text("#!/bin/sh\nfor i in $(seq 600); do sleep 0.1; done\n")
    stuck.chmod(0o755)

    # The mount namespace is that of all daemons of its directory.
    def inside(*command: str | Path) -> None:
        subprocess.run(["nsenter", f"--mount=/proc/{daemon.pid}/ns/mnt", "--", *command], check=True)

    inside("mount", "--bind", stuck, program)
    try:
        daemon.restart()
        yield
    finally:
        inside("umount", "--lazy", program)
        daemon.restart()


def test_a_runtime_that_outlives_its_daemon_is_ended_and_leaves_nothing(daemon: Daemon, client: Client) -> None:
    """Else it might make its sandbox when that has been removed."""
    with stuck_runtime(daemon), ThreadPoolExecutor() as threads:
        creating = threads.submit(client.create, spec(), id="late")
        until(lambda: descendants(daemon.pid, b"--root="))
        daemon.kill()
        assert isinstance(creating.exception(60), ConnectionFailed)
        daemon.start()
        assert client.list_all() == ()
        assert daemon.residue() == []


def test_a_storm_of_calls_and_kills_loses_nothing(daemon: Daemon, client: Client) -> None:
    """Clients that call whatever they like while the daemon is killed: what was acknowledged is there, and works."""
    acknowledged: set[str] = set()
    deleted: set[str] = set()

    async def caller(number: int) -> None:
        async with AsyncClient(socket=daemon.socket, retry_s=0) as concurrent:
            mine: list[str] = []
            for turn in range(1000):
                name = mine[turn % len(mine)] if mine else ""
                try:
                    match (turn * 7 + number) % 9:
                        case 0 | 1 | 2:
                            name = f"s{number}-{time.monotonic_ns()}"
                            await concurrent.create(spec(), id=name)
                            mine.append(name)
                            acknowledged.add(name)
                        case 3 if len(mine) > 3:
                            mine.remove(name)
                            acknowledged.discard(name)
                            await concurrent.delete(name)
                            deleted.add(name)
                        case 4 if mine:
                            await concurrent.exec(name, ExecRequest(argv=("sh", "-c", "echo x >> /root/count")))
                        case 5 if mine:
                            await concurrent.stop(name, grace_s=0)
                        case 6 if mine:
                            await concurrent.start(name)
                        case 7 if mine:
                            await concurrent.pause(name)
                        case 8 if mine:
                            await concurrent.resume(name)
                except ConnectionFailed:
                    return
                except (WrongState, SandboxLost):
                    continue

    async def storm(after_s: float) -> None:
        callers = [asyncio.create_task(caller(number)) for number in range(5)]
        await asyncio.sleep(after_s)
        await asyncio.to_thread(daemon.kill)
        async with asyncio.timeout(60):
            await asyncio.gather(*callers)

    for after_s in (0.4, 0.9, 1.3):
        asyncio.run(storm(after_s))
        daemon.start()
        found = list(client.list_all())
        there = {sandbox.id: str(sandbox.state) for sandbox in found}
        assert acknowledged <= set(there)
        assert not deleted & set(there)
        assert set(there.values()) <= {"running", "paused", "stopped"}, found
        for name, state in there.items():
            client.resume(name) if state == "paused" else client.start(name)
            assert sh(client, name, "echo alive") == "alive\n"
            client.delete(name)
        acknowledged.clear()
        assert daemon.residue() == []


def test_a_deletion_ends_nothing_before_it_is_recorded(daemon: Daemon, client: Client) -> None:
    """Else a daemon that is killed in between leaves what looks as if it had failed."""
    client.create(spec(), id="recorded")
    with ThreadPoolExecutor() as threads:
        with closing(sqlite3.connect(daemon.state_dir / "state.db", isolation_level=None, timeout=60)) as db:
            db.execute("BEGIN IMMEDIATE")  # from now on the daemon can write nothing
            deleting = threads.submit(client.delete, "recorded")
            with daemon.client() as other:
                until(lambda: other.inspect("recorded").state == "deleting")
            time.sleep(1)  # in which nothing is to happen
            daemon.kill()
        assert isinstance(deleting.exception(60), ConnectionFailed)
    daemon.start()
    assert sh(client, "recorded", "echo alive") == "alive\n"


def test_a_cancelled_batch_tells_how_far_it_came(client: Client) -> None:
    operation = client.create_batch([CreateRequest(spec=spec(), id=f"b{number}") for number in range(200)])
    time.sleep(0.3)
    cancelled = client.operation_cancel(operation.id)
    assert cancelled.state == "cancelled"
    until(lambda: not any(s.state == "creating" for s in client.list_all()), 60)
    there = len(client.list_all())
    progress = cancelled.progress or {}
    # Those under way when it was cancelled are completed.
    assert progress["done"] <= there < 200
    assert there - progress["done"] <= 16
    with pytest.raises(DsecError):
        client.finish(cancelled)


def test_a_lost_database_does_not_take_the_sandboxes_with_it(daemon: Daemon) -> None:
    with daemon.client() as client:
        sandbox = client.create(SandboxSpec(image=IMAGE))
        client.exec(sandbox.id, ExecRequest(argv=("sh", "-c", "echo precious > /root/work")))
    daemon.stop()
    database = daemon.state_dir / "state.db"
    saved = database.rename(database.with_suffix(".saved"))
    daemon.start(wait=False)
    assert daemon.wait_dead() != 0
    assert f"it knows nothing of 1 sandboxes here, such as '{sandbox.id}'" in daemon.tail()
    for path in daemon.state_dir.glob("state.db*"):
        if path != saved:
            path.unlink()
    saved.rename(database)
    daemon.start()
    with daemon.client() as client:
        assert client.exec(sandbox.id, ExecRequest(argv=("cat", "/root/work"))).stdout == b"precious\n"
        client.delete(sandbox.id)
