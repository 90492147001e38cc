# SPDX-License-Identifier: Apache-2.0
"""Image stores for tests: a store on a directory, trees to import, and an account of what lies in a store.

The account reads the directories and the database file itself, not through the code under test.
"""

import ctypes
import hashlib
import io
import mmap
import os
import sqlite3
import stat
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dsecd.backends.plan import Checkpoint, no_checkpoint
from dsecd.core.images.staging import Settings
from dsecd.core.images.store import ImageStore
from dsecd.core.schema import MIGRATIONS
from dsecd.core.store import Store


@contextmanager
def opened(
    root: Path, *, settings: Settings | None = None, checkpoint: Checkpoint = no_checkpoint
) -> Iterator[tuple[ImageStore, Store]]:
    """An image store and its database below `root`, as a starting daemon opens them."""
    root.mkdir(exist_ok=True)
    db = Store.open(root / "state.db", MIGRATIONS)
    try:
        yield ImageStore(db, root, root / "run", settings=settings, checkpoint=checkpoint), db
    finally:
        db.close()


def residue(root: Path) -> list[str]:
    """What a store should not have: files nobody refers to, references to files that are not there, wrong counts."""
    store = root / "images"
    db = sqlite3.connect(f"file:{root / 'state.db'}?mode=ro", uri=True)
    found: list[str] = []
    rows = dict(db.execute("SELECT digest, state FROM images"))
    found += [f"row {digest} {state}" for digest, state in rows.items() if state != "published"]
    found += [f"staging {name}" for name in os.listdir(store / "staging")]
    wanted: dict[str, int] = {}
    for digest in rows:
        raw = (store / "layers" / f"{digest}.objects").read_bytes()
        for at in range(0, len(raw), 40):
            name = raw[at : at + 32].hex()
            wanted[name] = wanted.get(name, 0) + 1
        if hashlib.sha256((store / "layers" / f"{digest}.erofs").read_bytes()).hexdigest() != digest:
            found.append(f"layer {digest} is not what it is called")
    expected = {f"{digest}.{end}" for digest in rows for end in ("erofs", "objects")}
    found += [f"layers/{name}" for name in set(os.listdir(store / "layers")) ^ expected]
    present = {sub.name + file.name for sub in (store / "objects").iterdir() for file in sub.iterdir()}
    found += [f"object {name}" for name in present ^ wanted.keys()]
    for name in present:
        path = store / "objects" / name[:2] / name[2:]
        if path.stat().st_nlink != 1 or stat.S_IMODE(path.stat().st_mode) != 0o444:
            found.append(f"object {name} has links or a wrong mode")
        if hashlib.sha256(path.read_bytes()).hexdigest() != name:
            found.append(f"object {name} is damaged")
    counts = {bytes(digest).hex(): refs for digest, refs in db.execute("SELECT digest, refs FROM objects")}
    found += [f"count of {name}: {counts.get(name)} != {wanted.get(name)}"
              for name in counts.keys() | wanted.keys() if counts.get(name) != wanted.get(name)]
    named = {digest for (digest,) in db.execute("SELECT digest FROM image_names")}
    found += [f"name of {digest}" for digest in named - rows.keys()]
    db.close()
    return sorted(found)


def make_tree(root: Path, *, salt: str = "") -> None:
    """A directory with one of everything an image may hold."""
    (root / "etc").mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc/hostname").write_text(f"box{salt}\n")
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/tool").write_bytes(b"#!/bin/sh\necho hello\n" * 300)
    (root / "usr/bin/tool").chmod(0o4755)
    os.link(root / "usr/bin/tool", root / "usr/bin/alias")
    (root / "bin").symlink_to("usr/bin")
    (root / "dangling").symlink_to("/no/where/" + "x" * 200)
    (root / "empty").touch(mode=0o600)
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "large").write_bytes(os.urandom(3 << 20))
    with open(root / "sparse", "wb") as file:
        file.seek(5 << 20)
        file.write(b"after a hole")
        file.truncate(9 << 20)
    os.mkfifo(root / "pipe", 0o640)
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    odd = os.fsencode(root) + b"/odd \xff\n\xc3\xbc"
    with open(odd, "wb") as file:
        file.write(b"odd")
    (root / ("n" * 255)).write_text("long")
    os.setxattr(root / "etc/passwd", "user.note", b"line\nzero\0end=")
    # File capability cap_net_raw+ep, version 2 (include/uapi/linux/capability.h).
    os.setxattr(root / "usr/bin/tool", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    os.chown(root / "etc/hostname", 1000, 65535)
    os.chown(root / "dangling", 5, 6, follow_symlinks=False)
    for number, path in enumerate(sorted(root.rglob("*"), key=os.fsencode)):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + number * 7), follow_symlinks=False)
    os.utime(root / "empty", ns=(0, -5_250_000_000))
    os.utime(root, ns=(0, 1_500_000_000_000_000_001))


def fingerprint(root: Path) -> dict[bytes, tuple[object, ...]]:
    """Everything stat, readlink, read and listxattr tell about a tree, hard links as groups of names."""
    top = os.fsencode(root)
    names = [b""]
    for directory, subs, files in os.walk(top):
        names += [os.path.join(directory, name)[len(top) + 1 :] for name in subs + files]
    groups: dict[int, list[bytes]] = {}
    found: dict[bytes, tuple[object, ...]] = {}
    for name in sorted(names):
        path = os.path.join(top, name)
        info = os.lstat(path)
        content: object = None
        if stat.S_ISREG(info.st_mode):
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        elif stat.S_ISLNK(info.st_mode):
            content = os.readlink(path)
        keys = [key for key in os.listxattr(path, follow_symlinks=False) if not key.startswith("trusted.")]
        xattrs = {key: os.getxattr(path, key, follow_symlinks=False) for key in keys}
        links: object = None
        if not stat.S_ISDIR(info.st_mode) and info.st_nlink > 1:
            groups.setdefault(info.st_ino, []).append(name)
            links = (info.st_nlink, groups[info.st_ino])
        found[name] = (
            oct(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns,
            0 if stat.S_ISDIR(info.st_mode) else info.st_size, info.st_rdev, content, xattrs, links,
        )
    return found


def tar_bytes(members: Sequence[tuple[tarfile.TarInfo, bytes | None]]) -> bytes:
    """A PAX tar of members made by hand."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, None if data is None else io.BytesIO(data))
    return buffer.getvalue()


def resident_bytes(path: Path) -> int:
    """How much of a file is in the page cache (mincore(2))."""
    size = path.stat().st_size
    if size == 0:
        return 0
    pages = -(-size // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, access) as area:
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), vector) == 0
    return sum(entry & 1 for entry in vector) * mmap.PAGESIZE
