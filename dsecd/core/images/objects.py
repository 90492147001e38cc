# SPDX-License-Identifier: Apache-2.0
"""Contents of files as objects: hashed, written once, linked when the store has them already.

What belongs here: one import's staging area of objects, and moving it into the store.  What does not: who refers to
an object (records) and trees.

An object is a file named by the SHA-256 of its bytes, `ab/cdef...`, mode 0444, never replaced and never changed.  An
import takes one that the store has by making a hard link to it in its staging area: a single step that both asks
whether it exists and keeps it, should its last image be removed meanwhile.  Publishing links everything back, so it
restores an object that went away in between.  The staging area is one flat directory: ext4 then puts the new inodes
beside each other, which makes creating them twice as fast as in 256 directories.
"""

import contextlib
import errno
import hashlib
import os
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from dsecd.core.images.tree import Node

#: Contents up to this size are hashed in memory before anything is written.
SMALL_BYTES = 1 << 20
_BATCH_BYTES = 4 << 20
_BATCH_FILES = 256
_WORKERS = 2
#: Batches waiting for a worker: with the ones being worked on, the bound of memory.
_WAITING = 4
_ZEROS = bytes(1 << 20)
_RECORD = struct.Struct("<32sQ")


@dataclass(frozen=True, slots=True)
class Contents:
    """A file's bytes, still to be read: pieces of data, and lengths of holes as numbers."""

    size: int
    segments: Iterator[memoryview | int]
    name: str


@dataclass
class Written:
    """What an import has put in its staging area."""

    #: digest -> size of every object it needs
    sizes: dict[bytes, int] = field(default_factory=dict)
    #: objects, and their bytes, that the store did not have
    new: int = 0
    new_bytes: int = 0
    #: bytes of contents read, for progress
    read_bytes: int = 0


def object_path(digest: bytes) -> str:
    """Where an object lies below the object directory."""
    text = digest.hex()
    return f"{text[:2]}/{text[2:]}"


