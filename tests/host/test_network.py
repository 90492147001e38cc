# SPDX-License-Identifier: Apache-2.0
"""Sandboxes with a network: what the policy allows works, the rest does not, whatever happens to the daemon.

The world around is tests/support/netlab.py; what arrives there is read from a packet socket. What hostile code tries
is in test_egress.py.
"""

import contextlib
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import Client
from libdsec.errors import ConnectionFailed, DsecError, FeatureMissing, InvalidSpec, NotFound
from libdsec.types import ExecRequest, NetworkState, SandboxSpec, State
from tests.support import cgroups
from tests.support.daemon import Daemon
from tests.support.imports import import_python
from tests.support.netlab import FAR4, FAR6, HOST4, HOST6, METADATA4, NEAR4, NEAR6, PRIVATE4, PRIVATE6, Lab
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

IMAGE = "debian:python"
_CHECKOUT = Path(__file__).resolve().parents[2]
_REACH_FILE = Path(__file__).resolve().parents[1] / "support" / "reach.py"
_REACH = _REACH_FILE.read_bytes()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as running:
        yield running


@pytest.fixture(scope="module")
def daemon(lab: Lab) -> Iterator[Daemon]:
    with Daemon(netns=lab.host) as running:
        import_python(running, IMAGE)
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected
        for sandbox in connected.list_all():
            connected.delete(sandbox.id)


def make(client: Client, *policy: str, **more: object) -> str:
    return client.create(SandboxSpec.model_validate({"image": IMAGE, "network": policy, **more})).id


def reach(client: Client, sandbox_id: str, *targets: str) -> dict[str, str]:
    result = client.exec(sandbox_id, ExecRequest(argv=("python3", "-", *targets), stdin=_REACH, timeout_s=60))
    assert result.exit_code == 0, result
    return dict(line.split(" ", 1) for line in result.text.splitlines())


def test_what_the_policy_names_is_reached_and_the_rest_is_an_error_at_once(client: Client) -> None:
    box = make(
        client, f"tcp:{NEAR4}:443", f"udp:{FAR4}:53", f"tcp:[{NEAR6}]:80-443", "udp:[2001:db8:2::]/48", f"icmp:{NEAR4}",
        f"icmp:[{NEAR6}]",
    )  # fmt: skip
    allowed = {
        f"tcp/{NEAR4}/443": HOST4, f"udp/{FAR4}/53": HOST4, f"tcp/{NEAR6}/443": HOST6, f"tcp/{NEAR6}/80": HOST6,
        f"udp/{FAR6}/8443": HOST6, f"icmp/{NEAR4}/0": "echo", f"icmp/{NEAR6}/0": "echo",
    }  # fmt: skip
    denied = [
        f"tcp/{NEAR4}/80", f"udp/{NEAR4}/443", f"tcp/{FAR4}/443", f"tcp/{NEAR6}/8443", f"tcp/{FAR6}/443",
        f"tcp/{HOST4}/443", f"tcp/{METADATA4}/80", f"udp/{PRIVATE6}/53",
    ]  # fmt: skip
    found = reach(client, box, *allowed, *denied, f"icmp/{FAR4}/0")
    # The world sees the host's address: it knows none of a sandbox's.
    assert found == {**allowed, **dict.fromkeys(denied, "EPERM"), f"icmp/{FAR4}/0": "timeout"}
    state = client.network(box)
    assert state.denied == len(denied) + 1
    assert state.sent_packets >= len(allowed)
    assert state.received_bytes > 0
    assert {(denial.address, denial.port, denial.protocol, denial.reason) for denial in state.recent} <= {
        *((t.split("/")[1], int(t.split("/")[2]), t.split("/")[0], "policy") for t in denied),
        (FAR4, 0, "icmp", "policy"),
    }
    assert len(state.recent) == 8


