# SPDX-License-Identifier: Apache-2.0
"""dsecd as a process: starting, stopping, restarting, systemd's part, and clients of other users."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.daemon import EX_CONFIG
from dsecd.linux import apparmor
from libdsec import Sandbox
from libdsec.errors import ConnectionFailed, FeatureMissing, InvalidSpec
from libdsec.types import AppArmor, SandboxSpec
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

_CHECKOUT = Path(__file__).resolve().parents[2]
_NOBODY = 65534
_CAP_SYS_RESOURCE = 24  # include/uapi/linux/capability.h

# Sends one request as another user and prints the answer's body.
_REQUEST = """
import http.client, socket, sys
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(sys.argv[1])
connection = Unix("dsec")
connection.request(sys.argv[2], sys.argv[3], sys.argv[4] or None, {"Content-Type": "application/json"})
print(connection.getresponse().read().decode())
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(config="socket_mode = 0o666\n") as running:
        yield running


def as_nobody(
    daemon: Daemon, method: str, path: str, body: str = "", *, groups: tuple[int, ...] = ()
) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", _REQUEST, str(daemon.socket), method, path, body],
        user=_NOBODY, group=_NOBODY, extra_groups=groups, capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_who_asks_is_who_the_kernel_says(daemon: Daemon) -> None:
    assert as_nobody(daemon, "GET", "/v1/version")["api"] == "v1"
    denied = as_nobody(daemon, "DELETE", "/v1/images?ref=x")
    assert denied["code"] == "denied"
    assert denied["message"] == "image_remove: needs scope 'image', uid 65534 has read, sandbox"


