# SPDX-License-Identifier: Apache-2.0
"""dsec-dns as the package runs it: its unit and hardening, names for a sandbox, its death and the daemon's, profiles.

The host's resolver is systemd-resolved, as Debian's package sets it up. Behind its stub is a server of the tests' own,
in a network namespace of the guest's: the world. The tests run in this order.
"""

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vm import packages
from tests.vm.host import VmHost
from tests.vm.service import Service

_SUPPORT = Path(__file__).resolve().parents[1] / "support"
HOST, SERVER, OTHER = "203.0.113.1", "203.0.113.10", "203.0.113.11"
HOST6, SERVER6 = "2001:db8:1::1", "2001:db8:1::10"
_STUB, _PORT = "127.0.0.53", 5353
#: What the policy's names may lead to, besides rules for the names of chains and of single tests.
_POLICY = "host:*.example.org:443,host:allowed.example.test:443"
_FRESH = [f"fresh{number}.example.org" for number in range(20)]
_MANY = [f"198.51.100.{number}" for number in range(1, 121)]
_RECORDS = (
    ("www.example.org", "A", SERVER), ("other.example.org", "A", OTHER), ("denied.example.test", "A", SERVER),
    ("allowed.example.test", "A", SERVER), ("allowed.example.test", "AAAA", SERVER6),
    ("alias.example.org", "CNAME", "middle.example.net."), ("middle.example.net", "CNAME", "end.example.net."),
    ("end.example.net", "A", SERVER), ("end.example.net", "AAAA", SERVER6),
    *(("many.example.org", "A", address) for address in _MANY), *((name, "A", SERVER) for name in _FRESH),
)  # fmt: skip
_ZONE = "".join(f"{name} 3600 {kind} {value}\n" for name, kind, value in _RECORDS) + ".\n"
_WORLD = f"""
ip netns add world
ip link add uplink type veth peer name eth0 netns world
ip addr add {HOST}/24 dev uplink
ip addr add {HOST6}/64 dev uplink nodad
ip link set uplink up
ip -n world addr add {SERVER}/24 dev eth0
ip -n world addr add {SERVER6}/64 dev eth0 nodad
ip -n world addr add {OTHER}/24 dev eth0
ip -n world link set eth0 up
ip -n world link set lo up
"""
#: As the package leaves /etc/resolv.conf where it is installed; with nobody to ask but our server.
_RESOLVED = f"""
mkdir -p /etc/systemd/resolved.conf.d
printf '[Resolve]\nDNS={SERVER}:{_PORT}\nFallbackDNS=\nDomains=~.\n' >/etc/systemd/resolved.conf.d/test.conf
ln -sf ../run/systemd/resolve/stub-resolv.conf /etc/resolv.conf
systemctl unmask systemd-resolved.service
systemctl start systemd-resolved.service
"""
#: Counts what dsec-dns asks of the stub by UDP, and how often it or resolved begin a connection instead.
_COUNTERS = f"""
table ip asked {{
  counter datagrams {{ }}
  counter stub_tcp {{ }}
  counter world_tcp {{ }}
  chain out {{
    type filter hook output priority 0;
    meta skuid "dsec-dns" ip daddr {_STUB} udp dport 53 counter name datagrams
    meta skuid "dsec-dns" ip daddr {_STUB} tcp dport 53 tcp flags & (syn | ack) == syn counter name stub_tcp
    ip daddr {SERVER} tcp dport {_PORT} tcp flags & (syn | ack) == syn counter name world_tcp
  }}
}}
"""
_GREETER = """
import socket
server = socket.create_server(("::", 443), family=socket.AF_INET6, dualstack_ipv6=True)
while True:
    with server.accept()[0] as connection:
        connection.sendall(b"hello\\n")
"""
#: In a sandbox: asks for the name again and again, and says what came of it.
_ASKING = (
    "export RES_OPTIONS='timeout:30 attempts:5'; "
    "while sleep 0.2; do getent ahostsv4 www.example.org >/dev/null && echo known || echo unknown; done"
)
#: In a sandbox: asks the server of resolv.conf(5) for an A record, and prints the response code.
_RCODE = """perl -MSocket -e '
open F, "<", "/etc/resolv.conf"; my ($server) = join("", <F>) =~ /nameserver (\\S+)/;
socket S, PF_INET, SOCK_DGRAM, 0; connect S, sockaddr_in(53, inet_aton($server)); alarm 60;
my $name = join("", map { pack("C/a", $_) } split /[.]/, $ARGV[0]);
send S, pack("n6", 7, 256, 1, 0, 0, 0) . $name . pack("Cnn", 0, 1, 1), 0;
recv S, my $answer, 512, 0; print unpack("n", substr $answer, 2) & 15, "\\n"' """
_UNIT = "dsec-dns.service"