def test_all_is_everything_public_and_named_addresses_beside_it(client: Client) -> None:
    closed = [f"tcp/{PRIVATE4}/443", f"tcp/{METADATA4}/80", f"tcp/{PRIVATE6}/443"]
    host = [f"tcp/{HOST4}/443", f"tcp/{HOST6}/443", f"udp/{HOST4}/53"]
    box = make(client, "all")
    opened = {f"tcp/{FAR4}/443": HOST4, f"udp/{FAR6}/53": HOST6, f"icmp/{FAR4}/0": "echo"}
    assert reach(client, box, *opened, *closed) == {**opened, **dict.fromkeys(closed, "EPERM")}
    assert {denial.reason for denial in client.network(box).recent} == {"policy"}
    # As often as TCP tries within the time, so that these may be all of the recent ones.
    assert reach(client, box, *host) == dict.fromkeys(host, "timeout")
    assert client.network(box).recent[0].reason == "host-address"
    client.update(box, network=("all", f"tcp:{PRIVATE4}:443", METADATA4))
    found = reach(client, box, *closed, f"tcp/{PRIVATE4}/80")
    assert found == {closed[0]: HOST4, closed[1]: HOST4, closed[2]: "EPERM", f"tcp/{PRIVATE4}/80": "EPERM"}


def test_an_address_of_the_host_is_reached_only_when_it_is_named_alone(lab: Lab, client: Client) -> None:
    box = make(client, f"tcp:{HOST4}:443", f"[{HOST6}]:443", "203.0.113.0/24:80")
    # Nobody listens there: a refusal by the host is an answer.
    found = reach(client, box, f"tcp/{HOST4}/443", f"tcp/{HOST6}/443", f"tcp/{HOST4}/80", f"tcp/{NEAR4}/80")
    assert found == {
        f"tcp/{HOST4}/443": "ECONNREFUSED", f"tcp/{HOST6}/443": "ECONNREFUSED", f"tcp/{HOST4}/80": "timeout",
        f"tcp/{NEAR4}/80": HOST4,
    }  # fmt: skip