def test_users_are_not_told_what_others_have_made_of_an_image(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.client() as client:
        client.finish(client.image_import("bare:1", str(tmp_path)))
        with Sandbox(image="bare:1", client=client) as box:
            assert client.image_inspect("bare:1").held_by == (box.id,)
            assert as_nobody(daemon, "GET", "/v1/images/inspect?ref=bare:1")["held_by"] == []
            assert as_nobody(daemon, "GET", "/v1/images")["images"][0]["held_by"] == []  # type: ignore[index]
        with pytest.raises(InvalidSpec, match="must be absolute"):
            client.image_import("bare:2", "bare.tar")


def test_doctor_is_content_with_a_host_that_lacks_only_what_dsec_works_without(daemon: Daemon) -> None:
    with daemon.client() as client:
        findings = {finding.check: finding for finding in client.doctor().findings}
    assert findings["feature erofs-file"].needed
    assert not findings["feature core-scheduling"].needed
    # Nobody has started it here.
    assert (findings["dsec-dns"].ok, findings["dsec-dns"].needed) == (False, False)
    assert "systemctl start dsec-dns" in findings["dsec-dns"].hint
    effective = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert effective is not None
    may_raise_limits = int(effective[1], 16) >> _CAP_SYS_RESOURCE & 1
    assert findings["open files"].ok or not may_raise_limits
    done = subprocess.run(
        [_CHECKOUT / "bin/dsecctl", "--socket", daemon.socket, "doctor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "wrong" not in {line.split()[0] for line in done.stdout.splitlines()}


def test_members_of_the_admin_group_may_change_images_but_name_no_files_of_the_host() -> None:
    with Daemon(config='socket_mode = 0o666\nadmin_group = "games"\n') as daemon:
        games = 60  # base-passwd's number, the same on every Debian
        answer = as_nobody(daemon, "DELETE", "/v1/images?ref=nothing", groups=(games,))
        assert answer["code"] == "not-found"
        body = json.dumps({"name": "x", "source": "/etc/shadow", "kind": "rootfs-tar"})
        answer = as_nobody(daemon, "POST", "/v1/images/import", body, groups=(games,))
        assert answer["code"] == "denied"
        body = json.dumps({"name": "x", "source": "oci:/root", "kind": "registry"})
        assert as_nobody(daemon, "POST", "/v1/images/import", body, groups=(games,))["code"] == "denied"
        body = json.dumps({"suite": "trixie", "mirror": "file:///root"})
        assert as_nobody(daemon, "POST", "/v1/images/build-debian", body, groups=(games,))["code"] == "denied"


def test_a_second_daemon_is_refused_and_the_first_goes_on(daemon: Daemon) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsecd", "--config", str(daemon.state_dir / "dsecd.toml")],
        capture_output=True, text=True, check=False, cwd=_CHECKOUT,
    )  # fmt: skip
    assert done.returncode == 5
    assert f"another dsecd runs there, pid {daemon.pid}" in done.stderr
    with daemon.client() as client:
        assert client.version().generation == 1


def test_every_start_counts_and_stays_in_one_mount_namespace(daemon: Daemon) -> None:
    def namespace() -> str:
        return os.readlink(f"/proc/{daemon.pid}/ns/mnt")

    first = namespace()
    assert first != os.readlink("/proc/self/ns/mnt")
    daemon.restart()
    assert namespace() == first
    daemon.stop()
    assert not daemon.socket.exists()
    daemon.start()
    assert namespace() == first
    with daemon.client() as client:
        assert client.version().generation == 3
        assert [event.details["generation"] for event in client.events().events] == [1, 2, 3]


def test_it_may_have_as_many_files_open_as_it_is_allowed(daemon: Daemon) -> None:
    limits = Path(f"/proc/{daemon.pid}/limits").read_text()
    soft, hard = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5]
    assert soft == hard


def test_a_required_feature_that_is_missing_ends_the_start() -> None:
    with Daemon() as daemon:
        daemon.stop()
        with (daemon.state_dir / "dsecd.toml").open("r+") as file:
            text = file.read()
            file.write('require = ["time-travel"]\n')
        daemon.start(wait=False)
        assert daemon.wait_dead() == 6
        assert "require 'time-travel': no such feature" in daemon.tail()
        (daemon.state_dir / "dsecd.toml").write_text(text)


def test_sigterm_breaks_waiting_off_and_takes_no_time(daemon: Daemon) -> None:
    waiting = socket.socket(socket.AF_UNIX)
    waiting.connect(str(daemon.socket))
    waiting.sendall(b"GET /v1/events?since=1&wait_s=300 HTTP/1.1\r\nHost: d\r\n\r\n")
    # Until the daemon has taken all of it: what the other end has not read counts as unsent, unix(7).
    until(lambda: fcntl.ioctl(waiting, termios.TIOCOUTQ, bytes(4)) == bytes(4))
    time.sleep(0.2)
    began = time.monotonic()
    daemon.stop()
    assert time.monotonic() - began < 60
    assert waiting.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    waiting.close()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_other_signals(daemon: Daemon, number: signal.Signals) -> None:
    os.kill(daemon.pid, number)
    if number == signal.SIGINT:
        assert daemon.wait_dead() == 0
        with pytest.raises(ConnectionFailed), daemon.client(retry_s=0) as client:
            client.version()
    else:
        time.sleep(0.2)
        with daemon.client() as client:
            assert client.version().generation == 1


def test_systemd_hands_the_socket_over_and_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, Daemon() as daemon:
        daemon.stop()
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(60)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(daemon.socket))
        listening.listen()
        inode = daemon.socket.stat().st_ino
        # What systemd does before it executes the daemon.
        shell = 'exec 3<&"$0"; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"'
        command = [sys.executable, "-m", "dsecd", "--config", str(daemon.state_dir / "dsecd.toml")]
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        with daemon.log.open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", shell, str(listening.fileno()), *command],
                pass_fds=[listening.fileno()], env=environment, cwd=_CHECKOUT, stderr=log,
            )  # fmt: skip
        listening.close()
        try:
            assert notify.recv(100) == b"READY=1"
            assert notify.recv(100) == b"WATCHDOG=1"
            with daemon.client() as client:
                assert client.version().generation == 2
            process.terminate()
            while (message := notify.recv(100)) == b"WATCHDOG=1":
                pass
            assert message == b"STOPPING=1"
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
        assert daemon.socket.stat().st_ino == inode  # systemd's, not ours to remove
        daemon.socket.unlink()


def test_sandboxes_without_apparmor_say_so_and_rules_are_refused() -> None:
    if not apparmor.why_missing():
        pytest.skip("this kernel has AppArmor: tests/vm/test_apparmor.py shows what it does")
    with Daemon() as daemon, daemon.client() as client:
        client.finish(client.image_import(name="debian:trixie", source=str(debian_tar()), kind="rootfs-tar"))
        made = client.create(SandboxSpec(image="debian:trixie"))
        assert made.apparmor_profile == "unconfined"
        assert "apparmor" in made.off
        asked = SandboxSpec(image="debian:trixie", apparmor=AppArmor(deny_write=("/srv",)))
        with pytest.raises(FeatureMissing, match="confine by AppArmor: AppArmor is not active in this kernel"):
            client.create(asked)
        assert [sandbox.id for sandbox in client.list_all()] == [made.id]


@pytest.mark.parametrize(("value", "status"), [("require", 6), ("sometimes", EX_CONFIG)])
def test_apparmor_that_is_required_and_missing_ends_the_start(value: str, status: int) -> None:
    if not apparmor.why_missing():
        pytest.skip("this kernel has AppArmor: tests/vm/test_apparmor.py shows what it does")
    with Daemon() as daemon:
        daemon.stop()
        file = daemon.state_dir / "dsecd.toml"
        text = file.read_text()
        file.write_text(f'apparmor = "{value}"\n{text}')
        daemon.start(wait=False)
        assert daemon.wait_dead() == status
        assert "apparmor" in daemon.tail().lower()
        file.write_text(text)
