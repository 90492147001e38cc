# SPDX-License-Identifier: Apache-2.0
"""Files with holes.

What belongs here: copying the data and leaving the holes, and telling contents apart.  What does not: what the files
are.  lseek(2), "Seeking file data and holes"; copy_file_range(2).
"""

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

_PIECE_BYTES = 64 << 20
_BLOCK_BYTES = 64 << 10
_ZEROS = bytes(_BLOCK_BYTES)


def copy(source: int | Path, target: Path, mode: int = 0o600) -> None:
    """Copy what of a file, given as a path or a descriptor, is data, to a new one.  Blocks.

    The file system shares the blocks where it can.  Raises OSError, FileExistsError among them; no half of a copy
    is left.
    """
    fd = source if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            size = os.fstat(fd).st_size
            os.ftruncate(out, size)
            for start, end in _data(fd, size):
                _copy_range(fd, out, start, end)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        finally:
            os.close(out)
    finally:
        if fd is not source:
            os.close(fd)


def digest(fd: int) -> str:
    """SHA-256 over the size, and over each block of 64 KiB that is not all zeros with its number: the same for the same
    bytes, whether zeros are holes or written.  Reads no hole.  Blocks.  Raises OSError."""
    size = os.fstat(fd).st_size
    total = hashlib.sha256(size.to_bytes(8, "big"))
    after = 0  # the block that has not been looked at yet
    for start, end in _data(fd, size):
        for number in range(max(after, start // _BLOCK_BYTES), -(-end // _BLOCK_BYTES)):
            block = os.pread(fd, _BLOCK_BYTES, number * _BLOCK_BYTES)
            after = number + 1
            if block != _ZEROS[: len(block)]:
                total.update(number.to_bytes(8, "big"))
                total.update(block)
    return total.hexdigest()


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """The pieces of a file that are no holes."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        wanted = min(end - start, _PIECE_BYTES)
        try:
            done = os.copy_file_range(source, target, wanted, start, start)
        except OSError as error:
            if error.errno != errno.EXDEV:  # another kind of file system
                raise
            os.lseek(target, start, os.SEEK_SET)
            done = os.sendfile(target, source, start, wanted)
        if done == 0:
            raise OSError(errno.EIO, "copy: the source became shorter")
        start += done
