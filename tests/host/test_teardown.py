# SPDX-License-Identifier: Apache-2.0
"""What removing the package does to sandboxes: all end, nothing of them stays mounted, what they wrote is kept."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec.types import ExecRequest, SandboxSpec
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

_CHECKOUT = Path(__file__).resolve().parents[2]
_IMAGE = "debian:trixie"


@pytest.fixture(scope="module")
def with_image() -> Iterator[Daemon]:
    with Daemon() as running:
        with running.client() as client:
            client.finish(client.image_import(name=_IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        yield running


@pytest.fixture
def daemon(with_image: Daemon) -> Iterator[Daemon]:
    """A running daemon with one sandbox, in which a command runs."""
    if not with_image.running:
        with_image.start()
    with with_image.client() as client:
        client.create(SandboxSpec(image=_IMAGE), id="box")
        client.exec("box", ExecRequest(argv=("sh", "-c", "echo kept >/root/file; sleep 600 >/dev/null &")))
        # In its first moments the agent has a child, and the command is still the shell that starts it.
        until(lambda: client.usage("box").processes == 2 and any("(sleep)" in line for line in left(with_image)))
    yield with_image
    if not with_image.running:
        with_image.start()
    with_image.delete_all()


def tear_down(daemon: Daemon) -> tuple[int, str]:
    command = [sys.executable, "-m", "dsecd.teardown", "--config", str(daemon.state_dir / "dsecd.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_CHECKOUT)
    return done.returncode, done.stderr


def mounts(daemon: Daemon) -> set[str]:
    """Mounts that have to do with the daemon's directories, in the namespaces of all processes."""
    found = set()
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            lines = table.read_text().splitlines()
        except OSError:  # the process has gone, or is going
            continue
        found |= {line for line in lines if str(daemon.runtime_dir) in line or f"{daemon.state_dir}/" in line}
    return found


def left(daemon: Daemon) -> list[str]:
    """What is left over, but for the files that are to be kept."""
    return [line for line in daemon.residue() if not line.startswith(f"file {daemon.state_dir}/sandboxes/")]


def settled(daemon: Daemon) -> list[str]:
    """The same, once nothing of it has come or gone for a second: files of a deletion go in the background."""
    seen: list[str] = []

    def stands_still() -> bool:
        former, seen[:] = list(seen), left(daemon)
        time.sleep(1)
        return seen == former

    until(stands_still)
    return seen


def test_it_ends_all_that_a_killed_daemon_left_and_keeps_the_files(daemon: Daemon) -> None:
    assert left(daemon) != []
    daemon.kill()
    assert [line for line in left(daemon) if "sleep" in line]
    assert mounts(daemon) != set()
    assert tear_down(daemon) == (0, "")
    assert left(daemon) == []
    assert mounts(daemon) == set()
    assert list(daemon.runtime_dir.iterdir()) == [daemon.socket]  # nobody closed it in good order
    assert not daemon.cgroup_dir.exists()

    daemon.start()
    with daemon.client() as client:
        assert client.inspect("box").state in ("stopped", "failed")
        client.start("box")
        assert client.exec("box", ExecRequest(argv=("cat", "/root/file"))).text == "kept\n"


def test_it_touches_nothing_while_a_daemon_runs(daemon: Daemon) -> None:
    before = settled(daemon)
    status, said = tear_down(daemon)
    assert status == 5
    assert f"another dsecd runs there, pid {daemon.pid}" in said
    assert settled(daemon) == before


def test_a_second_time_it_has_nothing_to_do(daemon: Daemon) -> None:
    daemon.stop()
    assert tear_down(daemon) == (0, "")
    assert tear_down(daemon) == (0, "")
    assert mounts(daemon) == set()
