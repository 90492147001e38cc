# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host: what AppArmor denies to root in a sandbox, each time beside a control that may."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from libdsec import Client, Sandbox
from libdsec.errors import InvalidSpec

sys.path.insert(0, "/usr/share/dsec")

from dsecd.backends import policy
from dsecd.linux import apparmor
from libdsec.types import AppArmor

_IMAGE = "debian:trixie"

#: Every name is an attempt, run by root on the host: no seccomp, no namespace, only the profile or nothing.
_HOSTILE = """
import ctypes, os, socket, sys
c = ctypes.CDLL(None, use_errno=True)
peer = int(sys.argv[1])
def call(name, *args):
    if getattr(c, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)
def opened(path, flags):
    os.close(os.open(path, flags))
attempts = {
    "mount": lambda: call("mount", b"x", b"/mnt", b"tmpfs", 0, None),
    "bind": lambda: call("mount", b"/root", b"/mnt", None, 4096, None),
    "remount": lambda: call("mount", None, b"/dev/shm", None, 32 | 2, None),
    "umount": lambda: call("umount2", b"/mnt", 2),
    "user namespace": lambda: call("unshare", 0x10000000),
    "ptrace": lambda: call("ptrace", 0x4206, peer, None, None),
    "memory": lambda: opened(f"/proc/{peer}/mem", os.O_RDWR),
    "signal": lambda: os.kill(peer, 18),
    "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 255).close(),
    "packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close(),
    "alg": lambda: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET).close(),
    "core_pattern": lambda: opened("/proc/sys/kernel/core_pattern", os.O_WRONLY),
    "sysrq": lambda: opened("/proc/sysrq-trigger", os.O_WRONLY),
    "sysfs": lambda: opened("/sys/kernel/mm/transparent_hugepage/enabled", os.O_WRONLY),
    "cgroup": lambda: opened("/sys/fs/cgroup/cgroup.procs", os.O_WRONLY),
    "profile": lambda: opened("/proc/self/attr/apparmor/exec", os.O_WRONLY),
    "kcore": lambda: opened("/proc/kcore", os.O_RDONLY),
}
for name, attempt in attempts.items():
    # Each in a process of its own: some change what comes after.
    child = os.fork()
    if not child:
        try:
            attempt()
        except OSError:
            os._exit(1)
        os._exit(0)
    print(name, "allowed" if os.waitpid(child, 0)[1] == 0 else "denied", sep=": ")
"""

#: Attempts at files that are denied below; what each changes it puts back, so that all can be tried in one sandbox.
_DENIED = AppArmor(deny_write=("/etc/skel", "/bin/gzip"), deny_read=("/etc/issue.net", "/usr/lib/os-rel*"))
_ATTEMPTS = {
    "append": "echo '#' >>/etc/skel/.bashrc",
    "truncate": "cp /etc/skel/.bashrc /root/c; : >/etc/skel/.bashrc; cmp -s /etc/skel/.bashrc /dev/null",
    "create": "touch /etc/skel/new",
    "create a directory": "mkdir /etc/skel/dir",
    "create a link": "ln -s /root /etc/skel/link",
    "remove": "rm /etc/skel/.profile",
    "mode": "chmod 666 /etc/skel/.bashrc",
    "owner": "chown 1 /etc/skel/.bashrc",
    "from within": "cd /etc/skel && echo '#' >>.bashrc",
    "by a symbolic link": "ln -sfn /etc/skel /root/s && echo '#' >>/root/s/.bashrc",
    "by /proc": "echo '#' >>/proc/self/root/etc/skel/.bashrc",
    "by another root": """perl -e 'chroot "/etc" or exit 1; open F, ">>", "/skel/.bashrc" or exit 2; print F "#"'""",
    "by a hard link": "ln -f /etc/skel/.bashrc /root/hard && echo '#' >>/root/hard",
    "a hard link there": "touch /root/h && ln /root/h /etc/skel/h",
    "move it away": "mv /etc/skel /etc/skel2 && mv /etc/skel2 /etc/skel",
    "move what is above": "mv /etc /etc2 && mv /etc2 /etc",
    "move over": "echo x >/root/f && mv /root/f /etc/skel/f",
    "exchange": "mkdir -p /root/e && mv -T --exchange /root/e /etc/skel && mv -T --exchange /root/e /etc/skel",
    "write /bin": "printf '' >>/bin/gzip",
    "write /usr/bin": "printf '' >>/usr/bin/gzip",
    "replace /usr/bin": "cp -p /usr/bin/gzip /root/g && mv /root/g /usr/bin/gzip",
    "replace /bin": "cp -p /usr/bin/gzip /root/g && mv /root/g /bin/gzip",
    "move /usr/bin": """perl -e 'rename "/usr/bin", "/usr/b" or exit 1; rename "/usr/b", "/usr/bin"'""",
    "move /usr": """perl -e 'rename "/usr", "/u" or exit 1; rename "/u", "/usr"'""",
    "move the link /bin": """perl -e 'rename "/bin", "/b" or exit 1; rename "/b", "/bin"'""",
    "as somebody else": "chmod 777 /root /etc/skel; su nobody -s /bin/sh -c 'touch /etc/skel/nobody'",
    "read": "cat /etc/issue.net",
    "read by a link": "cat /etc/os-release",
    "read by an own link": "ln -sf /usr/lib/os-release /root/o && cat /root/o",
    "read what was moved": "mv /etc/issue.net /root/i && cat /root/i && mv /root/i /etc/issue.net",
    "read by a hard link": "ln -f /usr/lib/os-release /root/r && cat /root/r",
    "read by another root": """perl -e 'chroot "/usr" or exit 1; open F, "<", "/lib/os-release" or exit 2'""",
}  # fmt: skip

