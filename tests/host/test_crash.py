# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of the daemon at every step of its plans, and with many live sandboxes.

The steps come from the plans: a first run records every checkpoint it passes, later runs die at each of
them. What is left is read by tests/support/residue.py, which shares no code with the daemon.
"""

import contextlib
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import Client
from libdsec.errors import ConnectionFailed, DsecError, NotFound
from libdsec.types import CreateRequest, ExecRequest, SandboxSpec
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

_IMAGE = "debian:trixie"
_LIVE = 50


@contextlib.contextmanager
def _daemon_with_image() -> Iterator[Daemon]:
    with Daemon() as daemon:
        with daemon.client() as client:
            client.finish(client.image_import(name=_IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        yield daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with _daemon_with_image() as running:
        yield running


def _recorded(daemon: Daemon, action: str) -> list[str]:
    """The checkpoints that `action` passes, learned from a daemon that records them."""
    log = daemon.state_dir / "points"
    daemon.kill()
    daemon.env = {"DSEC_FAULT_LOG": str(log)}
    daemon.start()
    log.write_text("")
    _ACTIONS[action](daemon)
    points = list(dict.fromkeys(log.read_text().split()))
    daemon.kill()
    daemon.env = {}
    daemon.start()
    return points


def _create_and_delete(daemon: Daemon) -> None:
    with daemon.client(retry_s=0) as client:
        client.create(SandboxSpec(image=_IMAGE), id="victim", idempotency_key="victim")
        client.delete("victim")


def _stop_and_start(daemon: Daemon) -> None:
    with daemon.client(retry_s=0) as client:
        client.create(SandboxSpec(image=_IMAGE), id="victim", idempotency_key="victim")
        client.stop("victim", grace_s=0)
        client.start("victim")
        client.delete("victim")


def _import(daemon: Daemon) -> None:
    tree = daemon.state_dir / "tree"
    tree.mkdir(exist_ok=True)
    (tree / "unique").write_text("content that no other image has\n" * 100)
    with daemon.client(retry_s=0) as client:
        client.finish(client.image_import(name="victim:1", source=str(tree), kind="directory"))
        client.image_remove("victim:1")


_ACTIONS = {"create and delete": _create_and_delete, "stop and start": _stop_and_start, "import": _import}


@pytest.mark.parametrize("action", list(_ACTIONS))
def test_sigkill_at_every_step_leaves_nothing(daemon: Daemon, action: str) -> None:
    points = _recorded(daemon, action)
    assert len(points) >= 8, points
    for point in points:
        daemon.kill()
        daemon.env = {"DSEC_FAULT": f"{point}=kill"}
        daemon.start()
        with pytest.raises((ConnectionFailed, DsecError)):
            _ACTIONS[action](daemon)
        assert daemon.wait_dead() == -9, point
        daemon.env = {}
        daemon.start()
        with daemon.client() as client:
            left = {sandbox.id: sandbox.state for sandbox in client.list().sandboxes}
            # A create that was acknowledged is there, and usable; one that was not has gone.
            assert set(left) <= {"victim"}, point
            if left:
                _usable(client, point)
                client.delete("victim")
            names = {name for image in client.images().images for name in image.names}
            assert names <= {_IMAGE, "victim:1"}, point
            if "victim:1" in names:
                client.image_remove("victim:1")
        assert daemon.residue() == [], point


def _usable(client: Client, point: str) -> None:
    if client.inspect("victim").state != "running":
        client.start("victim")
    assert client.exec("victim", ExecRequest(argv=("echo", "alive"))).stdout == b"alive\n", point


@pytest.mark.parametrize("action", list(_ACTIONS))
def test_failure_at_every_step_leaves_nothing(daemon: Daemon, action: str) -> None:
    points = [point for point in _recorded(daemon, action) if "/do/" in point]
    for point in points:
        daemon.kill()
        daemon.env = {"DSEC_FAULT": f"{point}=fail"}
        daemon.start()
        with pytest.raises(DsecError, match="fault injected"):
            _ACTIONS[action](daemon)
        with daemon.client() as client:
            with contextlib.suppress(NotFound):
                client.delete("victim")
        assert daemon.residue() == [], point
    daemon.kill()
    daemon.env = {}
    daemon.start()


def test_acknowledged_create_survives_sigkill_and_keeps_its_key(daemon: Daemon) -> None:
    request = CreateRequest(spec=SandboxSpec(image=_IMAGE, labels={"a": "b"}), idempotency_key="job7-3")
    with daemon.client() as client:
        first = client.create(request.spec, idempotency_key=request.idempotency_key)
    daemon.restart()
    with daemon.client() as client:
        again = client.create(request.spec, idempotency_key=request.idempotency_key)
        assert again.id == first.id
        assert len(client.list().sandboxes) == 1
        client.delete(first.id)


def test_live_sandboxes_with_running_commands_survive_a_restart(daemon: Daemon) -> None:
    with daemon.client() as client:
        ids = [client.create(SandboxSpec(image=_IMAGE)).id for _number in range(_LIVE)]
        script = "i=0; while [ $i -lt 100 ]; do i=$((i+1)); echo line $i; sleep 0.05; done; exit 7"
        for sandbox_id in ids:
            client.exec_start(sandbox_id, ExecRequest(argv=("sh", "-c", script), exec_id="count"))
        pids = {sandbox_id: client.exec_inspect(sandbox_id, "count").pid for sandbox_id in ids}
    layers = _layer_mounts(daemon)
    daemon.restart()
    with daemon.client() as client:
        states = {sandbox.id: sandbox.state for sandbox in client.list().sandboxes}
        assert states == dict.fromkeys(ids, "running")
        for sandbox_id in ids:
            result = client.exec_wait(sandbox_id, "count", wait_s=60)
            assert result.exit_code == 7
            assert result.pid == pids[sandbox_id]
            assert result.stdout == b"".join(b"line %d\n" % number for number in range(1, 101))
        assert _layer_mounts(daemon) == layers
        for sandbox_id in ids:
            client.delete(sandbox_id)


def _layer_mounts(daemon: Daemon) -> list[str]:
    """EROFS mounts of the daemon's namespace: their sources and targets, one entry for each mount."""
    lines = Path(f"/proc/{daemon.pid}/mountinfo").read_text().splitlines()
    found = [line for line in lines if " - erofs " in line]
    targets = [line.split()[4] for line in found]
    assert targets, "no layer is mounted"
    assert len(set(targets)) == len(targets), "a layer is mounted twice"
    return sorted(re.sub(r"^\d+ \d+ \S+ ", "", line) for line in found)


