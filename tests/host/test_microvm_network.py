# SPDX-License-Identifier: Apache-2.0
"""MicroVMs with a network: the same policies, enforced on a tap by the same programs, against a guest's root.

The world is tests/support/netlab.py, the attacker tests/support/escape.py, here as root in the guest, who may send any
frame. What has passed is counted behind the programs, by nft's ingress hook on the tap. One machine serves all tests,
in their order: guests are slow to boot where they are emulated.
"""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from libdsec import Client, Sandbox
from libdsec.types import ExecRequest, SandboxSpec, State
from tests.host.test_network import entries
from tests.host.test_network_names import DNS, Names
from tests.support import machines
from tests.support.daemon import Daemon
from tests.support.imports import import_python
from tests.support.netlab import FAR4, HOST4, HOST6, METADATA4, NEAR4, NEAR6, PRIVATE4, Lab
from tests.support.waiting import until

IMAGE = "debian:python"
_SUPPORT = Path(__file__).resolve().parents[1] / "support"
_REACH, _ESCAPE = ((_SUPPORT / name).read_text() for name in ("reach.py", "escape.py"))
_OTHER4, _OTHER6 = "198.18.7.7", "fd64:7365:6300::7"  # of no sandbox, within the pools
_SHUT4, _SHUT6 = "198.51.100.77", "2001:db8:2::77"  # public, and of no name that a rule covers
_POLICY = (
    f"tcp:{NEAR4}:443", f"udp:{NEAR4}:443", f"icmp:{NEAR4}", f"tcp:[{NEAR6}]:443", f"udp:[{NEAR6}]:443",
    "host:www.example.org:443",
)  # fmt: skip
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as running:
        yield running


@pytest.fixture(scope="module")
def daemon(lab: Lab) -> Iterator[Daemon]:
    config = machines.config() + f'[network]\ndns_upstreams = ["{DNS}:5353"]\n'
    with Daemon(netns=lab.host, config=config) as running:
        import_python(running, IMAGE)
        names = Names(lab, running)
        yield running
        names.close()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def vm(daemon: Daemon) -> str:
    with daemon.client() as client:
        box = client.create(SandboxSpec(image=IMAGE, backend="microvm", network=_POLICY), id="vm").id
        client.exec(box, ExecRequest(argv=("tar", "-xC", "/", "--skip-old-files"), stdin=ip_program()))
        return box


def ip_program() -> bytes:
    """ip(8) and the libraries it needs, of this very Debian, as a tar archive."""
    program = shutil.which("ip")
    assert program
    linked = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", dereference=True) as archive:
        for path in (program, *re.findall(r"=> (/\S+)", linked)):
            archive.add(path, f"usr{path}" if not path.startswith("/usr/") else path)
    return output.getvalue()


def reach(client: Client, sandbox_id: str, *targets: str) -> dict[str, str]:
    result = client.exec(sandbox_id, ExecRequest(argv=("python3", "-c", _REACH, *targets), timeout_s=60))
    assert result.exit_code == 0, result
    return dict(line.split(" ", 1) for line in result.text.splitlines())


def sh(client: Client, sandbox_id: str, script: str) -> str:
    result = client.exec(sandbox_id, ExecRequest(argv=("sh", "-c", script), timeout_s=60))
    assert result.exit_code == 0, result
    return result.text


