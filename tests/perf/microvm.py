# SPDX-License-Identifier: Apache-2.0
"""`make bench-microvm`: what microVMs cost, beside peers in the same run.

    python3 -m tests.perf.microvm [--rounds N] [--machines N] [--clones N] [--file-mib N] [--idle-s S] [--json FILE]
                                  [PART ...]

Here: the parts ``start``, ``memory``, ``exec``, ``clone`` (in one daemon, one after the other), and ``reclaim``; their
verdicts. Not here: starting peers (``guests.py``). Guests are emulated and boot what the tests boot. Fewer samples than
a promise names, or for times a busy machine, make its verdict PENDING. Memory is read from /proc, not from the daemon.
Exits 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsecd.backends import machines as plans
from dsecd.backends import vmdisk
from dsecd.backends.agentlink import AgentLink, StartRequest, connect_socket
from dsecd.backends.base import MachineSettings
from dsecd.vmm import guest, port, qemu
from dsecd.vmm.base import Machine
from libdsec import Client, Sandbox
from libdsec.types import SandboxSpec
from tests.perf import guests
from tests.perf.guests import MIB
from tests.support import machines
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar

_IMAGE, _WORKSPACE = "debian:trixie", "bench:1"
_FILE_MIB, _READ_MIB = 192, 100
_AGENT = Path(__file__).resolve().parents[2] / "build/agent/dsec-agent"
PARTS = ("start", "memory", "exec", "clone", "reclaim")


@dataclass
class Verdict:
    """One promise: ``value`` is at most ``limit``."""

    name: str
    value: float
    limit: float
    enough: bool  # samples, for it to prove anything
    told: Sequence[str] = ()  # what was measured, and how
    samples: dict[str, Any] = field(default_factory=dict)

    @property
    def word(self) -> str:
        if not self.enough:
            return "PENDING"
        return "PASS" if self.value <= self.limit else "FAIL"

    def lines(self) -> list[str]:
        verdict = f"{self.word:7} {self.name}: {self.value:.3g}, at most {self.limit:g}"
        return [verdict, *(f"        {line}" for line in self.told)]


def quiet() -> bool:
    """Whether nothing else ran when this began: times that are no ratios prove nothing on a busy machine."""
    return _LOAD <= 0.5


_LOAD = os.getloadavg()[0]


@dataclass(frozen=True)
class Options:
    rounds: int
    machines: int
    clones: int
    file_mib: int
    idle_s: float


def spread(samples: Sequence[float], unit: str) -> str:
    """How they lie."""
    ordered = sorted(samples)
    return f"n={len(ordered)} median {statistics.median(ordered):.4g} min {ordered[0]:.4g} max {ordered[-1]:.4g} {unit}"


# --- the daemon's machines --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def daemon_with_environment() -> Iterator[Daemon]:
    """One whose environment is a minimal Debian and a file of random bytes: some 300 MB."""
    config = machines.config(disk_bytes=4 << 30)
    with Daemon(config=config) as daemon, tempfile.TemporaryDirectory(dir="/var/lib/dsec") as folder:
        with (Path(folder) / "data").open("wb") as file:
            for _ in range(_FILE_MIB):
                file.write(os.urandom(MIB))
        with daemon.client() as client:
            client.finish(client.image_import(name=_IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
            client.finish(client.image_import(name=_WORKSPACE, source=folder, kind="directory", prefix="/workspace"))
        yield daemon


def spec() -> SandboxSpec:
    return SandboxSpec(image=_IMAGE, workspace=_WORKSPACE, backend="microvm")


def pid_of(daemon: Daemon, sandbox_id: str) -> int:
    return int((daemon.cgroup_dir / f"vm-{sandbox_id}" / "run" / "cgroup.procs").read_text())


def cpu_s(pid: int) -> float:
    """What a process has used so far: proc_pid_stat(5)."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def start(daemon: Daemon, client: Client, options: Options, boot: guest.Boot) -> list[Verdict]:
    """Create to the first exec, in turn with a plain QEMU to its first process."""
    ours: list[tuple[float, float]] = []
    plain: list[tuple[float, float]] = []
    command = [
        qemu.PROGRAM, "-accel", "tcg", "-cpu", "max", "-m", "256M", "-nographic", "-no-reboot", "-nodefaults",
        "-serial", "stdio", "-kernel", str(boot.kernel), "-initrd", str(boot.initramfs),
        "-append", "console=ttyS0 quiet no_timer_check mitigations=off",
    ]  # fmt: skip
    for number in range(options.machines):
        began = time.perf_counter()
        client.create(spec(), id=f"vm{number}")
        with Sandbox.get(f"vm{number}", client=client) as sandbox:
            sandbox.exec("true", check=True)
        ours.append((time.perf_counter() - began, cpu_s(pid_of(daemon, f"vm{number}"))))
        began = time.perf_counter()
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            guests.Guest(process, Path()).wait_for(b"dsec-bench-init")
            plain.append((time.perf_counter() - began, cpu_s(process.pid)))
            process.kill()
    mine, mine_cpu = ([one[index] for one in ours] for index in (0, 1))
    theirs, theirs_cpu = ([one[index] for one in plain] for index in (0, 1))
    by_cpu = statistics.median(mine_cpu) / statistics.median(theirs_cpu)
    return [Verdict(
        "create to the end of the first exec, against a plain QEMU to its first process",
        statistics.median(mine) / statistics.median(theirs), 1.3, options.machines >= 8 and quiet(), (
            f"create + exec true: {spread(mine, 's')}", f"{' '.join(command[:10])} …: {spread(theirs, 's')}",
            f"by processor time of QEMU {by_cpu:.3g}: {spread(mine_cpu, 's')}; {spread(theirs_cpu, 's')}",
        ), {"ours_s": mine, "peer_s": theirs, "ours_cpu_s": mine_cpu, "peer_cpu_s": theirs_cpu},
    )]  # fmt: skip


