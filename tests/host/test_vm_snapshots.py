# SPDX-License-Identifier: Apache-2.0
"""Snapshots of virtual machines, and copies of them that run at once: with QEMU's driver, without a daemon.

The machine itself is one that a daemon made and let go; copies differ in what they must and share what they may.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsecd.backends import machines as plans
from dsecd.backends.agentlink import AgentLink, StartRequest, connect_socket
from dsecd.backends.base import MachineSettings
from dsecd.linux import cgroup, mountns, sparse
from dsecd.vmm import guest
from dsecd.vmm.base import Machine, Place, Snapshot, VmmError
from dsecd.vmm.qemu import Qemu
from libdsec.types import SandboxSpec
from tests.support import machines
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar

_IMAGE = "debian:trixie"
_UID = 0x6F00_0000
_COPIES = 2
#: Prints how far the command that counts has come; for a moment the file is empty.
_COUNT = "until grep . /tmp/count; do :; done"
_AGENT = Path(__file__).resolve().parents[2] / "build/agent/dsec-agent"
pytestmark = pytest.mark.timeout(600)


@dataclass
class Yard:
    """Where the test's machines live, and what they are made of."""

    base: Path
    driver: Qemu
    machine: Machine
    groups: Path
    _names = ("source", *(f"copy{number}" for number in range(_COPIES)))

    def place(self, name: str) -> Place:
        uid = _UID + self._names.index(name)
        return Place(id=name, rundir=self.base / "run" / name, cgroup=self.groups / name, uid=uid)

    def disk(self, name: str) -> Path:
        return self.base / f"disk-{name}"

    def machine_for(self, name: str) -> Machine:
        made = self.machine
        return Machine(
            made.kernel, made.initramfs, made.cmdline, made.vcpus, made.memory_bytes, made.layers, self.disk(name)
        )

    @contextlib.asynccontextmanager
    async def running(self, name: str, restore: Snapshot | None = None) -> AsyncIterator[Place]:
        place = self.place(name)
        place.rundir.mkdir(parents=True, mode=0o700)
        cgroup.create(place.cgroup)
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(
                mountns.FreshThreads(), self.driver.start, place, self.machine_for(name), restore
            )
            yield place
        finally:
            cgroup.kill(place.cgroup)
            assert await cgroup.wait_empty(place.cgroup, 60)
            self.driver.forget(place)
            cgroup.remove(place.cgroup)
            shutil.rmtree(place.rundir)


