# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host: Firecracker and its jailer under their profiles, started by the installed daemon, and all
that the driver does with one.

Both are fakes, strict where the real ones are and written after what is documented of them; Python, which they are
written in, is added to the profiles for that, and nothing else.
"""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from libdsec import Client
from libdsec.errors import DsecError
from libdsec.types import SandboxSpec

sys.path.insert(0, "/usr/share/dsec")
from dsecd.vmm.base import Place, Snapshot
from tests.support import firecracker
from tests.support.waiting import until

_BASE = Path("/srv/house")
_CONFIG = Path("/etc/dsec/dsecd.toml.d/zz-firecracker.toml")
_LOCAL = Path("/etc/apparmor.d/local")
_PROFILE = "dsec-firecracker"
#: What an interpreter needs that a static program does not; and where the tests' own jails are.
_PYTHON = "/usr/{,**} mr,\n/etc/ld.so.cache r,\n"
_OWN_JAILS = f"{_BASE}/** rwlk,\nmount options=(rw, rbind) -> {_BASE}/**,\n"


@pytest.fixture(scope="module", autouse=True)
def since() -> str:
    """A time before any of it; programs and profiles are there from then on, as long as the machine."""
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    firecracker.fakes(Path("/usr/local/bin"), guest="hang")
    for name, rules in ((_PROFILE, _PYTHON), ("dsec-jailer", _PYTHON + _OWN_JAILS)):
        (_LOCAL / name).write_text(rules)
    subprocess.run(["apparmor_parser", "--replace", f"/etc/apparmor.d/{_PROFILE}"], check=True)
    return began


def _label(pid: int) -> str:
    return Path(f"/proc/{pid}/attr/apparmor/current").read_text()


def _denials(since: str) -> list[str]:
    # What audit has said is in the journal a moment later.
    subprocess.run(["journalctl", "--sync"], check=True)
    said = subprocess.run(
        ["journalctl", "--dmesg", "--no-pager", f"--since={since}", "--grep=apparmor=\"DENIED\""],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    return [line for line in said.splitlines() if "dsec" in line]


async def _talk_and_save(house: firecracker.House, place: Place, saved: Snapshot) -> None:
    with await house.driver.dial(place, 60) as sock:
        assert (await asyncio.get_running_loop().sock_recv(sock, 3)) == b"the"
    await house.driver.pause(place)
    await house.driver.save(place, saved)
    await house.driver.resume(place)
    assert (await house.driver.memory(place))["total"] > 0


def test_the_driver_does_all_it_does_with_one_under_its_profile(since: str) -> None:
    _BASE.mkdir()
    with firecracker.house(_BASE) as house:
        house.use(firecracker.fakes(Path("/usr/local/bin"), guest="echo"))
        place, machine = house.place(profile=_PROFILE), house.machine()
        house.start(place, machine)
        pid = firecracker.only_process_of(place.uid)
        assert _label(pid) == f"{_PROFILE} (enforce)\n"
        saved = Snapshot(_BASE / "state", _BASE / "memory")
        asyncio.run(_talk_and_save(house, place, saved))
        firecracker.end(pid)
        house.driver.forget(place)
        house.start(place, machine, saved)
        pid = firecracker.only_process_of(place.uid)
        assert _label(pid) == f"{_PROFILE} (enforce)\n"
        firecracker.end(pid)
        house.driver.forget(place)
    assert _denials(since) == []


def test_the_daemon_starts_it_under_its_profile(since: str) -> None:
    kernel = firecracker.tiny_kernel(_BASE / "vmlinux", firecracker.SPIN)
    firecracker.fakes(Path("/usr/local/bin"), guest="hang")
    _CONFIG.write_text(
        f'[microvm]\nmonitor = "firecracker"\nfirecracker = "/usr/local/bin/firecracker"\nkernel = "{kernel}"\n'
    )
    subprocess.run(["systemctl", "restart", "dsecd"], check=True)

    def create() -> None:
        # Its guest never answers; it is deleted meanwhile.
        with pytest.raises(DsecError), Client() as other:
            other.create(SandboxSpec(image="debian:trixie", backend="microvm"), id="caged")

    with Client() as client:
        caller = threading.Thread(target=create, daemon=True)
        caller.start()
        agent = Path("/var/lib/dsec/jails/caged/firecracker/caged/root/run/agent.sock")
        until(lambda: agent.exists() and _processes("caged"), 600)
        (pid,) = _processes("caged")
        assert _label(pid) == f"{_PROFILE} (enforce)\n"
        assert "apparmor" not in client.inspect("caged").off
        client.delete("caged")
        caller.join(timeout=600)
        assert not caller.is_alive()
    assert _denials(since) == []


def _processes(sandbox_id: str) -> list[int]:
    groups = Path("/sys/fs/cgroup").rglob(f"vm-{sandbox_id}/run/cgroup.procs")
    return [int(pid) for group in groups for pid in group.read_text().split()]