@dataclass
class Total:
    """All machines together, in bytes, and its highest while something went on."""

    layer: Path
    pids: Sequence[int]
    peak: int = 0

    def now(self) -> tuple[int, int, int]:
        """Guests' memory, the image's page cache, emulators."""
        held = [guests.held(pid) for pid in self.pids]
        found = sum(one.ram for one in held), guests.cached(self.layer), sum(one.emulator for one in held)
        self.peak = max(self.peak, found[0] + found[1])
        return found

    def during(self, calls: Sequence[Callable[[], object]]) -> None:
        """Make the calls, two at a time, and look all the while."""
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(call) for call in calls]
            while not all(one.done() for one in running):
                self.now()
                time.sleep(0.2)
            for one in running:
                one.result()


def _forget(layer: Path) -> None:
    """Drop a file from the page cache, which has it since it was built; nobody maps it now."""
    fd = os.open(layer, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


#: Before and after the reads.
Peer = tuple[Total, tuple[int, int, int], tuple[int, int, int]]


def memory(daemon: Daemon, client: Client, options: Options, peer: Peer) -> list[Verdict]:
    """Machines of one environment that all read the same 100 MB of it: mapped, and before that on virtio-blk."""
    count = options.machines
    layer = daemon.state_dir / "vms" / "vm0" / "environment"
    time.sleep(5)  # what booting took goes back
    total = Total(layer, [pid_of(daemon, f"vm{number}") for number in range(count)])
    before = total.now()
    total.peak = 0

    def read(number: int) -> None:
        with Sandbox.get(f"vm{number}", client=client) as sandbox:
            sandbox.exec("sh", "-c", f"head -c {_READ_MIB}M /workspace/data > /dev/null", check=True)

    total.during([functools.partial(read, number) for number in range(count)])
    ours, after = total, total.now()
    blk, blk_before, blk_after = peer
    kernel = machines.guest_kernel()
    grown = (after[0] - before[0]) / count
    own_kernel = kernel.name == "vmlinux"
    told = [
        f"{count} machines of 256 MiB, environment of {layer.stat().st_size / MIB:.0f} MiB, each reads {_READ_MIB} "
        f"MiB; kernel {kernel.name}",
        *(
            f"{name}: guests' memory {first[0] / MIB:.0f} -> {last[0] / MIB:.0f} MiB, image's page cache "
            f"{last[1] / MIB:.0f}, emulators {last[2] / MIB:.0f}; peak {side.peak / MIB:.0f}"
            for name, side, first, last in (
                ("mapped", ours, before, after), ("virtio-blk, no free page reporting", blk, blk_before, blk_after),
            )
        ),
    ]  # fmt: skip
    return [
        Verdict("peak of guests' memory and the image's page cache, mapped against virtio-blk",
                ours.peak / blk.peak, 0.5, count >= 8 and own_kernel, told),
        Verdict("of the memory that reading the shared files takes, mapped against virtio-blk",
                max(0, sum(after[:2]) - sum(before[:2])) / max(1, sum(blk_after[:2]) - sum(blk_before[:2])), 0.5,
                count >= 8, ["the growth of both figures from before to after the reads"]),
        Verdict("MiB that one more machine takes for what all of them read", grown / MIB, 8, count >= 8,
                [f"guests' memory grew by {grown / MIB:.2f} MiB each while they read {_READ_MIB} MiB"]),
    ]  # fmt: skip


def on_blk(layer: Path, boot: guest.Boot, count: int) -> Peer:
    """The same machines with the layer on virtio-blk: what everybody does who does not map it."""
    words = f"bench.layer=/dev/vda bench.file=/root/workspace/data bench.mib={_READ_MIB}"
    machine = Machine(boot.kernel, boot.initramfs, words, 1, machines.MEMORY_BYTES, (layer,))
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(guests.running(machine, _blk)) for _ in range(count)]
        for peer in peers:
            peer.wait_for(b"dsec-bench-ready")
        time.sleep(5)
        total = Total(layer, [peer.process.pid for peer in peers])
        before = total.now()
        total.peak = 0

        def read(peer: guests.Guest) -> None:
            peer.tell(b"go\n")
            peer.wait_for(b"dsec-bench-done")

        total.during([functools.partial(read, peer) for peer in peers])
        return total, before, total.now()


