# SPDX-License-Identifier: Apache-2.0
"""The file tree of an image while it is being imported, held in memory.

What belongs here: putting members into the tree the way tar and OCI layers mean it (last one wins, whiteouts,
hard links), and every check of a member that needs no more than the member and the tree.  What does not: reading
archives or directories, contents of files, and the form in which a tree is stored.

A hostile archive cannot escape from a tree in memory: a name is a path of components below the root, never
resolved by the kernel.  Symbolic links on the way to a member are followed inside the tree, as tar does it in a
root of its own: '/' is the image's root, and '..' there stays there.  Nothing is written to the host's file system
under a name that an archive chose.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from libdsec.errors import InvalidSpec

#: Ids that exist in a sandbox's user namespace; other owners could not be mapped (user_namespaces(7)).
ID_LIMIT = 65536
NAME_MAX = 255  # include/uapi/linux/limits.h
SYMLINKS_MAX = 40  # followed for one path: path_resolution(7)
PATH_MAX = 4095  # the kernel's PATH_MAX without its NUL
XATTR_NAME_MAX = 255
#: All extended attributes of one inode; more than any of Linux's own file systems but XFS can hold.
XATTR_BYTES_MAX = 64 << 10

WHITEOUT_PREFIX = b".wh."
OPAQUE_WHITEOUT = b".wh..wh..opq"
AUFS_PREFIX = b".wh..wh."

#: Character devices that give a sandbox nothing it does not have: null, zero, full, random, urandom, tty, ptmx.
HARMLESS_DEVICES = frozenset({(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)})

Parts = tuple[bytes, ...]


class Kind(enum.Enum):
    """What a node is; the value is its type flag in a tar header (POSIX pax, ustar interchange format)."""

    FILE = b"0"
    SYMLINK = b"2"
    CHAR = b"3"
    BLOCK = b"4"
    DIR = b"5"
    FIFO = b"6"


@dataclass(slots=True, eq=False)
class Node:
    """One inode.  Two names of one hard-linked file are the same Node under two parents."""

    kind: Kind
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    #: SHA-256 of a file's contents, None for an empty file and for everything that is not a file.
    digest: bytes | None = None
    target: bytes = b""
    rdev: tuple[int, int] = (0, 0)
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    children: "dict[bytes, Node] | None" = None
    #: Which layer, counted from the bottom, put it there: whiteouts hide only what lies below their own layer.
    layer: int = 0

    @classmethod
    def directory(cls, *, layer: int = 0) -> "Node":
        """A directory nobody described: mode 0755, owned by root, dated 1970 so that it is the same every time."""
        return cls(Kind.DIR, children={}, layer=layer)


@dataclass(frozen=True)
class Limits:
    """How much one import may make of its source, so that a small archive cannot fill the host."""

    max_entries: int = 2_000_000
    #: Contents of all files, holes included, also of files that a later layer hides.
    max_bytes: int = 128 << 30
    #: Names, link targets and extended attributes together: what a tree takes in memory.
    max_metadata_bytes: int = 512 << 20


def show(parts: Parts | bytes) -> str:
    """A member's name for a message: quoted, never with raw control characters of hostile origin."""
    raw = parts if isinstance(parts, bytes) else b"/".join(parts)
    text = raw.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 200 else f"{text[:197]}...")


def refuse(parts: Parts | bytes, problem: str, hint: str | None = None) -> InvalidSpec:
    """The error for a member that cannot be imported, naming it."""
    return InvalidSpec(f"import member {show(parts)}: {problem}", hint=hint)


def split_name(name: bytes) -> Parts:
    """Split a member's name into components, as tar would below its target directory.  Raises InvalidSpec.

    A leading slash and '.' components mean nothing; '..' is refused even where it would stay inside.
    """
    if b"\0" in name:
        raise refuse(name, "its name contains a NUL byte")
    if len(name) > PATH_MAX:
        raise refuse(name, f"its name is {len(name)} bytes long, at most {PATH_MAX} are possible")
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    for part in parts:
        if part == b"..":
            raise refuse(name, "its name contains '..'")
        if len(part) > NAME_MAX:
            raise refuse(name, f"a component of its name is {len(part)} bytes long, at most {NAME_MAX} are possible")
    return parts


def check_node(parts: Parts, node: Node) -> None:
    """Refuse what must not come in from outside, whatever the source.  Raises InvalidSpec naming the member."""
    for word, value in (("uid", node.uid), ("gid", node.gid)):
        if not 0 <= value < ID_LIMIT:
            raise refuse(
                parts, f"its {word} is {value}, a sandbox has only 0 to {ID_LIMIT - 1}",
                "change the owner before making the archive",
            )
    length = sum(map(len, parts)) + len(parts)
    if length > PATH_MAX:
        raise refuse(parts, f"its name is {length} bytes long, at most {PATH_MAX} are possible")
    if not 0 <= node.mode <= 0o7777:
        raise refuse(parts, f"its mode is {node.mode:#o}, expected at most 0o7777")
    if not -(1 << 62) < node.mtime_ns < 1 << 62:
        raise refuse(parts, "its modification time does not fit 64 bits of nanoseconds")
    if node.kind is Kind.SYMLINK and (not node.target or b"\0" in node.target or len(node.target) > PATH_MAX):
        raise refuse(parts, f"its link target must have 1 to {PATH_MAX} bytes without NUL, has {len(node.target)}")
    if node.kind in (Kind.CHAR, Kind.BLOCK):
        _check_device(parts, node)
    _check_xattrs(parts, node.xattrs)


