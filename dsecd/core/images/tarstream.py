# SPDX-License-Identifier: Apache-2.0
"""Reading a root file system tar or an image layer into a tree, strictly.

What belongs here: turning tar members into nodes.  What does not: compression, which archive lies where, and the
object store.

Python's tarfile does the parsing; two of its habits are changed.  It takes a damaged header in the middle, or the
sudden end of the file, for the end of the archive: here both are errors, since half an image must never pass for
one.  And it would collect every member in a list.
"""

import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from typing import Self, cast

from dsecd.core.images.objects import Contents, ObjectWriter
from dsecd.core.images.reader import ForwardReader, Truncated
from dsecd.core.images.tree import (
    AUFS_PREFIX,
    OPAQUE_WHITEOUT,
    WHITEOUT_PREFIX,
    Kind,
    Node,
    Parts,
    Tree,
    refuse,
    show,
    split_name,
)
from libdsec.errors import InvalidSpec

_NS = 10**9
_XATTR = "SCHILY.xattr."
_KINDS = {
    tarfile.DIRTYPE: Kind.DIR, tarfile.SYMTYPE: Kind.SYMLINK, tarfile.CHRTYPE: Kind.CHAR,
    tarfile.BLKTYPE: Kind.BLOCK, tarfile.FIFOTYPE: Kind.FIFO,
}
_VOLUME_LABEL = b"V"
_DECIMAL = re.compile(r"(-?)(\d{1,18})(?:\.(\d*))?")


class _StrictInfo(tarfile.TarInfo):
    """A member whose header must be whole: tarfile's quiet ends become errors."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            # Told apart by name: the classes are tarfile's own and known to no stub.
            match type(error).__name__:
                case "EOFHeaderError":
                    raise  # two blocks of zeros: the proper end
                case "EmptyHeaderError":
                    problem = "it ends without an end-of-archive mark"
                case "TruncatedHeaderError":
                    problem = "it ends inside a header"
                case _:
                    raise InvalidSpec(f"import tar archive: damaged header: {error}") from error
            raise Truncated(f"import tar archive: {problem}", hint="make or download it again") from error


class TarImport:
    """One archive, applied to a tree as its next layer."""

    def __init__(self, tree: Tree, writer: ObjectWriter, *, layered: bool, tick: Callable[[], None]) -> None:
        self.tree = tree
        self.writer = writer
        self.layered = layered
        self.tick = tick

    def run(self, reader: ForwardReader) -> None:
        """Apply every member.  Blocks.  Raises InvalidSpec naming the member, Truncated for half an archive."""
        try:
            # tarfile asks for no more of a file object than the reader has.
            archive = tarfile.TarFile(
                fileobj=reader, mode="r", tarinfo=_StrictInfo, errors="surrogateescape", encoding="utf-8",  # type: ignore[arg-type]
            )
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]
                self._member(member, reader)
                self.tick()
        except tarfile.TarError as error:
            raise InvalidSpec(f"import tar archive: at offset {reader.tell()}: {error}") from error
        except (ValueError, OverflowError) as error:
            # tarfile converts numbers of extended headers without catching what int() raises.
            raise InvalidSpec(f"import tar archive: damaged header near offset {reader.tell()}: {error}") from error
        reader.drain()

    def _member(self, member: tarfile.TarInfo, reader: ForwardReader) -> None:
        name = _bytes(member.name)
        if member.type == _VOLUME_LABEL:
            return
        parts = split_name(name)
        size = member.size if member.isreg() else 0
        self.tree.claim(parts, size)
        if self.layered and parts and parts[-1].startswith(WHITEOUT_PREFIX):
            if parts[-1] == OPAQUE_WHITEOUT or not parts[-1].startswith(AUFS_PREFIX):
                self.tree.whiteout(parts[:-1], parts[-1])
            return
        if member.type == tarfile.LNKTYPE:
            self.tree.link(parts, split_name(_bytes(member.linkname)))
            return
        if member.isdev() and self.tree.resolve(parts)[:1] == (b"dev",):
            return  # a sandbox has its own /dev
        node = _node(parts, member)
        self.tree.put(parts, node)
        if node.kind is Kind.FILE and size:
            node.size = size
            self.writer.add(node, Contents(size, _segments(parts, member, reader), show(parts)))


def _node(parts: Parts, member: tarfile.TarInfo) -> Node:
    kind = Kind.FILE if member.isreg() else _KINDS.get(member.type)
    if kind is None:
        raise refuse(parts, f"members of type {member.type!r} are not supported")
    headers = member.pax_headers
    node = Node(
        kind, mode=member.mode & 0o7777, uid=member.uid, gid=member.gid, mtime_ns=_mtime_ns(parts, member),
        xattrs=_xattrs(parts, headers) if headers else (),
    )
    if kind is Kind.SYMLINK:
        node.target = _bytes(member.linkname)
        node.mode = 0o777
    elif kind in (Kind.CHAR, Kind.BLOCK):
        node.rdev = (member.devmajor, member.devminor)
    return node


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _mtime_ns(parts: Parts, member: tarfile.TarInfo) -> int:
    text = member.pax_headers.get("mtime")
    if text is None:
        return int(member.mtime) * _NS
    match = _DECIMAL.fullmatch(text)
    if match is None:
        raise refuse(parts, f"its modification time {text[:40]!r} is not a number of seconds")
    sign, seconds, fraction = match.groups()
    value = int(seconds) * _NS + int((fraction or "0")[:9].ljust(9, "0"))
    return -value if sign else value


def _xattrs(parts: Parts, headers: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    found: list[tuple[bytes, bytes]] = []
    for key, value in headers.items():
        if key.startswith(_XATTR):
            found.append((_bytes(key.removeprefix(_XATTR)), _bytes(value)))
        elif key.startswith(("SCHILY.acl.", "LIBARCHIVE.xattr.", "RHT.security.")) and not _doubles(key, headers):
            raise refuse(
                parts, f"its extended header {key[:80]!r} is not supported",
                "make the archive with GNU tar's --xattrs and without --acls and --selinux",
            )
    return tuple(sorted(found))


def _doubles(key: str, headers: Mapping[str, str]) -> bool:
    # bsdtar writes each attribute in both spellings.
    return key.startswith("LIBARCHIVE.xattr.") and _XATTR + key.removeprefix("LIBARCHIVE.xattr.") in headers


def _segments(parts: Parts, member: tarfile.TarInfo, reader: ForwardReader) -> Iterator[memoryview | int]:
    """A file's contents in order: data, and the lengths of holes between."""
    name = show(parts)
    # A map of where data is; the stub knows it as a number.
    areas = cast("list[tuple[int, int]] | None", member.sparse)
    if areas is None:
        yield from reader.chunks(member.size, name)
        return
    if reader.tell() > member.offset_data:
        raise refuse(parts, "its map of holes is damaged")
    reader.seek(member.offset_data)
    position = 0
    for offset, length in areas:
        if length == 0:
            continue  # the old GNU form pads its map with zeros and ends it with the file's size
        if offset < position or length < 0 or offset + length > member.size:
            raise refuse(parts, "its map of holes is damaged")
        if offset > position:
            yield offset - position
        yield from reader.chunks(length, name)
        position = offset + length
    if position < member.size:
        yield member.size - position