def _blk(argv: list[str]) -> list[str]:
    """The layer on virtio-blk, and a plain balloon."""
    at = next(number for number, word in enumerate(argv) if word.startswith("memory-backend-file,id=pm0"))
    path = argv[at].partition("mem-path=")[2].partition(",")[0]
    drive = ["-drive", f"if=none,id=layer,file={path},format=raw,readonly=on", "-device", "virtio-blk-pci,drive=layer"]
    return _plain_balloon([*argv[: at - 1], *drive, *argv[at + 3 :]])


def _plain_balloon(argv: list[str]) -> list[str]:
    return [word.replace(",free-page-reporting=on", "") for word in argv]


def exec_and_files(daemon: Daemon, client: Client, options: Options) -> list[Verdict]:
    """Round trips of ``true``, and a large file in and out with the daemon's memory watched."""
    with Sandbox.get("vm0", client=client) as sandbox, tempfile.TemporaryDirectory(dir="/var/lib/dsec") as folder:
        took = []
        for _ in range(options.rounds):
            began = time.perf_counter()
            sandbox.exec("true", check=True)
            took.append((time.perf_counter() - began) * 1000)
        source, back = Path(folder) / "source", Path(folder) / "back"
        with source.open("wb") as file:
            piece = os.urandom(MIB)
            for _ in range(options.file_mib):
                file.write(piece)
        before = _peak_kib(daemon.pid)
        began = time.perf_counter()
        sandbox.put(source, "/root/big")
        put_s = time.perf_counter() - began
        began = time.perf_counter()
        sandbox.get_file("/root/big", back)
        get_s = time.perf_counter() - began
        subprocess.run(["cmp", str(source), str(back)], check=True)
        grown = (_peak_kib(daemon.pid) - before) / 1024
        sandbox.exec("rm", "/root/big", check=True)
    return [
        Verdict("exec of true through the SDK, p50 in ms", statistics.median(took), 15,
                options.rounds >= 200 and quiet(), [spread(took, "ms")], {"ms": took}),
        Verdict("MiB that a file of 2 GiB in and out adds to the daemon's peak", grown, 32, options.file_mib >= 2048,
                [f"{options.file_mib} MiB, equal bytes: in {put_s:.1f} s, out {get_s:.1f} s"]),
    ]  # fmt: skip


