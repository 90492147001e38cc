# SPDX-License-Identifier: Apache-2.0
"""Runtimes at work for a daemon that was killed: what they make, nobody may remove before they have made it.

Here: finding them, waiting for their ends, and ending them. Not here: starting them (``launch.py``, ``vmm/cage.py``),
and what becomes of what they made, which is undone with the sandbox that it was made for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Collection, Set
from pathlib import Path

from dsecd.backends import files
from dsecd.backends.plan import in_thread
from dsecd.linux import pidfd

log = logging.getLogger(__name__)

#: One that is not stuck needs a tenth of it.
_WAIT_S, _KILLED_S, _POLL_S = 3.0, 1.0, 0.05


async def ended(roots: Collection[Path]) -> None:
    """Return when no runtime works on one of these roots, killing what takes longer than seconds."""
    options = frozenset(f"--root={root}".encode() for root in roots)
    begun = time.monotonic()
    while found := await in_thread(at_work, options):
        took_s = time.monotonic() - begun
        if took_s > _WAIT_S + _KILLED_S:
            log.warning("runtimes of an earlier daemon do not end pids=%s", [process.pid for process in found])
            return
        if took_s > _WAIT_S:
            for process in found:
                _kill(process)
        await asyncio.sleep(_POLL_S)


def at_work(options: Set[bytes]) -> list[pidfd.Process]:
    """Processes of our user that were started with one of the options. Blocks. Runs in a thread."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [process for pid in pids if (process := _one(pid, options)) is not None]


def _kill(process: pidfd.Process) -> None:
    with contextlib.suppress(ProcessLookupError), files.closing(pidfd.open(process)) as fd:
        pidfd.send_signal(fd, signal.SIGKILL)


def _one(pid: int, options: Set[bytes]) -> pidfd.Process | None:
    place = f"/proc/{pid}"
    with contextlib.suppress(OSError):  # it has ended
        # Whose it is first: the words of another's process are in its memory, where reading may take for ever.
        if os.stat(place).st_uid != os.geteuid() or not _is_ours(Path(place, "status").read_text()):
            return None
        process = pidfd.identify(pid)
        if not options.isdisjoint(Path(place, "cmdline").read_bytes().split(b"\0")):
            return process
    return None


def _is_ours(status: str) -> bool:
    """By the ids, since files of what cannot be looked into belong to root: proc_pid_status(5)."""
    uids = next(line.split()[1:] for line in status.splitlines() if line.startswith("Uid:"))
    return set(uids) == {str(os.geteuid())}
