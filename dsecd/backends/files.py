# SPDX-License-Identifier: Apache-2.0
"""Files and descriptors that backends share.

What belongs here: descriptors that close themselves, removing trees a sandbox made, the few files a sandbox
is given. What does not: anything of the images (``dsecd.core.images``).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from dsecd.linux import mount, overlay, proc, syscalls
from dsecd.linux.fd import closing as closing

_REMOVE_TIMEOUT_S = 3600.0
# How deep and how large a tree may be that the daemon removes itself.
_LEVELS, _ENTRIES = 24, 4000
_INSIDE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def opened(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> contextlib.AbstractContextManager[int]:
    """A descriptor of ``path`` for the length of the block, close-on-exec."""
    return closing(os.open(path, os.O_CLOEXEC | flags, mode))


def idmapped_clone(path: Path, userns_fd: int) -> contextlib.AbstractContextManager[int]:
    """A detached clone of the mount at ``path`` that shows its ids as the user namespace maps them."""
    fd = mount.clone_tree(path)
    try:
        mount.idmap(fd, userns_fd)
    except OSError:
        os.close(fd)
        raise
    return closing(fd)


def remove_tree(path: Path) -> None:
    """Remove a tree that hostile code may have made. Blocks. Runs in a thread.

    The usual small one here, which saves a process. Each level costs a descriptor, of which the daemon has only so
    many, and each entry the interpreter's lock: what is deep or large is left to rm(1), which has bounds of its own.
    """
    try:
        with opened(path, os.O_DIRECTORY | os.O_NOFOLLOW) as top:
            _empty(top, _LEVELS, iter(range(_ENTRIES)))
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError:
        proc.run_blocking(["rm", "-rf", "--one-file-system", "--", path], timeout_s=_REMOVE_TIMEOUT_S)


def _empty(directory: int, levels: int, budget: Iterator[int]) -> None:
    """Remove what is in a directory, as far as both limits allow. Raises OSError where they do not."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if next(budget, None) is None or levels == 0:
                raise OSError(errno.E2BIG, "tree is large")
            if entry.is_dir(follow_symlinks=False):
                with closing(os.open(entry.name, _DIRECTORY_FLAGS, dir_fd=directory)) as below:
                    _empty(below, levels - 1, budget)
                os.rmdir(entry.name, dir_fd=directory)
            else:
                os.unlink(entry.name, dir_fd=directory)


def add_hosts_file(root: Path, hostname: str, uid: int) -> None:
    """Write /etc/hosts into a mounted tree unless there is something of that name. Blocks."""
    with contextlib.suppress(OSError), _etc(root) as etc, overlay.acting_as(uid):
        _add(etc, "hosts", f"127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\t{hostname}\n")


def add_resolv_conf(root: Path, upper: Path, server: str, uid: int) -> None:
    """Write /etc/resolv.conf into a mounted tree over what an image has there, which is of another machine. Blocks.

    One that the sandbox itself has made or removed, and so is in its writable layer, stays as it is.
    """
    with contextlib.suppress(OSError):
        with _etc(upper) as etc:
            os.stat("resolv.conf", dir_fd=etc, follow_symlinks=False)
            return
    with contextlib.suppress(OSError), _etc(root) as etc, overlay.acting_as(uid):
        with contextlib.suppress(FileNotFoundError):
            os.unlink("resolv.conf", dir_fd=etc)
        _add(etc, "resolv.conf", f"nameserver {server}\n")


def _etc(root: Path) -> contextlib.AbstractContextManager[int]:
    """The tree's /etc. The tree is hostile: that may be a link to anywhere, and is resolved inside. Raises OSError."""
    with opened(root, os.O_PATH | os.O_DIRECTORY) as tree:
        return closing(syscalls.openat2(tree, "etc", flags=_DIRECTORY_FLAGS & ~os.O_NOFOLLOW, resolve=_INSIDE))


def _add(directory: int, name: str, content: str) -> None:
    """Write a file that is not there yet. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with closing(os.open(name, flags, 0o644, dir_fd=directory)) as fd:
        os.write(fd, content.encode())
