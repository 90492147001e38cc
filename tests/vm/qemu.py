# SPDX-License-Identifier: Apache-2.0
"""One QEMU process: its arguments for the test host, its control socket, its end.

Here: what is said to QEMU. Not here: what is in the machine (``image.py``), what runs in it (``host.py``). The
processor is always emulated, so that a machine saved here can be restored anywhere, and results do not depend on
whether the kernel lends us its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tests.vm.frames import PORT

#: Two cores of two threads each, so that the guest sees siblings; a developer may say less.
SMP = os.environ.get("DSEC_TEST_VM_SMP", "4,sockets=1,cores=2,threads=2")
MEMORY_MIB = 4096

_APPEND = (
    "root=/dev/vda rw console=ttyS0 quiet loglevel=4 systemd.show_status=0 panic=-1 apparmor=1 mitigations=off "
    "no_timer_check tsc=reliable random.trust_cpu=1"
)
_MACHINE = (
    "-name", "testhost", "-nodefaults", "-no-user-config", "-display", "none", "-nic", "none",
    "-machine", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-smp", SMP, "-m", str(MEMORY_MIB),
    "-rtc", "base=utc", "-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng",
    "-device", "virtio-serial-pci",
)  # fmt: skip
#: What takes so long has not merely been slow, for a start, an answer and an end.
_START_S, _ANSWER_S, _MOVE_S = 300.0, 300.0, 600.0


class QemuError(Exception):
    """QEMU does not start, refuses a command or is gone."""


def fixed_arguments() -> list[str]:
    """What a saved machine depends on, besides files: with other arguments it cannot be restored."""
    return [*_MACHINE, _APPEND]


def version() -> str:
    """QEMU's version line."""
    done = subprocess.run(["qemu-system-x86_64", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def overlay(base: Path, form: str, target: Path) -> None:
    """Make a disk that begins as ``base`` and never changes it."""
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(base.resolve()), "-F", form, str(target)], check=True
    )


class Qemu:
    """A machine in ``folder``, which holds its disk, sockets and logs. It ends with this process at the latest."""

    def __init__(
        self, folder: Path, kernel: Path, initrd: Path | None, *, incoming: bool = False, more: Sequence[str] = ()
    ) -> None:
        """Start it, with ``more`` arguments; with ``incoming`` it waits for ``load``.  Raises QemuError."""
        self.folder = folder
        self.console, self.agent_socket = folder / "console.log", folder / "agent"
        self._errors = folder / "qemu.log"
        command = [
            "setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", *_MACHINE,
            "-kernel", str(kernel), "-append", _APPEND, *(["-initrd", str(initrd)] if initrd else []),
            "-drive", f"if=none,id=disk,file={folder}/disk.qcow2,format=qcow2,cache=unsafe,discard=unmap",
            "-device", "virtio-blk-pci,drive=disk",
            "-chardev", f"file,id=console,path={self.console}", "-serial", "chardev:console",
            "-chardev", f"socket,id=agent,path={self.agent_socket},server=on,wait=off",
            "-device", f"virtserialport,chardev=agent,name={PORT}",
            "-qmp", f"unix:{folder}/control,server=on,wait=off",
            *(["-incoming", "defer"] if incoming else []), *more,
        ]  # fmt: skip
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        try:
            self._control, self._lines = self._connect()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self.ask("qmp_capabilities")

    @property
    def running(self) -> bool:
        """The process is there."""
        return self._process.poll() is None

    @property
    def cpu_s(self) -> float:
        """Processor seconds that it used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def processors(self) -> list[int]:
        """The threads that are the guest's processors, in its order.  Raises QemuError."""
        return [int(one["thread-id"]) for one in self.ask("query-cpus-fast")]

    def threads(self) -> list[int]:
        """All its threads that there are now, those of the guest's processors among them."""
        return [int(path.name) for path in Path(f"/proc/{self._process.pid}/task").iterdir()]

    def thread_s(self, thread: int) -> float:
        """Processor seconds that a thread used so far, to the nanosecond.  schedstat, proc(5)."""
        return int(Path(f"/proc/{self._process.pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9

    def ask(self, name: str, *, timeout_s: float = _ANSWER_S, **arguments: object) -> Any:
        """Send a command to QEMU and give its answer.  Raises QemuError."""
        try:
            self._control.settimeout(timeout_s)
            self._control.sendall(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n")
            for line in self._lines:
                answer = json.loads(line)
                if "return" in answer:
                    return answer["return"]
                if "error" in answer:
                    raise QemuError(f"{name}: {answer['error']['desc']}")
        except OSError as error:
            raise QemuError(f"{name}: {error}; {self._said()}") from error
        raise QemuError(f"{name}: QEMU ended; {self._said()}")

    def save(self, target: Path) -> None:
        """Stop the machine and write its memory and devices to a file.  Raises QemuError."""
        self.ask("stop")
        self.ask("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
        self.ask("migrate", uri=f"file:{target}")
        state = self._await("query-migrate", ("completed", "failed", "cancelled"))
        if state != "completed":
            raise QemuError(f"save: {state}; {self._said()}")

    def load(self, source: Path) -> None:
        """Continue a machine that was saved.  Raises QemuError."""
        self.ask("migrate-incoming", uri=f"file:{source}")
        self._await("query-status", ("running", "paused", "internal-error", "shutdown"))
        self.ask("cont")

    def wait_reset(self, timeout_s: float) -> None:
        """Wait until the guest resets the machine.  Raises QemuError."""
        try:
            self._control.settimeout(timeout_s)
            for line in self._lines:
                if json.loads(line).get("event") == "RESET":
                    return
        except OSError as error:
            raise QemuError(f"the guest does not reset the machine within {timeout_s:.0f} s: {error}") from error
        raise QemuError(f"QEMU ended; {self._said()}")

    def kill(self) -> None:
        """End it at once, and wait."""
        self._process.kill()
        self._process.wait()
        self._close()

    def quit(self) -> None:
        """End it with its disk complete, and wait."""
        self.ask("quit")
        self._process.wait(_ANSWER_S)
        self._close()

    def _close(self) -> None:
        self._lines.close()
        self._control.close()

    def _await(self, query: str, wanted: Sequence[str]) -> str:
        deadline = time.monotonic() + _MOVE_S
        while True:
            state = str(self.ask(query).get("status"))
            if state in wanted:
                return state
            if time.monotonic() > deadline:
                raise QemuError(f"{query}: still {state} after {_MOVE_S:.0f} s; {self._said()}")
            time.sleep(0.02)

    def _connect(self) -> tuple[socket.socket, IO[bytes]]:
        deadline = time.monotonic() + _START_S
        while True:
            control = socket.socket(socket.AF_UNIX)
            try:
                control.connect(str(self.folder / "control"))
                control.settimeout(_START_S)
                lines = control.makefile("rb")
                lines.readline()  # its greeting
                return control, lines
            except OSError as error:
                control.close()
                if not self.running or time.monotonic() > deadline:
                    raise QemuError(f"QEMU does not start: {self._said()}") from error
                time.sleep(0.02)

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")[-2000:].strip() or "it said nothing"
