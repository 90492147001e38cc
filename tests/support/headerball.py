# SPDX-License-Identifier: Apache-2.0
"""Tar headers without contents, written byte by byte for the tests of what mkfs.erofs makes of them.

Here: members as bytes. Not here: trees, objects, or the code that imports images; this is written apart from it so
that a mistake there does not repeat itself here.
"""

from __future__ import annotations

import os

DIRECTORY, FILE, HARD_LINK, SYMLINK, CHAR, BLOCK, FIFO = b"5", b"0", b"1", b"2", b"3", b"4", b"6"

#: What ends an archive.
END = b"\0" * 1024


def member(
    name: str | bytes, kind: bytes = FILE, *, mode: int = 0o644, uid: int = 0, gid: int = 0, size: int = 0,
    mtime: str | int = 0, link: str | bytes = b"", device: tuple[int, int] = (0, 0),
    xattrs: dict[str, bytes] | None = None,
) -> bytes:
    """One member; `mtime` as a string goes into an extended header as it stands."""
    path, target = os.fsencode(name), os.fsencode(link)
    records = {b"path": path, b"uid": b"%d" % uid, b"gid": b"%d" % gid, b"size": b"%d" % size}
    if target:
        records[b"linkpath"] = target
    if isinstance(mtime, str):
        records[b"mtime"] = mtime.encode()
        mtime = 0
    records.update({b"SCHILY.xattr." + key.encode(): value for key, value in (xattrs or {}).items()})
    body = b"".join(_record(key, value) for key, value in records.items())
    extended = _header(b"pax", b"x", 0o644, len(body), 0, b"", (0, 0)) + body + b"\0" * (-len(body) % 512)
    return extended + _header(path, kind, mode, 0, mtime, target, device)


def stub(name: str | bytes, size: int, *, redirect: str = "/ab/cd", **rest: object) -> bytes:
    """A file whose data OverlayFS finds at `redirect`."""
    own: dict[str, bytes] = rest.pop("xattrs", {})  # type: ignore[assignment]
    xattrs = {"trusted.overlay.metacopy": b"", "trusted.overlay.redirect": redirect.encode(), **own}
    return member(name, size=size, xattrs=xattrs, **rest)  # type: ignore[arg-type]


def _record(key: bytes, value: bytes) -> bytes:
    rest = len(key) + len(value) + 3
    length = rest + 1
    while length != rest + len(str(length)):
        length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def _header(
    name: bytes, kind: bytes, mode: int, size: int, mtime: int, link: bytes, device: tuple[int, int]
) -> bytes:
    block = bytearray(512)

    def put(offset: int, value: bytes) -> None:
        block[offset : offset + len(value)] = value

    put(0, name[:100])
    put(100, b"%07o" % mode)
    put(108, b"%07o" % 0)
    put(116, b"%07o" % 0)
    put(124, b"%011o" % size)
    put(136, b"%011o" % mtime)
    put(148, b" " * 8)
    put(156, kind)
    put(157, link[:100])
    put(257, b"ustar\x0000")
    put(329, b"%07o" % device[0])
    put(337, b"%07o" % device[1])
    put(148, b"%06o\0 " % sum(block))
    return bytes(block)
