# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host: attempts to get past a policy that the installed package enforces, under systemd.

The world is a network namespace of the guest's; attacker and judgement are those of tests/host/test_egress.py. The
tests run in this order, against the same two sandboxes.
"""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import Client
from libdsec.types import ExecRequest, SandboxSpec
from tests.support import attempts, own_python
from tests.support.attempts import POLICY, Endless, Target
from tests.support.netlab import FAR4, FAR6, HOST4, HOST6, METADATA4, NEAR4, NEAR6, Lab
from tests.support.waiting import until

_IMAGE = "own:python"
_CGROUPS = Path("/sys/fs/cgroup/system.slice/dsecd.service/dsec")
_SUPPORT = Path(__file__).parent / "tests/support"
_REACH = (_SUPPORT / "reach.py").read_bytes()
_PROGRAM = Path("/usr/lib/dsec/egress.bpf.o")
#: What takes so long has not merely been slow: an emulated processor, beside an installation and others' work.
_FAULT_S = 300.0
_PATIENT = {"REACH_TIMEOUT_S": "120"}
#: Asks for what the policy does not allow from its first moment on, and says whom it reached.
_KNOCK = f"""
import socket, time
while True:
    time.sleep(0.1)
    for kind, port in ((socket.SOCK_STREAM, 80), (socket.SOCK_DGRAM, 80)):
        for address in ("{FAR4}", "{NEAR4}"):
            with socket.socket(socket.AF_INET, kind) as sock:
                sock.settimeout(0.2)
                try:
                    sock.connect((address, port))
                    sock.send(b"knock")
                    # A datagram may seem sent while the hooks that tell of errors at once are exchanged.
                    sock.recv(100)
                except OSError:
                    continue
                print(kind, address, flush=True)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(Path("/proc/1/ns/net")) as running:
        yield running


@pytest.fixture(scope="module")
def client(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(retry_s=120) as connected:
        tar = own_python.tar(tmp_path_factory.mktemp("image") / "python.tar")
        connected.finish(connected.image_import(name=_IMAGE, source=str(tar), kind="rootfs-tar"))
        yield connected


@pytest.fixture(scope="module")
def watched(lab: Lab, client: Client) -> Target:
    return Target(lab, client, _IMAGE, _CGROUPS, *POLICY)


@pytest.fixture(scope="module")
def open_(lab: Lab, client: Client) -> Target:
    target = Target(lab, client, _IMAGE, _CGROUPS, *attempts.EVERYTHING)
    target.unwatch()
    return target


def _reach(client: Client, box: str, *targets: str) -> dict[str, str]:
    request = ExecRequest(argv=("python3", "-", *targets), stdin=_REACH, env=_PATIENT, timeout_s=300)
    result = client.exec(box, request)
    assert result.exit_code == 0, result
    return dict(line.split(" ", 1) for line in result.text.splitlines())


def _begin_stream(client: Client, box: str, exec_id: str, *, late_s: int) -> None:
    """Answers that come late, on an emulated processor beside an installation, are no end."""
    argv = ("python3", "-c", _REACH.decode(), f"stream/{NEAR4}/443")
    env = {**_PATIENT, "REACH_STREAM_S": str(late_s)}
    client.exec_start(box, ExecRequest(argv=argv, exec_id=exec_id, env=env))
    _goes_on(client, box, exec_id)


def _goes_on(client: Client, box: str, exec_id: str) -> None:
    end = client.exec_output(box, exec_id).end
    until(lambda: client.exec_output(box, exec_id).end > end, _FAULT_S)


def _main_pid() -> str:
    return _systemctl("show", "--value", "--property=MainPID", "dsecd.service")


def _systemctl(*arguments: str) -> str:
    return subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False).stdout.strip()


