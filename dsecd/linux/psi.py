# SPDX-License-Identifier: Apache-2.0
"""Pressure stall information: how much of the time tasks wait for memory, CPU or disk.

What belongs here: reading the host's figures and those of a cgroup.  What does not: how much is too much.  Linux
documentation, accounting/psi.
"""

import errno
import re
from dataclasses import dataclass
from pathlib import Path

HOST = Path("/proc/pressure")

_LINE = re.compile(
    r"^(some|full) avg10=(\d+\.\d+) avg60=(\d+\.\d+) avg300=(\d+\.\d+) total=(\d+)$", re.MULTILINE | re.ASCII
)
# ENODEV: the cgroup went while it was read; EOPNOTSUPP: the kernel was booted with psi=0, or psi is off for the cgroup.
_ABSENT = (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.ENOTDIR)


@dataclass(frozen=True)
class Stall:
    """Share of the time that was lost, in percent over the last 10, 60 and 300 s, and all that ever was."""

    avg10: float = 0.0
    avg60: float = 0.0
    avg300: float = 0.0
    total_us: int = 0


@dataclass(frozen=True)
class Pressure:
    """`some`: at least one task waited; `full`: all that wanted to run did (always zero for the host's CPU)."""

    some: Stall
    full: Stall


def parse(text: str) -> Pressure:
    """The content of a pressure file.  Raises ValueError when it is none."""
    found = {
        kind: Stall(float(avg10), float(avg60), float(avg300), int(total))
        for kind, avg10, avg60, avg300, total in _LINE.findall(text)
    }
    if "some" not in found:
        raise ValueError(f"no pressure in {text[:80]!r}")
    return Pressure(found["some"], found.get("full", Stall()))


def read(resource: str, cgroup: Path | None = None) -> Pressure | None:
    """Pressure on "memory", "cpu" or "io", of the host or of one cgroup; None where it is not to be had."""
    path = HOST / resource if cgroup is None else cgroup / f"{resource}.pressure"
    try:
        text = path.read_text("ascii")
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
    return parse(text)
