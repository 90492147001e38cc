# SPDX-License-Identifier: Apache-2.0
"""Files on this side of a transfer: reading them with their holes, writing them so that nothing planted leads astray.

Here: blocking calls on local files and directories. Not here: the transfer (``_async/tree.py``).

What a sandbox says of its files is hostile: names are checked, directories are opened without following links, links
are made last and only when they stay inside the tree.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

from libdsec.filetypes import FileInfo
from libdsec.frames import EXTENT_BYTES, Record, record

_COUNTING = threading.Lock()
_NO_FOLLOW = os.O_CLOEXEC | os.O_NOFOLLOW
#: What goes in one request: about so much, since one more is added before. Contents of an upload are in memory then.
_BATCH_FILES, _BATCH_BYTES, _BATCH_NAMES_BYTES = 256, 1 << 20, 32 * 1024

T = TypeVar("T")


@dataclass
class TreeReport:
    """What a transfer of a tree did. ``skipped`` are paths that were left out, each with the reason."""

    files: int = 0
    directories: int = 0
    symlinks: int = 0
    data_bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    #: Called with each path before it is transferred.
    on_path: Callable[[str], None] | None = field(default=None, repr=False, compare=False)

    def add_file(self, data_bytes: int) -> None:
        """Count one more file; from any thread."""
        with _COUNTING:
            self.files += 1
            self.data_bytes += data_bytes

    def at(self, path: str) -> None:
        """Tell the observer."""
        if self.on_path is not None:
            self.on_path(path)


class Source:
    """An open local file to be uploaded."""

    def __init__(self, path: str | os.PathLike[str] | int, *, follow: bool = True) -> None:
        """Open it (a number is a descriptor, used as it is). Raises OSError."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        self.fd = os.dup(path) if isinstance(path, int) else os.open(path, flags)
        self.status = os.fstat(self.fd)
        self.name = os.fspath(path) if not isinstance(path, int) else f"descriptor {path}"
        if stat.S_ISDIR(self.status.st_mode):
            self.close()
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.name)
        self.regular = stat.S_ISREG(self.status.st_mode)
        self.size = self.status.st_size if self.regular else None

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)

    def read(self, offset: int | None, length: int = EXTENT_BYTES) -> bytes:
        """Bytes at ``offset``, or the next ones of a pipe."""
        if offset is None:
            os.set_blocking(self.fd, True)
            return os.read(self.fd, length)
        return os.pread(self.fd, length, offset)

    def next_data(self, offset: int) -> tuple[int, int] | None:
        """Begin and end of the data at or after ``offset``, see lseek(2) SEEK_DATA; None when only a hole is left."""
        size = self.size or 0
        if offset >= size:
            return None
        try:
            begin = os.lseek(self.fd, offset, os.SEEK_DATA)
            end = os.lseek(self.fd, begin, os.SEEK_HOLE)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                return None
            return offset, size  # a file system that knows no holes
        return (begin, min(end, size)) if begin < size else None


