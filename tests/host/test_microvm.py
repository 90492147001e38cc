# SPDX-License-Identifier: Apache-2.0
"""MicroVM sandboxes through a real daemon and a real QEMU: the wall around them, and everything that may go wrong.

What they do as all sandboxes do is in the tests that run for each backend. Effects are read from /proc, from inside,
or by tests/support/residue.py.
"""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.backends.agentlink import AgentLink, StartRequest, connect_socket
from dsecd.vmm.base import Place
from dsecd.vmm.qemu import Qemu
from libdsec import Client
from libdsec.errors import AlreadyExists, DsecError, FeatureMissing, InvalidSpec, WrongState
from libdsec.types import ExecRequest, Limits, SandboxSpec, State
from tests.support import machines
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

IMAGE = "debian:trixie"
_DISK_BYTES = 256 << 20
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(config=machines.config(disk_bytes=_DISK_BYTES)) as running:
        with running.client() as client:
            client.finish(client.image_import(name=IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def vm(daemon: Daemon) -> str:
    """A machine for tests that leave it as it was."""
    with daemon.client() as client:
        return client.create(spec(), id="vm").id


def spec(**more: object) -> SandboxSpec:
    return SandboxSpec.model_validate({"image": IMAGE, "backend": "microvm", **more})


def sh(client: Client, sandbox_id: str, script: str) -> str:
    result = client.exec(sandbox_id, ExecRequest(argv=("sh", "-c", script)))
    assert result.exit_code == 0, result
    return result.text


def monitor(daemon: Daemon, sandbox_id: str) -> int:
    """The pid of its QEMU, as the kernel tells it."""
    pids = (daemon.cgroup_dir / f"vm-{sandbox_id}" / "run" / "cgroup.procs").read_text().split()
    (pid,) = [int(pid) for pid in pids]
    assert Path(f"/proc/{pid}/exe").readlink().name.startswith("qemu-system")
    return pid


def until_failed(client: Client, sandbox_id: str) -> str:
    return client.wait(sandbox_id, [State.FAILED], wait_s=60).reason or ""


def test_a_kernel_of_its_own_over_the_same_tree(client: Client, vm: str) -> None:
    assert sh(client, vm, "uname -n").strip() == "vm"
    assert sh(client, vm, "cat /proc/sys/kernel/random/boot_id") != Path(
        "/proc/sys/kernel/random/boot_id"
    ).read_text()
    assert sh(client, vm, "id -u; cat /etc/hosts").split()[0] == "0"
    assert "trixie" in sh(client, vm, "cat /etc/os-release")
    # An emulated processor would have it, and a kernel with KVM turn it on while it boots: a fifth of what that takes.
    flags = sh(client, vm, "grep -m1 ^flags /proc/cpuinfo").split()
    assert ("fpu" in flags, "svm" in flags) == (True, False)
    # Without a network it has no device, and none can be added while it runs.
    assert "eth0" not in sh(client, vm, "ls /sys/class/net")
    with pytest.raises(FeatureMissing, match="started without a network"):
        client.update(vm, network=("tcp:203.0.113.1:443",))


def test_the_monitor_is_nobody_in_namespaces_of_its_own(daemon: Daemon, vm: str) -> None:
    pid = monitor(daemon, vm)
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert {int(uid) for uid in status["Uid"].split()}.isdisjoint({0, os.getuid()})
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for namespace in ("mnt", "net", "pid", "ipc", "uts"):
        assert os.readlink(f"/proc/{pid}/ns/{namespace}") != os.readlink(f"/proc/self/ns/{namespace}")
    # Only a loopback device, and of the host's files no more than programs and its own.
    assert len(Path(f"/proc/{pid}/net/dev").read_text().splitlines()) == 3
    assert {path.name for path in Path(f"/proc/{pid}/root").iterdir()} == {
        "bin", "dev", "lib", "lib64", "m", "proc", "sbin", "usr",
    }  # fmt: skip


def test_what_is_mapped_is_not_copied(daemon: Daemon, client: Client, vm: str) -> None:
    """The layer is the host's file, mapped shared; reading it takes no memory of the guest's."""
    maps = Path(f"/proc/{monitor(daemon, vm)}/maps").read_text()
    assert any("r--s" in line and line.endswith("/m/layer0") for line in maps.splitlines())
    cached = "awk '/^Cached/ {print $2}' /proc/meminfo"
    sh(client, vm, "cat /usr/bin/* > /dev/null")
    before = int(sh(client, vm, cached))
    read = int(sh(client, vm, "cat /usr/lib/*/*.so* | wc -c"))
    assert read > 10 << 20
    assert int(sh(client, vm, cached)) - before < (read >> 10) // 10


def test_what_the_host_pays_and_what_the_guest_says_are_told_apart(daemon: Daemon, client: Client, vm: str) -> None:
    sh(client, vm, "cat /usr/bin/perl > /dev/null")

    def differs() -> list[str]:
        """What the daemon says and others do not, who are asked one after another while the guest goes on."""
        (one,) = client.memory(sandbox=(vm,)).sandboxes
        assert one.machine is not None
        rollup = Path(f"/proc/{monitor(daemon, vm)}/smaps_rollup").read_text().splitlines()
        pss_kib = int(next(line.split()[1] for line in rollup if line.startswith("Pss:")))
        paid = one.machine.guest_bytes + one.machine.layers_bytes + one.machine.monitor_bytes
        resident = resident_kib(daemon, vm)
        inside = sh(client, vm, "awk '/^(MemTotal|MemAvailable)/ {print $2}' /proc/meminfo").split()
        used = client.usage(vm).memory_current_bytes
        agrees = {
            "paid": abs(paid - (pss_kib << 10)) < 16 << 20,
            "resident": abs(one.machine.guest_resident_bytes - (resident << 10)) < 8 << 20,
            "layers": one.machine.layers_bytes > 1 << 20,
            "size": one.machine.size_bytes == machines.MEMORY_BYTES,
            "total": one.machine.told["total"] == int(inside[0]) << 10,
            "available": abs(one.machine.told["available"] - (int(inside[1]) << 10)) < 32 << 20,
            "used": used is not None and used > one.machine.guest_bytes,
        }
        return [name for name, does in agrees.items() if not does]

    found: list[str] = []

    def all_agree() -> bool:
        nonlocal found
        found = differs()
        return not found

    with contextlib.suppress(AssertionError):
        until(all_agree)
    assert found == []


def test_commands_survive_sigkill_of_the_daemon(daemon: Daemon, client: Client, vm: str) -> None:
    script = "i=0; while [ $i -lt 60 ]; do i=$((i+1)); echo line $i; sleep 0.05; done; exit 7"
    client.exec_start(vm, ExecRequest(argv=("sh", "-c", script), exec_id="count"))
    pid = monitor(daemon, vm)
    for _ in range(3):
        time.sleep(0.5)
        daemon.restart()
    assert monitor(daemon, vm) == pid
    result = client.exec_wait(vm, "count", wait_s=60)
    assert result.exit_code == 7
    assert result.stdout == b"".join(b"line %d\n" % number for number in range(1, 61))
    assert client.inspect(vm).state == "running"


def test_the_agent_is_reached_whatever_the_last_daemon_left(daemon: Daemon, client: Client, vm: str) -> None:
    """Daemons that die while they dial, many of them before the monitor or the guest looks, or while output flows."""
    place = Place(vm, daemon.runtime_dir / "vms" / vm, daemon.cgroup_dir / f"vm-{vm}", uid=0)
    pid = monitor(daemon, vm)
    key, generation = (place.rundir / "key").read_bytes(), client.version().generation

    def dial_and_die(times: int) -> None:
        for _ in range(times):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(place.rundir / "agent"))
                sock.sendall(b"\x7fdsec-connect-1\n" + key + os.urandom(16))

    async def link() -> AgentLink:
        sock = await Qemu(daemon.runtime_dir, -1, accelerator="tcg").dial(place, 60)
        return await connect_socket(sock, generation=generation, timeout_s=60, on_lost=lambda _lost: None)

    async def flood_and_die(number: int) -> None:
        sender = await link()
        await sender.start(StartRequest(f"flood-{number}", ["head", "-c", "50M", "/dev/zero"]), attach=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2), await sender.put_file("/tmp/half") as writer:
                await writer.write(0, bytes(8 << 20))
        await sender.close()

    async def story() -> None:
        for number in range(6):
            await asyncio.to_thread(dial_and_die, 1 + 2 * number)
            await (await link()).close()
            os.kill(pid, signal.SIGSTOP)
            await asyncio.to_thread(dial_and_die, 2)  # as many as wait for a monitor
            os.kill(pid, signal.SIGCONT)
            await flood_and_die(number)
            last = await link()
            await asyncio.wait_for(last.ping(60), 60)
            await last.close()

    daemon.kill()
    try:
        asyncio.run(story())
    finally:
        os.kill(pid, signal.SIGCONT)
        daemon.start()


def test_processes_are_limited_inside(client: Client, vm: str) -> None:
    client.update(vm, limits=Limits(pids_max=40))
    bomb = "for i in $(seq 100); do sleep 30 & done; true"
    result = client.exec(vm, ExecRequest(argv=("sh", "-c", bomb)))
    assert b"fork" in result.stderr.lower()
    client.update(vm, limits=Limits(pids_max=512))
    with pytest.raises(FeatureMissing, match="memory_max_bytes of a microVM"):
        client.update(vm, limits=Limits(memory_max_bytes=512 << 20))


def test_a_full_disk_is_an_error_of_the_command(client: Client, vm: str) -> None:
    result = client.exec(vm, ExecRequest(argv=("dd", "if=/dev/urandom", "of=/root/big", "bs=1M", "count=400")))
    assert b"No space left on device" in result.stderr
    assert sh(client, vm, "rm /root/big; sync; echo alive") == "alive\n"


def test_stop_keeps_files_and_a_death_is_told_and_keeps_them_too(daemon: Daemon, client: Client) -> None:
    client.create(spec(), id="mortal")
    sh(client, "mortal", "echo kept > /root/file; touch /tmp/gone")
    assert client.stop("mortal", grace_s=2).state == "stopped"
    assert client.start("mortal").state == "running"
    assert sh(client, "mortal", "cat /root/file; ls /tmp") == "kept\n"
    # The guest's own end: a panic.
    end = "echo more >> /root/file; sync; echo c > /proc/sysrq-trigger"
    client.exec_start("mortal", ExecRequest(argv=("sh", "-c", end)))
    reason = until_failed(client, "mortal")
    assert reason.startswith("crash")
    assert "sysrq triggered crash" in reason
    client.start("mortal")
    assert sh(client, "mortal", "cat /root/file") == "kept\nmore\n"
    # The monitor's end.
    os.kill(monitor(daemon, "mortal"), signal.SIGKILL)
    assert until_failed(client, "mortal") == "crash"
    assert not (daemon.cgroup_dir / "vm-mortal").exists()
    client.delete("mortal")


def test_forks_go_on_by_themselves_and_are_machines_of_their_own(daemon: Daemon, client: Client) -> None:
    client.create(spec(), id="parent")
    counting = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"
    client.exec_start("parent", ExecRequest(argv=("sh", "-c", counting), exec_id="count"))
    sh(client, "parent", "echo kept > /root/file; until [ -s /tmp/count ]; do sleep 0.05; done")
    with pytest.raises(AlreadyExists):
        client.fork("parent", ids=("kid-1", "parent"))
    assert "kid-1" not in {one.id for one in client.list_all()}
    copies = client.fork("parent", ids=("kid-1", "kid-2")).sandboxes
    assert [one.state for one in copies] == ["running", "running"]
    random = "head -c 16 /dev/urandom | od -An -tx1"
    names = ("parent", "kid-1", "kid-2")
    assert len({sh(client, name, random) for name in names}) == 3
    assert [sh(client, name, "uname -n").strip() for name in names] == list(names)
    for name in names:
        assert client.exec_inspect(name, "count").running
        first = counted(client, name)
        until(functools.partial(_counts_on, client, name, first), 60)
        sh(client, name, f"cat /root/file; echo {name} > /root/mine; sync")
    # A copy of a copy; and a copy outlives its origin.
    client.delete("parent")
    client.fork("kid-1", ids=("grandkid",))
    daemon.restart()
    assert sh(client, "grandkid", "uname -n; cat /root/mine").split() == ["grandkid", "kid-1"]
    assert sh(client, "kid-2", "cat /root/mine") == "kid-2\n"
    # Stopped and started, a copy boots as any other does.
    client.stop("kid-2", grace_s=1)
    client.start("kid-2")
    assert sh(client, "kid-2", "uname -n; cat /root/mine").split() == ["kid-2", "kid-2"]
    with pytest.raises(WrongState):
        client.stop("kid-1", grace_s=0)
        client.fork("kid-1")
    for name in ("kid-1", "kid-2", "grandkid"):
        client.delete(name)
    assert list((daemon.state_dir / "origins").iterdir()) == []


def counted(client: Client, sandbox_id: str) -> int:
    """How far the command has come; for a moment its file is empty."""
    return int(sh(client, sandbox_id, "until grep . /tmp/count; do :; done"))


def _counts_on(client: Client, sandbox_id: str, first: int) -> bool:
    return counted(client, sandbox_id) > first


def resident_kib(daemon: Daemon, sandbox_id: str) -> int:
    """How much of the guest's memory the host holds."""
    entries = Path(f"/proc/{monitor(daemon, sandbox_id)}/smaps").read_text().split("VmFlags:")
    (ram,) = [entry for entry in entries if "memfd:dsec-memory" in entry]
    return int(next(line.split()[1] for line in ram.splitlines() if line.startswith("Rss:")))


def peak_kib(daemon: Daemon, client: Client, request: ExecRequest) -> int:
    """The most memory the host held for the guest while a command ran."""
    exec_id = client.exec_start("vm", request).exec_id
    peak = resident_kib(daemon, "vm")
    while client.exec_inspect("vm", exec_id).running:
        peak = max(peak, resident_kib(daemon, "vm"))
        time.sleep(0.05)
    return max(peak, resident_kib(daemon, "vm"))


def settles_below(daemon: Daemon, sandbox_id: str, most_kib: float, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while (now := resident_kib(daemon, sandbox_id)) > most_kib and time.monotonic() < deadline:
        time.sleep(0.5)
    return now


def settled_kib(daemon: Daemon, sandbox_id: str, timeout_s: float = 60) -> int:
    """How much the host holds once that has stopped to fall: what booting took is given back for some seconds, too."""
    deadline = time.monotonic() + timeout_s
    now, last = resident_kib(daemon, sandbox_id), 1 << 40
    while last - now > 4 << 10 and time.monotonic() < deadline:
        # Longer than memory has to be idle for.
        time.sleep(5)
        now, last = resident_kib(daemon, sandbox_id), now
    return now


def test_memory_that_is_free_or_idle_goes_back_to_the_host() -> None:
    config = machines.config() + "reclaim_age_s = 3\nreport_order = 0\n"
    with Daemon(config=config) as daemon, daemon.client() as client:
        client.finish(client.image_import(name=IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        client.create(spec(limits=Limits(memory_max_bytes=384 << 20)), id="vm")
        # Freed: tail holds what has no line's end.
        before = settled_kib(daemon, "vm")
        taking = ExecRequest(argv=("sh", "-c", "head -c 150M /dev/zero | tail -n 1 | wc -c"))
        peak = peak_kib(daemon, client, taking)
        taken = peak - before
        assert taken > 100 << 10
        left = settles_below(daemon, "vm", before + 0.2 * taken, 120)
        assert left - before <= 0.2 * taken, (before, peak, left)
        # Idle: the page cache of a file that nobody reads. Written faster than the first of it gets old.
        before = settled_kib(daemon, "vm")
        writing = ExecRequest(argv=("dd", "if=/dev/zero", "of=/root/f", "bs=1M", "count=100", "conv=fsync"))
        cached = peak_kib(daemon, client, writing)
        assert cached - before > 80 << 10
        left = settles_below(daemon, "vm", before + 0.2 * (cached - before), 180)
        assert left - before <= 0.2 * (cached - before), (before, cached, left)


@pytest.mark.parametrize("harm", ["slow", "no kernel", "corrupt"])
def test_a_guest_that_does_not_boot_is_told_and_nothing_is_left(harm: str, tmp_path: Path) -> None:
    kernel = tmp_path / "kernel"
    if harm == "corrupt":
        kernel.write_bytes(os.urandom(4 << 20))
    elif harm == "slow":
        kernel = machines.guest_kernel()
    with Daemon(config=machines.config(kernel=kernel, boot_timeout_s=1)) as daemon, daemon.client() as client:
        client.finish(client.image_import(name=IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        with pytest.raises(DsecError) as caught:
            client.create(spec(), id="never")
        wanted = {"slow": "did not answer within 1 s", "no kernel": "no such kernel", "corrupt": "ended before its"}
        assert wanted[harm] in str(caught.value)
        assert client.list().sandboxes == ()
        assert daemon.residue() == []


def test_too_little_memory_is_refused(client: Client) -> None:
    with pytest.raises(InvalidSpec, match="at least 128 MiB"):
        client.create(spec(limits=Limits(memory_max_bytes=64 << 20)))


def test_residue_script_sees_what_a_machine_has(daemon: Daemon, vm: str) -> None:
    """The control of every empty list above."""
    found = "\n".join(daemon.residue())
    for kind in ("process", "cgroup", "/vms/", "/crun-vm/"):
        assert kind in found, found
    assert vm in found