def _main_pid(vm: VmHost) -> str:
    return vm.run(["systemctl", "show", "--value", "--property=MainPID", _UNIT]).text.strip()


def _wait(condition: Callable[[], bool], what: str, timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


def _inside(vm: VmHost, *steps: str) -> list[str]:
    """What each line of shell in the sandbox prints, in one command."""
    _, said = Service(vm).execute("named", "bash", "-c", "; echo; ".join(steps))
    return [line for line in said.splitlines() if line]


def _resolve(name: str, *, family: int = 4, patience_s: int = 30) -> str:
    """The first address of a name, by the sandbox's own C library; what knows of none says so at once.

    It asks again where the answer is that there was none in time, as it is on a machine that stands still.
    """
    options = f"RES_OPTIONS='timeout:{patience_s} attempts:5'"
    return f"{options} getent ahostsv{family} {name} | head -n 1 | grep -o '^[0-9a-f.:]*' || echo unknown"


def _reach(address: str) -> str:
    """What a connection brings, or the kernel's word for why there is none."""
    return f"(exec 3<>/dev/tcp/{address}/443 && timeout 60 cat <&3) 2>&1 | grep -oE 'hello|not permitted' | head -n 1"


def _counted(vm: VmHost) -> dict[str, int]:
    """Packets of each counter of _COUNTERS."""
    listed = json.loads(vm.run(["nft", "--json", "list", "counters", "table", "ip", "asked"]).text)["nftables"]
    return {one["counter"]["name"]: one["counter"]["packets"] for one in listed if "counter" in one}


def _asked(vm: VmHost) -> list[str]:
    """The names that the world was asked for."""
    return vm.read("/root/lab/asked").decode().split()


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
    vm.run(_RESOLVED)
    vm.run(["nft", "-f", "-"], stdin=_COUNTERS.encode())
    for port in (_PORT, 443):
        listening = ["ip", "netns", "exec", "world", "ss", "-Hltn", f"sport = {port}"]
        _wait(lambda: vm.run(listening).text != "", "the world does not listen")  # noqa: B023
    vm.run(["dsecctl", "create", "--name", "named", "--network", _POLICY, packages.IMAGE])
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
    _restart_after(host, 3600)
    old = _main_pid(host)
    host.run(["kill", "-9", old])
    _wait(lambda: _main_pid(host) == "0", "systemd has not noticed the end of dsec-dns")
    # What was opened before stays so.
    steps = _resolve("other.example.org", patience_s=1), _reach(OTHER), _reach(SERVER)
    assert _inside(host, *steps) == ["unknown", "not permitted", "hello"]
    assert _main_pid(host) == "0"
    _restart_after(host, 1)
    _wait(lambda: _main_pid(host) not in ("0", old) and _connections(host) == 3, "dsec-dns was not started again")
    assert _inside(host, _resolve("other.example.org"), _reach(OTHER)) == [OTHER, "hello"]
    assert host.run(["systemctl", "show", "--value", "--property=NRestarts", _UNIT]).text == "1\n"


def _restart_after(vm: VmHost, seconds: int) -> None:
    """When systemd starts dsec-dns again, counted from its end, also where it has ended."""
    setting = f"[Service]\nRestartSec={seconds}\nRestartMaxDelaySec={seconds}\nRestartSteps=0\n"
    vm.write(f"/run/systemd/system/{_UNIT}.d/restart.conf", setting.encode())
    vm.run(["systemctl", "daemon-reload"])


def test_names_of_both_families_chains_and_long_answers_come_through_systemd_resolved(host: VmHost) -> None:
    assert host.run(["readlink", "-f", "/etc/resolv.conf"]).text == "/run/systemd/resolve/stub-resolv.conf\n"
    (process,) = {line.split()[-1] for line in host.run(["ss", "-Hlunp", f"src = {_STUB}"]).text.splitlines()}
    assert '"systemd-resolve"' in process
    before = _counted(host)
    steps = (
        _reach(SERVER6), _resolve("allowed.example.test"), _resolve("allowed.example.test", family=6), _reach(SERVER6),
        _resolve("alias.example.org"), _resolve("alias.example.org", family=6),
    )  # fmt: skip
    assert _inside(host, *steps) == ["not permitted", SERVER, SERVER6, "hello", SERVER, SERVER6]
    after = _counted(host)
    # Letters of random case came back as they were: dsec-dns asks by TCP whoever does not keep them.
    assert (after["datagrams"] > before["datagrams"], after["stub_tcp"]) == (True, before["stub_tcp"])
    # Of more addresses than fit into a datagram some are told, and all that are told are of it.
    patient = "RES_OPTIONS='timeout:30 attempts:5'"
    said = _inside(host, f"{patient} getent ahostsv4 many.example.org | cut -d' ' -f1 | sort -u")
    assert len(said) == 32 and set(said) <= set(_MANY)
    long = _counted(host)
    assert (long["stub_tcp"] > after["stub_tcp"], long["world_tcp"] > after["world_tcp"]) == (True, True)


def test_systemd_resolved_is_not_asked_for_a_name_outside_the_policy(host: VmHost) -> None:
    for name, rcode in (("denied.example.test", "3"), ("fresh0.example.org", "0")):
        # "2" is that there was no answer in time.
        said = next((said for _ in range(5) if (said := _inside(host, f"{_RCODE}{name}")) != ["2"]), ["2"])
        assert (name, said) == (name, [rcode])
    asked = _asked(host)
    assert ("fresh0.example.org" in asked, "denied.example.test" in asked) == (True, False)
    # The control: the host may ask for it, and then the world hears of it.
    assert SERVER in host.run(["resolvectl", "query", "--legend=no", "denied.example.test"]).text
    assert "denied.example.test" in _asked(host)


def test_names_go_on_while_systemd_resolved_is_restarted(host: VmHost) -> None:
    fresh = iter(_FRESH[1:])
    host.run(["systemctl", "restart", "systemd-resolved.service"])
    # Of what was asked before, dsec-dns has forgotten all that was not asked again since it was killed.
    assert _inside(host, _resolve(next(fresh)), _resolve("www.example.org")) == [SERVER, SERVER]
    host.run(["systemctl", "stop", "systemd-resolved.service"])
    # Only what is remembered, and what it opened, is there without it.
    steps = f"{_RCODE}{next(fresh)}", _resolve("www.example.org"), _reach(SERVER)
    assert _inside(host, *steps) == ["2", SERVER, "hello"]
    # Who asks while it is started gets an answer, unless that takes longer than anybody waits.
    assert any(_is_answered_while_resolved_starts(host, name) for name in fresh)
    assert _inside(host, _resolve(_FRESH[1]), _reach(SERVER)) == [SERVER, "hello"]


def _is_answered_while_resolved_starts(vm: VmHost, name: str) -> bool:
    vm.run(["systemctl", "stop", "systemd-resolved.service"])
    vm.run("(sleep 0.5; systemctl start systemd-resolved.service) >/dev/null 2>&1 &")
    return _inside(vm, f"{_RCODE}{name}") == ["0"]


def test_the_daemon_stops_at_once_though_dsec_dns_stays(host: VmHost) -> None:
    pid = _main_pid(host)
    mark = host.run(["date", "+%s.%N"]).text.strip()
    began = time.monotonic()
    host.run(["systemctl", "restart", "dsecd.service"])
    print(f"restart: {time.monotonic() - began:.1f} s")
    host.run(["journalctl", "--sync"])
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
    # What audit has said is in the journal a moment later.
    host.run(["journalctl", "--sync"])
    said = host.run(["journalctl", "--dmesg", "--no-pager", "--grep=apparmor"], check=False).text
    # The control: the kernel's messages about profiles are there.
    assert 'operation="profile_load"' in said
    assert "DENIED" not in said, said
