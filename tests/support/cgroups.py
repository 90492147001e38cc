# SPDX-License-Identifier: Apache-2.0
"""Cgroups of tests and of sandboxes.

Here: killing and removing a whole tree of them, and who is the first in one. Not here: what runs in them.
"""

import time
from contextlib import suppress
from pathlib import Path

from tests.support.waiting import until


def remove_tree(top: Path, timeout_s: float = 60.0) -> None:
    """Kill all in it and remove it; one that is gone is fine.

    Killed processes leave their cgroup when they are reaped, and one that is just moving in comes after the kill: so
    it is tried until it works. Raises TimeoutError.
    """
    deadline = time.monotonic() + timeout_s
    while top.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{top} is still populated: {(top / 'cgroup.procs').read_text().split()}")
        # A frozen or a vanishing one may refuse any of it for a moment.
        with suppress(OSError):
            (top / "cgroup.kill").write_text("1")
        for folder, _, _ in top.walk(top_down=False):
            with suppress(OSError):
                folder.rmdir()
        if top.exists():
            time.sleep(0.01)


def first_process(sandbox: Path) -> int:
    """The pid of a container's first process, by the container's cgroup.

    In its first moments a child moves it into a place of its own, which takes the kernel its time; until then there are
    two, and which is which nobody tells.
    """
    place = sandbox / "agent/cgroup.procs"
    until(place.read_text)
    (pid,) = place.read_text().split()
    return int(pid)
