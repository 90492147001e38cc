# SPDX-License-Identifier: Apache-2.0
"""Processes that are not our children, by an identity that pid reuse cannot fake.

What belongs here: pid + start time, pidfds, signals through them, waiting for an exit.  What does not:
starting processes (proc).
"""

import asyncio
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from dsecd.linux import syscalls

_PF_EXITING = 0x4  # include/linux/sched.h


@dataclass(frozen=True)
class Process:
    """Identity of a process on this boot: its pid and when it started, in clock ticks since boot."""

    pid: int
    #: Field 22 of /proc/PID/stat.
    started: int


def identify(pid: int) -> Process | None:
    """The identity of the process with this pid now; None if there is none or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, started = parse_stat(stat)
    return None if state in "ZX" else Process(pid, started)


def parse_stat(stat: bytes) -> tuple[str, int]:
    """State letter and start time out of /proc/PID/stat.  proc_pid_stat(5)."""
    # The command name in field 2 is the process's own choice: it may hold blanks, newlines and parentheses.
    fields = stat[stat.rindex(b")") + 1 :].split()
    return fields[0].decode("ascii"), int(fields[19])


def is_alive(process: Process) -> bool:
    """Whether that very process exists and has not exited."""
    return identify(process.pid) == process


def is_ending(process: Process) -> bool:
    """Whether that very process is gone or about to be.

    In exit(2) the kernel sets PF_EXITING before it closes the process's files, and may then take as long as others of
    its pid namespace do. It is told in the flags, field 9 of /proc/PID/stat. proc_pid_stat(5).
    """
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True
    state, started = parse_stat(stat)
    flags = int(stat[stat.rindex(b")") + 1 :].split()[6])
    return started != process.started or state in "ZX" or bool(flags & _PF_EXITING)


def open(process: Process) -> int:
    """pidfd of that very process.  Raises ProcessLookupError if it is gone, or its pid is another's now."""
    try:
        fd = syscalls.pidfd_open(process.pid)
    except OSError as error:
        # EINVAL: the pid is a thread's now.
        if error.errno not in (errno.ESRCH, errno.EINVAL):
            raise
        raise _gone(process) from error
    # Only after the open does the fd hold whatever the pid then named; so compare now.
    if identify(process.pid) != process:
        os.close(fd)
        raise _gone(process)
    return fd


def _gone(process: Process) -> ProcessLookupError:
    return ProcessLookupError(errno.ESRCH, f"process {process.pid} (started {process.started}): gone")


def send_signal(fd: int, sig: int) -> bool:
    """Signal the process behind a pidfd; False if it has been reaped already."""
    try:
        syscalls.pidfd_send_signal(fd, sig)
    except ProcessLookupError:
        return False
    return True


async def wait_exit(fd: int, timeout_s: float) -> bool:
    """Wait until the process behind a pidfd has exited (it may still be a zombie); False after `timeout_s`.

    The fd itself must not be waited for by two tasks at once: a loop keeps one reader for each fd.
    """
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    loop.add_reader(fd, exited.set)
    try:
        async with asyncio.timeout(timeout_s):
            await exited.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True
