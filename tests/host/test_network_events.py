# SPDX-License-Identifier: Apache-2.0
"""Events about what a sandbox was refused: true, soon, few however much is tried, and none lost with a daemon."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from libdsec import Client
from libdsec.types import ExecRequest, SandboxSpec
from tests.support import cgroups
from tests.support.daemon import Daemon
from tests.support.imports import import_python
from tests.support.netlab import FAR4, FAR6, HOST4, NEAR4, Lab
from tests.support.waiting import until

IMAGE = "debian:python"
_KIND = "network.refused"
#: Tries again and again to connect to two addresses, by TCP and UDP, for ever.
_FLOOD = """
import socket, sys
while True:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as s:
            try:
                s.connect((sys.argv[1], 80))
            except OSError:
                pass
"""
#: The same, so many times.
_TRY = """
import socket, sys
for _ in range(int(sys.argv[2])):
    with socket.socket() as s:
        try:
            s.connect((sys.argv[1], 80))
        except PermissionError:
            pass
"""
_SEND = """
import socket, sys
with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as s:
    try:
        s.sendto(b"x", (sys.argv[1], 53))
    except PermissionError:
        pass
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as running:
        yield running


@pytest.fixture(scope="module")
def daemon(lab: Lab) -> Iterator[Daemon]:
    with Daemon(netns=lab.host) as running:
        import_python(running, IMAGE)
        yield running


def make(client: Client) -> str:
    return client.create(SandboxSpec(image=IMAGE, network=(f"tcp:{NEAR4}:443",))).id


def run(client: Client, box: str, script: str, *arguments: str) -> None:
    done = client.exec(box, ExecRequest(argv=("python3", "-c", script, *arguments), timeout_s=60))
    assert done.exit_code == 0, done


def told(client: Client, box: str) -> list[dict[str, Any]]:
    """Details of all events about refusals to a sandbox so far, with when they came."""
    return [
        {**event.details, "at": event.at.timestamp()} for event in client.events(limit=10000).events
        if event.kind == _KIND and event.subject == box
    ]  # fmt: skip


def counted(client: Client, box: str, total: int) -> list[dict[str, Any]]:
    """The same, once they have told of so many."""
    until(lambda: sum(event["count"] for event in told(client, box)) >= total, 60)
    return told(client, box)


def test_an_event_says_what_was_refused_to_whom_and_how_often(daemon: Daemon) -> None:
    with daemon.client() as client:
        box, other = make(client), make(client)
        run(client, box, _TRY, FAR4, "7")
        ended = time.time()
        first = counted(client, box, 1)[0]
        assert first["at"] - ended < 20
        wanted = {"address": FAR4, "port": 80, "protocol": "tcp", "reason": "policy"}
        assert {name: first[name] for name in wanted} == wanted
        assert sum(event["count"] for event in counted(client, box, 7)) == 7 == client.network(box).denied
        run(client, box, _SEND, FAR6)
        last = counted(client, box, 8)[-1]
        wanted = {"address": FAR6, "port": 53, "protocol": "udp", "reason": "policy", "count": 1}
        assert {name: last[name] for name in wanted} == wanted
        run(client, box, f"import socket; socket.create_connection(({NEAR4!r}, 443), 5)")
        assert told(client, other) == []


def test_a_flood_makes_one_event_a_second_and_no_log_and_its_neighbour_is_heard(daemon: Daemon) -> None:
    with daemon.client() as client:
        hostile, box = make(client), make(client)
        log_bytes = daemon.log.stat().st_size
        for number in range(2):
            client.exec_start(hostile, ExecRequest(argv=("python3", "-c", _FLOOD, FAR4), exec_id=f"flood{number}"))
        until(lambda: client.network(hostile).denied > 1000, 60)
        run(client, box, _TRY, HOST4, "3")
        ended = time.time()
        assert counted(client, box, 1)[0]["at"] - ended < 20
        until(lambda: client.network(hostile).denied > 2000 and len(told(client, hostile)) > 2, 60)
        for number in range(2):
            client.exec_signal(hostile, f"flood{number}", 9)
            client.exec_wait(hostile, f"flood{number}", wait_s=60)
        denied = client.network(hostile).denied
        assert denied > 2000
        events = counted(client, hostile, denied)
        assert sum(event["count"] for event in events) == denied
        assert all(later["at"] - earlier["at"] > 0.9 for earlier, later in itertools.pairwise(events))
        assert daemon.log.stat().st_size - log_bytes < 2000


def test_what_is_refused_while_the_daemon_is_away_is_told_by_the_next(daemon: Daemon) -> None:
    with daemon.client() as client:
        box = make(client)
        run(client, box, _TRY, FAR4, "2")
        counted(client, box, 2)
        inside = Path(f"/proc/{cgroups.first_process(daemon.cgroup_dir / f'sandbox-{box}')}/root/tmp")
        script = (
            "import os, time\nopen('/tmp/wait', 'w').close()\nwhile os.path.exists('/tmp/wait'): time.sleep(0.05)\n"
            f"{_TRY}open('/tmp/done', 'w').close()"
        )
        client.exec_start(box, ExecRequest(argv=("python3", "-c", script, HOST4, "5"), exec_id="later"))
        until((inside / "wait").exists)
        # Told a second ago and more, and the daemon has had its turn since: it has noted what was told.
        time.sleep(2)
        client.version()
        daemon.kill()
    (inside / "wait").unlink()
    until((inside / "done").exists)
    daemon.start()
    with daemon.client() as client:
        assert client.exec_wait(box, "later", wait_s=60).exit_code == 0
        events = counted(client, box, 7)
        assert [sum(event["count"] for event in events if event["address"] == to) for to in (FAR4, HOST4)] == [2, 5]
