# SPDX-License-Identifier: Apache-2.0
"""dsecctl's streams while the daemon is killed under them: they go on, and nothing is missing or twice."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import Client
from libdsec.types import ExecRequest, SandboxSpec
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
COUNTER = "i=0; while [ $i -lt 150 ]; do i=$((i+1)); echo $i; sleep 0.02; done; exit 9"
LINES = [str(number) for number in range(1, 151)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        with running.client() as client:
            client.finish(client.image_import(name="debian:trixie", source=str(debian_tar()), kind="rootfs-tar"))
            client.create(SandboxSpec(image="debian:trixie"), id="box")
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected


def dsecctl(daemon: Daemon, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "dsecctl", "--socket", str(daemon.socket), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=pipe, stderr=pipe, stdin=pipe, text=True)


def kill_amid(daemon: Daemon, running: "subprocess.Popen[str]") -> tuple[list[str], str, int]:
    """Two kills while it prints; all it printed, what it complained of, its status."""
    assert running.stdout is not None
    seen = [running.stdout.readline().rstrip("\n") for _ in range(20)]
    for _ in range(2):
        daemon.restart()
        seen += [running.stdout.readline().rstrip("\n") for _ in range(20)]
    assert running.stderr is not None
    rest, complaints = running.stdout.read(), running.stderr.read()
    return seen + rest.splitlines(), complaints, running.wait()


def test_exec_goes_on_and_ends_with_the_commands_status(daemon: Daemon) -> None:
    with dsecctl(daemon, "exec", "box", "--", "sh", "-c", COUNTER) as running:
        assert kill_amid(daemon, running) == (LINES, "", 9)


def test_logs_that_are_followed_go_on(daemon: Daemon, client: Client) -> None:
    client.exec_start("box", ExecRequest(argv=("sh", "-c", COUNTER), exec_id="counter"))
    with dsecctl(daemon, "logs", "-f", "box", "counter") as running:
        assert kill_amid(daemon, running) == (LINES, "", 0)


def test_input_goes_on(daemon: Daemon) -> None:
    with dsecctl(daemon, "exec", "-i", "box", "--", "cat") as running:
        assert running.stdin is not None
        assert running.stdout is not None
        for number in range(3):
            running.stdin.write(f"line {number}\n")
            running.stdin.flush()
            assert running.stdout.readline() == f"line {number}\n"
            daemon.restart()
        assert running.communicate(timeout=90) == ("", "")
        assert running.returncode == 0


def test_events_that_are_followed_go_on(daemon: Daemon, client: Client) -> None:
    with dsecctl(daemon, "events", "-f", "--json") as running:
        assert running.stdout is not None
        # It follows from now on: tell it something until it says so.
        client.image_tag("debian:trixie", "first:1")
        until(lambda: bool(client.image_tag("debian:trixie", "first:1")) and readable(running.stdout))
        daemon.restart()
        client.image_tag("debian:trixie", "second:1")
        kinds: list[tuple[str, object]] = []
        numbers: list[int] = []
        while "second:1" not in str(kinds):
            event = json.loads(running.stdout.readline())
            kinds.append((event["kind"], event["details"]))
            numbers.append(event["seq"])
        running.terminate()
    assert "daemon.started" in [kind for kind, _ in kinds]
    assert numbers == sorted(set(numbers))


def readable(file: object) -> bool:
    return bool(select.select([file], [], [], 0.1)[0])