def becomes_true(question: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Passed:
    """Counts what comes in by a tap, behind the programs."""

    def __init__(self, lab: Lab, device: str) -> None:
        self._lab, self._device = lab, device
        lab.run(lab.host, f"""nft -f - <<'X'
table netdev {device} {{
  chain passed {{ type filter hook ingress device "{device}" priority 0; policy accept; counter; }}
}}
X""")

    def count(self) -> int:
        found = re.search(r"packets (\d+)", self._lab.run(self._lab.host, f"nft list table netdev {self._device}"))
        assert found
        return int(found[1])


class Attacker:
    """escape.py as root in the guest, one attempt at a time."""

    def __init__(self, lab: Lab, client: Client, sandbox_id: str) -> None:
        state = client.network(sandbox_id)
        mac = re.search(r"link/ether (\S+)", lab.run(lab.host, f"ip link show {state.device}"))
        assert mac
        facts = {
            "own4": state.addresses[0], "own6": state.addresses[1], "allowed4": NEAR4, "denied4": _SHUT4,
            "allowed6": NEAR6, "denied6": _SHUT6, "host4": HOST4, "other4": _OTHER4, "other6": _OTHER6,
            "hostmac": mac[1], "frames": "1",
        }  # fmt: skip
        command = ("python3", "-uc", _ESCAPE, json.dumps(facts))
        self.stream = Sandbox.get(sandbox_id, client=client).popen(*command, stdin=True)
        self._lines = self.stream.stdout
        self.names: list[str] = json.loads(next(self._lines))

    def tries(self, name: str) -> str:
        self.stream.write(name + "\n")
        return next(self._lines).removeprefix(f"{name}: ").strip()


def test_what_the_policy_names_is_reached_and_the_rest_is_silence(client: Client, vm: str) -> None:
    allowed = {
        f"tcp/{NEAR4}/443": HOST4, f"udp/{NEAR4}/443": HOST4, f"tcp/{NEAR6}/443": HOST6, f"udp/{NEAR6}/443": HOST6,
        f"icmp/{NEAR4}/0": "echo", "tcp/www.example.org/443": HOST4,
    }  # fmt: skip
    denied = {
        f"tcp/{NEAR4}/80", f"tcp/{PRIVATE4}/443", f"tcp/{METADATA4}/80", f"udp/{FAR4}/53", f"tcp/{HOST4}/443",
    }  # fmt: skip
    found = reach(client, vm, *allowed, *denied)
    assert found == {**allowed, **dict.fromkeys(denied, "timeout")}
    state = client.network(vm)
    assert state.sent_packets >= len(allowed)
    assert state.received_bytes > 0
    assert {(one.address, one.port, one.protocol, one.reason) for one in state.recent} <= {
        (target.split("/")[1], int(target.split("/")[2]), target.split("/")[0], "policy") for target in denied
    }
    assert state.denied >= len(denied)
    # A name that no rule covers does not exist, and nothing but the device's own two addresses is there.
    assert "Name or service not known" in str(reach(client, vm, "tcp/cdn.example.org/443"))
    assert set(re.findall(r"inet6? (\S+)/", sh(client, vm, "ip addr show eth0"))) == set(state.addresses)


def test_root_in_the_guest_gets_no_frame_past_the_programs(lab: Lab, daemon: Daemon, client: Client, vm: str) -> None:
    """Each attempt is refused and counted, and gets through when the programs are taken off the same device."""
    device = client.network(vm).device
    passed, attacker = Passed(lab, device), Attacker(lab, client, vm)
    uncounted, powerless = [], []
    with attacker.stream:
        assert len(attacker.names) >= 60
        for name in attacker.names:
            denied = client.network(vm).denied
            outcome = attacker.tries(name)
            if outcome == "sent" and not becomes_true(lambda: client.network(vm).denied > denied, 30):  # noqa: B023
                uncounted.append(name)
        assert uncounted == []
        assert passed.count() == 0
        lab.run(lab.host, f"tc qdisc del dev {device} clsact")
        for name in attacker.names:
            before = passed.count()
            outcome = attacker.tries(name)
            if not becomes_true(lambda: passed.count() > before, 30 if outcome == "sent" else 1):  # noqa: B023
                powerless.append(f"{name}: {outcome}")
    print(f"{len(attacker.names)} attempts; proving nothing, since the control fails, too: {powerless}")
    # A kernel may be built without a type of device; all else has to get through.
    assert [text for text in powerless if not re.fullmatch(r"a device of type \w+: E\w+", text)] == []
    # A new daemon puts the programs back, whoever took them away.
    daemon.restart()
    before = passed.count()
    assert reach(client, vm, f"tcp/{NEAR4}/80") == {f"tcp/{NEAR4}/80": "timeout"}
    assert passed.count() == before
    assert reach(client, vm, f"tcp/{NEAR4}/443") == {f"tcp/{NEAR4}/443": HOST4}


_KNOCK = """
import socket, sys, time
while True:
    for target in ((sys.argv[1], 80), (sys.argv[1], 8443)):
        with socket.socket() as s:
            s.settimeout(0.2)
            try:
                s.connect(target)
                print("reached", target, flush=True)
            except OSError:
                pass
"""


def test_enforcement_and_connections_go_on_without_the_daemon_and_policies_change_live(
    lab: Lab, daemon: Daemon, client: Client, vm: str
) -> None:
    client.exec_start(vm, ExecRequest(argv=("python3", "-c", _REACH, f"stream/{NEAR4}/443"), exec_id="stream"))
    client.exec_start(vm, ExecRequest(argv=("python3", "-c", _KNOCK, NEAR4), exec_id="knock"))
    until(lambda: client.exec_output(vm, "stream").end > 20, 60)
    before = client.network(vm).denied
    daemon.kill()
    seen = len(lab.packets())
    until(lambda: sum(f" {NEAR4} 443 " in line for line in lab.packets()[seen:]) > 3)
    daemon.start()
    until(lambda: client.network(vm).denied > before)
    assert client.exec_inspect(vm, "stream").running
    # What was allowed ends with the policy that allowed it; and back.
    client.update(vm, network=(f"tcp:{FAR4}:443",))
    assert client.exec_wait(vm, "stream", wait_s=60).text.splitlines()[-1].endswith("timeout")
    targets = [f"tcp/{NEAR4}/443", f"tcp/{FAR4}/443"]
    assert reach(client, vm, *targets) == {targets[0]: "timeout", targets[1]: HOST4}
    client.update(vm, network="none")
    assert reach(client, vm, *targets) == dict.fromkeys(targets, "timeout")
    client.update(vm, network=_POLICY)
    assert reach(client, vm, *targets) == {targets[0]: HOST4, targets[1]: "timeout"}
    assert client.exec_output(vm, "knock").data == b""
    client.exec_signal(vm, "knock", signal.SIGKILL, tree=True)


_WATCH = "while :; do echo $(date +%s%N) $(ip -o addr show eth0) $(cat /sys/class/net/eth0/address) >> /tmp/seen; done"


def test_a_copy_has_another_address_before_any_command_of_it_goes_on(client: Client, vm: str) -> None:
    client.exec_start(vm, ExecRequest(argv=("sh", "-c", _WATCH), exec_id="watch"))
    sh(client, vm, "until [ -s /tmp/seen ]; do sleep 0.1; done")
    client.fork(vm, ids=("kid",))
    own = {name: (*client.network(name).addresses, address_of(client, name)) for name in (vm, "kid")}
    assert set(own[vm]).isdisjoint(own["kid"])
    fresh: list[str] = []

    def seen_enough() -> bool:
        nonlocal fresh
        seen = {name: [line for line in sh(client, name, "cat /tmp/seen").splitlines() if line] for name in own}
        fresh = [line for line in seen["kid"][:-1] if line not in seen[vm]]
        return len(fresh) > 2

    until(seen_enough, 60)
    # One line may have been begun by the machine that it is a copy of.
    assert all(word in line for line in fresh[1:] for word in own["kid"])
    assert not any(word in line for line in fresh[1:] for word in own[vm])
    assert reach(client, "kid", f"tcp/{NEAR4}/443", f"tcp/{NEAR4}/80") == {
        f"tcp/{NEAR4}/443": HOST4, f"tcp/{NEAR4}/80": "timeout",
    }  # fmt: skip
    client.delete("kid")
    client.exec_signal(vm, "watch", signal.SIGKILL, tree=True)


def address_of(client: Client, sandbox_id: str) -> str:
    return sh(client, sandbox_id, "cat /sys/class/net/eth0/address").strip()


def test_a_tap_ends_with_its_monitor(lab: Lab, daemon: Daemon, client: Client, vm: str) -> None:
    device = client.network(vm).device
    assert "tun type tap pi off vnet_hdr off persist off" in lab.run(lab.host, f"ip -d link show {device}")
    daemon.kill()
    (pid,) = (daemon.cgroup_dir / f"vm-{vm}" / "run" / "cgroup.procs").read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    until(lambda: "dsec" not in lab.run(lab.host, "ip -o link"))
    daemon.start()
    assert client.wait(vm, [State.FAILED], wait_s=60).state == "failed"
    client.delete(vm)
    assert entries(daemon, "sandboxes") == entries(daemon, "policies") == 0