#: What must go on working, as root, in a sandbox with rules.
_WORK = """
set -e
mkdir -p /srv/work && cd /srv/work && echo a >a && mv a b && ln b c && ln -s b d && rm b
echo x >/etc/other && mv /etc/other /etc/other2 && echo 'new:x:4000:4000::/:/bin/sh' >>/etc/passwd
su nobody -s /bin/sh -c 'test $(id -u) -gt 0 && touch /tmp/mine'
mkdir -p p/DEBIAN p/usr/share/p && touch p/usr/share/p/f
printf '%s: x\\n' Package Description >p/DEBIAN/control
printf '%s\\n' 'Version: 1' 'Architecture: all' 'Maintainer: x <x@example.org>' >>p/DEBIAN/control
dpkg-deb --root-owner-group --build p p.deb >/dev/null && dpkg -i p.deb >/dev/null && test -e /usr/share/p/f
apt-get check >/dev/null
perl -e 'use Socket; socketpair A, B, AF_UNIX, SOCK_STREAM, 0 or die; socket C, PF_INET, SOCK_STREAM, 0 or die'
sleep 100 & kill -9 $!
mknod pipe p && (echo through >pipe & cat pipe >/dev/null)
"""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client() as connected:
        yield connected


def _sandbox(client: Client, apparmor: AppArmor | None = None) -> Sandbox:
    return Sandbox(image=_IMAGE, apparmor=apparmor, client=client)


def _tried(sandbox: Sandbox, attempts: Mapping[str, str]) -> dict[str, bool]:
    """Which of the attempts succeed: all in one command, each in a shell of its own."""
    lines = [f"( {script}\n) >/dev/null 2>&1 && echo '{name}'" for name, script in attempts.items()]
    done = sandbox.exec("sh", "-c", "\n".join([*lines, "true"]), timeout_s=600).text.splitlines()
    return {name: name in done for name in attempts}


def _on_host(*before: str) -> dict[str, bool]:
    peer = subprocess.Popen(["sleep", "1000"])
    try:
        argv = ["unshare", "--mount", "--propagation", "private", *before, sys.executable, "-c", _HOSTILE]
        said = subprocess.run([*argv, str(peer.pid)], capture_output=True, text=True, check=True).stdout
    finally:
        peer.kill()
        peer.wait()
    return {name: answer == "allowed" for name, _, answer in (line.partition(": ") for line in said.splitlines())}


def test_the_daemon_and_its_sandboxes_are_confined(client: Client) -> None:
    show = ["systemctl", "show", "--value", "--property=MainPID", "dsecd.service"]
    daemon = subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(f"/proc/{daemon}/attr/apparmor/current").read_text() == "dsecd (enforce)\n"
    with _sandbox(client) as sandbox:
        assert sandbox.info.apparmor_profile == "dsec-sandbox"
        assert "apparmor" not in sandbox.info.off
        (group,) = Path("/sys/fs/cgroup").rglob(f"*-{sandbox.id}/agent")
        for pid in (group / "cgroup.procs").read_text().split():
            assert Path(f"/proc/{pid}/attr/apparmor/current").read_text() == "dsec-sandbox (enforce)\n"
        look = "cat /proc/self/attr/apparmor/current"
        for command in (look.split(), ("su", "nobody", "-s", "/bin/sh", "-c", look)):
            assert sandbox.exec(*command).text == "dsec-sandbox (enforce)\n"