def make_fan_out(directory: Path) -> None:
    """The 256 directories of an object directory, readable for every sandbox whatever the daemon's umask."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    directory.chmod(0o755)
    for number in range(256):
        sub = directory / f"{number:02x}"
        with contextlib.suppress(FileExistsError):
            sub.mkdir()
            sub.chmod(0o755)


class ObjectWriter:
    """Takes the contents of one import's files.  Threads of its own hash and write; `finish` waits for them."""

    def __init__(self, store: Path, staging: Path) -> None:
        """`store` is an object directory (see make_fan_out), `staging` a plain one of the same file system.

        The process's umask must let mode 0444 through.
        """
        self.written = Written()
        self._lock = threading.Lock()
        self._store = os.open(store, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._staging = os.open(staging, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="import-objects")
        self._room = threading.Semaphore(_WORKERS + _WAITING)
        self._futures: list[Future[None]] = []
        self._batch: list[tuple[Node, bytes]] = []
        self._batch_bytes = 0
        self._temporary = 0

    def __enter__(self) -> "ObjectWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        os.close(self._store)
        os.close(self._staging)

    def add(self, node: Node, contents: Contents) -> None:
        """Take a file's contents; its node gets the digest by the time `finish` returns.

        Reads all of the contents now.  Raises OSError (also one that a worker met earlier) and what reading raises.
        """
        if contents.size <= SMALL_BYTES:
            pieces = (_ZEROS[:part] if isinstance(part, int) else part for part in contents.segments)
            self.add_bytes(node, b"".join(pieces))
        else:
            self._add_large(node, contents)

    def add_bytes(self, node: Node, data: bytes) -> None:
        """`add` for contents already in memory."""
        if not data:
            return
        self._batch.append((node, data))
        self._batch_bytes += len(data)
        if self._batch_bytes >= _BATCH_BYTES or len(self._batch) >= _BATCH_FILES:
            self._submit()

    def finish(self) -> Written:
        """Wait until everything is written (not yet synced)."""
        if self._batch:
            self._submit()
        for future in self._futures:
            future.result()
        self._futures.clear()
        return self.written

    def drop_unused(self, used: set[bytes]) -> None:
        """Forget objects of files that a later layer replaced or hid."""
        for digest in self.written.sizes.keys() - used:
            size = self.written.sizes.pop(digest)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(digest.hex(), dir_fd=self._staging).st_nlink == 1:
                    self.written.new -= 1
                    self.written.new_bytes -= size
                os.unlink(digest.hex(), dir_fd=self._staging)

    def _submit(self) -> None:
        while len(self._futures) > _WAITING and self._futures[0].done():
            self._futures.pop(0).result()
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        self._room.acquire()
        self._futures.append(self._pool.submit(self._work, batch))

    def _work(self, batch: list[tuple[Node, bytes]]) -> None:
        try:
            for node, data in batch:
                node.digest = digest = hashlib.sha256(data).digest()
                if self._is_first(digest, len(data)) and not self._take(digest):
                    with _created(digest.hex(), self._staging) as fd:
                        _write_all(fd, data)
                    self._count_new(len(data))
        finally:
            self._room.release()

    def _is_first(self, digest: bytes, size: int) -> bool:
        with self._lock:
            self.written.read_bytes += size
            if digest in self.written.sizes:
                return False
            self.written.sizes[digest] = size
            return True

    def _count_new(self, size: int) -> None:
        with self._lock:
            self.written.new += 1
            self.written.new_bytes += size

    def _take(self, digest: bytes) -> bool:
        """Keep the store's object, if it has it."""
        try:
            os.link(object_path(digest), digest.hex(), src_dir_fd=self._store, dst_dir_fd=self._staging)
        except FileNotFoundError:
            return False
        except OSError as error:
            # As many imports at once as an inode may have links: write it again, publishing will drop the copy.
            if error.errno != errno.EMLINK:
                raise
            return False
        return True

    def _add_large(self, node: Node, contents: Contents) -> None:
        """Write while hashing, since it does not fit memory; named by its digest afterwards."""
        self._temporary += 1
        name = f"temporary-{self._temporary}"
        digest = hashlib.sha256()
        with _created(name, self._staging) as fd:
            position = 0
            for part in contents.segments:
                if isinstance(part, int):
                    _hash_zeros(digest, part)
                    position += part
                    continue
                digest.update(part)
                if part != _ZEROS[: len(part)]:
                    os.lseek(fd, position, os.SEEK_SET)
                    _write_all(fd, part)
                position += len(part)
            os.ftruncate(fd, position)
        node.digest = digest.digest()
        if not self._is_first(node.digest, contents.size) or self._take(node.digest):
            os.unlink(name, dir_fd=self._staging)
            return
        os.rename(name, node.digest.hex(), src_dir_fd=self._staging, dst_dir_fd=self._staging)
        self._count_new(contents.size)


@contextlib.contextmanager
def _created(name: str, dir_fd: int) -> Iterator[int]:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    done = os.write(fd, data)
    while done < len(data):
        done += os.write(fd, memoryview(data)[done:])


def _hash_zeros(digest: "hashlib._Hash", count: int) -> None:
    while count:
        step = min(count, len(_ZEROS))
        digest.update(_ZEROS[:step])
        count -= step


def move_in(staging: Path, store: Path, digests: list[bytes]) -> None:
    """Give the store every object of a staging area it lacks.  Blocks.  May be repeated after being cut off.

    link(2) never replaces: what is in the store keeps its inode, and with it its page cache and its open files.
    """
    source = os.open(staging, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    target = os.open(store, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for digest in digests:
            with contextlib.suppress(FileExistsError):
                os.link(digest.hex(), object_path(digest), src_dir_fd=source, dst_dir_fd=target)
    finally:
        os.close(source)
        os.close(target)


def write_manifest(path: Path, sizes: dict[bytes, int]) -> None:
    """Write which objects an image needs, in order of digest: what its reference counts are taken from."""
    path.write_bytes(b"".join(_RECORD.pack(digest, sizes[digest]) for digest in sorted(sizes)))


def read_manifest(path: Path) -> list[tuple[bytes, int]]:
    """Digest and size of the objects an image needs.  Raises OSError."""
    return list(_RECORD.iter_unpack(path.read_bytes()))