def test_what_the_policy_names_is_reached_and_the_rest_is_an_error_at_once(client: Client, watched: Target) -> None:
    allowed = {
        f"tcp/{NEAR4}/443": HOST4, f"udp/{NEAR4}/443": HOST4, f"tcp/{NEAR6}/443": HOST6, f"udp/{NEAR6}/443": HOST6,
    }  # fmt: skip
    denied = (
        f"tcp/{NEAR4}/80", f"udp/{NEAR4}/53", f"tcp/{FAR4}/443", f"tcp/{NEAR6}/80", f"udp/{FAR6}/443",
        f"tcp/{HOST4}/22", f"tcp/{METADATA4}/80",
    )  # fmt: skip
    before = watched.denied()
    assert _reach(client, watched.id, *allowed, *denied) == {**allowed, **dict.fromkeys(denied, "EPERM")}
    assert watched.denied() == before + len(denied)


def test_every_attempt_fails_and_is_counted_and_its_control_gets_through(watched: Target, open_: Target) -> None:
    attempts.judge(watched, open_).hold()


def test_root_inside_gets_nothing_through(client: Client, watched: Target, open_: Target) -> None:
    passed, denied = watched.passed(), watched.denied()
    outcomes = attempts.from_inside(client, watched, open_)
    assert watched.passed() == passed
    sent = [name for name, outcome in outcomes.items() if outcome == "sent"]
    until(lambda: watched.denied() >= denied + len(sent), _FAULT_S)
    # Without raw sockets, which the profile of the sandbox's takes away, little gets as far as the device.
    assert {"tcp to another address", "udp to another port", "tcp to metadata"} <= _with(outcomes, "EPERM")
    assert {"raw udp", "gre", "later fragment", "source of the host"} <= _with(outcomes, "EACCES")


def _with(outcomes: dict[str, str], error: str) -> set[str]:
    return {name for name, outcome in outcomes.items() if outcome == error}


def test_a_policy_narrows_live_and_ends_what_it_no_longer_allows(lab: Lab, client: Client) -> None:
    # One of its own: what TCP still has to say for an ended connection would count as passed later.
    box = client.create(SandboxSpec(image=_IMAGE, network=POLICY)).id
    _begin_stream(client, box, "narrowed", late_s=20)
    client.update(box, network=(f"tcp:{NEAR4}:80",))
    # What was let through before may be on its way on another processor; a stream that goes on is never quiet.
    until(lambda: _is_quiet(lab, f"6 {HOST4} {NEAR4} 443 "), _FAULT_S)
    seen = len(lab.packets())
    targets = {f"tcp/{NEAR4}/443": "EPERM", f"tcp/{NEAR4}/80": HOST4}
    assert _reach(client, box, *targets) == targets
    ended = client.exec_wait(box, "narrowed", wait_s=120)
    assert ended.text.splitlines()[-1].endswith("timeout")
    assert [line for line in lab.packets()[seen:] if f"6 {HOST4} {NEAR4} 443 " in line] == []
    client.update(box, network=POLICY)
    assert _reach(client, box, f"tcp/{NEAR4}/443") == {f"tcp/{NEAR4}/443": HOST4}
    client.delete(box)


def _is_quiet(lab: Lab, what: str) -> bool:
    """Whether none of these packets arrives for a second."""
    seen = len(lab.packets())
    time.sleep(1)
    return not any(what in line for line in lab.packets()[seen:])