def _check_device(parts: Parts, node: Node) -> None:
    major, minor = node.rdev
    if node.kind is Kind.CHAR and node.rdev == (0, 0):
        raise refuse(parts, "character device 0:0 is OverlayFS's mark of a deleted file, not a device")
    if node.kind is Kind.BLOCK or node.rdev not in HARMLESS_DEVICES:
        word = "block" if node.kind is Kind.BLOCK else "character"
        raise refuse(
            parts, f"{word} device {major}:{minor} would reach the host's hardware",
            "leave devices out of the archive; every sandbox gets its own /dev",
        )


def _check_xattrs(parts: Parts, xattrs: tuple[tuple[bytes, bytes], ...]) -> None:
    # trusted.overlay.* steers OverlayFS: a planted redirect would read another image's file.  security.* other
    # than file capabilities belongs to the host's security modules, system.* other than ACLs to the kernel.
    total = 0
    for name, value in xattrs:
        allowed = (
            name.startswith(b"user.") and not name.startswith(b"user.overlay.")
        ) or name in (b"security.capability", b"system.posix_acl_access", b"system.posix_acl_default")
        if not allowed or b"\0" in name or len(name) > XATTR_NAME_MAX:
            raise refuse(
                parts, f"extended attribute {show(name)} is not accepted",
                "only user.*, security.capability and POSIX ACLs may come in an image",
            )
        total += len(name) + len(value)
    if total > XATTR_BYTES_MAX:
        raise refuse(parts, f"its extended attributes take {total} bytes, at most {XATTR_BYTES_MAX} are possible")