@pytest.fixture
def yard(disk: Path) -> Iterator[Yard]:
    kernel = machines.guest_kernel()
    with Daemon(config=machines.config()) as daemon, daemon.client() as client:
        client.finish(client.image_import(name=_IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        client.create(SandboxSpec(image=_IMAGE, backend="microvm"), id="seed")
        client.stop("seed", grace_s=1)
        made = daemon.state_dir / "vms" / "seed"
        (disk / "environment").hardlink_to(made / "environment")
        sparse.copy(made / "disk", disk / "disk-source")
        client.delete("seed")
    boot = guest.prepare(kernel, _AGENT, disk / "guest")
    settings = MachineSettings(memory_bytes=machines.MEMORY_BYTES)
    spec = SandboxSpec(image=_IMAGE, backend="microvm", hostname="source")
    machine = plans.machine(
        "source", spec, settings, boot, environment=disk / "environment", disk=disk / "disk-source"
    )
    groups = cgroup.root() / f"snapshots-{os.getpid()}"
    cgroup.create(groups)
    namespace = mountns.create_private()
    yield Yard(disk, Qemu(disk / "runtime", namespace, accelerator="tcg"), machine, groups)
    os.close(namespace)
    cgroup.remove(groups)


async def linked(yard: Yard, place: Place) -> AgentLink:
    sock = await yard.driver.dial(place, machines.BOOT_TIMEOUT_S)
    return await connect_socket(sock, generation=1, timeout_s=120, on_lost=lambda _lost: None)


async def said(link: AgentLink, script: str) -> str:
    request = StartRequest(exec_id=f"e{time.monotonic_ns()}", argv=["sh", "-c", script])
    channel = await link.start(request, attach=True)
    done = await channel.collect(1 << 16)
    return done.stdout.decode().strip()


async def goes_on(link: AgentLink, count: int) -> None:
    """The command that counts does so."""
    async with asyncio.timeout(60):
        while int(await said(link, _COUNT)) <= count:
            await asyncio.sleep(0.1)


def digest(snapshot: Snapshot) -> str:
    total = hashlib.sha256()
    for path in (snapshot.state, snapshot.memory):
        total.update(path.read_bytes())
    return total.hexdigest()


async def saved(yard: Yard) -> tuple[Snapshot, float]:
    """A snapshot of a machine in which a command counts, and how long the machine took to boot."""
    folder = yard.base / "snapshot"
    folder.mkdir(mode=0o700)
    snapshot = Snapshot(folder / "state", folder / "memory")
    began = time.monotonic()
    async with yard.running("source") as place:
        link = await linked(yard, place)
        booted_s = time.monotonic() - began
        await said(link, "echo 0123456789abcdef0123456789abcdef > /etc/machine-id; echo kept > /root/file; sync")
        counting = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"
        await link.start(StartRequest(exec_id="count", argv=["sh", "-c", counting]), attach=False)
        await asyncio.sleep(0.5)
        await link.machine.freeze(frozen=True)
        await yard.driver.pause(place)
        await yard.driver.save(place, snapshot)
        for number in range(_COPIES):
            sparse.copy(yard.disk("source"), yard.disk(f"copy{number}"))
        with pytest.raises(FileExistsError):
            await yard.driver.save(place, snapshot)
        # The machine that was saved goes on, over the same connection.
        await yard.driver.resume(place)
        await link.machine.freeze(frozen=False)
        await goes_on(link, int(await said(link, _COUNT)))
        await link.close()
    return snapshot, booted_s


async def copied(yard: Yard, number: int, snapshot: Snapshot, stack: contextlib.AsyncExitStack) -> dict[str, str]:
    """Run a copy until the test ends; what it is once it was renewed, and what it was before."""
    began = time.monotonic()
    place = await stack.enter_async_context(yard.running(f"copy{number}", snapshot))
    await yard.driver.resume(place)
    link = await linked(yard, place)
    took_s = time.monotonic() - began
    stack.push_async_callback(link.close)
    # The command that counts stands still until its machine is one of its own.
    asked = time.time()
    await link.machine.renew(f"copy-{number}")
    await link.machine.freeze(frozen=False)
    random = "head -c 16 /dev/urandom | od -An -tx1; "
    text = await said(link, random + f"uname -n; cat /etc/machine-id /root/file; date +%s%N; {_COUNT}")
    drawn, host, machine_id, kept, clock, count = text.splitlines()
    # Its clock was set to what the host's was when it was asked to.
    assert asked - 2 < int(clock) / 1e9 < time.time() + 2
    await said(link, f"echo {number} > /root/mine; sync")
    await goes_on(link, int(count))
    return {"random": drawn, "host": host, "machine": machine_id, "kept": kept, "took": f"{took_s:.2f}",
            "mine": await said(link, "cat /root/mine")}  # fmt: skip


async def refused(yard: Yard, snapshot: Snapshot) -> None:
    """A state that is none: told, and nothing of its machine is left."""
    snapshot.state.chmod(0o600)
    snapshot.state.write_bytes(b"QEVM" + os.urandom(4096))
    async with yard.running("copy0", snapshot) as place:
        with pytest.raises((VmmError, OSError)):
            await yard.driver.resume(place)


def test_copies_of_a_snapshot_are_machines_of_their_own(yard: Yard) -> None:
    async def main() -> None:
        snapshot, booted_s = await saved(yard)
        assert snapshot.state.stat().st_size < 1 << 20
        before = digest(snapshot)
        async with contextlib.AsyncExitStack() as stack:
            found = [await copied(yard, number, snapshot, stack) for number in range(_COPIES)]
        print("boot", f"{booted_s:.2f} s,", "copies", [one["took"] for one in found])
        for name in ("random", "host", "machine", "mine"):
            assert len({one[name] for one in found}) == _COPIES, (name, found)
        assert {one["kept"] for one in found} == {"kept"}
        assert digest(snapshot) == before
        await refused(yard, snapshot)
        assert not yard.driver.residents()

    asyncio.run(main())
