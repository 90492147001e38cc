# SPDX-License-Identifier: Apache-2.0
"""Rules for names, from a sandbox through dsec-dns and the daemon to the programs on the device.

Everything is real but the world: the DNS server and whom its answers lead to are in a namespace of the test's.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import Client
from libdsec.types import ExecRequest, SandboxSpec
from tests.support.daemon import Daemon
from tests.support.imports import import_python
from tests.support.netlab import FAR4, FAR6, HOST4, HOST6, METADATA4, NEAR4, PRIVATE4, Lab
from tests.support.waiting import until

IMAGE = "debian:python"
_CHECKOUT = Path(__file__).resolve().parents[2]
_REACH = (_CHECKOUT / "tests/support/reach.py").read_bytes()
#: Where the world's DNS server is; peers.py holds port 53 of the other addresses.
DNS = "203.0.113.10"
ZONE = f"""
www.example.org 2 A {FAR4}
www.example.org 2 AAAA {FAR6}
cdn.example.org 300 CNAME edge.example.net.
edge.example.net 300 A {NEAR4}
edge.example.net 300 A {FAR4}
rebind.example.org 300 A {PRIVATE4}
meta.example.org 300 A {METADATA4}
host.example.org 300 A {HOST4}
"""


class Names:
    """dsec-dns in the host's namespace, and the server that it asks in the world."""

    def __init__(self, lab: Lab, daemon: Daemon) -> None:
        self._lab, self._daemon = lab, daemon
        self.asked = daemon.runtime_dir / "asked"
        self._server = subprocess.Popen(
            ["nsenter", f"--net={lab.world}", sys.executable, "-m", "tests.support.dns_server", f"{DNS}:5353",
             self.asked], cwd=_CHECKOUT, stdin=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._server.stdin is not None
        self._server.stdin.write(ZONE + "\n.\n")
        self._server.stdin.flush()
        self.start()

    def start(self) -> None:
        log = (self._daemon.runtime_dir / "dns.log").open("ab")
        self.process = subprocess.Popen(
            ["nsenter", f"--net={self._lab.host}", sys.executable, "-m", "dsecd.dns", "--link",
             str(self._daemon.runtime_dir / "dns.sock")], cwd=_CHECKOUT, stdout=log, stderr=log,
        )  # fmt: skip
        log.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._server.kill()
        self._server.wait()
        assert self._server.stdin is not None
        self._server.stdin.close()

    def questions(self) -> list[str]:
        return self.asked.read_text().split() if self.asked.exists() else []


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as running:
        yield running


@pytest.fixture(scope="module")
def daemon(lab: Lab) -> Iterator[Daemon]:
    config = f'[network]\ndns_upstreams = ["{DNS}:5353"]\n'
    with Daemon(netns=lab.host, config=config) as running:
        import_python(running, IMAGE)
        yield running


@pytest.fixture(scope="module")
def names(lab: Lab, daemon: Daemon) -> Iterator[Names]:
    running = Names(lab, daemon)
    yield running
    print((daemon.runtime_dir / "dns.log").read_text()[-3000:])
    running.close()


@pytest.fixture
def client(daemon: Daemon, names: Names) -> Iterator[Client]:
    del names
    with daemon.client() as connected:
        yield connected
        for sandbox in connected.list_all():
            connected.delete(sandbox.id)


def make(client: Client, *policy: str) -> str:
    return client.create(SandboxSpec.model_validate({"image": IMAGE, "network": policy})).id


def reach(client: Client, sandbox_id: str, *targets: str) -> dict[str, str]:
    result = client.exec(sandbox_id, ExecRequest(argv=("python3", "-", *targets), stdin=_REACH, timeout_s=60))
    assert result.exit_code == 0, result
    return dict(line.split(" ", 1) for line in result.text.splitlines())


def resolve(client: Client, sandbox_id: str, *hosts: str) -> dict[str, list[str]]:
    """What the sandbox's own C library makes of names: addresses, or the name of its error."""
    script = (
        "import socket, sys\nfor name in sys.argv[1:]:\n"
        " try: print(name, *sorted({a[4][0] for a in socket.getaddrinfo(name, 443)}))\n"
        " except socket.gaierror as error: print(name, error.args[0])\n"
    )
    text = client.exec(sandbox_id, ExecRequest(argv=("python3", "-c", script, *hosts), timeout_s=60)).text
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()}


