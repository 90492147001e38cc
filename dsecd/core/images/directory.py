# SPDX-License-Identifier: Apache-2.0
"""Reading a directory of the host into a tree.

What belongs here: the walk and what of an inode is taken over.  What does not: what an image may hold (tree) and
where contents go (objects).

The directory may change meanwhile, by someone hostile even: every step opens one component below an open directory
and never follows a symbolic link, and what was opened is what counts, not what was listed.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

from dsecd.core.images.objects import SMALL_BYTES, Contents, ObjectWriter
from dsecd.core.images.tree import Kind, Node, Parts, Tree, refuse, show
from libdsec.errors import InvalidSpec

_READ_BYTES = 1 << 20
_KINDS = {
    stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.DIR, stat.S_IFLNK: Kind.SYMLINK,
    stat.S_IFCHR: Kind.CHAR, stat.S_IFBLK: Kind.BLOCK, stat.S_IFIFO: Kind.FIFO,
}
#: Labels of the host's security modules are about the host's policy, not about the files.
_HOST_XATTRS = ("security.selinux", "security.ima", "security.evm", "security.apparmor", "security.SMACK64")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: What this process or its host has too little of, or what has gone since it was listed: not a fault of what is read.
_NOT_ITS_FAULT = (errno.ENOENT, errno.ESRCH, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class DirectoryImport:
    """One directory, applied to a tree.  Stays on the directory's own file system; mount points come in empty."""

    def __init__(self, tree: Tree, writer: ObjectWriter, *, tick: Callable[[], None]) -> None:
        self.tree = tree
        self.writer = writer
        self.tick = tick
        self._device = -1
        self._links: dict[int, Node] = {}

    def run(self, path: str) -> None:
        """Take everything below `path`.  Blocks.  Raises InvalidSpec naming the member, OSError of the object store."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidSpec(f"import directory {path!r}: {error.strerror}") from error
        self._device = os.fstat(fd).st_dev
        # Depth is bounded by the length of a path, not by Python's stack: the open directories are ours.
        stack: list[tuple[int, Parts, list[str]]] = [(fd, (), [])]
        try:
            with _reading(()):
                self._put((), os.fstat(fd), _xattrs(fd), None)
                stack[0][2].extend(_names(fd))
            while stack:
                fd, parts, names = stack[-1]
                if not names:
                    os.close(stack.pop()[0])
                    continue
                child = self._entry(fd, names.pop(), parts)
                if child is not None:
                    stack.append(child)
                self.tick()
        finally:
            for fd, _, _ in stack:
                os.close(fd)

    def _entry(self, parent: int, name: str, above: Parts) -> tuple[int, Parts, list[str]] | None:
        parts = (*above, os.fsencode(name))
        try:
            with _reading(parts):
                info = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                return self._directory(parent, name, parts)
            if stat.S_ISREG(info.st_mode):
                self._file(parent, name, parts)
                return None
            if stat.S_ISSOCK(info.st_mode) or (stat.S_IFMT(info.st_mode) in (stat.S_IFCHR, stat.S_IFBLK)
                                               and parts[:1] == (b"dev",)):
                return None  # a socket without its server is nothing, as tar thinks; a sandbox has its own /dev
            self._special(parent, name, parts, info)
        except (FileNotFoundError, ProcessLookupError):
            pass  # gone since it was listed
        return None

    def _directory(self, parent: int, name: str, parts: Parts) -> tuple[int, Parts, list[str]] | None:
        with contextlib.ExitStack() as stack, _reading(parts):
            fd = os.open(name, _DIRECTORY, dir_fd=parent)
            stack.callback(os.close, fd)
            info, xattrs = os.fstat(fd), _xattrs(fd)
            names = _names(fd) if info.st_dev == self._device else None
            self._put(parts, info, xattrs, None)
            if names is None:
                return None
            stack.pop_all()
            return fd, parts, names

    def _file(self, parent: int, name: str, parts: Parts) -> None:
        with _reading(parts):
            fd = os.open(name, _FILE, dir_fd=parent)
        try:
            with _reading(parts):
                info, xattrs = os.fstat(fd), _xattrs(fd)
                data = _read_small(fd) if stat.S_ISREG(info.st_mode) and info.st_size <= SMALL_BYTES else b""
            if not stat.S_ISREG(info.st_mode):
                raise refuse(parts, "it was replaced while being read")
            node = self._put(parts, info, xattrs, None)
            if node is None:
                return
            if info.st_size <= SMALL_BYTES:
                node.size = len(data)
                self.writer.add_bytes(node, data)
            else:
                node.size = info.st_size
                self.writer.add(node, Contents(info.st_size, _segments(fd, info.st_size, parts), show(parts)))
        finally:
            os.close(fd)

    def _special(self, parent: int, name: str, parts: Parts, info: os.stat_result) -> None:
        with _reading(parts):
            target = os.readlink(os.fsencode(name), dir_fd=parent) if stat.S_ISLNK(info.st_mode) else b""
            xattrs = _xattrs(f"/proc/self/fd/{parent}/{name}")
        self._put(parts, info, xattrs, target)

    def _put(
        self, parts: Parts, info: os.stat_result, xattrs: tuple[tuple[bytes, bytes], ...], target: bytes | None
    ) -> Node | None:
        """Add an entry; None if it is another name of a file that is in the tree already."""
        kind = _KINDS[stat.S_IFMT(info.st_mode)]
        many = info.st_nlink > 1 and kind is not Kind.DIR
        first = self._links.get(info.st_ino) if many else None
        self.tree.claim(parts, info.st_size if kind is Kind.FILE and first is None else 0)
        if first is not None:
            self.tree.link_node(parts, first)
            return None
        node = Node(
            kind, mode=stat.S_IMODE(info.st_mode), uid=info.st_uid, gid=info.st_gid, mtime_ns=info.st_mtime_ns,
            target=target or b"", xattrs=xattrs,
            rdev=(os.major(info.st_rdev), os.minor(info.st_rdev)) if kind in (Kind.CHAR, Kind.BLOCK) else (0, 0),
        )
        self.tree.put(parts, node)
        if many:
            self._links[info.st_ino] = node
        return node


@contextlib.contextmanager
def _reading(parts: Parts) -> Iterator[None]:
    """What cannot be read is an error of the request, which named it; the member is told."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_ITS_FAULT:
            raise
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise refuse(parts, "it was replaced while being read") from error
        raise refuse(parts, f"it cannot be read: {(error.strerror or str(error)).lower()}") from error


