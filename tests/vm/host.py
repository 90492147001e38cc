# SPDX-License-Identifier: Apache-2.0
"""The test host as tests see it: a fresh machine, commands and files in it, reboot, end.

Here: the life of a machine, and keeping one that has booted so that each module of tests starts from it. Not
here: QEMU's arguments (``qemu.py``), the protocol (``channel.py``), the disk (``image.py``).
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self, TextIO

from tests.vm import frames, image, kernels, qemu
from tests.vm.channel import Channel, ChannelError, CommandFailed, Result
from tests.vm.image import Image
from tests.vm.kernels import Kernel

#: Emulated, on two cores that others use, too: a boot takes 30 to 60 s, several times that under load.
BOOT_S = 600.0
_RESTORE_S = 600.0
_LOCK_S = 1500.0  # less than a test may take, so that the reason is told

_in_this_process = threading.Lock()


@dataclass(frozen=True)
class Saved:
    """A machine that has booted and waits in the cache."""

    folder: Path
    kernel: Kernel

    @property
    def disk(self) -> Path:
        """Its disk, the base of each restored machine's."""
        return self.folder / "disk.qcow2"

    @property
    def memory(self) -> Path:
        """Its memory and devices."""
        return self.folder / "memory"


@contextmanager
def only_machine(tell: Callable[[str], object] = print) -> Iterator[None]:
    """At most one machine at a time for all that share a cache: two would take each other's time.

    ``tell``: who waits long wants to know for whom. Not to be nested: a module of tests uses one machine. Raises
    TimeoutError after 25 minutes.
    """
    if not _in_this_process.acquire(blocking=False):
        raise RuntimeError("this process has a machine already")
    try:
        with (image.cache() / "lock").open("w") as lock:
            _lock(lock, tell)
            yield
    finally:
        _in_this_process.release()


def _lock(lock: TextIO, tell: Callable[[str], object]) -> None:
    deadline, told = time.monotonic() + _LOCK_S, False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another run has used {lock.name} for {_LOCK_S:.0f} s") from None
            if not told:
                tell("waiting for another run's machine to end")
            told = True
            time.sleep(0.5)


