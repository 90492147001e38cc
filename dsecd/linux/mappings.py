# SPDX-License-Identifier: Apache-2.0
"""What is mapped in a process, and how much of it is in memory.

What belongs here: reading /proc/PID/smaps, proc_pid_smaps(5).  What does not: which of it is worth anything.
"""

import re
from dataclasses import dataclass
from pathlib import Path

#: A mapping takes some 700 bytes, so this is for six thousand; a process may make ten times as many.
_READ_MAX = 4 << 20
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S{4} ")


@dataclass(frozen=True)
class Mapping:
    """A range of addresses, and how many bytes of it are in memory."""

    begin: int
    end: int
    resident_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


def of(pid: int) -> list[Mapping]:
    """The mappings of a process, lowest first; of more than about 6,000 the first.  Blocks, while its page tables are
    walked.

    Raises FileNotFoundError or ProcessLookupError when it is gone, and PermissionError without CAP_SYS_PTRACE.
    """
    with Path(f"/proc/{pid}/smaps").open("rb") as file:
        return parse(file.read(_READ_MAX).decode("ascii", "replace"))


def parse(text: str) -> list[Mapping]:
    """Out of the text of smaps, which may be cut off.  A path in it is the process's own choice of words."""
    found, range_ = [], (0, 0)
    # Not by splitlines: the kernel escapes a newline in a path, and no other character that ends a line there.
    for line in text.split("\n"):
        if match := _HEAD.match(line):
            range_ = int(match[1], 16), int(match[2], 16)
        elif line.startswith("Rss:") and line.endswith(" kB"):
            found.append(Mapping(*range_, int(line.split()[1]) << 10))
    return found
