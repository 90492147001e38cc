# SPDX-License-Identifier: Apache-2.0
"""Virtual machines without a daemon, as peers: the arguments that dsec gives QEMU, changed where the peer differs.

Here: starting one, what it says on its console, its agent, and what the host holds of it. Not here: what is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dsecd.vmm import guest, qemu
from dsecd.vmm.base import Machine
from dsecd.vmm.cage import FILES
from dsecd.vmm.guest import Boot
from tests.support import machines

_INIT = Path(__file__).with_name("guest_init.c")
_WAIT_S = 300.0
MIB = 1 << 20
PAGE = mmap.PAGESIZE

Change = Callable[[list[str]], list[str]]


def peer_boot(directory: Path) -> Boot:
    """The kernel that tests boot, with an initramfs of our least init and the modules this kernel needs."""
    program = directory / "init"
    command = ["musl-gcc", "-static", "-Os", "-s", "-o", str(program), str(_INIT)]
    subprocess.run(command, check=True, capture_output=True)
    return guest.prepare(machines.guest_kernel(), program, directory / "guest")


@dataclass
class Guest:
    """One that runs."""

    process: subprocess.Popen[bytes]
    agent: Path
    said: bytes = field(default=b"")

    def wait_for(self, marker: bytes) -> None:
        """Until it has said that."""
        deadline = time.monotonic() + _WAIT_S
        assert self.process.stdout is not None
        while marker not in self.said:
            if not select.select([self.process.stdout], [], [], deadline - time.monotonic())[0]:
                raise TimeoutError(f"no {marker!r} in {_WAIT_S:g} s: {self.said[-500:]!r}")
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                raise RuntimeError(f"the guest ended: {self.said[-500:]!r}")
            self.said += piece

    def tell(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()


@contextlib.contextmanager
def running(machine: Machine, change: Change = lambda argv: argv) -> Iterator[Guest]:
    """Start one with dsec's arguments, changed; it ends with the block."""
    argv = [qemu.PROGRAM, *change(qemu.arguments("peer", machine, "tcg"))]
    real = {"kernel": machine.kernel, "initramfs": machine.initramfs, "disk": machine.disk}
    real |= {f"layer{number}": path for number, path in enumerate(machine.layers)}
    for name, path in real.items():
        argv = [word.replace(f"{FILES}/{name}", str(path)) for word in argv]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peer-", dir="/run")))
        fds = [_listening(stack, folder / name) for name in ("agent", "control")]
        memory = os.memfd_create("dsec-memory")
        stack.callback(os.close, memory)
        os.ftruncate(memory, machine.memory_bytes)
        argv = [
            word.replace("fd=3,", f"fd={fds[0]},").replace("fd=4,", f"fd={fds[1]},").replace("/fd/5", f"/fd/{memory}")
            for word in argv
        ]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   pass_fds=[*fds, memory])  # fmt: skip
        stack.callback(process.wait)
        stack.callback(process.kill)
        yield Guest(process, folder / "agent")


def _listening(stack: contextlib.ExitStack, path: Path) -> int:
    sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    sock.bind(str(path))
    sock.listen(1)
    return sock.fileno()


# --- what the host holds ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """Of one monitor, in bytes; shared pages as the kernel divides them (Pss)."""

    ram: int  # the guest's memory that is resident
    layers: int  # its part of images that it maps
    emulator: int  # everything else: its program, its buffers, translated code

    @property
    def own(self) -> int:
        return self.ram + self.emulator


def held(pid: int) -> Held:
    """proc_pid_smaps(5)."""
    ram = layers = rest = 0
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text("utf-8", "replace").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            name = " ".join(words[5:])
        elif words[0] == "Pss:":
            size = int(words[1]) << 10
            if "memfd:dsec-memory" in name or name.endswith("/ram"):
                ram += size
            elif "layer" in name or "environment" in name:
                layers += size
            else:
                rest += size
    return Held(ram, layers, rest)


def cached(path: Path) -> int:
    """Bytes of a file that are in the host's page cache, without reading any: mincore(2)."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE,
                                            flags=mmap.MAP_PRIVATE) as area:  # fmt: skip
        there = (ctypes.c_ubyte * (-(-size // PAGE)))()
        start = ctypes.c_char.from_buffer(area)
        if libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), there) < 0:
            raise OSError(ctypes.get_errno(), "mincore")
        del start
        return sum(page & 1 for page in there) * PAGE
