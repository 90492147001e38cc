# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of the daemon, and failures, at the steps of a microVM's plan, as test_crash.py does it for containers.

A guest takes seconds to boot where all is emulated, so each step is met once on its way there and once on its way back:
after it was done, and before it is undone. ``DSEC_TEST_LONG=1`` meets every checkpoint.
"""

import os
from collections.abc import Iterator

import pytest

from libdsec.errors import ConnectionFailed, DsecError
from libdsec.types import ExecRequest, SandboxSpec
from tests.support import machines
from tests.support.daemon import Daemon
from tests.support.netlab import NEAR4, Lab
from tests.support.rootfs import debian_tar

_IMAGE = "debian:trixie"
_SHORT = ("/do/after", "/undo/before")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Lab() as lab, Daemon(config=machines.config(), netns=lab.host) as running:
        with running.client() as client:
            client.finish(client.image_import(name=_IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        yield running


@pytest.fixture(scope="module")
def points(daemon: Daemon) -> list[str]:
    """The checkpoints of a creation and a deletion, learned from a daemon that records them."""
    log = daemon.state_dir / "points"
    _restart(daemon, {"DSEC_FAULT_LOG": str(log)})
    log.write_text("")
    _create_and_delete(daemon)
    found = list(dict.fromkeys(log.read_text().split()))
    assert len(found) >= 24, found
    return found if os.environ.get("DSEC_TEST_LONG") else [point for point in found if point.endswith(_SHORT)]


def _restart(daemon: Daemon, env: dict[str, str]) -> None:
    if daemon.running:
        daemon.kill()
    daemon.env = env
    daemon.start()


def _create_and_delete(daemon: Daemon) -> None:
    with daemon.client(retry_s=0) as client:
        spec = SandboxSpec(image=_IMAGE, backend="microvm", network=(f"tcp:{NEAR4}:443",))
        client.create(spec, id="victim", idempotency_key="victim")
        client.delete("victim")


def test_sigkill_at_every_step_leaves_nothing(daemon: Daemon, points: list[str]) -> None:
    for point in points:
        _restart(daemon, {"DSEC_FAULT": f"{point}=kill"})
        with pytest.raises((ConnectionFailed, DsecError)):
            _create_and_delete(daemon)
        assert daemon.wait_dead() == -9, point
        _restart(daemon, {})
        with daemon.client() as client:
            left = [sandbox.id for sandbox in client.list().sandboxes]
            assert set(left) <= {"victim"}, point
            if left:  # it was acknowledged
                if client.inspect("victim").state != "running":
                    client.start("victim")
                assert client.exec("victim", ExecRequest(argv=("echo", "alive"))).stdout == b"alive\n", point
                client.delete("victim")
        assert daemon.residue() == [], point


def test_failure_at_every_step_leaves_nothing(daemon: Daemon, points: list[str]) -> None:
    for point in (point for point in points if "/do/" in point):
        _restart(daemon, {"DSEC_FAULT": f"{point}=fail"})
        with pytest.raises(DsecError, match="fault injected"):
            _create_and_delete(daemon)
        assert daemon.residue() == [], point
    _restart(daemon, {})
