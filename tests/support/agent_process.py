# SPDX-License-Identifier: Apache-2.0
"""The agent as a plain process for tests: a socket and a cgroup of its own, and a look at how it ended."""

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import cgroups, processes
from tests.support.agent_client import AgentClient

CHECKOUT = Path(__file__).parents[2]
CGROUPS = Path("/sys/fs/cgroup")
BUILDS = {"plain": "dsec-agent", "asan": "dsec-agent-asan"}


def build() -> None:
    """Both programs, up to date."""
    subprocess.run(
        ["make", "--quiet", "-C", CHECKOUT / "agent", "all", "asan"], check=True, stdout=subprocess.DEVNULL
    )


class AgentProcess:
    """One running agent. Its effects are read here from /proc and the cgroup file system, never by asking it."""

    def __init__(self, build_name: str, directory: Path, *, cgroup: bool = True, user: int = 0,
                 prefix: tuple[str, ...] = (), arguments: tuple[str, ...] = ()) -> None:  # fmt: skip
        self.directory = directory
        self.socket = str(directory / "agent.sock")
        self.cgroup = CGROUPS / f"dsec-test-{os.getpid()}-{id(self):x}" if cgroup else None
        self.stderr = open(directory / "stderr", "wb+")  # noqa: SIM115 (closed in stop)
        self.generation = 0
        self.ended = False
        # Slower and bigger: tests with figures ask.
        self.sanitized = build_name == "asan"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.socket)
            listener.listen(8)
            program = str(CHECKOUT / "build/agent" / BUILDS[build_name])
            command = [*prefix, program, f"--listen-fd={listener.fileno()}", *arguments]
            handed = [listener.fileno()]
            if self.cgroup:
                self.cgroup.mkdir()
                handed.append(os.open(self.cgroup, os.O_RDONLY | os.O_DIRECTORY))
                command.append(f"--cgroup-fd={handed[1]}")
            self.process = subprocess.Popen(
                command,
                pass_fds=handed,
                user=user,
                stdin=subprocess.DEVNULL,
                stdout=self.stderr,
                stderr=self.stderr,
                # No leak check: it needs to trace the process, which the agent forbids.
                env={
                    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
                    "UBSAN_OPTIONS": "print_stacktrace=1",
                },
            )
            if self.cgroup:
                os.close(handed[1])
        self.pid = self.process.pid

    def connect(self, **options: object) -> AgentClient:
        """A client of the newest generation, which takes over from the one before."""
        self.generation += 1
        return AgentClient(self.socket, generation=self.generation, **options)  # type: ignore[arg-type]

    # ---- by another road

    def processes_of(self, exec_id: str) -> list[int]:
        """The pids in an exec's cgroup; [] when it is gone."""
        assert self.cgroup
        try:
            return [int(pid) for pid in (self.cgroup / "run" / exec_id / "cgroup.procs").read_text().split()]
        except (FileNotFoundError, OSError):
            return []

    def exec_cgroups(self) -> set[str]:
        assert self.cgroup
        return {path.name for path in (self.cgroup / "run").iterdir() if path.is_dir()}

    def children(self) -> list[int]:
        return processes.children(self.pid)

    def zombies(self) -> list[int]:
        return [pid for pid in self.children() if state_of(pid) == "Z"]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def rss_kib(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4

    # ---- the end

    def said(self) -> str:
        self.stderr.seek(0)
        return self.stderr.read().decode(errors="replace")

    def wait_for_end(self) -> None:
        """It ends by itself, and well."""
        assert (self.process.wait(60), self.said()) == (0, "")
        self.ended = True

    def stop(self) -> None:
        """Ends it in order and checks that it was well; removes what is left either way."""
        try:
            if not self.ended:
                assert self.process.poll() is None, (
                    f"the agent ended with {self.process.returncode}: {self.said()}"
                )
                self.process.send_signal(signal.SIGTERM)
                self.wait_for_end()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.stderr.close()
            self.remove_cgroup()

    def remove_cgroup(self) -> None:
        if self.cgroup is not None:
            cgroups.remove_tree(self.cgroup)


def state_of(pid: int) -> str | None:
    """The state letter in /proc/PID/stat, None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


@contextmanager
def running(build_name: str, *, cgroup: bool = True, user: int = 0, prefix: tuple[str, ...] = (),
            arguments: tuple[str, ...] = ()) -> Iterator[AgentProcess]:  # fmt: skip
    """An agent for the length of a with block. `prefix` is a command that becomes the agent, such as unshare."""
    with tempfile.TemporaryDirectory(prefix="agent-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        agent = AgentProcess(
            build_name, Path(directory), cgroup=cgroup, user=user, prefix=prefix, arguments=arguments
        )
        try:
            yield agent
        finally:
            agent.stop()