def test_the_profile_alone_denies_what_root_can_do_without_it() -> None:
    free, confined = _on_host(), _on_host("aa-exec", "-p", "dsec-sandbox", "--")
    cannot = {name for name, allowed in free.items() if not allowed}
    # Nothing is mounted at /mnt for the one that unmounts it: the attempts do not build on each other.
    assert cannot <= {"umount", "kcore"}, free
    assert not any(confined.values()), confined


def test_raw_sockets_are_for_those_that_ask_for_them(client: Client) -> None:
    attempt = {"raw": "perl -e 'socket S, 2, 3, 1 or exit 1'", "raw6": "perl -e 'socket S, 10, 3, 58 or exit 1'"}
    with _sandbox(client) as default, _sandbox(client, AppArmor(allow_raw_sockets=True)) as control:
        assert _tried(control, attempt) == {"raw": True, "raw6": True}
        assert _tried(default, attempt) == {"raw": False, "raw6": False}


def test_families_can_be_denied(client: Client) -> None:
    attempts = {
        family: f"perl -e 'socket S, {number}, {kind}, 0 or exit 1'"
        for family, number, kind in (("inet", 2, 1), ("inet6", 10, 2), ("netlink", 16, 3), ("unix", 1, 1))
    }
    denied = AppArmor(deny_sockets=("inet", "inet6", "netlink"))
    with _sandbox(client) as control, _sandbox(client, denied) as sandbox:
        assert all(_tried(control, attempts).values())
        assert _tried(sandbox, attempts) == {"inet": False, "inet6": False, "netlink": False, "unix": True}


def test_no_way_leads_to_a_denied_path(client: Client) -> None:
    with _sandbox(client) as control, _sandbox(client, _DENIED) as sandbox:
        look = "cd /etc/skel; stat -c '%n %A %u %g' . .[a-z]* *; sha256sum .[a-z]* /usr/bin/gzip"
        before = sandbox.exec("sh", "-c", look).text
        free, confined = _tried(control, _ATTEMPTS), _tried(sandbox, _ATTEMPTS)
        assert [name for name, succeeded in free.items() if not succeeded] == []
        assert [name for name, succeeded in confined.items() if succeeded] == []
        after = sandbox.exec("sh", "-c", look).text
        assert after == before


def test_work_goes_on_beside_what_is_denied(client: Client) -> None:
    for rules in (None, _DENIED):
        with _sandbox(client, rules) as sandbox:
            done = sandbox.exec("sh", "-c", _WORK, timeout_s=600)
            assert done.exit_code == 0, (rules, done.stdout, done.stderr)


def test_the_agents_file_requests_are_denied_it_too(client: Client) -> None:
    with _sandbox(client) as control, _sandbox(client, _DENIED) as sandbox:
        assert b"Debian" in control.read("/etc/issue.net")
        with pytest.raises(Exception, match="ermission"):
            sandbox.read("/etc/issue.net")
        control.write("/etc/skel/put", b"x")
        with pytest.raises(Exception, match="ermission"):
            sandbox.write("/etc/skel/put", b"x")


def test_a_profile_goes_with_its_last_user(client: Client) -> None:
    with _sandbox(client, _DENIED) as one, _sandbox(client, _DENIED) as other:
        name = one.info.apparmor_profile
        assert name == other.info.apparmor_profile and name.startswith(policy.prefix("/var/lib/dsec"))
        assert apparmor.loaded()[name] == "enforce"
        one.delete()
        assert name in apparmor.loaded()
        other.stop()
        assert name not in apparmor.loaded()
        other.start()
        assert name in apparmor.loaded()
        assert other.exec("cat", "/proc/self/attr/apparmor/current").text == f"{name} (enforce)\n"
    assert name not in apparmor.loaded()


@pytest.mark.parametrize("glob", ['/a" w, } profile x { "', "/a,b", "/a\n}", "/{a,b}", "/@{HOME}/x", "/a/../b"])
def test_what_is_no_path_does_not_get_in(client: Client, glob: str) -> None:
    # Past the checks of the SDK.
    body = json.dumps({"spec": {"image": _IMAGE, "apparmor": {"deny_write": [glob]}}}).encode()
    with pytest.raises(InvalidSpec) as caught:
        client.request("create", body=body)
    assert caught.value.details["errors"][0]["path"].startswith("spec.apparmor.deny_write")


def test_a_policy_that_cannot_be_compiled_is_an_error_of_the_request(client: Client) -> None:
    hard = AppArmor(deny_write=tuple(f"/srv/**{letter}x**{letter}y" for letter in "abcdefghijklmnop"))
    with pytest.raises(InvalidSpec, match="spec.apparmor"), _sandbox(client, hard):
        pass