NOT_KNOWN = ["-2"]  # EAI_NONAME


def test_a_name_opens_its_addresses_on_its_ports_and_nothing_else(client: Client, names: Names) -> None:
    box = make(client, "host:www.example.org:443")
    before = [f"tcp/{FAR4}/443", f"tcp/{FAR6}/443"]
    assert reach(client, box, *before) == dict.fromkeys(before, "EPERM")
    assert resolve(client, box, "www.example.org") == {"www.example.org": sorted((FAR4, FAR6))}
    assert reach(client, box, *before, f"tcp/{FAR4}/80", f"tcp/{NEAR4}/443", f"udp/{FAR4}/443") == {
        f"tcp/{FAR4}/443": HOST4, f"tcp/{FAR6}/443": HOST6, f"tcp/{FAR4}/80": "EPERM", f"tcp/{NEAR4}/443": "EPERM",
        f"udp/{FAR4}/443": HOST4,
    }  # fmt: skip
    asked = len(names.questions())
    assert resolve(client, box, "example.org", "x.www.example.org", "secret.exfil.example") == dict.fromkeys(
        ("example.org", "x.www.example.org", "secret.exfil.example"), NOT_KNOWN
    )
    assert len(names.questions()) == asked
    until(lambda: client.network(box).denied_names >= 3)
    state = client.network(box)
    assert {denial.name for denial in state.recent_names} == {
        "example.org", "x.www.example.org", "secret.exfil.example"
    }  # fmt: skip
    assert state.opened_addresses == 2


def test_another_sandbox_gains_nothing_by_what_one_has_opened(client: Client) -> None:
    one, two = make(client, "host:www.example.org:443"), make(client, "host:cdn.example.org:443")
    assert resolve(client, one, "www.example.org")["www.example.org"] != NOT_KNOWN
    assert resolve(client, two, "www.example.org") == {"www.example.org": NOT_KNOWN}
    assert reach(client, two, f"tcp/{FAR6}/443") == {f"tcp/{FAR6}/443": "EPERM"}


def test_a_chain_opens_all_addresses_at_its_end(client: Client) -> None:
    box = make(client, "host:*.example.org:443")
    assert resolve(client, box, "cdn.example.org") == {"cdn.example.org": sorted((NEAR4, FAR4))}
    targets = [f"tcp/{NEAR4}/443", f"tcp/{FAR4}/443"]
    assert reach(client, box, *targets) == dict.fromkeys(targets, HOST4)


def test_a_name_that_leads_to_special_addresses_or_the_host_opens_nothing(client: Client) -> None:
    box = make(client, "host:*.example.org")
    resolve(client, box, "rebind.example.org", "meta.example.org", "host.example.org")
    targets = [f"tcp/{PRIVATE4}/443", f"tcp/{METADATA4}/80"]
    assert reach(client, box, *targets) == dict.fromkeys(targets, "EPERM")
    assert reach(client, box, f"tcp/{HOST4}/443") == {f"tcp/{HOST4}/443": "timeout"}
    client.update(box, network=("host:*.example.org", f"tcp:{PRIVATE4}:443"))
    assert resolve(client, box, "rebind.example.org") == {"rebind.example.org": [PRIVATE4]}
    assert reach(client, box, targets[0], f"tcp/{PRIVATE4}/80") == {
        targets[0]: HOST4, f"tcp/{PRIVATE4}/80": "EPERM"
    }  # fmt: skip


def test_a_policy_that_narrows_closes_what_names_had_opened(client: Client) -> None:
    box = make(client, "host:www.example.org:443", "host:cdn.example.org:443")
    resolve(client, box, "www.example.org", "cdn.example.org")
    assert reach(client, box, f"tcp/{NEAR4}/443", f"tcp/{FAR6}/443") == {
        f"tcp/{NEAR4}/443": HOST4, f"tcp/{FAR6}/443": HOST6,
    }  # fmt: skip
    client.update(box, network=("host:www.example.org:443",))
    assert reach(client, box, f"tcp/{NEAR4}/443", f"tcp/{FAR6}/443") == {
        f"tcp/{NEAR4}/443": "EPERM", f"tcp/{FAR6}/443": HOST6,
    }  # fmt: skip
    assert resolve(client, box, "cdn.example.org") == {"cdn.example.org": NOT_KNOWN}


