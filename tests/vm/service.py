# SPDX-License-Identifier: Apache-2.0
"""The installed daemon as the host around it sees it: systemd's word, the kernel's cgroups and processes, the API bare.

Here: looking and asking, with nothing of ours in between, so that what the daemon says can be compared. Not here:
installing it (``packages.py``), tests.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from pathlib import Path

from tests.vm.host import VmHost
from tests.vm.packages import IMAGE

#: Prints pid and start time of each process below the cgroup it is given.
_PROCESSES = (
    'find "$0" -name cgroup.procs -exec cat {} + | while read -r pid; do '
    'sed "s/.*) //" "/proc/$pid/stat" 2>/dev/null | cut -d" " -f20 | sed "s/^/$pid /"; done | sort -n'
)
#: Holds one thread by ptrace(2) until its process ends, then prints the signal that ended it.
_HOLD = """
import ctypes, os, sys
libc, pid, wall = ctypes.CDLL(None, use_errno=True), int(sys.argv[1]), 0x40000000
for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
    assert libc.ptrace(request, pid, None, None) == 0, ctypes.get_errno()
print("held", flush=True)
while os.WIFSTOPPED(status := os.waitpid(pid, wall)[1]):
    pass
print(os.WTERMSIG(status))
"""
_CHECK = Path(__file__).resolve().parents[1] / "support" / "residue.py"
_READY_S = 600.0


class Service:
    """dsecd.service on a host."""

    def __init__(self, vm: VmHost) -> None:
        self.vm = vm

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        shown = self.vm.run(["systemctl", "show", unit, *(f"--property={name}" for name in names)]).text
        return dict(line.split("=", 1) for line in shown.splitlines())

    def api(self, path: str, body: Mapping[str, object] | None = None, *, method: str = "") -> dict[str, object]:
        """An answer of the daemon's, without any program of ours in between: a start of dsecctl takes seconds here.

        With a ``body`` it is sent by POST, if no other method is named.  Raises CommandFailed with the answer.
        """
        words = ["--request", method] if method else []
        words += ["--header", "Content-Type: application/json", "--data-binary", "@-"] if body is not None else []
        answer = self.vm.run(
            ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", str(_READY_S), *words,
             "--unix-socket", "/run/dsec/dsecd.sock", f"http://d{path}"],
            stdin=b"" if body is None else json.dumps(body).encode(), timeout_s=_READY_S + 10,
        ).text  # fmt: skip
        loaded = json.loads(answer)
        assert isinstance(loaded, dict)
        return loaded

    def create(self, name: str, **spec: object) -> None:
        """Make a sandbox of packages.IMAGE and start it."""
        self.api("/v1/sandboxes", {"id": name, "spec": {"image": IMAGE, **spec}})

    def delete(self, name: str) -> None:
        """Delete a sandbox."""
        self.api(f"/v1/sandboxes/{name}", method="DELETE")

    def execute(self, sandbox: str, *argv: str) -> tuple[object, str]:
        """A command in a sandbox: its exit status, None when it has none, and its output."""
        done = self.api(f"/v1/sandboxes/{sandbox}/execs", {"argv": argv})
        return done["exit_code"], base64.b64decode(str(done["stdout"])).decode()

    def part(self) -> str:
        """The unit's part of the cgroup tree."""
        return f"/sys/fs/cgroup{self.show('dsecd.service', 'ControlGroup')['ControlGroup']}"

    def cgroup(self, sandbox: str) -> str:
        """The sandbox's cgroup, found by its name."""
        # Others come and go meanwhile, of which find complains.
        look = ["find", "/sys/fs/cgroup", "-type", "d", "-name", f"*-{sandbox}"]
        found = self.vm.run(look, check=False).text.split()
        assert len(found) == 1, found
        return found[0]

    def processes(self, cgroup: str) -> list[str]:
        """Pid and start time of each process in a cgroup and below, from the kernel."""
        return self.vm.run(["sh", "-euc", _PROCESSES, cgroup]).text.splitlines()

    def main_pid(self) -> str:
        """The daemon's; "0" when there is none."""
        return self.show("dsecd.service", "MainPID")["MainPID"]

    def wait_for_new_daemon(self, old: str) -> None:
        """Until systemd has another main process that says it is ready."""
        deadline = time.monotonic() + _READY_S
        while True:
            state = self.show("dsecd.service", "MainPID", "ActiveState")
            if state["MainPID"] not in ("0", old) and state["ActiveState"] == "active":
                return
            assert time.monotonic() < deadline, state
            time.sleep(0.5)

    def hold_event_loop(self) -> str:
        """Stop the daemon's main thread, and no other, until the daemon is ended; what ended it, a signal's number."""
        said = self.vm.run(["python3", "-c", _HOLD, self.main_pid()], timeout_s=_READY_S).text.split()
        assert said[0] == "held" and len(said) == 2, said
        return said[1]

    def residue(self) -> list[str]:
        """What is there of sandboxes, by a program that shares no code with the daemon."""
        self.vm.put(_CHECK, "/root")
        return self.vm.run(
            ["python3", f"/root/{_CHECK.name}", "/var/lib/dsec", "/run/dsec", f"{self.part()}/dsec", "671088640",
             str(65536 * 8192)], check=False,
        ).text.splitlines()  # fmt: skip
