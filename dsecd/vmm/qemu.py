# SPDX-License-Identifier: Apache-2.0
"""QEMU as a monitor of microVMs: a q35 machine without all that a guest of ours does not use.

What belongs here: its arguments, and its control protocol's commands. What does not: the cage it runs in (``cage.py``),
the protocol itself (``qmp.py``), connections over the agent's port (``port.py``).

Why q35 and not ``-M microvm``: that one accepts virtio-pmem devices and never maps them. The kernel is entered at its
PVH entry where it has one. Sockets are made by the daemon and handed in, so nothing in the cage can put another in
their place.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

from dsecd.linux import cpuinfo, mechanisms, pidfd, proc, sparse
from dsecd.linux.pidfd import Process
from dsecd.vmm import cage, port
from dsecd.vmm.base import ALIGN_BYTES, Machine, Place, Probe, Snapshot, VmmError
from dsecd.vmm.cage import FILES, Cage
from dsecd.vmm.qmp import Qmp

PROGRAM = "qemu-system-x86_64"
#: In apparmor/, as is its name.
PROFILE = "dsec-monitor"
_PORT = "dsec.agent"
_AGENT_FD, _CONTROL_FD, _MEMORY_FD, _NIC_FD = 3, 4, 5, 6  # and of further devices those above
_ANSWER_S = 20.0
_CONSOLE_BYTES = 64 << 10
_CONSOLE_NAME = "dsec-console"
_WORDS, _WORDS_BYTES = 8, 1500
_PANIC = "Kernel panic"
_CONTROLS = re.compile(r"\x1b\[[0-9;?=]*[A-Za-z]|[\x00-\x1f]")
_GIB = 1 << 30
_MEMORY_NAME = "dsec-memory"
_LIKENESS = "likeness"  # in a machine's directory: what a host must be like that restores it
_RESTORE = "restore"  # in a machine's directory, a link to the state that it begins with
_SAVE_SET = 7
_MIGRATE_POLL_S = 0.01
_POLLING = "guest-stats-polling-interval"
_BALLOON = {"path": "/machine/peripheral/balloon"}
#: How long the guest's first figures may take, and how old later ones may be.
_BALLOON_S, _BALLOON_LOOK_S, _BALLOON_EVERY_S = 2.5, 0.1, 15
_IGNORE_SHARED = [{"capability": "x-ignore-shared", "state": True}]

#: What of a q35 a guest of ours has no use for.
_MACHINE = "q35,smm=off,vmport=off,sata=off,smbus=off,usb=off,graphics=off,hpet=off,i8042=off,memory-backend=ram"
#: No device for random numbers, which a guest would look for at its every start: the processor has an instruction, and
#: the agent stirs in what begins each of its connections.
_DEVICES = (
    # Its number changes with every restored copy, at which the guest's kernel draws new random numbers.
    "-device", "vmgenid,guid=auto",
    "-device", "virtio-balloon-pci,id=balloon,free-page-reporting=on",
)  # fmt: skip
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
#: reboot=t: the guest ends by a triple fault, at which QEMU, told not to reboot, ends too.
_CMDLINE = f"console=ttyS0 quiet panic=-1 reboot=t random.trust_cpu=1 dsec.port={_PORT}"
#: Without it, a guest on a busy host says that its timer does not work, and panics.
_CMDLINE_TCG = "no_timer_check tsc=reliable mitigations=off"


class Qemu:
    """See ``base.Driver``."""

    name = "qemu"
    memory_names: Sequence[str] = (f"memfd:{_MEMORY_NAME}", f"{FILES}/ram")  # its own, or a snapshot's

    def __init__(self, runtime_dir: Path, launch_ns: int, *, accelerator: str) -> None:
        """``accelerator``: kvm, tcg, or auto for kvm where it runs guests."""
        self._cage = Cage(runtime_dir, launch_ns)
        self._cage.prepare()
        self._asked = accelerator
        self._consoles: dict[str, int] = {}
        #: What marked the program when it was asked, and what it said.
        self._version: tuple[tuple[int, int], str] | None = None

    def probe(self) -> Probe:
        try:
            version = _version()
        except (OSError, proc.ProcessFailed) as error:
            return Probe(works=False, detail=str(error))
        return Probe(works=True, detail=f"QEMU {version} with {self._accelerator()}")

    def profile(self, *, network: bool) -> str:
        del network
        return PROFILE

    def likeness(self, *, network: bool) -> Mapping[str, str]:
        del network
        return self._likeness(self._accelerator())

    def _likeness(self, accelerator: str) -> Mapping[str, str]:
        status = os.stat(shutil.which(PROGRAM) or PROGRAM)
        mark = (status.st_ino, status.st_mtime_ns)
        if self._version is None or self._version[0] != mark:
            self._version = (mark, _version())
        shape = hashlib.sha256("\n".join(_shape(accelerator)).encode()).hexdigest()[:16]
        return {
            "monitor": self.name, "version": self._version[1], "accelerator": accelerator, "machine": shape,
            **(cpuinfo.likeness() if accelerator == "kvm" else {"cpu": "emulated"}),
        }  # fmt: skip

    def _accelerator(self) -> str:
        """What to run guests with. Blocks."""
        if self._asked != "auto":
            return self._asked
        return "kvm" if mechanisms.by_name("kvm").status().works else "tcg"

    # --- start and end ------------------------------------------------------------------------------------------------

    def start(self, place: Place, machine: Machine, restore: Snapshot | None = None) -> None:
        accelerator = self._accelerator()
        files = {"kernel": machine.kernel} | {f"layer{n}": path for n, path in enumerate(machine.layers)}
        if machine.initramfs is not None:
            files["initramfs"] = machine.initramfs
        if restore is not None:
            files["ram"] = restore.memory
            (place.rundir / _RESTORE).symlink_to(restore.state)
        writable = {} if machine.disk is None else {"disk": machine.disk}
        if machine.disk is not None:
            os.chown(machine.disk, place.uid, place.uid)
        argv = [PROGRAM, *arguments(place.id, machine, accelerator, restoring=restore is not None)]
        (place.rundir / "key").write_bytes(os.urandom(port.KEY_BYTES) if restore is None else _key_of(restore))
        (place.rundir / _LIKENESS).write_text(json.dumps(self._likeness(accelerator)))
        with contextlib.ExitStack() as stack:
            agent = stack.enter_context(_listening(place, "agent"))
            control = stack.enter_context(_listening(place, "control"))
            memory = _memory_file(machine.memory_bytes)
            stack.callback(os.close, memory)
            devices = [Path("/dev/kvm")] if accelerator == "kvm" else []
            try:
                self._cage.start(
                    place, argv, files=files, writable=writable, devices=devices,
                    fds=[agent.fileno(), control.fileno(), memory, *(nic.fd for nic in machine.nics)],
                    stdio=self._new_console(place),
                )  # fmt: skip
            except proc.ProcessFailed as error:
                raise proc.ProcessFailed(error.argv, error.returncode, self.last_words(place)) from error

    def process(self, place: Place) -> Process | None:
        number = cage.pid(place)
        return None if number is None else pidfd.identify(number)

    def forget(self, place: Place) -> None:
        self._cage.forget(place)
        fd = self._consoles.pop(place.id, None)
        if fd is not None:
            os.close(fd)

    def residents(self) -> set[str]:
        return self._cage.residents()

    def _new_console(self, place: Place) -> int:
        """What crun, QEMU and the guest's console print: the first bytes of it, in a file that cannot grow."""
        fd = os.memfd_create(_CONSOLE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _CONSOLE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._consoles[place.id] = fd
        return fd

    def last_words(self, place: Place) -> str:
        said = self._console(place).partition(b"\0")[0].decode("utf-8", "replace")
        lines = [text for line in said.splitlines() if (text := _CONTROLS.sub("", line).strip())]
        # What follows a panic's first line are registers and a stack.
        panic = next((number for number, line in enumerate(lines) if _PANIC in line), None)
        told = lines[-_WORDS:] if panic is None else lines[panic : panic + 1]
        return " | ".join(told)[-_WORDS_BYTES:]

    def _console(self, place: Place) -> bytes:
        fd = self._consoles.get(place.id)
        if fd is not None:
            return os.pread(fd, _CONSOLE_BYTES, 0)
        # An earlier daemon made it: QEMU has it as long as it lives.
        process = self.process(place)
        with contextlib.suppress(OSError):
            return Path(f"/proc/{process.pid if process else 0}/fd/1").read_bytes()[:_CONSOLE_BYTES]
        return b""

    # --- the agent --------------------------------------------------------------------------------------------------

    async def dial(self, place: Place, timeout_s: float) -> socket.socket:
        async with asyncio.timeout(timeout_s):
            # When QEMU ends, so does the connection, also one that it had not accepted yet.
            return await port.dial(lambda: _connect(place, "agent"), (place.rundir / "key").read_bytes())

    # --- the control protocol ---------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _control(self, place: Place) -> AsyncIterator[Qmp]:
        async with asyncio.timeout(_ANSWER_S), Qmp(await _connect(place, "control")) as qmp:
            yield qmp

    async def pause(self, place: Place) -> None:
        async with self._control(place) as qmp:
            await qmp.execute("stop")

    async def resume(self, place: Place) -> None:
        async with self._control(place) as qmp:
            if (await qmp.execute("query-status")).get("status") == "inmigrate":
                await _load(qmp, place)
            await qmp.execute("cont")

    async def save(self, place: Place, target: Snapshot) -> Mapping[str, str]:
        process = self.process(place)
        if process is None:
            raise VmmError("save: the virtual machine has ended")
        async with self._control(place) as qmp:
            # Memory is a file: devices only are written, and the file is copied. The state is some hundred KiB.
            await qmp.execute("migrate-set-capabilities", capabilities=_IGNORE_SHARED)
            fd = os.open(target.state, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
            try:
                await qmp.execute("migrate", uri=f"file:{await qmp.give(fd, _SAVE_SET)}")
            finally:
                os.close(fd)
            await _migrated(qmp)
            await qmp.execute("remove-fd", **{"fdset-id": _SAVE_SET})
        await asyncio.to_thread(sparse.copy, Path(f"/proc/{process.pid}/fd/{_MEMORY_FD}"), target.memory, 0o444)
        target.state.with_name("key").write_bytes((place.rundir / "key").read_bytes())
        # A machine that an older dsecd started is like none of now.
        with contextlib.suppress(FileNotFoundError):
            noted: Mapping[str, str] = json.loads((place.rundir / _LIKENESS).read_text())
            return noted
        return {"monitor": self.name, "version": "unknown"}

    async def memory(self, place: Place) -> Mapping[str, int]:
        async with self._control(place) as qmp:
            answer = await _balloon(qmp, "guest-stats")
            if await _balloon(qmp, _POLLING) == 0:
                # What there is was said while it booted. Asked for the first time: soon, and from then on now and then.
                await qmp.execute("qom-set", **_BALLOON, property=_POLLING, value=1)
                first = _updated(answer)
                async with asyncio.timeout(_BALLOON_S):
                    while _updated(answer) == first:
                        await asyncio.sleep(_BALLOON_LOOK_S)
                        answer = await _balloon(qmp, "guest-stats")
                await qmp.execute("qom-set", **_BALLOON, property=_POLLING, value=_BALLOON_EVERY_S)
        return balloon_statistics(answer)


# --- arguments ------------------------------------------------------------------------------------------------------


def arguments(name: str, machine: Machine, accelerator: str, *, restoring: bool = False) -> list[str]:
    """What QEMU is started with, for files that lie in FILES. Pure."""
    return [
        "-name", name, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-sandbox", _SANDBOX,
        "-M", _MACHINE, *_processor(accelerator), "-smp", str(machine.vcpus),
        *_memory(machine, restoring=restoring),
        *_channels(),
        *_layers(machine),
        *_disk(machine),
        *_nics(machine),
        *_kernel(machine, accelerator),
        *_DEVICES,
        *(["-incoming", "defer"] if restoring else []),
    ]  # fmt: skip


def _shape(accelerator: str) -> list[str]:
    """What all machines have in common: one that was saved with another is another machine."""
    return [_MACHINE, *_processor(accelerator), *_channels(), *_DEVICES]


def _processor(accelerator: str) -> list[str]:
    if accelerator == "kvm":
        return ["-accel", "kvm", "-cpu", "host"]
    # A small buffer for translated code: what a guest runs is small, and there are many guests. It holds all of a boot;
    # in half of it, the first command would find it full, and everything be translated anew. No emulated virtualization
    # in an emulated guest: a kernel that has KVM turns it on when it boots, and from then on the processor is in
    # another state, for which everything is translated a second time.
    return ["-accel", "tcg,tb-size=64", "-cpu", "max,svm=off"]


def _memory(machine: Machine, *, restoring: bool) -> list[str]:
    layers = sum(_padded(path) for path in machine.layers)
    most = (machine.memory_bytes + layers) // _GIB * _GIB + 2 * _GIB
    size = f"size={machine.memory_bytes}"
    # A restored machine maps the snapshot's file for itself alone: what it writes, and only that, is its own.
    ram = (
        f"memory-backend-file,id=ram,mem-path={FILES}/ram,share=off,readonly=on,rom=off,{size}" if restoring
        else f"memory-backend-file,id=ram,mem-path=/proc/self/fd/{_MEMORY_FD},share=on,{size}"
    )  # fmt: skip
    return ["-m", f"size={machine.memory_bytes}B,maxmem={most}B", "-object", ram]


def _channels() -> list[str]:
    return [
        "-chardev", f"socket,id=control,fd={_CONTROL_FD},server=on,wait=off", "-mon", "chardev=control,mode=control",
        "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
        "-chardev", f"socket,id=agent,fd={_AGENT_FD},server=on,wait=off", "-device", "virtio-serial-pci,max_ports=2",
        "-device", f"virtserialport,chardev=agent,name={_PORT}",
    ]  # fmt: skip


def _layers(machine: Machine) -> list[str]:
    words: list[str] = []
    for number, path in enumerate(machine.layers):
        backend = f"memory-backend-file,id=pm{number},mem-path={FILES}/layer{number},share=on,readonly=on"
        words += ["-object", f"{backend},size={_padded(path)}"]
        words += ["-device", f"virtio-pmem-pci,id=layer{number},memdev=pm{number}"]
    return words


def _padded(path: Path) -> int:
    """The size of a layer. Raises ValueError for one that a guest could not map."""
    size = path.stat().st_size
    if size == 0 or size % ALIGN_BYTES:
        raise ValueError(f"layer {path}: {size} bytes, not a multiple of {ALIGN_BYTES}")
    return size


def _disk(machine: Machine) -> list[str]:
    if machine.disk is None:
        return []
    return [
        "-drive", f"if=none,id=disk,file={FILES}/disk,format=raw,discard=unmap,detect-zeroes=unmap",
        "-device", "virtio-blk-pci,drive=disk",
    ]  # fmt: skip


def _nics(machine: Machine) -> list[str]:
    words: list[str] = []
    for number, nic in enumerate(machine.nics):
        # Without a ROM to boot from: it does not.
        words += ["-netdev", f"tap,id=net{number},fd={_NIC_FD + number}"]
        words += ["-device", f"virtio-net-pci,netdev=net{number},mac={nic.mac},romfile="]
    return words


def _kernel(machine: Machine, accelerator: str) -> list[str]:
    words = [_CMDLINE, *([_CMDLINE_TCG] if accelerator == "tcg" else []), machine.cmdline]
    initramfs = [] if machine.initramfs is None else ["-initrd", f"{FILES}/initramfs"]
    return ["-kernel", f"{FILES}/kernel", *initramfs, "-append", " ".join(words)]


# --- parts ------------------------------------------------------------------------------------------------------------


def _version() -> str:
    """Of the program. Blocks. Raises OSError, proc.ProcessFailed."""
    found = re.search(rb"version (\S+)", proc.run_blocking([PROGRAM, "--version"], timeout_s=20).stdout)
    return found[1].decode("ascii", "replace") if found else "of unknown version"


async def _balloon(qmp: Qmp, name: str) -> object:
    return await qmp.execute("qom-get", **_BALLOON, property=name)


def _updated(answer: object) -> object:
    """When the guest's driver reported last, 0 for never."""
    return answer.get("last-update", 0) if isinstance(answer, dict) else 0


def balloon_statistics(answer: object) -> dict[str, int]:
    """The figures of the balloon device by Linux's names; those that the guest does not report are left out."""
    if not isinstance(answer, dict) or not _updated(answer):
        return {}
    stats = answer.get("stats")
    if not isinstance(stats, dict):
        return {}
    unknown = (1 << 64) - 1
    return {
        str(name).removeprefix("stat-").replace("-", "_"): value
        for name, value in stats.items()
        if isinstance(value, int) and 0 <= value < unknown
    }


async def _load(qmp: Qmp, place: Place) -> None:
    """Put the state of a snapshot into a machine that waits for it."""
    await qmp.execute("migrate-set-capabilities", capabilities=_IGNORE_SHARED)
    # A machine that has moved would be announced to its neighbours. A copy is another one, under another address.
    await qmp.execute("migrate-set-parameters", **{"announce-rounds": 0})
    fd = os.open(place.rundir / _RESTORE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        await qmp.execute("migrate-incoming", uri=f"file:{await qmp.give(fd, _SAVE_SET)}")
    finally:
        os.close(fd)
    await _migrated(qmp)


async def _migrated(qmp: Qmp) -> None:
    """Wait for the end of a migration; the control connection's time bounds it. Raises VmmError."""
    while True:
        answer = await qmp.execute("query-migrate")
        if answer.get("status") == "completed":
            return
        if answer.get("status") in ("failed", "cancelled"):
            said = str(answer.get("error-desc", "failed"))[:300]
            if os.strerror(errno.ENOSPC) in said:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise VmmError(f"snapshot: {said}")
        await asyncio.sleep(_MIGRATE_POLL_S)


def _memory_file(size: int) -> int:
    """The guest's memory: a file that belongs to no file system, and that only its machine has.

    Shared memory, so that a snapshot is a copy of it, and that the host gives it no huge pages, which would keep what
    the guest has given back.
    """
    fd = os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def _key_of(restore: Snapshot) -> bytes:
    return restore.state.with_name("key").read_bytes()


@contextlib.contextmanager
def _listening(place: Place, name: str) -> Iterator[socket.socket]:
    """A listening socket in the machine's directory, by a path that is short whatever the directory (unix(7))."""
    folder = os.open(place.rundir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.bind(f"/proc/self/fd/{folder}/{name}")
            sock.listen(1)
            yield sock
    finally:
        os.close(folder)


async def _connect(place: Place, name: str) -> socket.socket:
    folder = os.open(place.rundir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        while True:
            try:
                sock.connect(f"/proc/self/fd/{folder}/{name}")
                return sock
            except BlockingIOError:  # its queue is full: unix(7)
                await asyncio.sleep(0.01)
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(folder)