def test_nothing_opens_while_the_daemon_is_killed_restarted_and_upgraded(
    lab: Lab, client: Client, watched: Target, open_: Target
) -> None:
    beside = client.create(SandboxSpec(image=_IMAGE, network=POLICY)).id
    _begin_stream(client, beside, "stream", late_s=120)
    client.exec_start(beside, ExecRequest(argv=("python3", "-u", "-c", _KNOCK), exec_id="knock"))
    passed, denied, seen, programs = watched.passed(), watched.denied(), len(lab.packets()), [_programs(lab, watched)]
    with Endless(watched, open_, pause_s=0.05) as attacker:
        # As if the installed package were of another build: its programs are not those of the package that comes.
        _PROGRAM.write_bytes(_PROGRAM.read_bytes() + b"\0")
        old = _main_pid()
        subprocess.run(["kill", "-9", old], check=True)
        until(lambda: _main_pid() not in ("0", old) and _systemctl("is-active", "dsecd.service") == "active", _FAULT_S)
        programs.append(_exchanged(lab, watched, programs))
        for port in range(1000, 1005):
            client.update(watched.id, network=(*POLICY, f"tcp:{NEAR4}:{port}"))
        _systemctl("restart", "dsecd.service")
        client.update(watched.id, network=POLICY)
        old = _main_pid()
        packages = sorted(map(str, Path("/root/packages").glob("*.deb")))
        done = subprocess.run(
            ["dpkg", "--install", *packages], capture_output=True, text=True, check=False,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"},
        )  # fmt: skip
        assert done.returncode == 0, done
        assert _main_pid() not in ("0", old)
        programs.append(_exchanged(lab, watched, programs))
        tried = attacker.tried
        until(lambda: attacker.tried > tried + 2 * len(attempts.ENDLESS), _FAULT_S)
    assert watched.passed() == passed
    # The counters have come along, but for what was refused while they were copied.
    assert watched.denied() > denied
    assert _forbidden(lab, seen) == []
    assert client.exec_output(beside, "knock").data == b""
    assert client.exec_inspect(beside, "knock").running
    assert client.exec_inspect(beside, "stream").running, client.exec_output(beside, "stream").data[-400:]
    _goes_on(client, beside, "stream")


def _programs(lab: Lab, target: Target) -> list[str]:
    """Ids of the programs on a device, as the kernel lists them."""
    shown = "".join(lab.run(lab.host, f"tc filter show dev {target.device} {place}") for place in ("ingress", "egress"))
    return re.findall(r"(?:from|to)_sandbox direct-action .* id (\d+) ", shown)


def _exchanged(lab: Lab, target: Target, former: list[list[str]]) -> list[str]:
    """The ids once both programs are others than ever before: a new daemon takes over one sandbox after another."""
    seen = {number for pair in former for number in pair}
    until(lambda: len(set(_programs(lab, target)) - seen) == 2, _FAULT_S)
    return _programs(lab, target)


def _forbidden(lab: Lab, since: int) -> list[str]:
    """What arrived that nobody but _KNOCK sends."""
    return [line for line in lab.packets()[since:] if line.split()[0] in ("6", "17") and line.split()[3] == "80"]


def test_no_sandbox_has_a_moment_of_open_network_at_its_start(lab: Lab, client: Client) -> None:
    seen = len(lab.packets())
    spec = SandboxSpec(image=_IMAGE, network=POLICY, command=("python3", "-u", "-c", _KNOCK))
    boxes = [client.create(spec).id for _ in range(2)]
    for box in boxes:
        until(lambda: client.network(box).denied > 10, _FAULT_S)  # noqa: B023
        client.stop(box, grace_s=0)
        client.start(box)
        until(lambda: client.network(box).denied > 10, _FAULT_S)  # noqa: B023
        assert client.exec_output(box, "main").data == b""
    assert _forbidden(lab, seen) == []
    # The control: whoever may, arrives, and is seen.
    client.update(boxes[0], network="all")
    until(lambda: _forbidden(lab, seen), _FAULT_S)
    for box in boxes:
        client.delete(box)


def test_the_daemons_profile_denied_nothing_of_all_this() -> None:
    # What audit has said is in the journal a moment later.
    subprocess.run(["journalctl", "--sync"], check=True)
    said = subprocess.run(["journalctl", "--dmesg", "--no-pager"], capture_output=True, text=True, check=True).stdout
    # The control: the kernel's messages about profiles are there.
    assert 'operation="profile_load"' in said or 'operation="profile_replace"' in said
    assert [line for line in said.splitlines() if 'apparmor="DENIED"' in line and 'profile="dsecd' in line] == []