def _peak_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def clone(daemon: Daemon, client: Client, options: Options, boot_s: Sequence[float]) -> list[Verdict]:
    """Clones of a snapshot, one after the other, then as many as are to live at once."""
    made = client.snapshot_create("vm0", "warm")
    took = []
    for number in range(options.rounds // 20 or 1):
        began = time.perf_counter()
        client.clone("warm", ids=(f"c{number}",))
        with Sandbox.get(f"c{number}", client=client) as sandbox:
            sandbox.exec("true", check=True)
        took.append(time.perf_counter() - began)
    ids = [f"many{number}" for number in range(options.clones - len(took))]
    began = time.perf_counter()
    for first in range(0, len(ids), 10):
        client.clone("warm", ids=tuple(ids[first : first + 10]))
    many_s = time.perf_counter() - began
    alive = [box.id for box in client.list_all() if box.snapshot == "warm"]
    pids = [pid_of(daemon, name) for name in alive]
    time.sleep(5)
    busy = sum(map(cpu_s, pids))
    time.sleep(10)
    idle_permil = (sum(map(cpu_s, pids)) - busy) / 10 / len(pids) * 1000
    held = [guests.held(pid) for pid in pids]
    own = [one.own / MIB for one in held]
    for name in alive:
        client.delete(name)
    client.snapshot_remove("warm")
    return [
        Verdict("create of a clone and its first exec, against create of a machine and its first exec",
                statistics.median(took) / statistics.median(boot_s), 0.2, len(took) >= 10 and quiet(),
                [f"clone + exec true: {spread(took, 's')}; boot: {spread(boot_s, 's')}"], {"s": took}),
        Verdict("MB of state beside memory and disk", made.state_bytes / 1e6, 1, True,
                [f"{made.state_bytes} bytes; the snapshot takes {made.used_bytes / MIB:.0f} MiB on disk"]),
        Verdict("MiB of the host's memory for each of 50 idle clones, shared pages divided", statistics.mean(own), 128,
                len(alive) >= 50, [
                    f"{len(alive)} alive at once, {len(ids)} of them made in {many_s:.1f} s: {spread(own, 'MiB')}",
                    f"of it emulator {statistics.mean(one.emulator for one in held) / MIB:.1f} MiB, guest "
                    f"{statistics.mean(one.ram for one in held) / MIB:.1f}; processor while idle {idle_permil:.1f} "
                    "permil each",
                ]),
    ]  # fmt: skip


def daemon_parts(parts: Sequence[str], options: Options) -> list[Verdict]:
    verdicts: list[Verdict] = []
    with daemon_with_environment() as daemon, daemon.client() as client, tempfile.TemporaryDirectory() as folder:
        boot = guests.peer_boot(Path(folder))
        client.delete(client.create(spec(), id="first").id)
        (layer,) = (daemon.state_dir / "environments").iterdir()
        _forget(layer)
        peer = on_blk(layer, boot, options.machines) if "memory" in parts else None
        _forget(layer)
        verdicts += _told(start(daemon, client, options, boot))
        boot_s = verdicts[0].samples["ours_s"]
        if peer is not None:
            verdicts += _told(memory(daemon, client, options, peer))
        own = [guests.held(pid_of(daemon, f"vm{number}")) for number in range(options.machines)]
        ram, emulator = (statistics.mean(sizes) / MIB for sizes in ([h.ram for h in own], [h.emulator for h in own]))
        print(f"        each machine that booted: guest {ram:.1f} MiB, emulator {emulator:.1f} MiB", flush=True)
        for number in range(1, options.machines):
            client.delete(f"vm{number}")
        if "exec" in parts:
            verdicts += _told(exec_and_files(daemon, client, options))
        if "clone" in parts:
            verdicts += _told(clone(daemon, client, options, boot_s))
    return verdicts


# --- reclaim ----------------------------------------------------------------------------------------------------------


def reclaim(options: Options) -> list[Verdict]:
    """One machine twice at once: as dsec runs it, and without free page reporting and DAMON. Each reads and writes
    files, holds memory that it does not touch, stands idle, lets go of it, and stands idle again."""
    with tempfile.TemporaryDirectory(dir="/var/lib/dsec") as name, daemon_with_environment() as daemon:
        folder = Path(name)
        with daemon.client() as client:
            client.create(spec(), id="seed")
            client.stop("seed", grace_s=1)
        layer = daemon.state_dir / "vms" / "seed" / "environment"
        boot = guest.prepare(machines.guest_kernel(), _AGENT, folder / "guest")
        samples = asyncio.run(_both(folder, layer, boot, options.idle_s))
    means = {side: statistics.mean(sample[side] for sample in samples) / MIB for side in ("dsec", "none")}
    ends = {side: samples[-1][side] / MIB for side in means}
    table = [
        f"{sample['at_s']:5.0f} s: dsec {sample['dsec'] / MIB:4.0f} MiB, none {sample['none'] / MIB:4.0f}"
        for sample in samples[:: max(1, len(samples) // 12)]
    ]  # fmt: skip
    return [
        Verdict("resident memory of a machine over time, with reclaim against without",
                means["dsec"] / means["none"], 0.67, options.idle_s >= 60, [
                    f"means {means['dsec']:.0f} and {means['none']:.0f} MiB, at the end {ends['dsec']:.0f} and "
                    f"{ends['none']:.0f}; reclaim_age_s 10, report_order 2 (dsecd's), no zram", *table,
                ], {"samples": samples}),
    ]  # fmt: skip


#: Files written, whose pages stay in the guest's cache; then memory that is held untouched, and let go half-way.
_WORK = """
dd if=/dev/urandom of=/root/file bs=1M count=100 conv=fsync 2>/dev/null
perl -e '$x = "x" x (120 << 20); sleep %d'
"""


async def _both(folder: Path, layer: Path, boot: guest.Boot, idle_s: float) -> list[dict[str, float]]:
    samples: list[dict[str, float]] = []
    settings = {
        "dsec": MachineSettings(memory_bytes=512 * MIB, reclaim_age_s=10),
        "none": MachineSettings(memory_bytes=512 * MIB, reclaim_age_s=0),
    }
    async with contextlib.AsyncExitStack() as stack:
        pids: dict[str, int] = {}
        links: dict[str, AgentLink] = {}
        for side, wanted in settings.items():
            disk = folder / f"disk-{side}"
            vmdisk.make(folder / "templates", disk, 1 << 30)
            machine = plans.machine(side, SandboxSpec(image=_IMAGE, backend="microvm"), wanted, boot,
                                    environment=layer, disk=disk)  # fmt: skip
            peer = stack.enter_context(guests.running(machine, _plain_balloon if side == "none" else lambda argv: argv))
            pids[side] = peer.process.pid
            links[side] = await stack.enter_async_context(_linked(peer))
        began = time.monotonic()

        async def watch(seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                found = {side: float(guests.held(pid).ram) for side, pid in pids.items()}
                samples.append({"at_s": time.monotonic() - began, **found})
                await asyncio.sleep(1)

        script = _WORK % (idle_s / 2)
        await asyncio.gather(watch(idle_s), *(_run(link, script) for link in links.values()))
    return samples


@contextlib.asynccontextmanager
async def _linked(peer: guests.Guest) -> AsyncIterator[AgentLink]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    await asyncio.get_running_loop().sock_connect(sock, str(peer.agent))
    async with asyncio.timeout(300):
        await port.begin(sock, os.urandom(port.KEY_BYTES))
    link = await connect_socket(sock, generation=1, timeout_s=60, on_lost=lambda _lost: None)
    try:
        yield link
    finally:
        await link.close()


async def _run(link: AgentLink, script: str) -> None:
    channel = await link.start(StartRequest(exec_id="work", argv=["sh", "-c", script]), attach=True)
    await channel.collect(1 << 16)


# --- the whole --------------------------------------------------------------------------------------------------------


def _told(verdicts: list[Verdict]) -> list[Verdict]:
    for verdict in verdicts:
        print("\n".join(verdict.lines()), flush=True)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.perf.microvm")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without")
    parser.add_argument("--rounds", type=int, default=200, help="execs; a twentieth of it clones, one after the other")
    parser.add_argument("--machines", type=int, default=8)
    parser.add_argument("--clones", type=int, default=50, help="alive at once")
    parser.add_argument("--file-mib", type=int, default=2048)
    parser.add_argument("--idle-s", type=float, default=120)
    parser.add_argument("--json", type=Path, help="where to write every sample")
    options = parser.parse_args()
    asked = options.parts or PARTS
    if unknown := set(asked) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    wanted = Options(options.rounds, options.machines, options.clones, options.file_mib, options.idle_s)
    busy = "" if quiet() else ", so times are PENDING"
    host = f"Linux {platform.release()}, {os.cpu_count()} CPUs, load {_LOAD:.1f}{busy}"
    print(f"{host}; guests emulated (TCG)", flush=True)
    verdicts = daemon_parts(asked, wanted) if set(asked) - {"reclaim"} else []
    if "reclaim" in asked:
        verdicts += _told(reclaim(wanted))
    if options.json is not None:
        rows = [{"name": v.name, "verdict": v.word, "value": v.value, **v.samples} for v in verdicts]
        options.json.write_text(json.dumps(rows))
    print(f"\nJSON: {json.dumps({v.name: [round(v.value, 4), v.word] for v in verdicts})}")
    return 1 if any(v.word == "FAIL" for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
