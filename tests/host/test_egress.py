# SPDX-License-Identifier: Apache-2.0
"""Attempts to get past a sandbox's network policy, each with a control that gets through where nothing watches.

The attacker is tests/support/escape.py: as root inside a sandbox, and, since that one lacks packet sockets and the
right to change devices, as root of the host inside the sandbox's network namespace. What has passed is counted by
packet rules behind the programs, at the host's end of the device (nft's ingress hook). The control is another
sandbox, with every address allowed and the programs taken off its device.
"""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from libdsec import Client
from libdsec.types import ExecRequest, SandboxSpec
from tests.support.daemon import Daemon
from tests.support.imports import import_python
from tests.support.netlab import FAR4, FAR6, HOST4, NEAR4, NEAR6, Lab

IMAGE = "debian:python"
_ESCAPE = Path(__file__).resolve().parents[1] / "support" / "escape.py"
_POLICY = (f"tcp:{NEAR4}:443", f"udp:{NEAR4}:443", f"icmp:{NEAR4}", f"tcp:[{NEAR6}]:443", f"udp:[{NEAR6}]:443")
#: Everything, special addresses as well: what is refused to this one is refused by the programs on its device alone.
_EVERYTHING = (
    "all", "10.0.0.0/8", "169.254.169.254", "198.18.0.0/15", "224.0.0.0/4", "255.255.255.255", HOST4, "[fd00::]/8",
    "[fd00:ec2::254]", "[ff00::]/8", "[fe80::]/10",
)  # fmt: skip


class Target:
    """A sandbox, its namespace and what has passed the host's end of its device."""

    def __init__(self, lab: Lab, daemon: Daemon, client: Client, *policy: str) -> None:
        self._lab = lab
        self.id = client.create(SandboxSpec(image=IMAGE, network=policy)).id
        state = client.network(self.id)
        self.device, (self.own4, self.own6) = state.device, state.addresses
        procs = (daemon.cgroup_dir / f"sandbox-{self.id}").rglob("cgroup.procs")
        self.pid = next(pid for file in procs for pid in file.read_text().split())
        lab.run(lab.host, f"""nft -f - <<'X'
table netdev {self.device} {{
  chain passed {{ type filter hook ingress device "{self.device}" priority 0; policy accept; counter; }}
}}
X""")

    def passed(self) -> int:
        listed = self._lab.run(self._lab.host, f"nft list table netdev {self.device}")
        found = re.search(r"counter packets (\d+)", listed)
        assert found, listed
        return int(found[1])


