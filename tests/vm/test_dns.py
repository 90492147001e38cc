# SPDX-License-Identifier: Apache-2.0
"""dsec-dns as the package runs it: its unit and hardening, names for a sandbox, its death and the daemon's, profiles.

The world that is asked is a network namespace of the guest's. The tests run in this order.
"""

import base64
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vm import packages
from tests.vm.host import VmHost
from tests.vm.service import Service

_SUPPORT = Path(__file__).resolve().parents[1] / "support"
HOST, SERVER, OTHER = "203.0.113.1", "203.0.113.10", "203.0.113.11"
_ZONE = f"www.example.org 300 A {SERVER}\nother.example.org 300 A {OTHER}\n.\n"
_WORLD = f"""
ip netns add world
ip link add uplink type veth peer name eth0 netns world
ip addr add {HOST}/24 dev uplink
ip link set uplink up
ip -n world addr add {SERVER}/24 dev eth0
ip -n world addr add {OTHER}/24 dev eth0
ip -n world link set eth0 up
ip -n world link set lo up
"""
_GREETER = """
import socket
server = socket.create_server(("", 443))
while True:
    with server.accept()[0] as connection:
        connection.sendall(b"hello\\n")
"""
#: In a sandbox: asks for the name again and again, and says what came of it.
_ASKING = "while sleep 0.2; do getent ahostsv4 www.example.org >/dev/null && echo known || echo unknown; done"
_UNIT = "dsec-dns.service"


def _main_pid(vm: VmHost) -> str:
    return vm.run(["systemctl", "show", "--value", "--property=MainPID", _UNIT]).text.strip()


