# SPDX-License-Identifier: Apache-2.0
"""Cgroups that tests made, and their end.

Here: killing and removing a whole tree of them. Not here: what runs in them.
"""

import time
from contextlib import suppress
from pathlib import Path


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