def test_without_a_policy_there_is_no_device_and_the_host_is_left_alone(lab: Lab) -> None:
    with Lab() as fresh, Daemon(netns=fresh.host) as daemon, daemon.client() as client:
        client.finish(client.image_import(name=IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        box = client.create(SandboxSpec(image=IMAGE)).id
        listed = client.exec(box, ExecRequest(argv=("ls", "/sys/class/net"))).text
        assert listed == "lo\n"
        assert client.network(box) == NetworkState(id=box, policy="none")
        assert fresh.run(fresh.host, "nft list ruleset; cat /proc/sys/net/ipv4/ip_forward") == "0\n"
        assert len(fresh.run(fresh.host, "ip -o link").splitlines()) == 2
        assert not (daemon.runtime_dir / "bpf").exists()


def test_what_kernels_say_by_themselves_is_no_attempt(lab: Lab, daemon: Daemon, client: Client) -> None:
    """Each end of the device reports its multicast groups, twice; none of it gets through."""
    box = make(client, f"tcp:{NEAR4}:443")
    device = client.network(box).device
    pid = cgroups.first_process(daemon.cgroup_dir / f"sandbox-{box}")

    def sent(where: str | Path, name: str) -> int:
        shown = lab.run(where, f"cat /proc/net/dev_snmp6/{name}")
        return int(dict(line.split() for line in shown.splitlines())["Ip6OutMcastPkts"])

    until(lambda: sent(f"/proc/{pid}/ns/net", "eth0") >= 2 and sent(lab.host, device) >= 2, 60)
    state = client.network(box)
    assert (state.denied, state.denied_inbound, state.sent_packets, state.received_packets) == (0, 0, 0, 0)


def test_a_policy_changes_live_in_both_directions(lab: Lab, client: Client) -> None:
    box = make(client, f"tcp:{NEAR4}:443")
    targets = [f"tcp/{NEAR4}/443", f"tcp/{FAR4}/443"]
    assert list(reach(client, box, *targets).values()).count(HOST4) == 1
    assert client.update(box, network=("tcp:*:443",)).spec.network == ("tcp:*:443",)
    assert reach(client, box, *targets) == dict.fromkeys(targets, HOST4)
    client.update(box, network="none")
    assert set(reach(client, box, *targets).values()) == {"ENETUNREACH"}
    assert "dsec" not in lab.run(lab.host, "ip -o link")
    client.update(box, network=(f"tcp:{FAR4}:443",))
    assert reach(client, box, *targets) == {targets[0]: "EPERM", targets[1]: HOST4}


def test_an_open_connection_ends_when_the_policy_narrows(lab: Lab, client: Client) -> None:
    box = make(client, "tcp:*:443")
    running = client.exec_start(
        box, ExecRequest(argv=("python3", "-c", _REACH.decode(), f"stream/{FAR4}/443"), exec_id="stream")
    )
    until(lambda: client.exec_output(box, running.exec_id).end >= 20)
    client.update(box, network=(f"tcp:{NEAR4}:443",))
    seen = len(lab.packets())
    result = client.exec_wait(box, "stream", wait_s=30)
    assert result.text.splitlines()[-1].endswith("timeout")
    assert not [line for line in lab.packets()[seen:] if f"6 {HOST4} {FAR4}" in line]
    assert any(denial.address == FAR4 for denial in client.network(box).recent)


_SERVE = """
import socket, time
server = socket.create_server(("::", 443), family=socket.AF_INET6, dualstack_ipv6=True)
print("up", flush=True)
time.sleep(60)
"""


def test_sandboxes_reach_each_other_only_when_each_names_the_other(client: Client) -> None:
    one, two = (make(client, "all") for _ in range(2))
    addresses = {box: client.network(box).addresses for box in (one, two)}
    server = client.exec_start(two, ExecRequest(argv=("python3", "-c", _SERVE)))
    until(lambda: client.exec_output(two, server.exec_id).data == b"up\n")
    targets = [f"tcp/{address}/443" for address in addresses[two]]
    assert set(reach(client, one, *targets).values()) == {"EPERM"}
    client.update(one, network=tuple(f"tcp:{a}:443" if "." in a else f"tcp:[{a}]:443" for a in addresses[two]))
    assert set(reach(client, one, *targets).values()) == {"timeout"}
    assert client.network(two).denied_inbound > 0
    client.update(two, network=tuple(a if "." in a else f"[{a}]" for a in addresses[one]))
    # The server says nothing: a connection is made when it is not refused.
    connect = f"import socket\nfor a in {addresses[two]!r}: socket.create_connection((a, 443), 20)"
    assert client.exec(one, ExecRequest(argv=("python3", "-c", connect))).exit_code == 0


def test_nothing_reaches_a_sandbox_that_it_did_not_ask(lab: Lab, client: Client) -> None:
    box = make(client, "tcp:*:443", f"{HOST4}")
    address = client.network(box).addresses[0]
    knock = f"python3 - tcp/{address}/443 udp/{address}/443 icmp/{address}/0"
    route = f"ip route replace {address} via {HOST4}"
    tried = lab.run(lab.world, f"{route}; {knock} < {_REACH_FILE}; ip route del {address}")
    assert {line.split()[1] for line in tried.splitlines()} == {"timeout"}
    # From the host itself, to whose address the sandbox may speak: the address it uses is another one.
    tried = lab.run(lab.host, f"{knock} < {_REACH_FILE}")
    assert "ECONNREFUSED" in tried


def test_addresses_stay_over_stop_start_and_restart_and_are_nobody_elses(daemon: Daemon, client: Client) -> None:
    one, two = (make(client, "tcp:*:443") for _ in range(2))
    first = client.network(one).addresses
    assert not set(first) & set(client.network(two).addresses)
    client.stop(one, grace_s=0)
    daemon.restart()
    three = make(client, "tcp:*:443")
    assert not set(first) & {*client.network(two).addresses, *client.network(three).addresses}
    client.start(one)
    assert client.network(one).addresses == first
    assert reach(client, one, f"tcp/{FAR4}/443", f"tcp/{FAR4}/80") == {
        f"tcp/{FAR4}/443": HOST4, f"tcp/{FAR4}/80": "EPERM",
    }  # fmt: skip
    assert reach(client, two, f"tcp/{FAR4}/443") == {f"tcp/{FAR4}/443": HOST4}


_KNOCK = """
import socket, sys, time
while True:
    for target in ((sys.argv[1], 80), (sys.argv[2], 443)):
        with socket.socket() as s:
            s.settimeout(0.2)
            try:
                s.connect(target)
                print("reached", target, flush=True)
            except OSError:
                pass
    time.sleep(0.01)
"""


def test_enforcement_and_connections_do_not_need_the_daemon(lab: Lab, daemon: Daemon, client: Client) -> None:
    box = make(client, f"tcp:{FAR4}:443")
    stream = ("python3", "-c", _REACH.decode(), f"stream/{FAR4}/443")
    client.exec_start(box, ExecRequest(argv=stream, exec_id="stream"))
    client.exec_start(box, ExecRequest(argv=("python3", "-c", _KNOCK, FAR4, NEAR4), exec_id="knock"))
    until(lambda: client.exec_output(box, "stream").end > 0 and client.network(box).denied > 0)
    before = client.network(box).denied
    daemon.kill()
    seen = len(lab.packets())
    until(lambda: sum(f" {FAR4} 443 " in line for line in lab.packets()[seen:]) > 10)
    daemon.start()
    with daemon.client() as again:
        until(lambda: again.network(box).denied > before + 10)
        assert again.exec_output(box, "knock").data == b""
        assert again.exec_inspect(box, "stream").running
        again.update(box, network=(f"tcp:{NEAR4}:443",))
        assert reach(again, box, f"tcp/{NEAR4}/443", f"tcp/{FAR4}/443") == {
            f"tcp/{NEAR4}/443": HOST4, f"tcp/{FAR4}/443": "EPERM",
        }  # fmt: skip
    assert not [line for line in lab.packets()[seen:] if f" {FAR4} 80 " in line]


def test_policies_are_enforced_after_the_cgroup_of_all_sandboxes_has_gone(
    lab: Lab, daemon: Daemon, client: Client
) -> None:
    """systemd removes it when the unit ends and no sandbox lives, and with it goes what was attached to it."""
    box = make(client, f"tcp:{NEAR4}:443")
    client.delete(box)
    daemon.kill()
    cgroups.remove_tree(daemon.cgroup_dir)
    daemon.start()
    with daemon.client() as again:
        box = make(again, f"tcp:{NEAR4}:443")
        assert reach(again, box, f"tcp/{NEAR4}/443", f"tcp/{FAR4}/443") == {
            f"tcp/{NEAR4}/443": HOST4, f"tcp/{FAR4}/443": "EPERM",
        }  # fmt: skip


@contextlib.contextmanager
def _another_build(daemon: Daemon, *options: str) -> Iterator[None]:
    """While the block lasts, the daemon finds programs that were built with these options of the compiler."""
    built = _CHECKOUT / "build/ebpf/egress.bpf.o"
    other = Path("/run/another-egress.bpf.o")
    libraries = subprocess.run(["gcc", "-print-multiarch"], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run(
        ["clang", "-O2", "-g", f"-I/usr/include/{libraries}", "-target", "bpf", "-mcpu=v3", *options, "-c", "-o", other,
         _CHECKOUT / "ebpf/egress.bpf.c"], check=True,
    )  # fmt: skip
    assert other.read_bytes() != built.read_bytes()
    # The mount namespace is that of all daemons of its directory.
    def inside(*command: str | Path) -> None:
        subprocess.run(["nsenter", f"--mount=/proc/{daemon.pid}/ns/mnt", "--", *command], check=True)

    inside("mount", "--bind", other, built)
    try:
        yield
    finally:
        inside("umount", built)


def _programs(lab: Lab, device: str) -> list[str]:
    """Ids of the programs on a device, as the kernel lists them."""
    shown = "".join(lab.run(lab.host, f"tc filter show dev {device} {place}") for place in ("ingress", "egress"))
    return re.findall(r"(?:from|to)_sandbox direct-action .* id (\d+) ", shown)


@pytest.mark.parametrize(("options", "kept"), [(("-DBUILD=2",), True), (("-DBUILD=2", "-DRECENT=4"), False)])
def test_programs_of_another_build_are_exchanged_and_nothing_is_open_meanwhile(
    options: tuple[str, ...], *, kept: bool
) -> None:
    with Lab() as lab, Daemon(netns=lab.host) as daemon:
        with _another_build(daemon, *options), daemon.client() as client:
            tar = str(debian_tar(include=("python3",)))
            client.finish(client.image_import(name=IMAGE, source=tar, kind="rootfs-tar"))
            box = make(client, f"tcp:{FAR4}:443")
            stream = ("python3", "-c", _REACH.decode(), f"stream/{FAR4}/443")
            client.exec_start(box, ExecRequest(argv=stream, exec_id="stream"))
            client.exec_start(box, ExecRequest(argv=("python3", "-c", _KNOCK, FAR4, NEAR4), exec_id="knock"))
            until(lambda: client.exec_output(box, "stream").end > 0 and client.network(box).denied > 0)
            before, seen = client.network(box), len(lab.packets())
        (old,) = _folders(daemon)
        programs, after = _programs(lab, before.device), before
        for _again in range(2):
            daemon.restart()
            with daemon.client() as client:
                at = client.exec_output(box, "stream").end
                until(functools.partial(_grown, client, box, at))
                assert reach(client, box, f"tcp/{FAR4}/443", f"tcp/{NEAR4}/443") == {
                    f"tcp/{FAR4}/443": HOST4, f"tcp/{NEAR4}/443": "EPERM",
                }  # fmt: skip
                assert client.exec_inspect(box, "stream").running
                assert client.exec_output(box, "knock").data == b""
                after = client.network(box)
        assert len(programs) == 2 and not set(programs) & set(_programs(lab, before.device))
        assert len(_folders(daemon)) == 1 and _folders(daemon) != [old]
        assert (after.sent_packets > before.sent_packets) or not kept
        assert (after.denied > before.denied) or not kept
        forbidden = (f" {FAR4} 80 ", f" {NEAR4} 443 ")
        assert not [line for line in lab.packets()[seen:] if any(text in line for text in forbidden)]


def test_programs_that_lack_what_the_daemon_needs_are_refused_by_name(daemon: Daemon) -> None:
    """As an object file does that an older checkout built. Whoever has no network is none the worse for it."""
    with daemon.client() as client:
        box = make(client, f"tcp:{NEAR4}:443")
        without = client.create(SandboxSpec(image=IMAGE)).id
    denied = {f"tcp/{FAR4}/443": "EPERM", f"tcp/{NEAR4}/443": HOST4}
    with _another_build(daemon, "-Dtold=told_otherwise"):
        daemon.restart()
        with daemon.client() as client:
            with pytest.raises(FeatureMissing, match="egress.bpf.o' is of another build .*no 'told'") as refused:
                make(client, f"tcp:{NEAR4}:443")
            assert refused.value.hint is not None and "make agent" in refused.value.hint
            client.create(SandboxSpec(image=IMAGE))
            assert client.inspect(without).state is State.RUNNING
            # Nobody could tell what it may reach from here on.
            ended = client.wait(box, [State.FAILED], wait_s=60)
            assert "egress.bpf.o' is of another build" in (ended.reason or "")
    daemon.restart()
    with daemon.client() as client:
        client.start(box)
        assert reach(client, box, *denied) == denied
        for found in client.list_all():
            client.delete(found.id)


def _grown(client: Client, box: str, end: int) -> bool:
    return client.exec_output(box, "stream").end > end


def _folders(daemon: Daemon) -> list[str]:
    """Of pinned programs."""
    place = Path(f"/proc/{daemon.pid}/root/{daemon.runtime_dir}/bpf")
    return [path.name for path in place.iterdir() if (path / "from_sandbox").exists()]


def _life(daemon: Daemon) -> None:
    with daemon.client(retry_s=0) as client:
        client.create(SandboxSpec(image=IMAGE, network=(f"tcp:{NEAR4}:443",)), id="victim")
        client.update("victim", network=(f"tcp:{FAR4}:443",))
        client.stop("victim", grace_s=0)
        client.start("victim")
        client.delete("victim")


def test_sigkill_and_failure_at_every_step_leave_no_device_and_no_entry(lab: Lab, daemon: Daemon) -> None:
    log = daemon.state_dir / "points"
    _with_fault(daemon, {"DSEC_FAULT_LOG": str(log)})
    log.write_text("")
    _life(daemon)
    points = [point for point in dict.fromkeys(log.read_text().split()) if "/network/" in point or "/launch/" in point]
    assert len(points) >= 12, points
    for point in points:
        for how in ("kill", "fail") if "/do/" in point else ("kill",):
            _with_fault(daemon, {"DSEC_FAULT": f"{point}={how}"})
            with pytest.raises((ConnectionFailed, DsecError)):
                _life(daemon)
            if how == "kill":
                assert daemon.wait_dead() == -9, point
                _with_fault(daemon, {})
            with daemon.client() as client:
                for box in client.list_all():
                    if box.state == "running":
                        assert reach(client, box.id, f"tcp/{PRIVATE4}/443") == {f"tcp/{PRIVATE4}/443": "EPERM"}, point
                with contextlib.suppress(NotFound):
                    client.delete("victim")
            assert daemon.residue() == [], point
            assert entries(daemon, "sandboxes") == entries(daemon, "policies") == 0, point
    _with_fault(daemon, {})


def _with_fault(daemon: Daemon, env: dict[str, str]) -> None:
    if daemon.running:
        daemon.kill()
    daemon.env = env
    daemon.start()


def entries(daemon: Daemon, name: str) -> int:
    """How many a pinned map holds, read by libbpf in a process of its own."""
    script = (
        "import ctypes, sys\nb = ctypes.CDLL('libbpf.so.1')\n"
        "fd = b.bpf_obj_get(sys.argv[1].encode())\nassert fd >= 0\n"
        "key, found = None, ctypes.create_string_buffer(64)\nn = 0\n"
        "while b.bpf_map_get_next_key(fd, key, found) == 0:\n key = found.raw\n n += 1\nprint(n)"
    )
    (pins,) = [p for p in Path(f"/proc/{daemon.pid}/root/{daemon.runtime_dir}/bpf").glob("*") if (p / name).exists()]
    done = subprocess.run(
        ["nsenter", f"--mount=/proc/{daemon.pid}/ns/mnt", sys.executable, "-c", script,
         f"{daemon.runtime_dir}/bpf/{pins.name}/{name}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout)


def test_policies_that_cannot_be_enforced_are_refused_and_nothing_is_made(client: Client) -> None:
    with pytest.raises(InvalidSpec, match="rule 2 'tcp:x', column 5.*rule 3 'udp:"):
        client.create(SandboxSpec.model_construct(image=IMAGE, network=("tcp:*:1", "tcp:x", "udp:*:0")))
    with pytest.raises(InvalidSpec, match="17 separate port ranges"):
        make(client, *(f"tcp:{NEAR4}:{port}" for port in range(100, 134, 2)))
    assert client.list_all() == ()
