# SPDX-License-Identifier: Apache-2.0
"""Identity of processes: started by the shell, watched through /proc and pidfds."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsecd.linux import pidfd, proc
from tests.support.waiting import until


@pytest.fixture
def sleeping() -> Iterator[int]:
    """Pid of a process that is not our child."""
    pid = int(proc.run_blocking(["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"], timeout_s=60).stdout)
    yield pid
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def test_identity_holds_the_start_time(sleeping: int) -> None:
    process = pidfd.identify(sleeping)
    assert process is not None
    assert process.pid == sleeping
    # The same moment from another source: uptime, in the same clock's ticks.
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    age_s = uptime_s - process.started / os.sysconf("SC_CLK_TCK")
    assert 0 <= age_s + 0.05 < 60
    assert pidfd.is_alive(process)


def test_another_start_time_is_another_process(sleeping: int) -> None:
    """What a reused pid looks like."""
    process = pidfd.identify(sleeping)
    assert process is not None
    former = replace(process, started=process.started - 1)
    assert not pidfd.is_alive(former)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ProcessLookupError):
        pidfd.open(former)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_signal_reaches_that_process(sleeping: int) -> None:
    process = pidfd.identify(sleeping)
    assert process is not None
    fd = pidfd.open(process)
    assert not os.get_inheritable(fd)
    assert pidfd.send_signal(fd, signal.SIGKILL)
    assert asyncio.run(pidfd.wait_exit(fd, 60))
    until(lambda: not pidfd.send_signal(fd, 0))  # Whoever adopted it has reaped it.
    assert not Path(f"/proc/{sleeping}").exists()
    assert pidfd.identify(sleeping) is None
    assert not pidfd.is_alive(process)
    with pytest.raises(ProcessLookupError):
        pidfd.open(process)
    os.close(fd)


def test_wait_exit_gives_up_and_leaves_no_reader(sleeping: int) -> None:
    process = pidfd.identify(sleeping)
    assert process is not None
    fd = pidfd.open(process)

    async def scenario() -> tuple[bool, bool]:
        first = await pidfd.wait_exit(fd, 0.05)
        loop = asyncio.get_running_loop()
        left = loop.remove_reader(fd)
        return first, left

    assert asyncio.run(scenario()) == (False, False)
    os.close(fd)


def test_zombie_is_not_alive() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert " Z " in Path(f"/proc/{pid}/stat").read_text()
        assert pidfd.identify(pid) is None
    finally:
        os.waitpid(pid, 0)


def test_hostile_command_name_does_not_confuse(tmp_path: Path) -> None:
    """Its name is the process's own choice, also one that looks like the rest of the line."""
    name = ") Z 1 1 (\n"
    program = tmp_path / name
    program.symlink_to("/bin/sleep")
    pid = os.posix_spawn(os.fspath(program), [name, "60"], {})
    try:
        assert f"({name})" in Path(f"/proc/{pid}/stat").read_text()
        process = pidfd.identify(pid)
        assert process is not None
        assert process.started > 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_no_such_process() -> None:
    # Above the largest pid_max there is.
    assert pidfd.identify(1 << 23) is None
    with pytest.raises(ProcessLookupError, match="gone"):
        pidfd.open(pidfd.Process(1 << 22, 1))