def test_a_second_daemon_on_the_same_state_is_refused(daemon: Daemon) -> None:
    done = subprocess.run(
        ["python3", "-m", "dsecd", "--config", str(daemon.state_dir / "dsecd.toml")],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert str(daemon.pid) in done.stderr


def test_a_buffered_exec_in_flight_ends_once_although_the_daemon_dies(daemon: Daemon) -> None:
    with daemon.client() as client:
        sandbox = client.create(SandboxSpec(image=_IMAGE))
        script = "echo begun >> /count; sleep 3; echo done"
        killer = threading.Timer(1.0, daemon.restart)
        killer.start()
        result = client.exec(sandbox.id, ExecRequest(argv=("sh", "-c", script)))
        killer.join()
        assert result.stdout == b"done\n"
        assert client.exec(sandbox.id, ExecRequest(argv=("cat", "/count"))).stdout == b"begun\n"
        client.delete(sandbox.id)


def test_residue_script_sees_what_a_live_sandbox_has(daemon: Daemon) -> None:
    """The control for every empty list above: with a live sandbox the script finds each kind of thing."""
    with daemon.client() as client:
        sandbox = client.create(SandboxSpec(image=_IMAGE))
        found = "\n".join(daemon.residue())
        for kind in ("process", "overlay", "cgroup", "/sandboxes/", "/agents/", "/crun/"):
            assert kind in found
        client.delete(sandbox.id)
    until(lambda: daemon.residue() == [])