def _names(directory: int) -> list[str]:
    """Those in an open directory, in the reverse of the order in which they are taken."""
    return sorted(os.listdir(directory), key=os.fsencode, reverse=True)


def _xattrs(file: int | str) -> tuple[tuple[bytes, bytes], ...]:
    follow = isinstance(file, int)
    try:
        names = os.listxattr(file, follow_symlinks=follow)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EACCES):
            return ()
        raise
    return tuple(sorted(
        (os.fsencode(name), os.getxattr(file, name, follow_symlinks=follow))
        for name in names if name not in _HOST_XATTRS
    ))


def _read_small(fd: int) -> bytes:
    parts: list[bytes] = []
    while data := os.read(fd, _READ_BYTES):
        parts.append(data)
        if len(parts) > 4:
            break  # it grew since: what an archiver would do, take what it had
    return b"".join(parts)[: 2 * SMALL_BYTES]


def _segments(fd: int, size: int, parts: Parts) -> Iterator[memoryview | int]:
    """Data and holes as the file system tells them (lseek(2), SEEK_DATA)."""
    position = 0
    while position < size:
        with _reading(parts):
            start = min(_next_data(fd, position, size), size)
        if start > position:
            yield start - position
            position = start
            continue
        with _reading(parts):
            end = min(os.lseek(fd, position, os.SEEK_HOLE), size)
            os.lseek(fd, position, os.SEEK_SET)
        while position < end:
            with _reading(parts):
                data = os.read(fd, min(_READ_BYTES, end - position))
            if not data:
                raise refuse(parts, f"it shrank from {size} to {position} bytes while being read")
            yield memoryview(data)
            position += len(data)


def _next_data(fd: int, position: int, size: int) -> int:
    try:
        return os.lseek(fd, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size  # only a hole is left