class VmHost:
    """One running machine. Leave the block, or call ``close``, to end it and remove its disk."""

    def __init__(self, kernel: Kernel, base: Image | Saved, *, more: Sequence[str] = ()) -> None:
        """Boot from an image, or continue a saved machine, in a QEMU that is given ``more`` arguments, which are none
        of devices.  Hold ``only_machine``.  Raises QemuError, ChannelError."""
        self.kernel = kernel
        # Sockets lie in it, whose paths may not be long.
        self.folder = Path(tempfile.mkdtemp(prefix="dsec-vm-", dir="/var/tmp"))
        self._channel: Channel | None = None
        self._machine: qemu.Qemu | None = None
        try:
            if isinstance(base, Saved):
                self._continue(base, more)
            else:
                qemu.overlay(base.disk, "raw", self.folder / "disk.qcow2")
                self._machine = qemu.Qemu(self.folder, kernel.image, kernel.initrd, more=more)
                self._channel = Channel(self._machine.agent_socket, timeout_s=BOOT_S)
        except BaseException as error:
            error.add_note(f"the guest's console ends with:\n{self.console()[-3000:]}")
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def cpu_s(self) -> float:
        """Processor seconds that the machine took so far."""
        return self.machine.cpu_s

    def run(
        self, argv: Sequence[str] | str, *, check: bool = True, stdin: bytes | BinaryIO = b"",
        stdout: BinaryIO | None = None, timeout_s: float = 900.0, env: Mapping[str, str] | None = None,
    ) -> Result:  # fmt: skip
        """Run a command as root; a string is a line for the guest's shell.

        With ``check``, raises CommandFailed unless it ends by exit status 0 in time. Raises ChannelError when the
        guest does not answer.
        """
        if self._channel is None:
            raise ChannelError("there is no connection to the guest")
        words = ["bash", "-euc", argv] if isinstance(argv, str) else argv
        result = self._channel.run(words, stdin=stdin, stdout=stdout, timeout_s=timeout_s, env=env)
        if check and not result.ok:
            raise CommandFailed(result)
        return result

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Make a file in the guest, and the folders above it."""
        folder = str(PurePosixPath(path).parent)
        self.run(["sh", "-euc", 'mkdir -p "$1"; cat >"$2"; chmod "$3" "$2"', "sh", folder, path, f"{mode:o}"],
                 stdin=data)  # fmt: skip

    def read(self, path: str) -> bytes:
        """The content of a file in the guest."""
        return self.run(["cat", "--", path]).stdout

    def put(self, source: Path, folder: str, *, timeout_s: float = 600.0) -> str:
        """Copy a file or a tree into a folder of the guest, owned by root; gives its path there."""
        with tempfile.TemporaryFile(dir=self.folder) as spool:
            with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
                archive.add(source, source.name, filter=_for_root)
            spool.seek(0)
            self.run(["sh", "-euc", 'mkdir -p "$1"; exec tar -x -C "$1"', "sh", folder], stdin=spool,
                     timeout_s=timeout_s)  # fmt: skip
        return f"{folder.rstrip('/')}/{source.name}"

    def get(self, path: str, folder: Path, *, timeout_s: float = 600.0) -> Path:
        """Copy a file or a tree out of the guest into a folder here; gives its path."""
        place = PurePosixPath(path)
        with tempfile.TemporaryFile(dir=self.folder) as spool:
            self.run(["tar", "-c", "-C", str(place.parent), "--", place.name], stdout=spool, timeout_s=timeout_s)
            spool.seek(0)
            with tarfile.open(fileobj=spool) as archive:
                archive.extractall(folder, filter="data")
        return folder / place.name

    def boot_id(self) -> str:
        """Changes with each boot."""
        return self.run(["cat", "/proc/sys/kernel/random/boot_id"]).text.strip()

    def reboot(self, *, timeout_s: float = BOOT_S) -> None:
        """Shut down in order and boot again.  Raises ChannelError when the guest does not come back."""
        before = self.boot_id()
        began = time.monotonic()
        # Later, so that the answer to the order itself is not lost.
        self.run(["systemd-run", "--quiet", "--on-active=1", "systemctl", "reboot"])
        self.machine.wait_reset(timeout_s)
        down = time.monotonic()
        self._reconnect(timeout_s)
        if self.boot_id() == before:
            raise ChannelError("the guest did not reboot")
        self.wait_booted()
        print(f"reboot: down after {down - began:.1f} s, up {time.monotonic() - down:.1f} s later")

    def wait_booted(self, *, timeout_s: float = BOOT_S) -> None:
        """Wait until systemd has started all it is to start.  Raises CommandFailed with the units that failed."""
        state = self.run(["systemctl", "is-system-running", "--wait"], check=False, timeout_s=timeout_s)
        if not state.ok:
            failed = self.run("systemctl --failed --no-legend; journalctl -b -p warning --no-pager | tail -n 50")
            raise CommandFailed(
                Result(state.argv, state.status, state.reason, state.seconds, state.stdout + failed.stdout, b"")
            )

    def set_clock(self) -> None:
        """Give the guest our time."""
        self.run(["date", "--utc", "--set", f"@{time.time():.3f}"])

    def save(self, folder: Path) -> Saved:
        """Stop the machine for good and keep it in a folder.  Raises QemuError."""
        # What is in the guest's cache would be written, and read at each restore.
        self.run("sync; echo 3 >/proc/sys/vm/drop_caches; fstrim / || true")
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        machine = self.machine
        saved = Saved(folder, self.kernel)
        machine.save(saved.memory)
        machine.quit()
        shutil.move(self.folder / "disk.qcow2", saved.disk)
        return saved

    def console(self) -> str:
        """What the guest wrote on its console."""
        path = self.folder / "console.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """End the machine at once."""
        if self._channel is not None:
            self._channel.close()
        if self._machine is not None and self._machine.running:
            self._machine.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _continue(self, saved: Saved, more: Sequence[str]) -> None:
        qemu.overlay(saved.disk, "qcow2", self.folder / "disk.qcow2")
        self._machine = qemu.Qemu(self.folder, saved.kernel.image, saved.kernel.initrd, incoming=True, more=more)
        self._machine.load(saved.memory)
        self._channel = Channel(self._machine.agent_socket, timeout_s=_RESTORE_S)
        self.set_clock()

    @property
    def machine(self) -> qemu.Qemu:
        """The QEMU that it runs in.  Raises QemuError when it does not."""
        if self._machine is None or not self._machine.running:
            raise qemu.QemuError("the machine does not run")
        return self._machine

    def _reconnect(self, timeout_s: float) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._channel = Channel(self.machine.agent_socket, timeout_s=timeout_s)


def booted(kernel: Kernel, base: Image) -> Saved:
    """The saved machine of an image and a kernel that has booted and done nothing else.  Hold ``only_machine``."""
    # The path: a saved disk names the one below it.
    parts = [str(base.folder), qemu.version(), *qemu.fixed_arguments(), frames.PORT, kernels.sha256(kernel.image)]
    name = f"booted-{kernel.name}-{short_digest(parts)}"
    return prepared(base.folder / name, kernel, lambda: VmHost(kernel, base), VmHost.wait_booted)


def prepared(
    folder: Path, kernel: Kernel, start: Callable[[], VmHost], prepare: Callable[[VmHost], object]
) -> Saved:
    """The machine saved in a folder; made by starting and preparing one when it is not there.

    Hold ``only_machine``.  Raises QemuError, ChannelError, CommandFailed.
    """
    if not folder.is_dir():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            with start() as machine:
                prepare(machine)
                machine.save(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return Saved(folder, kernel)


def short_digest(parts: Iterable[str]) -> str:
    """A name for all that a saved machine depends on."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _for_root(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if "__pycache__" in PurePosixPath(member.name).parts:
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