class Tree:
    """An image's files.  Layers are applied from the bottom up: `start_layer` before each but the first."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.root = Node.directory()
        self.layer = 0
        #: Members and bytes taken so far, shadowed ones included: what the limits bound.
        self.entries = 0
        self.bytes = 0
        self.metadata_bytes = 0

    def start_layer(self) -> None:
        """From here on members belong to the next layer above."""
        self.layer += 1

    def claim(self, parts: Parts, size: int) -> None:
        """Count one member of `size` bytes against the limits, before its contents are read.  Raises InvalidSpec."""
        self.entries += 1
        self.bytes += size
        if self.entries > self.limits.max_entries:
            raise refuse(parts, f"more than {self.limits.max_entries} members", "raise images.max_entries")
        if size < 0 or self.bytes > self.limits.max_bytes:
            raise refuse(
                parts, f"with its {size} bytes the contents exceed {self.limits.max_bytes} bytes",
                "raise images.max_bytes",
            )

    def put(self, parts: Parts, node: Node) -> None:
        """Add a member; what had its name is replaced, but a directory keeps its children under a directory.

        Symbolic links on the way are followed, one that has the member's own name is replaced.  Raises InvalidSpec
        if the member is refused or lies below something that is not a directory.
        """
        check_node(parts, node)
        self._claim_metadata(parts, node)
        node.layer = self.layer
        if node.kind is Kind.DIR and node.children is None:
            node.children = {}
        if not parts:
            if node.kind is not Kind.DIR:
                raise refuse(b"/", "the root of an image must be a directory")
            node.children = self.root.children
            self.root = node
            return
        siblings = self._directory(parts)
        old = siblings.get(parts[-1])
        if node.kind is Kind.DIR and old is not None and old.kind is Kind.DIR:
            node.children = old.children
        siblings[parts[-1]] = node

    def link(self, parts: Parts, target: Parts) -> None:
        """Give the file at `target` a second name.  Raises InvalidSpec if there is no such file."""
        node = self.find(target)
        if node is None or node.kind is Kind.DIR:
            what = "is a directory" if node is not None else "is not in the image"
            raise refuse(parts, f"it is a hard link to {show(target)}, which {what}")
        self.link_node(parts, node)

    def link_node(self, parts: Parts, node: Node) -> None:
        """Give a node another name."""
        if not parts:
            raise refuse(b"/", "the root of an image must be a directory")
        self._directory(parts)[parts[-1]] = node

    def whiteout(self, parts: Parts, name: bytes) -> None:
        """Apply the whiteout `name` of a layer in directory `parts` (OCI image spec, layer.md)."""
        way, broken = self._follow((*parts, name))
        directory = None if broken else self.find(way[:-1])
        if directory is None or directory.children is None:
            return
        if name == OPAQUE_WHITEOUT:
            self._prune(directory)
            return
        hidden = name.removeprefix(WHITEOUT_PREFIX)
        if hidden in (b"", b".", b".."):
            raise refuse((*parts, name), "it hides no file")
        node = directory.children.get(hidden)
        if node is None:
            return
        self._prune(node)
        if node.layer < self.layer and not node.children:
            del directory.children[hidden]

    def find(self, parts: Parts) -> Node | None:
        """The node at a path; symbolic links on the way to its last component are followed, the last is not."""
        node: Node | None = self.root
        for depth, part in enumerate(parts):
            if node is None or node.children is None:
                return None
            node = node.children.get(part)
            if node is not None and node.kind is Kind.SYMLINK and depth < len(parts) - 1:
                way, broken = self._follow(parts)
                return None if broken else self.find(way)
        return node

    def resolve(self, parts: Parts) -> Parts:
        """`parts` without symbolic links on the way to its last component.

        Raises InvalidSpec if one leads nowhere.  What comes after the links need not be there yet.
        """
        way, broken = self._follow(parts)
        if broken:
            raise refuse(parts, broken)
        return way

    def walk(self) -> Iterator[tuple[bytes, Node]]:
        """Every name below the root with its node, parents first, in byte order of each directory's names."""
        stack: list[tuple[bytes, Node]] = [(b"", self.root)]
        while stack:
            path, node = stack.pop()
            if path:
                yield path, node
            if node.children:
                prefix = path + b"/" if path else b""
                stack.extend((prefix + name, node.children[name]) for name in sorted(node.children, reverse=True))

    def graft(self, prefix: Parts) -> None:
        """Move the whole tree below `prefix`, whose ancestors are plain directories."""
        for name in reversed(prefix):
            parent = Node.directory()
            parent.children = {name: self.root}
            self.root = parent

    def _claim_metadata(self, parts: Parts, node: Node) -> None:
        own = sum(len(name) + len(value) for name, value in node.xattrs) + len(node.target)
        self.metadata_bytes += own + (len(parts[-1]) if parts else 0)
        if self.metadata_bytes > self.limits.max_metadata_bytes:
            raise refuse(
                parts, f"names, link targets and attributes exceed {self.limits.max_metadata_bytes} bytes in all"
            )

    def _directory(self, parts: Parts) -> dict[bytes, Node]:
        """The children of the directory that holds `parts`, missing ancestors made."""
        node = self.root
        for depth, part in enumerate(parts[:-1]):
            assert node.children is not None
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = Node.directory(layer=self.layer)
            elif child.kind is Kind.SYMLINK:
                return self._directory(self.resolve(parts))
            elif child.kind is not Kind.DIR:
                raise refuse(
                    parts, f"it lies below {show(parts[: depth + 1])}, which is a {child.kind.name.lower()}"
                )
            node = child
        assert node.children is not None
        return node.children

    def _follow(self, parts: Parts) -> tuple[Parts, str]:
        """See `resolve`; the second value says what is wrong, "" for nothing (path_resolution(7))."""
        way: list[tuple[bytes, Node | None]] = []
        # What is still to be walked, the next one last, and the link it comes from.
        pending: list[tuple[bytes, Parts | None]] = [(part, None) for part in reversed(parts[:-1])]
        followed = length = 0
        while pending:
            part, link = pending.pop()
            if part == b"..":
                length -= len(way.pop()[0]) + 1 if way else 0
                continue
            above = way[-1][1] if way else self.root
            child = above.children.get(part) if above is not None and above.children is not None else None
            here = (*(name for name, _ in way), part) if link is None else link
            if child is not None and child.kind is Kind.SYMLINK:
                followed += 1
                if followed > SYMLINKS_MAX:
                    return parts, f"more than {SYMLINKS_MAX} symlinks lie on the way to it"
                if child.target.startswith(b"/"):
                    way, length = [], 0
                pending += [(p, here) for p in reversed(child.target.split(b"/")) if p not in (b"", b".")]
                continue
            if link is not None and (child is None or child.kind is not Kind.DIR):
                return parts, f"it lies below {show(link)}, a symlink that leads to no directory in the image"
            way.append((part, child))
            length += len(part) + 1
            if length + len(parts[-1]) > PATH_MAX:
                return parts, f"its name is over {PATH_MAX} bytes long when the symlinks on the way are followed"
        return (*(name for name, _ in way), *parts[-1:]), ""

    def _prune(self, top: Node) -> None:
        """Remove everything below `top` that a lower layer put there; directories that keep something stay."""
        order: list[Node] = []
        stack = [top]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(child for child in (node.children or {}).values() if child.children)
        for node in reversed(order):
            for name, child in list((node.children or {}).items()):
                if child.layer < self.layer and not child.children:
                    assert node.children is not None
                    del node.children[name]
