# SPDX-License-Identifier: Apache-2.0
"""Snapshots with names, through a real daemon and a real QEMU: what clones are, who may remove what, and every way in
which making one can end.

What a monitor saves and restores is in test_vm_snapshots.py. Files are looked at by themselves, not through the daemon.
"""

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import Client, Sandbox
from libdsec.errors import (
    AlreadyExists,
    BackendFailed,
    Conflict,
    ConnectionFailed,
    DsecError,
    FeatureMissing,
    NoCapacity,
    NotFound,
    WrongState,
)
from libdsec.types import ExecRequest, SandboxSpec
from tests.support import machines
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

_IMAGE = "debian:trixie"
#: Every checkpoint of making and removing one; ``DSEC_TEST_LONG=1`` also stops before each.
_SHORT = ("/do/after", "/undo/after")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    # On a disk of its own, which a test fills.
    with Daemon(config=machines.config(disk_bytes=256 << 20), disk_bytes=2 << 30) as running:
        with running.client() as client:
            client.finish(client.image_import(name=_IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
            client.create(SandboxSpec(image=_IMAGE, backend="microvm", labels={"job": "7"}), id="source")
            counting = "echo kept > /root/file; i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"
            client.exec_start("source", ExecRequest(argv=("sh", "-c", counting), exec_id="count"))
            sh(client, "source", "until [ -s /tmp/count ]; do sleep 0.05; done")
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client(retry_s=0) as connected:
        yield connected


def sh(client: Client, sandbox_id: str, script: str) -> str:
    result = client.exec(sandbox_id, ExecRequest(argv=("sh", "-c", script)))
    assert result.exit_code == 0, result
    return result.text


def goes_on(client: Client, sandbox_id: str) -> None:
    counted = "until grep . /tmp/count; do :; done"
    first = int(sh(client, sandbox_id, counted))
    until(lambda: int(sh(client, sandbox_id, counted)) > first, 60)


def on_disk(daemon: Daemon) -> dict[str, tuple[int, int]]:
    """All files of snapshots: size and the time they were last written."""
    return {
        str(path.relative_to(daemon.state_dir)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in (daemon.state_dir / "snapshots").rglob("*") if path.is_file() and path.name in ("memory", "disk")
    }  # fmt: skip


def test_clones_begin_as_what_was_saved_and_hold_it(daemon: Daemon, client: Client) -> None:
    with Sandbox.get("source", client=client) as source:
        made = source.snapshot("warm")
    assert (made.source, made.spec.labels, made.used_by) == ("source", {"job": "7"}, ())
    assert made.state_bytes < 1 << 20
    assert {"format", "monitor", "version", "machine", "cpu"} <= made.needs.keys()
    with pytest.raises(AlreadyExists, match="there is a snapshot 'warm'"):
        client.snapshot_create("source", "warm")
    goes_on(client, "source")
    frozen = sh(client, "source", "until grep . /tmp/count; do :; done")
    files = on_disk(daemon)
    # The name of the image may lead elsewhere by now, and nobody else may need it.
    ids = ("one", "two")
    clones = Sandbox.from_snapshot("warm", ids=ids, client=client)
    assert [(clone.id, clone.info.snapshot, clone.info.state) for clone in clones] == [
        (name, "warm", "running") for name in ids
    ]
    random = "head -c 16 /dev/urandom | od -An -tx1"
    assert len({sh(client, name, random) for name in ("source", *ids)}) == 3
    for name in ids:
        assert sh(client, name, "uname -n; cat /root/file").split() == [name, "kept"]
        assert client.exec_inspect(name, "count").running
        assert int(sh(client, name, "until grep . /tmp/count; do :; done")) < int(frozen) + 1000
        goes_on(client, name)
        sh(client, name, f"echo {name} > /root/mine; sync")
    # It is held, also by what a new daemon finds, and named are those who hold it.
    daemon.restart()
    assert sorted(client.snapshot_inspect("warm").used_by) == ["one", "two"]
    with pytest.raises(Conflict, match="used by one, two") as caught:
        client.snapshot_remove("warm")
    assert caught.value.details["sandboxes"] == ["one", "two"]
    with pytest.raises(AlreadyExists):
        client.clone("warm", ids=("three", "one"))
    assert "three" not in {one.id for one in client.list_all()}
    # One that is stopped boots from its own disk, and holds nothing any more.
    client.stop("one", grace_s=0)
    client.start("one")
    assert client.inspect("one").snapshot is None
    assert sh(client, "one", "cat /root/mine") == "one\n"
    client.delete("two")
    assert on_disk(daemon) == files
    client.snapshot_remove("warm")
    assert on_disk(daemon) == {}
    with pytest.raises(NotFound, match="no such snapshot"):
        client.clone("warm")
    client.delete("one")


def holds(path: Path, what: bytes) -> bool:
    """Whether a file of a disk holds these bytes, which fill whole blocks of it."""
    with path.open("rb") as file:
        return any(what in chunk for chunk in iter(lambda: file.read(1 << 20), b""))


def test_what_was_deleted_is_not_saved_and_what_was_just_written_is(daemon: Daemon, client: Client) -> None:
    deleted, late = (os.urandom(16).hex() for _ in range(2))
    live, saved = daemon.state_dir / "vms/source/disk", daemon.state_dir / "snapshots/lean/disk"
    before = live.stat().st_blocks  # of 512 bytes each
    sh(client, "source", f"yes {deleted} | head -c 48M > /root/deleted; sync")
    assert live.stat().st_blocks - before > 90_000
    assert holds(live, deleted.encode())
    sh(client, "source", f"rm /root/deleted; yes {late} | head -c 1M > /root/late")
    client.snapshot_create("source", "lean")
    assert [path for path in (live, saved) if path.stat().st_blocks - before > 20_000] == []
    assert [holds(saved, mark.encode()) for mark in (deleted, late)] == [False, True]
    client.snapshot_remove("lean")
    sh(client, "source", "rm /root/late")


def test_one_of_a_clone_and_of_one_that_is_paused(daemon: Daemon, client: Client) -> None:
    client.pause("source")
    client.snapshot_create("source", "still")
    assert client.inspect("source").state == "paused"
    client.resume("source")
    goes_on(client, "source")
    client.clone("still", ids=("first",), labels={"job": "8"}, ttl_s=3000)
    info = client.inspect("first")
    assert (info.spec.labels, info.expires_at is not None) == ({"job": "8"}, True)
    goes_on(client, "first")
    sh(client, "first", "echo more > /root/more")
    client.snapshot_create("first", "second")
    client.delete("first")
    client.snapshot_remove("still")
    client.clone("second", ids=("third",))
    assert sh(client, "third", "uname -n; cat /root/file /root/more").split() == ["third", "kept", "more"]
    goes_on(client, "third")
    client.delete("third")
    client.snapshot_remove("second")


def test_a_container_is_refused_with_what_can(daemon: Daemon, client: Client) -> None:
    client.create(SandboxSpec(image=_IMAGE), id="box")
    for call in (lambda: client.snapshot_create("box", "never"), lambda: client.fork("box")):
        with pytest.raises(FeatureMissing, match="backend 'container' cannot be saved") as caught:
            call()
        assert caught.value.hint == "use backend microvm"
    client.delete("box")
    with pytest.raises(NotFound):
        client.snapshot_inspect("never")


def test_another_host_and_damage_are_told(daemon: Daemon, client: Client) -> None:
    client.snapshot_create("source", "old")
    daemon.kill()
    with sqlite3.connect(daemon.state_dir / "state.db") as db:
        (body,) = db.execute("SELECT body FROM snapshots WHERE id = 'old'").fetchone()
        changed = json.loads(body)
        changed["needs"] |= {"version": "9.2.0", "cpu-features": "avx2 sse"}
        db.execute("UPDATE snapshots SET body = ? WHERE id = 'old'", (json.dumps(changed),))
    db.close()
    daemon.start()
    with pytest.raises(FeatureMissing, match=r"version: 9\.2\.0, here \d") as caught:
        client.clone("old")
    assert caught.value.details["differs"] == ["cpu-features", "version"]
    assert "avx2 sse are missing here" in str(caught.value)
    client.snapshot_remove("old")
    client.snapshot_create("source", "bad")
    memory = daemon.state_dir / "snapshots" / "bad" / "memory"
    with memory.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"other")
    with pytest.raises(BackendFailed, match="its file 'memory' is not what was saved"):
        client.clone("bad")
    client.snapshot_remove("bad")
    assert client.snapshots().snapshots == ()


def test_a_full_disk_leaves_nothing(daemon: Daemon, client: Client) -> None:
    filler = daemon.state_dir / "filler"
    before = sorted(path.name for path in (daemon.state_dir / "vms" / "source").iterdir())
    with filler.open("wb") as file:
        free = os.statvfs(daemon.state_dir)
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - (20 << 20))
    with pytest.raises(NoCapacity, match="No space left"):
        client.snapshot_create("source", "full")
    filler.unlink()
    assert client.snapshots().snapshots == ()
    _nothing_left(daemon)
    assert sorted(path.name for path in (daemon.state_dir / "vms" / "source").iterdir()) == before
    goes_on(client, "source")


def left(daemon: Daemon) -> list[str]:
    """What there is of snapshots, on the disk and in the database."""
    places = [daemon.state_dir / name for name in ("snapshots", "origins", "trash-snapshots", "trash-vms")]
    found = [str(path) for place in places for path in place.iterdir()]
    with sqlite3.connect(f"file:{daemon.state_dir}/state.db?mode=ro", uri=True) as db:
        found += [str(row) for row in db.execute("SELECT id, state FROM snapshots")]
        found += [str(row) for row in db.execute("SELECT * FROM image_holders WHERE holder LIKE 'snapshot:%'")]
    db.close()
    return found


def _nothing_left(daemon: Daemon, *said: object) -> None:
    """Trees in the trash go by themselves, and nobody waits long for them."""
    with contextlib.suppress(AssertionError):
        until(lambda: not left(daemon))
    assert left(daemon) == [], said


def _save_and_remove(daemon: Daemon) -> None:
    with daemon.client(retry_s=0) as client:
        client.snapshot_create("source", "victim")
        client.snapshot_remove("victim")


def test_sigkill_and_failure_at_every_step_leave_nothing(daemon: Daemon) -> None:
    log = daemon.state_dir / "points"
    points = _again(daemon, {"DSEC_FAULT_LOG": str(log)}, log)
    assert len(points) >= 14, points
    short = not os.environ.get("DSEC_TEST_LONG")
    for point in (point for point in points if not short or point.endswith(_SHORT)):
        for how in ("kill", "fail"):
            if how == "fail" and "snapshot-rm" in point:
                continue  # a removal goes on where it was
            daemon.kill() if daemon.running else None
            daemon.env = {"DSEC_FAULT": f"{point}={how}"}
            daemon.start()
            with pytest.raises((ConnectionFailed, DsecError)):
                _save_and_remove(daemon)
            if how == "kill":
                assert daemon.wait_dead() == -9, point
                daemon.env = {}
                daemon.start()
            with daemon.client() as client:
                # It is there as a whole, or not at all; and the source goes on.
                if [one.id for one in client.snapshots().snapshots]:
                    assert how == "kill" and point in ("snapshot/ready/do/after", "snapshot-rm/row/do/before"), point
                    client.snapshot_remove("victim")
                goes_on(client, "source")
            _nothing_left(daemon, point, how)
    daemon.kill()
    daemon.env = {}
    daemon.start()


def _again(daemon: Daemon, env: dict[str, str], log: Path) -> list[str]:
    daemon.kill()
    daemon.env = env
    daemon.start()
    log.write_text("")
    _save_and_remove(daemon)
    return [point for point in dict.fromkeys(log.read_text().split()) if point.startswith("snapshot")]


def test_what_does_not_run_cannot_be_saved(daemon: Daemon, client: Client) -> None:
    client.stop("source", grace_s=0)
    with pytest.raises(WrongState, match="not running or paused"):
        client.snapshot_create("source", "late")
    _nothing_left(daemon)
    client.delete("source")
    assert daemon.residue() == []
