# SPDX-License-Identifier: Apache-2.0
"""Processes that take long to die: as a program, holds one in exit(2) by ptrace(2) until its standard input ends.

Here: that, for a process whose own end then waits: the first of a pid namespace closes its files, and waits for all
others before it has ended. Prints a line when it holds. Needs nothing else of ours, so that it also runs elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

_PTRACE_SEIZE, _PTRACE_O_TRACEEXIT, _WALL = 0x4206, 0x40, 0x40000000


def hold(pid: int) -> None:
    """The tracee stops early in its end, also by SIGKILL, and goes on when its tracer, this process, ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_PTRACE_SEIZE, pid, None, _PTRACE_O_TRACEEXIT) != 0:
        raise OSError(ctypes.get_errno(), f"trace process {pid}")
    print("held", flush=True)
    os.waitpid(pid, _WALL)
    sys.stdin.read()


@contextlib.contextmanager
def held_in_exit(pid: int) -> Iterator[None]:
    """Once killed, the process does not get through its end before the block is left."""
    command = [sys.executable, __file__, str(pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield


if __name__ == "__main__":
    hold(int(sys.argv[1]))
