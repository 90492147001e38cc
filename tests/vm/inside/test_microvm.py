# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host: microVMs of the installed daemon, under its profile, from their making to their end.

What the profile denies is tried by a program under it, beside the same program without it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import Client, Sandbox
from libdsec.types import Limits

_IMAGE = "debian:trixie"
_PROFILE = "dsec-monitor"
_MEMORY_BYTES, _OVERHEAD_BYTES = 256 << 20, 192 << 20

#: Every name is an attempt, by root on the host: no namespace, no other filter, only the profile or nothing. It is
#: chosen when all that the attempts need has been loaded.
_HOSTILE = """
import ctypes, os, socket, sys
c = ctypes.CDLL(None, use_errno=True)
peer, disk, profile = int(sys.argv[1]), sys.argv[2], sys.argv[3]
def call(name, *args):
    if getattr(c, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)
def opened(path, flags):
    os.close(os.open(path, flags, 0o600))
def asked(family, kind, protocol=0):
    socket.socket(family, kind, protocol).close()
attempts = {
    "shadow": lambda: opened("/etc/shadow", os.O_RDONLY),
    "passwd": lambda: opened("/etc/passwd", os.O_WRONLY),
    "database": lambda: opened("/var/lib/dsec/state.db", os.O_RDWR),
    "disk": lambda: opened(disk, os.O_RDWR),
    "read disk": lambda: opened(disk, os.O_RDONLY),
    "daemon's socket": lambda: opened("/run/dsec", os.O_RDONLY | os.O_DIRECTORY),
    "create": lambda: opened("/tmp/planted", os.O_CREAT | os.O_WRONLY),
    "program": lambda: opened("/usr/sbin/mke2fs", os.O_WRONLY | os.O_APPEND),
    "shell": lambda: os.execv("/bin/sh", ["sh", "-c", "exit 0"]),
    "itself": lambda: os.execv("/usr/bin/qemu-system-x86_64", ["qemu", "--version"]),
    "ptrace": lambda: call("ptrace", 0x4206, peer, None, None),
    "memory": lambda: opened(f"/proc/{peer}/mem", os.O_RDWR),
    "signal": lambda: os.kill(peer, 18),
    "mount": lambda: call("mount", b"x", b"/mnt", b"tmpfs", 0, None),
    "user namespace": lambda: call("unshare", 0x10000000),
    "raw": lambda: asked(socket.AF_INET, socket.SOCK_RAW, 255),
    "packet": lambda: asked(socket.AF_PACKET, socket.SOCK_RAW),
    "inet": lambda: asked(socket.AF_INET, socket.SOCK_STREAM),
    "netlink": lambda: asked(socket.AF_NETLINK, socket.SOCK_RAW),
    "vsock": lambda: asked(socket.AF_VSOCK, socket.SOCK_STREAM),
    "tap": lambda: opened("/dev/net/tun", os.O_RDWR),
    "root": lambda: os.chroot("/"),
    "user": lambda: os.setuid(1),
    "core_pattern": lambda: opened("/proc/sys/kernel/core_pattern", os.O_WRONLY),
    "cgroup": lambda: opened("/sys/fs/cgroup/cgroup.procs", os.O_WRONLY),
    "profile": lambda: opened("/proc/self/attr/apparmor/exec", os.O_WRONLY),
    # What it may: a profile that denied all would prove nothing.
    "null": lambda: opened("/dev/null", os.O_RDWR),
    "kvm": lambda: opened("/dev/kvm", os.O_RDWR),
    "library": lambda: opened("/usr/lib/os-release", os.O_RDONLY),
    "unix": lambda: asked(socket.AF_UNIX, socket.SOCK_STREAM),
}
# Loaded before: encodings, and the functions that are called; and where what is said goes.
null = os.open("/dev/null", os.O_RDWR)
for family in (socket.AF_UNIX, socket.AF_INET):
    asked(family, socket.SOCK_STREAM)
if profile:
    with open("/proc/self/attr/apparmor/current", "w") as file:
        file.write(f"changeprofile {profile}")
for name, attempt in attempts.items():
    # Each in a process of its own: some change what comes after.
    child = os.fork()
    if not child:
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            attempt()
        except OSError:
            os._exit(1)
        os._exit(0)
    print(name, "allowed" if os.waitpid(child, 0)[1] == 0 else "denied", sep=": ")
"""
#: By profile, what it allows of that.
_MAY = {
    "dsec-monitor": {"null", "kvm", "library", "unix"},
    "dsec-firecracker": {"kvm", "unix"},
    # What makes a jail: it joins a cgroup, and becomes the machine's user.
    "dsec-jailer": {"null", "kvm", "library", "cgroup", "user", "tap"},
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client() as connected:
        yield connected


@pytest.fixture(scope="module")
def since() -> str:
    """A time before any machine was made."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


@pytest.fixture(scope="module")
def vm(client: Client, since: str) -> Iterator[Sandbox]:
    limits = Limits(memory_max_bytes=_MEMORY_BYTES)
    with Sandbox(image=_IMAGE, backend="microvm", network="all", limits=limits, client=client) as made:
        yield made


def _group(sandbox_id: str) -> Path:
    (group,) = Path("/sys/fs/cgroup").rglob(f"vm-{sandbox_id}")
    return group / "run"


def _monitor(sandbox_id: str) -> int:
    (pid,) = (_group(sandbox_id) / "cgroup.procs").read_text().split()
    assert Path(f"/proc/{pid}/exe").readlink().name == "qemu-system-x86_64"
    return int(pid)


def test_a_machine_of_its_own_runs_under_the_profile(client: Client, vm: Sandbox) -> None:
    (backend,) = (one for one in client.host().backends if one.name == "microvm")
    print(f"microVMs here: {backend.detail}")
    assert backend.works
    monitor = _monitor(vm.id)
    assert Path(f"/proc/{monitor}/attr/apparmor/current").read_text() == f"{_PROFILE} (enforce)\n"
    assert (vm.info.apparmor_profile, "apparmor" in vm.info.off) == (_PROFILE, False)
    theirs, ours = (set(Path(f"/proc/{pid}/status").read_text().splitlines()) for pid in (monitor, os.getpid()))
    assert {"NoNewPrivs:\t1", "CapEff:\t0000000000000000", "Seccomp:\t2"} <= theirs - ours
    boot_id = "/proc/sys/kernel/random/boot_id"
    assert vm.exec("cat", boot_id).text != Path(boot_id).read_text()


def test_the_life_of_a_machine_meets_no_denial(client: Client, vm: Sandbox, since: str) -> None:
    assert "eth0" in vm.exec("cat", "/proc/net/dev").text
    vm.exec("sh", "-c", "echo kept > /root/file")
    client.pause(vm.id)
    client.resume(vm.id)
    vm.snapshot("warm")
    for copy in (*vm.fork(1), *Sandbox.from_snapshot("warm", count=1, client=client)):
        assert copy.exec("cat", "/root/file").text == "kept\n"
        assert Path(f"/proc/{_monitor(copy.id)}/attr/apparmor/current").read_text() == f"{_PROFILE} (enforce)\n"
        copy.delete()
    client.snapshot_remove("warm")
    # What audit has said is in the journal a moment later.
    subprocess.run(["journalctl", "--sync"], check=True)
    assert _denials(since) == []


def _denials(since: str) -> list[str]:
    said = subprocess.run(
        ["journalctl", "--dmesg", "--no-pager", f"--since={since}", "--grep=apparmor=\"DENIED\""],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    return [line for line in said.splitlines() if _PROFILE in line or 'profile="dsecd"' in line]


def _tried(disk: Path, profile: str) -> dict[str, bool]:
    peer = subprocess.Popen(["sleep", "1000"])
    try:
        said = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", _HOSTILE, str(peer.pid),
             str(disk), profile], capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    finally:
        peer.kill()
        peer.wait()
        Path("/tmp/planted").unlink(missing_ok=True)
    return {name: answer == "allowed" for name, _, answer in (line.partition(": ") for line in said.splitlines())}


def test_a_program_under_the_profile_reaches_nothing_of_the_host(vm: Sandbox) -> None:
    disk = Path("/var/lib/dsec/vms") / vm.id / "disk"
    assert [name for name, allowed in _tried(disk, "").items() if not allowed] == []
    for profile, may in _MAY.items():
        assert {name for name, allowed in _tried(disk, profile).items() if allowed} == may, profile


def test_the_host_holds_a_machine_to_its_memory(client: Client, vm: Sandbox) -> None:
    group = _group(vm.id)
    assert int((group / "memory.max").read_text()) == _MEMORY_BYTES + _OVERHEAD_BYTES
    assert int((group / "memory.current").read_text()) > 16 << 20
    # A monitor that takes more than it is meant to: the same, by a bound that it has passed already.
    (group / "memory.max").write_text(str(8 << 20))
    told = client.wait(vm.id, ["failed"], wait_s=300)
    assert "oom" in (told.reason or "")
