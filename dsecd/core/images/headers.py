# SPDX-License-Identifier: Apache-2.0
"""A tree as a tar of headers without contents, from which mkfs.erofs makes the metadata image.

What belongs here: that form, which is a pure function of the tree.  What does not: running mkfs.erofs.

Each file that has contents carries `trusted.overlay.metacopy` (empty) and `trusted.overlay.redirect` (the object's
path), which make OverlayFS take its data from the data-only layer (Linux documentation, filesystems/overlayfs).
Everything that a plain header cannot hold goes into an extended header (POSIX pax).  mkfs.erofs reads a time's
fraction as a count of nanoseconds, so it always has nine digits.
"""

from collections.abc import Iterator

from dsecd.core.images.objects import object_path
from dsecd.core.images.tree import Kind, Node, Tree

_BLOCK = 512
_NS = 10**9
_HARD_LINK = b"1"
_OCTAL_11 = 8**11
_EMPTY_TAIL = b"\0" * 167

#: On the root directory: the digest of the image's configuration, which makes it part of the image's identity.
CONFIG_XATTR = b"trusted.dsec.config"


def tar_of(tree: Tree, config_digest: bytes) -> Iterator[bytes]:
    """The pieces of the tar, in the order of `Tree.walk`, ended as tar archives are."""
    first_names: dict[int, bytes] = {}
    root_xattrs = (*tree.root.xattrs, (CONFIG_XATTR, config_digest))
    yield _member(b".", tree.root, Kind.DIR.value, root_xattrs)
    for path, node in tree.walk():
        if node.kind is Kind.DIR:
            yield _member(path, node, Kind.DIR.value, node.xattrs)
            continue
        first = first_names.setdefault(id(node), path)
        if first is not path:
            yield _member(path, node, _HARD_LINK, (), link=first)
            continue
        xattrs = node.xattrs
        if node.digest is not None:
            redirect = f"/{object_path(node.digest)}".encode()
            xattrs = (*xattrs, (b"trusted.overlay.metacopy", b""), (b"trusted.overlay.redirect", redirect))
        yield _member(path, node, node.kind.value, xattrs, link=node.target)
    yield b"\0" * (2 * _BLOCK)


def _member(
    path: bytes, node: Node, flag: bytes, xattrs: tuple[tuple[bytes, bytes], ...], *, link: bytes = b""
) -> bytes:
    seconds, fraction = divmod(node.mtime_ns, _NS)
    size = node.size if flag == Kind.FILE.value else 0
    records = [_record(b"path", path)]
    if link:
        records.append(_record(b"linkpath", link))
    if fraction or not 0 <= seconds < _OCTAL_11:
        records.append(_record(b"mtime", b"%d.%09d" % (seconds, fraction)))
        seconds = 0
    if size >= _OCTAL_11:
        records.append(_record(b"size", b"%d" % size))
    records.extend(_record(b"SCHILY.xattr." + name, value) for name, value in xattrs)
    body = b"".join(records)
    extended = _header(b"x", b"x", 0o644, 0, 0, len(body), 0, b"", (0, 0))
    header = _header(
        path, flag, node.mode, node.uid, node.gid, size if size < _OCTAL_11 else 0, seconds, link, node.rdev
    )
    return extended + body + b"\0" * (-len(body) % _BLOCK) + header


def _record(keyword: bytes, value: bytes) -> bytes:
    """One record of an extended header; its length counts the digits of the length itself."""
    rest = len(keyword) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) > len(str(rest)):
        length += 1
    return b"%d %s=%s\n" % (length, keyword, value)


def _header(
    name: bytes, flag: bytes, mode: int, uid: int, gid: int, size: int, seconds: int, link: bytes,
    rdev: tuple[int, int],
) -> bytes:
    fields = b"%b%07o\0%07o\0%07o\0%011o\0%011o\0" % (name[:100].ljust(100, b"\0"), mode, uid, gid, size, seconds)
    tail = b"%b%bustar\00000%b%07o\0%07o\0%b" % (
        flag, link[:100].ljust(100, b"\0"), b"\0" * 64, rdev[0], rdev[1], _EMPTY_TAIL
    )
    checksum = sum(fields) + sum(tail) + 8 * 0x20
    return b"%b%06o\0 %b" % (fields, checksum, tail)