def _wait(condition: Callable[[], bool], what: str, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


def _inside(vm: VmHost, *steps: str) -> list[str]:
    """What each line of shell in the sandbox prints, in one command."""
    _, said = Service(vm).execute("named", "bash", "-c", "; echo; ".join(steps))
    return [line for line in said.splitlines() if line]


def _resolve(name: str) -> str:
    """The first address of a name, by the sandbox's own C library."""
    return f"RES_OPTIONS='timeout:1 attempts:1' getent ahostsv4 {name} | head -n 1 | grep -o '^[0-9.]*' || echo unknown"


def _reach(address: str) -> str:
    """What a connection brings, or the kernel's word for why there is none."""
    return f"(exec 3<>/dev/tcp/{address}/443 && timeout 5 cat <&3) 2>&1 | grep -oE 'hello|not permitted' | head -n 1"


def _connections(vm: VmHost) -> int:
    """How often dsec-dns has been told the policy of the sandbox by a daemon that began."""
    said = vm.run(["journalctl", "--unit", _UNIT, "--output=cat", "--no-pager"]).text
    return said.count("the daemon knows 1 sandboxes") + 1


@pytest.fixture(scope="module")
def host(dsec_vm: VmHost) -> Iterator[VmHost]:
    """A sandbox whose policy has a name, and a world that knows it."""
    vm = dsec_vm
    vm.run(_WORLD)
    for name in ("__init__.py", "dns.py", "dns_server.py"):
        vm.put(_SUPPORT / name, "/root/lab/tests/support")
    vm.write("/root/lab/zone", _ZONE.encode())
    vm.write("/root/lab/greeter.py", _GREETER.encode())
    server = f"(cat zone; exec sleep infinity) | python3 -m tests.support.dns_server {SERVER}:5353 /root/lab/asked"
    for command in (server, "exec python3 greeter.py"):
        vm.run(
            ["systemd-run", "--quiet", "--working-directory=/root/lab", "ip", "netns", "exec", "world", "sh", "-c",
             command]
        )  # fmt: skip
    vm.write("/etc/dsec/dsecd.toml.d/dns.toml", f'[network]\ndns_upstreams = ["{SERVER}:5353"]\n'.encode())
    vm.run(["systemctl", "restart", "dsecd.service"])
    vm.run(["dsecctl", "create", "--name", "named", "--network", "host:*.example.org:443", packages.IMAGE])
    yield vm
    print(vm.run(["journalctl", "--unit", _UNIT, "--no-pager"]).text[-2000:])


def test_the_unit_runs_as_nobody_with_one_right_and_sees_little(host: VmHost) -> None:
    pid = _main_pid(host)
    status = dict(line.split(":\t", 1) for line in host.read(f"/proc/{pid}/status").decode().splitlines())
    uid = host.run(["id", "-u", "dsec-dns"]).text.strip()
    assert status["Uid"].split() == [uid] * 4 and uid != "0"
    # CAP_NET_BIND_SERVICE alone.
    assert {status[name] for name in ("CapEff", "CapBnd", "CapAmb")} == {f"{1 << 10:016x}"}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    # What root could write, in its mount namespace and in the host's.
    for path in ("/etc/dsec/x", "/usr/x", "/srv/x"):
        assert not host.run(["nsenter", f"--mount=/proc/{pid}/ns/mnt", "touch", path], check=False).ok, path
        host.run(f"touch {path}; rm {path}")
    assert not host.run(["nsenter", f"--mount=/proc/{pid}/ns/mnt", "ls", "/var/lib/dsec"], check=False).text
    assert host.run(["ls", "/var/lib/dsec"]).text


def test_names_resolve_and_open_what_they_lead_to(host: VmHost) -> None:
    steps = _reach(SERVER), _resolve("www.example.org"), _reach(SERVER), _resolve("www.example.com")
    assert _inside(host, *steps) == ["not permitted", SERVER, "hello", "unknown"]


def test_names_go_on_while_the_daemon_is_killed(host: VmHost) -> None:
    service, pid = Service(host), _main_pid(host)
    service.api("/v1/sandboxes/named/execs/start", {"exec_id": "asking", "argv": ["sh", "-c", _ASKING]})
    old = service.main_pid()
    assert _connections(host) == 1
    host.run(["kill", "-9", old])
    service.wait_for_new_daemon(old)
    assert _main_pid(host) == pid
    _wait(lambda: _connections(host) == 2, "dsec-dns has not come back to the daemon")
    said: list[str] = []

    def has_asked_again() -> bool:
        output = service.api("/v1/sandboxes/named/execs/asking/output")["data"]
        said[:] = base64.b64decode(str(output)).decode().splitlines()
        return len(said) > 3

    _wait(has_asked_again, "the sandbox asks no more")
    assert set(said) == {"known"}


def test_without_dsec_dns_nothing_opens_until_systemd_has_started_it_again(host: VmHost) -> None:
    slow = b"[Service]\nRestartSec=30\nRestartMaxDelaySec=30\nRestartSteps=0\n"
    host.write(f"/run/systemd/system/{_UNIT}.d/slow.conf", slow)
    host.run(["systemctl", "daemon-reload"])
    old = _main_pid(host)
    host.run(["kill", "-9", old])
    # What was opened before stays so.
    steps = _resolve("other.example.org"), _reach(OTHER), _reach(SERVER)
    assert _inside(host, *steps) == ["unknown", "not permitted", "hello"]
    assert _main_pid(host) == "0", "dsec-dns was back too soon: nothing was seen"
    _wait(lambda: _main_pid(host) not in ("0", old) and _connections(host) == 3, "dsec-dns was not started again")
    assert _inside(host, _resolve("other.example.org"), _reach(OTHER)) == [OTHER, "hello"]
    assert host.run(["systemctl", "show", "--value", "--property=NRestarts", _UNIT]).text == "1\n"


def test_the_daemon_stops_at_once_though_dsec_dns_stays(host: VmHost) -> None:
    pid = _main_pid(host)
    mark = host.run(["date", "+%s.%N"]).text.strip()
    began = time.monotonic()
    host.run(["systemctl", "restart", "dsecd.service"])
    print(f"restart: {time.monotonic() - began:.1f} s")
    assert "did not end" not in host.run(["journalctl", "--unit=dsecd", f"--since=@{mark}", "--no-pager"]).text
    assert _main_pid(host) == pid
    assert _inside(host, _resolve("www.example.org")) == [SERVER]


def test_profiles_deny_nothing_of_it(host: VmHost) -> None:
    """All that a network takes (devices, packet rules, programs in the kernel, ports in) was confined, and worked."""
    service = Service(host)
    confined = host.run(["cat", f"/proc/{service.main_pid()}/attr/current"]).text
    assert confined.startswith("dsecd (enforce)")
    for policy in ("none", "all"):
        service.api("/v1/sandboxes/named", {"network": policy}, method="PATCH")
    service.delete("named")
    said = host.run(["journalctl", "--dmesg", "--no-pager", "--grep=apparmor"], check=False).text
    # The control: the kernel's messages about profiles are there.
    assert 'operation="profile_load"' in said
    assert "DENIED" not in said, said
