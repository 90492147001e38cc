# SPDX-License-Identifier: Apache-2.0
"""Writing cpio archives, the form of an initramfs.

What belongs here: the "newc" format of Linux's Documentation/driver-api/early-userspace/buffer-format.rst, as far as
an initramfs of directories and plain files goes.  What does not: what is in one.
"""

from __future__ import annotations

import stat
from typing import BinaryIO

_TRAILER = "TRAILER!!!"


class Writer:
    """Writes members to a stream, one after the other; ``end`` finishes the archive."""

    def __init__(self, output: BinaryIO | object) -> None:
        """``output``: anything with ``write(bytes)``."""
        self._write = output.write  # type: ignore[union-attr]
        self._inode = 0

    def directory(self, name: str) -> None:
        """Add an empty directory."""
        self._member(name, stat.S_IFDIR | 0o755, b"")

    def file(self, name: str, data: bytes, *, mode: int = 0o644) -> None:
        """Add a regular file."""
        self._member(name, stat.S_IFREG | mode, data)

    def end(self) -> None:
        """Write the member that ends an archive."""
        self._member(_TRAILER, 0, b"")

    def _member(self, name: str, mode: int, data: bytes) -> None:
        self._inode += 1
        encoded = name.encode() + b"\0"
        # inode, mode, uid, gid, links, mtime, size, device (2), device number (2), length of the name, sum
        fields = (self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        self._write(header + bytes(-len(header) % 4))
        self._write(data + bytes(-len(data) % 4))
