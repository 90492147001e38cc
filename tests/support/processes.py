# SPDX-License-Identifier: Apache-2.0
"""Which processes descend from which, as /proc tells it while they come and go."""

from pathlib import Path


def children(pid: int | str = "self") -> list[int]:
    """Pids of a process's children, zombies included; [] when it has gone."""
    tasks = Path(f"/proc/{pid}/task")
    while True:
        try:
            return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            # A thread that ended meanwhile has handed its children on, perhaps to one that was looked at before.
            if not tasks.exists():
                return []


def descendants(pid: int, word: bytes) -> list[int]:
    """Processes below `pid` with `word` in their command lines, parents first."""
    found, todo = [], children(pid)
    while todo:
        here = todo.pop(0)
        todo += children(here)
        try:
            if word in Path(f"/proc/{here}/cmdline").read_bytes():
                found.append(here)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
