# SPDX-License-Identifier: Apache-2.0
"""What memory a process has mapped, by what it is mapped from: proc_pid_smaps(5).

What belongs here: adding up /proc/PID/smaps. What does not: what the mappings are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Mapped:
    """Bytes: ``resident`` counts each page whole, ``shared`` (Pss) by the part of one among those who map it."""

    resident: int = 0
    shared: int = 0


def read(pid: int, kinds: Mapping[str, Sequence[str]]) -> dict[str, Mapped]:
    """Mappings by kind, each kind told by parts of the names of its files; "" is all the rest. Blocks: the kernel walks
    the page tables. A process that is gone has none."""
    found = {kind: Mapped() for kind in (*kinds, "")}
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text("utf-8", "replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return found
    current = found[""]
    for line in lines:
        head, _space, rest = line.partition(" ")
        if head == "Rss:":
            current.resident += int(rest.split()[0]) << 10
        elif head == "Pss:":
            current.shared += int(rest.split()[0]) << 10
        elif not head.endswith(":"):
            # address permissions offset device inode pathname
            name = line.split(None, 5)[5] if len(line.split(None, 5)) > 5 else ""
            kind = next((kind for kind, parts in kinds.items() if any(part in name for part in parts)), "")
            current = found[kind]
    return found