class Target:
    """A local file being downloaded: written beside its place and renamed into it, so it appears whole or not."""

    def __init__(self, name: str, *, parent_fd: int | None = None) -> None:
        """``name`` is relative to the directory ``parent_fd`` when given. Raises OSError."""
        self.name = name
        self._parent_fd = parent_fd
        if parent_fd is None and os.path.exists(name) and not os.path.isfile(name):
            # Renaming would put a file in its place: of /dev/null, say, for everybody on this machine.
            raise OSError(errno.EINVAL, "not a regular file, and not replaced by one", name)
        directory, base = os.path.split(name)
        self._part = os.path.join(directory, f".{base[:200]}.{secrets.token_hex(4)}.part")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_FOLLOW
        try:
            self.fd = os.open(self._part, flags, 0o600, dir_fd=parent_fd)
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror, name) from exc  # nobody knows our name for the part
        self._done = False

    def write(self, offset: int, data: bytes) -> None:
        """Write all of ``data`` at ``offset``."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self.fd, view, offset)
            view, offset = view[written:], offset + written

    def commit(self, size: int, mode: int, mtime_ns: int) -> None:
        """Give it its final size, permissions (0777) and time, and its name."""
        os.ftruncate(self.fd, size)
        os.fchmod(self.fd, mode & 0o777)
        os.utime(self.fd, ns=(mtime_ns, mtime_ns))
        os.rename(self._part, self.name, src_dir_fd=self._parent_fd, dst_dir_fd=self._parent_fd)
        self._done = True

    def close(self) -> None:
        """Close it; a file that was not committed is removed."""
        os.close(self.fd)
        if not self._done:
            try:
                os.unlink(self._part, dir_fd=self._parent_fd)
            except FileNotFoundError:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Entry:
    """One entry of a local tree; ``path`` is relative to its top."""

    path: str
    status: os.stat_result
    target: str = ""
    #: Why it cannot be read, of a directory that was told before.
    reason: str = ""

    @property
    def mode(self) -> int:
        return stat.S_IMODE(self.status.st_mode)

    @property
    def kind(self) -> str:
        """directory, file, symlink, or what else it is."""
        names = {
            stat.S_IFDIR: "directory",
            stat.S_IFREG: "file",
            stat.S_IFLNK: "symlink",
            stat.S_IFIFO: "fifo",
            stat.S_IFSOCK: "socket",
            stat.S_IFCHR: "character device",
            stat.S_IFBLK: "block device",
        }
        return names.get(stat.S_IFMT(self.status.st_mode), "unknown")


def walk(top: str) -> Iterator[Entry]:
    """All entries below ``top``, each directory before what it holds, symlinks as themselves.

    What goes while it is read is as if it had never been; a directory that cannot be read comes again with the reason.
    Raises OSError for ``top``.
    """
    waiting: list[Entry | None] = [None]
    while waiting:
        above = waiting.pop()
        directory = "" if above is None else above.path
        try:
            with os.scandir(os.path.join(top, directory)) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as exc:
            if above is None:
                raise
            yield replace(above, reason=os.strerror(exc.errno or 0).lower())
            continue
        for item in found:
            path = os.path.join(directory, item.name)
            try:
                target = os.readlink(item.path) if item.is_symlink() else ""
                entry = Entry(path, item.stat(follow_symlinks=False), target)
            except FileNotFoundError:
                continue
            yield entry
            if entry.kind == "directory":
                waiting.append(entry)


#: A file or directory of a sandbox: its path in the tree, and what a listing told of it.
Found = tuple[str, FileInfo]


class Batch(Generic[T]):
    """Files to go in one request, gathered until there are enough."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._bytes = self._names_bytes = 0

    def add(self, item: T, path: str, size_bytes: int) -> bool:
        """Whether there are enough with this one."""
        self._items.append(item)
        self._bytes += size_bytes
        self._names_bytes += 4 * len(path) + 1  # as many as UTF-8 may make of it
        enough = self._bytes >= _BATCH_BYTES or self._names_bytes >= _BATCH_NAMES_BYTES
        return enough or len(self._items) >= _BATCH_FILES

    def take(self) -> list[T]:
        """All of them; gathering begins anew."""
        items, self._items = self._items, []
        self._bytes = self._names_bytes = 0
        return items


class Packed(NamedTuple):
    """Entries of a tree as one body: the sizes of the files in it, and the entries that are not."""

    body: list[bytes]
    taken: list[int]
    left: list[Entry]


def pack(top: str, entries: list[Entry], max_bytes: int) -> Packed:
    """Directories, and files that have at most ``max_bytes`` and no hole, as records; whatever fails is left."""
    packed = Packed([], [], [])
    for entry in entries:
        name = os.fsencode(entry.path)
        if entry.kind == "directory":
            packed.body.append(record(stat.S_IFDIR | entry.mode & 0o777, 0, name, b""))
            continue
        try:
            found = _small(os.path.join(top, entry.path), max_bytes)
        except OSError:
            found = None
        if found is None:
            packed.left.append(entry)
            continue
        status, data = found
        mode = stat.S_IFREG | status.st_mode & 0o777
        packed.body.append(record(mode, status.st_mtime_ns, name, data))
        packed.taken.append(len(data))
    return packed


