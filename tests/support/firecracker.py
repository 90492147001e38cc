# SPDX-License-Identifier: Apache-2.0
"""A place for a machine of Firecracker's, with fakes or the real programs, and looks at it from outside.

What is looked at comes from /proc, the file system and plain sockets, not from the driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsecd.linux import mountns
from dsecd.vmm.base import Machine, Place, Snapshot
from dsecd.vmm.firecracker.driver import Firecracker
from dsecd.vmm.firecracker.jail import Programs

_SUPPORT = Path(__file__).parent
_CGROUP = Path("/sys/fs/cgroup")
_UID = 1_500_000_000
MIB = 1 << 20
LAYER = b"a layer's content"


def fakes(directory: Path, **scenario: Any) -> Programs:
    """Both fakes as programs in a directory of their own; the scenario is written into the one that is jailed."""
    directory.mkdir(exist_ok=True)
    text = (_SUPPORT / "fake_firecracker.py").read_text()
    lines = [f"SCENARIO = {scenario!r}" if line.startswith("SCENARIO") else line for line in text.splitlines()]
    (directory / "firecracker").write_text("\n".join(lines) + "\n")
    (directory / "jailer").write_text((_SUPPORT / "fake_jailer.py").read_text())
    for name in ("firecracker", "jailer"):
        (directory / name).chmod(0o755)
    return Programs(directory / "firecracker", directory / "jailer")


@dataclass
class House:
    """Everything that machines of one test need."""

    base: Path
    launch_ns: int
    cgroup: Path
    driver: Firecracker

    def use(self, programs: Programs) -> Firecracker:
        """A driver as a new daemon would have it."""
        self.driver = driver(programs, self.base, self.launch_ns)
        return self.driver

    def place(self, name: str = "vm1", number: int = 0, *, profile: str = "") -> Place:
        rundir = self.base / "run" / name
        rundir.mkdir(mode=0o700, parents=True, exist_ok=True)
        group = self.cgroup / name
        group.mkdir(exist_ok=True)
        return Place(name, rundir, group, _UID + number, profile)

    def machine(self, name: str = "vm1", *, layers: int = 2) -> Machine:
        """A machine with a disk of its own and layers that all share."""
        files = self.base / "files"
        files.mkdir(exist_ok=True)
        kernel, initramfs = files / "kernel", files / "initramfs"
        for path in (kernel, initramfs, *(files / f"l{n}" for n in range(layers))):
            path.write_bytes(LAYER)
        disk = files / f"disk-{name}"
        disk.touch()
        os.truncate(disk, 8 * MIB)
        disk.chmod(0o600)
        return Machine(
            kernel=kernel, initramfs=initramfs, cmdline="dsec.layers=2", vcpus=1, memory_bytes=128 * MIB,
            layers=tuple(files / f"l{n}" for n in range(layers)), disk=disk,
        )  # fmt: skip

    def start(self, place: Place, machine: Machine, restore: Snapshot | None = None) -> None:
        """As the daemon does it: on a thread that is thrown away."""
        done: Future[None] = mountns.FreshThreads().submit(self.driver.start, place, machine, restore)
        done.result(timeout=120)

    def jail(self, place: Place) -> Path:
        """What the process has as its root."""
        return self.base / "jails" / place.id / "firecracker" / place.id.replace(".", "-") / "root"

    def left_of(self, place: Place) -> list[str]:
        """Everything that is still there of a machine, once its threads had time to end."""
        def populated() -> bool:
            # That does not count a process that has ended and is still to be reaped.
            return "populated 1" in (place.cgroup / "cgroup.events").read_text()

        deadline = time.monotonic() + 60
        while (populated() or processes_of(place.uid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        found = [f"process {pid}" for pid in processes_of(place.uid)]
        found += ["something in its cgroup"] * populated()
        if place.id in os.listdir(self.base / "jails"):
            found.append(f"jail {sorted(str(p) for p in (self.base / 'jails' / place.id).rglob('*'))}")
        mounts = Path("/proc/self/mounts").read_text()
        return found + (["mounts"] if str(self.base / "jails") in mounts else [])


def driver(programs: Programs, base: Path, launch_ns: int) -> Firecracker:
    """A driver whose guests would boot a file that looks like a kernel."""
    return Firecracker(programs, base / "jails", launch_ns, lambda: tiny_kernel(base / "default-kernel", SPIN))


@contextlib.contextmanager
def house(base: Path) -> Iterator[House]:
    """Ends all that was started in it."""
    own = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].split("\n", 1)[0]
    group = _CGROUP / own.lstrip("/") / f"test-{base.name}"
    group.mkdir()
    launch_ns = mountns.create_private()
    try:
        yield House(base, launch_ns, group, driver(fakes(base / "programs"), base, launch_ns))
    finally:
        os.close(launch_ns)
        (group / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + 60
        for child in [*(p for p in group.iterdir() if p.is_dir()), group]:
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    child.rmdir()
                    break
                time.sleep(0.02)


def processes_of(uid: int) -> list[int]:
    """Pids of all processes of a user that have not ended."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = Path("/proc", name, "status").read_text()
            if f"\nUid:\t{uid}\t" in status and "\nState:\tZ" not in status:
                found.append(int(name))
    return found


def only_process_of(uid: int) -> int:
    (pid,) = processes_of(uid)
    return pid


def end(pid: int) -> None:
    """SIGKILL, and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if "\nState:\tZ" in Path("/proc", str(pid), "status").read_text():
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def ask(api: Path, method: str, target: str, found: Any = None) -> tuple[int, Any]:
    """One call of an API, by a client of the tests' own."""
    content = b"" if found is None else json.dumps(found).encode()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        here = os.open(api.parent, os.O_PATH)
        try:
            sock.connect(f"/proc/self/fd/{here}/{api.name}")
        finally:
            os.close(here)
        length = "" if method == "GET" else f"Content-Length: {len(content)}\r\n"
        sock.sendall(f"{method} {target} HTTP/1.1\r\nHost: t\r\n{length}\r\n".encode() + content)
        with sock.makefile("rb") as stream:
            status = int(stream.readline().split()[1])
            size = 0
            while (line := stream.readline().strip()) != b"":
                name, _, value = line.partition(b":")
                size = int(value) if name.lower() == b"content-length" else size
            body = stream.read(size)
    return status, json.loads(body, strict=False) if body else None


def tiny_kernel(path: Path, code: bytes) -> Path:
    """An ELF file with some machine code where a kernel would be: enough of a guest to be started, and to end."""
    at, offset = 0x100_0000, 0x1000
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 62, 1, at, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 7, offset, at, at, len(code), len(code), 0x1000)
    path.write_bytes((header + segment).ljust(offset, b"\0") + code)
    return path


#: A guest that waits for ever: `hlt; jmp` with interrupts off would end the machine, so it spins.
SPIN = b"\xf3\x90\xeb\xfc"
#: A guest that ends its machine: an instruction that is none, without a table that says what to do then.
TRIPLE_FAULT = b"\x0f\x0b"

