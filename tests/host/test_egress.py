# SPDX-License-Identifier: Apache-2.0
"""Attempts to get past a sandbox's network policy, each with a control that gets through where nothing watches.

The attacker, and who judges what came of it, are tests/support/escape.py and attempts.py.
"""

import time
from collections.abc import Iterator

import pytest

from libdsec import Client
from libdsec.types import ExecRequest, SandboxSpec
from tests.support import attempts
from tests.support.attempts import POLICY, Endless, Target
from tests.support.daemon import Daemon
from tests.support.imports import import_python
from tests.support.netlab import FAR4, NEAR4, NEAR6, Lab
from tests.support.waiting import until

IMAGE = "debian:python"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as running:
        yield running


@pytest.fixture(scope="module")
def daemon(lab: Lab) -> Iterator[Daemon]:
    with Daemon(netns=lab.host) as running:
        import_python(running, IMAGE)
        yield running


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def watched(lab: Lab, daemon: Daemon, client: Client) -> Target:
    return Target(lab, client, IMAGE, daemon.cgroup_dir, *POLICY)


@pytest.fixture(scope="module")
def open_(lab: Lab, daemon: Daemon, client: Client) -> Target:
    target = Target(lab, client, IMAGE, daemon.cgroup_dir, *attempts.EVERYTHING)
    target.unwatch()
    return target


def test_every_attempt_fails_and_is_counted_and_its_control_gets_through(watched: Target, open_: Target) -> None:
    attempts.judge(watched, open_).hold()


def test_what_the_policy_allows_passes_all_the_while(client: Client, watched: Target) -> None:
    """The same counter, and the same packets but for what made each of them an attempt."""
    passed = watched.passed()
    script = (
        "import socket\n"
        f"for a in ('{NEAR4}', '{NEAR6}'):\n"
        " with socket.create_connection((a, 443), 60) as s: assert s.recv(100)\n"
        " with socket.socket(socket.AF_INET6 if ':' in a else socket.AF_INET, socket.SOCK_DGRAM) as s:\n"
        "  s.settimeout(60); s.sendto(b'x', (a, 443)); assert s.recv(100)\n"
    )
    result = client.exec(watched.id, ExecRequest(argv=("python3", "-c", script), timeout_s=150))
    assert result.exit_code == 0, result.stderr
    assert watched.passed() > passed + 6


def test_root_inside_gets_nothing_through(client: Client, watched: Target, open_: Target) -> None:
    passed, denied = watched.passed(), watched.denied()
    outcomes = attempts.from_inside(client, watched, open_)
    sent = [name for name, outcome in outcomes.items() if outcome == "sent"]
    # Raw sockets work inside; packet sockets and changes of devices do not.
    assert {"raw udp", "gre", "later fragment", "source of the host"} <= set(sent)
    assert outcomes["arp request"] != "sent"
    assert outcomes["another address"] != "sent"
    refused_at_once = [name for name, outcome in outcomes.items() if outcome == "EPERM"]
    until(lambda: watched.denied() >= denied + len(sent))
    # Only now: the kernel may take its time with what was sent, wherever it ends.
    assert watched.passed() == passed
    assert {"tcp to another address", "udp to another port", "tcp to metadata"} <= set(refused_at_once)


def test_nothing_escapes_while_the_daemon_dies_and_the_policy_changes(
    daemon: Daemon, watched: Target, open_: Target
) -> None:
    passed = watched.passed()
    with Endless(watched, open_) as attacker:
        for round_ in range(3):
            with daemon.client() as changing:
                for number in range(15):
                    changing.update(watched.id, network=(*POLICY, f"tcp:{NEAR4}:{1000 + round_ * 100 + number}"))
            daemon.kill()
            time.sleep(0.3)
            daemon.start()
        with daemon.client() as changing:
            changing.update(watched.id, network=POLICY)
        until(lambda: attacker.tried > 100, 120)
    assert watched.passed() == passed


_SPAM = f"""
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
head = bytes.fromhex("450000280001000040110000")
own = None
while True:
    for target in ("{FAR4}", "{NEAR4}"):
        packet = head + bytes(4) + socket.inet_aton(target) + bytes.fromhex("11110050001400000000") + bytes(10)
        try:
            sock.sendto(packet, (target, 0))
        except OSError:
            pass
"""


def test_no_sandbox_has_a_moment_of_open_network_at_its_start(lab: Lab, client: Client) -> None:
    """Their first command sends at once; the source is filled in by the kernel."""
    seen = len(lab.packets())
    spec = SandboxSpec(image=IMAGE, network=POLICY, command=("python3", "-c", _SPAM))
    ids = [client.create(spec).id for _ in range(8)]
    until(lambda: all(client.network(box).denied > 10 for box in ids), 120)
    for box in ids:
        client.stop(box, grace_s=0)
        client.start(box)
    for box in ids:
        client.delete(box)
    arrived = [line for line in lab.packets()[seen:] if line.startswith("17 ") and line.split()[3] == "80"]
    assert arrived == []