class Attacker:
    """escape.py by root of the host, in the network namespace of a sandbox."""

    def __init__(self, lab: Lab, target: Target, other: Target) -> None:
        known = facts(lab, target, other, frames="1")
        self._process = subprocess.Popen(
            ["nsenter", f"--net=/proc/{target.pid}/ns/net", sys.executable, _ESCAPE, known],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.names: list[str] = json.loads(self._line())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def tries(self, name: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        return self._line().removeprefix(f"{name}: ").strip()


def facts(lab: Lab, target: Target, other: Target, *, frames: str) -> str:
    mac = re.search(r"link/ether (\S+)", lab.run(lab.host, f"ip link show {target.device}"))
    assert mac
    return json.dumps({
        "own4": target.own4, "own6": target.own6, "allowed4": NEAR4, "denied4": FAR4, "allowed6": NEAR6,
        "denied6": FAR6, "host4": HOST4, "other4": other.own4, "other6": other.own6, "hostmac": mac[1],
        "frames": frames,
    })  # fmt: skip


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
    return Target(lab, daemon, client, *_POLICY)


@pytest.fixture(scope="module")
def open_(lab: Lab, daemon: Daemon, client: Client) -> Target:
    target = Target(lab, daemon, client, *_EVERYTHING)
    lab.run(lab.host, f"tc qdisc del dev {target.device} clsact")
    return target


def test_every_attempt_fails_and_is_counted_and_its_control_gets_through(
    lab: Lab, client: Client, watched: Target, open_: Target
) -> None:
    with Attacker(lab, watched, open_) as attacker, Attacker(lab, open_, watched) as control:
        assert len(attacker.names) >= 60
        escaped, uncounted, powerless = [], [], []
        for name in attacker.names:
            passed, denied = watched.passed(), client.network(watched.id).denied
            outcome = attacker.tries(name)
            if watched.passed() > passed:
                escaped.append(name)
            if outcome == "sent" and client.network(watched.id).denied == denied:
                uncounted.append(name)
            passed = open_.passed()
            outcome = control.tries(name)
            time.sleep(0.02)
            if open_.passed() == passed:
                powerless.append(f"{name}: {outcome}")
    assert escaped == []
    assert uncounted == []
    print(f"{len(attacker.names)} attempts; proving nothing, since the control fails, too: {powerless}")
    # A kernel may be built without a type of device; all else has to get through.
    assert [text for text in powerless if not re.fullmatch(r"a device of type \w+: ENOTSUP", text)] == []
    assert len(attacker.names) - len(powerless) >= 60


def test_what_the_policy_allows_passes_all_the_while(lab: Lab, client: Client, watched: Target) -> None:
    """The same counter, and the same packets but for what made each of them an attempt."""
    passed = watched.passed()
    script = (
        "import socket\n"
        f"for a in ('{NEAR4}', '{NEAR6}'):\n"
        " with socket.create_connection((a, 443), 5) as s: assert s.recv(100)\n"
        " with socket.socket(socket.AF_INET6 if ':' in a else socket.AF_INET, socket.SOCK_DGRAM) as s:\n"
        "  s.settimeout(5); s.sendto(b'x', (a, 443)); assert s.recv(100)\n"
    )
    result = client.exec(watched.id, ExecRequest(argv=("python3", "-c", script), timeout_s=30))
    assert result.exit_code == 0, result.stderr
    assert watched.passed() > passed + 6


def test_root_inside_gets_nothing_through(lab: Lab, client: Client, watched: Target, open_: Target) -> None:
    passed, denied = watched.passed(), client.network(watched.id).denied
    with Attacker(lab, watched, open_) as attacker:
        names = attacker.names
    result = client.exec(watched.id, ExecRequest(
        argv=("python3", "-c", _ESCAPE.read_text(), facts(lab, watched, open_, frames="")),
        stdin="\n".join(names).encode(), timeout_s=60,
    ))  # fmt: skip
    outcomes = dict(line.rsplit(": ", 1) for line in result.text.splitlines()[1:])
    assert set(outcomes) == set(names), result.stderr
    assert watched.passed() == passed
    sent = [name for name, outcome in outcomes.items() if outcome == "sent"]
    # Raw sockets work inside; packet sockets and changes of devices do not.
    assert {"raw udp", "gre", "later fragment", "source of the host"} <= set(sent)
    assert outcomes["arp request"] != "sent"
    assert outcomes["another address"] != "sent"
    refused_at_once = [name for name, outcome in outcomes.items() if outcome == "EPERM"]
    assert client.network(watched.id).denied >= denied + len(sent)
    assert {"tcp to another address", "udp to another port", "tcp to metadata"} <= set(refused_at_once)


def test_nothing_escapes_while_the_daemon_dies_and_the_policy_changes(
    lab: Lab, daemon: Daemon, client: Client, watched: Target, open_: Target
) -> None:
    names = (
        "raw syn", "raw udp", "raw udp over ipv6", "later fragment", "source of the host", "arp request",
    )  # fmt: skip
    passed = watched.passed()
    stop = threading.Event()
    tried = 0

    def attack() -> None:
        nonlocal tried
        with Attacker(lab, watched, open_) as attacker:
            while not stop.is_set():
                for name in names:
                    attacker.tries(name)
                    tried += 1

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        for round_ in range(3):
            with daemon.client() as changing:
                for number in range(15):
                    changing.update(watched.id, network=(*_POLICY, f"tcp:{NEAR4}:{1000 + round_ * 100 + number}"))
            daemon.kill()
            time.sleep(0.3)
            daemon.start()
        with daemon.client() as changing:
            changing.update(watched.id, network=_POLICY)
    finally:
        stop.set()
        thread.join()
    assert tried > 100
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
    spec = SandboxSpec(image=IMAGE, network=_POLICY, command=("python3", "-c", _SPAM))
    ids = [client.create(spec).id for _ in range(8)]
    time.sleep(0.5)
    assert all(client.network(box).denied > 10 for box in ids)
    for box in ids:
        client.stop(box, grace_s=0)
        client.start(box)
    for box in ids:
        client.delete(box)
    arrived = [line for line in lab.packets()[seen:] if line.startswith("17 ") and line.split()[3] == "80"]
    assert arrived == []
