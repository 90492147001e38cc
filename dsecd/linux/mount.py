# SPDX-License-Identifier: Apache-2.0
"""Mounts as file descriptors: clone, idmap, make, attach, detach, and what is mounted where.

What belongs here: the new mount API (fsopen, fsmount, open_tree, move_mount, mount_setattr) and mountinfo.
What does not: which file system with which options (erofs, overlay) and mount namespaces (mountns).

A mount fd stands for a mount that is not attached anywhere yet: closing it unmounts.  Attached mounts belong
to the mount namespace of the calling thread.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsecd.linux import syscalls

#: The kernel cuts a string option here: fsconfig(2) answers EINVAL for a longer one.
MAX_OPTION_BYTES = 255

Options = Mapping[str, str | None] | Iterable[tuple[str, str | None]]


@dataclass(frozen=True)
class Mount:
    """One line of /proc/PID/mountinfo, octal escapes decoded.  proc_pid_mountinfo(5)."""

    mount_id: int
    parent_id: int
    device: str
    root: str
    target: Path
    options: tuple[str, ...]
    propagation: tuple[str, ...]
    fstype: str
    source: str
    super_options: tuple[str, ...]


def clone_tree(path: syscalls.StrPath, *, recursive: bool = False) -> int:
    """Detached copy of the mount at `path`, seen from `path` down: a mount fd.

    Mounts below come with `recursive`.
    """
    flags = syscalls.OPEN_TREE_CLONE | (syscalls.AT_RECURSIVE if recursive else 0)
    return syscalls.open_tree(syscalls.AT_FDCWD, path, flags)


def idmap(mount_fd: int, userns_fd: int) -> None:
    """Map a detached mount's ids through a user namespace: 0 on disk appears as what 0 in there is outside.

    EINVAL: the file system cannot be idmapped (OverlayFS, FUSE, NFS) or the mount is attached; EPERM: the
    namespace is the initial one.
    """
    syscalls.mount_setattr(
        mount_fd, "", syscalls.AT_EMPTY_PATH, attr_set=syscalls.MOUNT_ATTR_IDMAP, userns_fd=userns_fd
    )


def set_attrs(mount_fd: int, *, attr_set: int = 0, attr_clr: int = 0, recursive: bool = False) -> None:
    """Set and clear MOUNT_ATTR_* of the mount behind `mount_fd`, attached or not."""
    flags = syscalls.AT_EMPTY_PATH | (syscalls.AT_RECURSIVE if recursive else 0)
    syscalls.mount_setattr(mount_fd, "", flags, attr_set=attr_set, attr_clr=attr_clr)


def attach(mount_fd: int, target: Path) -> None:
    """Put a detached mount on `target`, in the calling thread's mount namespace.

    The fd may be closed after.
    """
    try:
        syscalls.move_mount(mount_fd, "", syscalls.AT_FDCWD, target, syscalls.MOVE_MOUNT_F_EMPTY_PATH)
    except OSError as error:
        raise OSError(error.errno, f"attach mount: {os.strerror(error.errno or 0)}", str(target)) from error


def make_private(path: syscalls.StrPath, *, recursive: bool = True) -> None:
    """Stop mount events passing in and out of the mounts at and (unless told otherwise) below `path`."""
    syscalls.mount(None, path, None, syscalls.MS_PRIVATE | (syscalls.MS_REC if recursive else 0))


def detach(path: syscalls.StrPath) -> None:
    """Unmount `path` at once, also when it is busy: what is open stays usable until closed (MNT_DETACH)."""
    syscalls.umount2(path, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)


def new_mount(
    fstype: str, *, source: syscalls.StrPath | None = None, options: Options = (), attrs: int = 0
) -> int:
    """A new file system instance as a detached mount fd.

    `options` are set in order; a pair list allows a key to repeat; None as the value means a flag.  `attrs`
    are MOUNT_ATTR_*.  Raises OSError whose text holds what the kernel said about it; ENODEV without that file
    system.
    """
    pairs = list(options.items()) if isinstance(options, Mapping) else list(options)
    context = syscalls.fsopen(fstype)
    try:
        if source is not None:
            syscalls.fsconfig_set_string(context, "source", source)
        for key, value in pairs:
            if value is None:
                syscalls.fsconfig_set_flag(context, key)
            else:
                syscalls.fsconfig_set_string(context, key, value)
        syscalls.fsconfig_create(context)
        return syscalls.fsmount(context, attrs)
    except OSError as error:
        said = "; ".join(_context_log(context))
        wrong = f"{said}: " if said else ""
        text = f"mount {fstype}: {wrong}{os.strerror(error.errno or 0)}"
        raise OSError(error.errno, text, error.filename or source) from error
    finally:
        os.close(context)


@contextlib.contextmanager
def source_path(path: Path) -> Iterator[Path]:
    """`path` in a form that fsconfig takes as a string: itself, or a short alias of it while the block lasts.

    Too long a string is refused, and OverlayFS reads a backslash in some options as an escape.  The alias
    goes through an open fd of this process, so it must be used on this machine's own /proc.
    """
    text = os.fsencode(path)
    if len(text) <= MAX_OPTION_BYTES and b"\\" not in text:
        yield path
        return
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        yield syscalls.path_of_fd(fd)
    finally:
        os.close(fd)


def _context_log(context: int) -> list[str]:
    """What the kernel noted on a file system context: one message per read, each after "e " or the like."""
    messages: list[str] = []
    # ENODATA is the end of the list; a message longer than the buffer is EMSGSIZE and lost.
    with contextlib.suppress(OSError):
        while len(messages) < 16:
            text = os.read(context, 4096).decode("utf-8", "replace").strip()
            messages.append(text[2:] if text[1:2] == " " else text)
    return messages


def mountinfo(pid: int | str = "self") -> list[Mount]:
    """The mounts process `pid` sees, "thread-self" for those of the calling thread, in the kernel's order.

    Raises ProcessLookupError when the process is gone.
    """
    try:
        text = Path(f"/proc/{pid}/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError as error:
        # A zombie has no mounts any more: EINVAL on read.
        if error.errno in (errno.ENOENT, errno.EINVAL, errno.ESRCH):
            raise ProcessLookupError(errno.ESRCH, f"read mounts: no process {pid}") from error
        raise
    return parse_mountinfo(text)


def parse_mountinfo(text: str) -> list[Mount]:
    """Parse the content of a mountinfo file; raises ValueError on a line that is none."""
    # Not splitlines(): a path may hold any byte the kernel does not escape, a form feed say.
    return [_parse_line(line) for line in text.split("\n") if line]


def _parse_line(line: str) -> Mount:
    fields = line.split(" ")
    try:
        dash = fields.index("-", 6)
        return Mount(
            mount_id=int(fields[0]), parent_id=int(fields[1]), device=fields[2], root=_unescape(fields[3]),
            target=Path(_unescape(fields[4])), options=tuple(fields[5].split(",")),
            propagation=tuple(fields[6:dash]), fstype=fields[dash + 1], source=_unescape(fields[dash + 2]),
            super_options=tuple(_unescape(option) for option in fields[dash + 3].split(",")),
        )
    except (IndexError, ValueError) as error:
        raise ValueError(f"parse mountinfo line {line!r}: {error}") from error


def _unescape(text: str) -> str:
    """Undo the kernel's \\ooo; it escapes single bytes, and those it does are all ASCII."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
