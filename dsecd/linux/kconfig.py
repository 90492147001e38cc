# SPDX-License-Identifier: Apache-2.0
"""A kernel's build configuration: reading the file that says which options it was built with.

What belongs here: the file's form, and where the running kernel's is.  What does not: which options anybody needs
(mechanisms, and the table of dsecd.kernelcheck).
"""

import contextlib
import functools
import gzip
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: A configuration is some 300 KB; nobody needs one of more.
_MOST_BYTES = 8 << 20
_OPTION = re.compile(r"^CONFIG_(\w+)=([ym])$", re.MULTILINE)
_VERSION = re.compile(r"^# Linux/\S+ (\S+) Kernel Configuration$", re.MULTILINE)


@dataclass(frozen=True)
class Config:
    """What a kernel was built with."""

    #: As its head tells, "" when it does not.
    version: str
    #: Options that are built in or modules, without CONFIG_.
    options: frozenset[str]

    def lacks(self, wanted: Iterable[str]) -> list[str]:
        """Those of the options that are neither built in nor a module."""
        return [name for name in wanted if name not in self.options]


def parse(text: str) -> Config:
    """The content of a configuration file.  Raises ValueError when it is none."""
    options = frozenset(name for name, _ in _OPTION.findall(text))
    if not options:
        raise ValueError("it sets no option, so it is no kernel configuration")
    version = _VERSION.search(text)
    return Config(version[1] if version else "", options)


def read(path: Path) -> Config:
    """A configuration file, plain or compressed by gzip.  Blocks.  Raises OSError, ValueError."""
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
        stream.seek(0)
        with gzip.open(stream) if packed else contextlib.nullcontext(stream) as content:
            data = content.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    return parse(data.decode("utf-8", "replace"))


def running_path() -> Path | None:
    """Where the running kernel's configuration is, None when it is nowhere."""
    # The kernel's own word first: the file in /boot may be of another kernel of the same name.
    for path in (Path("/proc/config.gz"), Path("/boot", f"config-{os.uname().release}")):
        if path.exists():
            return path
    return None


@functools.cache
def running() -> Config | None:
    """The running kernel's configuration, None when it cannot be had.  Blocks."""
    path = running_path()
    if path is None:
        return None
    try:
        return read(path)
    except (OSError, ValueError):
        return None