def test_who_may_reach_anything_public_may_resolve_any_name(client: Client) -> None:
    box = make(client, "tcp:*:443")
    assert resolve(client, box, "www.example.org", "rebind.example.org") == {
        "www.example.org": sorted((FAR4, FAR6)), "rebind.example.org": ["-5"],
    }  # fmt: skip
    assert client.network(box).opened_addresses == 0
    box = make(client, f"tcp:{FAR4}:443")
    assert client.network(box).dns == ""


def test_names_go_on_while_the_daemon_or_dsec_dns_is_killed(
    lab: Lab, daemon: Daemon, client: Client, names: Names
) -> None:
    box = make(client, "host:*.example.org:443")
    assert resolve(client, box, "cdn.example.org")["cdn.example.org"] != NOT_KNOWN
    script = (
        "import socket, time\nwhile True:\n time.sleep(0.1)\n"
        " try: print('known', socket.create_connection(('cdn.example.org', 443), 30).close(), flush=True)\n"
        " except OSError as error: print('failed', error, flush=True)\n"
    )
    client.exec_start(box, ExecRequest(argv=("python3", "-c", script), exec_id="knock"))
    until(lambda: client.exec_output(box, "knock").end > 0)
    daemon.kill()
    # What arrives in the world tells that it goes on.
    seen = len(lab.packets())
    until(lambda: sum(" 443 " in line and line[:2] == "6 " for line in lab.packets()[seen:]) > 30)
    daemon.start()
    with daemon.client() as again:
        assert reach(again, box, f"tcp/{NEAR4}/443") == {f"tcp/{NEAR4}/443": HOST4}
        lines = again.exec_output(box, "knock").data.decode().splitlines()
        assert len(lines) > 5
        assert [line for line in lines if line.startswith("failed")] == []
        names.kill()
        names.start()
        until(lambda: resolve(again, box, "www.example.org")["www.example.org"] == sorted((FAR4, FAR6)), 60)
        assert reach(again, box, f"tcp/{FAR6}/443") == {f"tcp/{FAR6}/443": HOST6}


def test_after_a_names_time_nothing_begins_and_what_is_open_goes_on(client: Client, daemon: Daemon) -> None:
    box = make(client, "host:www.example.org:443")
    stream = ("python3", "-c", _REACH.decode(), f"stream/{FAR4}/443")
    with _grace(daemon, 8):
        began = time.monotonic()
        until(lambda: resolve(client, box, "www.example.org")["www.example.org"] == sorted((FAR4, FAR6)))
        # At once, and so by what was just opened.
        client.exec_start(box, ExecRequest(argv=stream, exec_id="stream"))
        until(lambda: client.exec_output(box, "stream").end > 0)
        until(lambda: reach(client, box, f"tcp/{FAR4}/443") == {f"tcp/{FAR4}/443": "EPERM"}, 90)
        assert time.monotonic() - began > 8
        assert client.exec_inspect(box, "stream").running
        at = client.exec_output(box, "stream").end
        until(lambda: client.exec_output(box, "stream").end > at)
    until(lambda: resolve(client, box, "www.example.org")["www.example.org"] == sorted((FAR4, FAR6)))
    assert reach(client, box, f"tcp/{FAR4}/443") == {f"tcp/{FAR4}/443": HOST4}


@contextlib.contextmanager
def _grace(daemon: Daemon, seconds: int) -> Iterator[None]:
    """While the block lasts, a daemon that lets addresses stay open for so long after their names' time."""
    file = daemon.state_dir / "dsecd.toml"
    text = file.read_text()
    assert text.count("[network]\n") == 1
    file.write_text(text.replace("[network]\n", f"[network]\ndns_grace_s = {seconds}\n"))
    try:
        _restart_with_dns(daemon)
        yield
    finally:
        file.write_text(text)
        _restart_with_dns(daemon)


def _restart_with_dns(daemon: Daemon) -> None:
    """Until dsec-dns has heard its settings from the new daemon."""
    at = daemon.log.stat().st_size
    daemon.restart()
    until(lambda: b"dsec-dns connected" in daemon.log.read_bytes()[at:])