def _small(path: str, max_bytes: int) -> tuple[os.stat_result, bytes] | None:
    """All of a small regular file that has no hole, else None. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NO_FOLLOW)
    try:
        status = os.fstat(fd)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode) or size > max_bytes:
            return None
        data = os.read(fd, size + 1)  # one byte more, for a file that grew or tells no size
        if len(data) != size or (size and os.lseek(fd, 0, os.SEEK_HOLE) != size):
            return None
        return status, data
    finally:
        os.close(fd)


def safe_name(name: str) -> bool:
    """Whether a name that a sandbox gave is one of a directory entry."""
    return bool(name) and name not in (".", "..") and "/" not in name and "\0" not in name


def escapes(directory: str, target: str) -> bool:
    """Whether a symlink in ``directory`` (relative to the top of a tree) may lead out of the tree.

    Only leading ``..`` are allowed: one after a name would be taken from wherever that name leads, maybe by a link.
    """
    if target.startswith("/") or not target or "\0" in target:
        return True
    depth = len([part for part in directory.split("/") if part])
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return ups > depth or ".." in parts[ups:]


class Tree:
    """A local directory into which a tree is downloaded, through descriptors that no link can redirect."""

    def __init__(self, top: str | os.PathLike[str]) -> None:
        """Open or make it. Raises OSError."""
        Path(top).mkdir(exist_ok=True)
        self.fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)

    def directory(self, path: str, *, make: bool) -> int:
        """A descriptor of the directory ``path``; its last part is made when missing. The caller closes it."""
        fd = os.dup(self.fd)
        parts = [part for part in path.split("/") if part]
        for index, part in enumerate(parts):
            try:
                if make and index == len(parts) - 1:
                    self._make(fd, part)
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _NO_FOLLOW, dir_fd=fd)
            finally:
                os.close(fd)
            fd = inner
        return fd

    @staticmethod
    def _make(fd: int, name: str) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=fd)
        except FileExistsError:
            pass

    def make_directory(self, path: str) -> None:
        """Make a directory below one that exists; only we may enter until ``finish_directory``."""
        os.close(self.directory(path, make=True))

    def finish_directory(self, path: str, mode: int, mtime_ns: int) -> None:
        """Give a directory its permissions and time, when all is in it."""
        fd = self.directory(path, make=False)
        try:
            os.fchmod(fd, mode & 0o777)
            os.utime(fd, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(fd)

    def symlink(self, path: str, target: str) -> None:
        """Make a symlink, replacing a file or link but no directory."""
        directory, name = os.path.split(path)
        fd = self.directory(directory, make=False)
        try:
            part = f".{name[:200]}.{secrets.token_hex(4)}.part"
            os.symlink(target, part, dir_fd=fd)
            try:
                os.rename(part, name, src_dir_fd=fd, dst_dir_fd=fd)
            except OSError:
                os.unlink(part, dir_fd=fd)
                raise
        finally:
            os.close(fd)


class Shelf:
    """Small files put into a local tree as they come, in the order in which they were asked for."""

    def __init__(self, tree: Tree, paths: list[str]) -> None:
        self._tree = tree
        self._paths = iter(paths)
        self._directory: str | None = None
        self._fd = -1
        #: What is there.
        self.done: set[str] = set()

    def put(self, records: list[Record]) -> list[int]:
        """Write the next files; the sizes of those that are there. One that failed or did not come is not ``done``."""
        sizes = []
        for (mode, mtime_ns, data), path in zip(records, self._paths, strict=False):
            if not stat.S_ISREG(mode):
                continue
            directory, name = os.path.split(path)
            try:
                self._enter(directory)
                with Target(name, parent_fd=self._fd) as target:
                    target.write(0, data)
                    target.commit(len(data), mode, mtime_ns)
            except OSError:
                continue
            self.done.add(path)
            sizes.append(len(data))
        return sizes

    def _enter(self, directory: str) -> None:
        # Neighbours mostly lie in one directory.
        if directory == self._directory:
            return
        self.close()
        self._fd = self._tree.directory(directory, make=False)
        self._directory = directory

    def close(self) -> None:
        """Close it."""
        if self._directory is not None:
            os.close(self._fd)
            self._directory = None
