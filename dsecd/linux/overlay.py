# SPDX-License-Identifier: Apache-2.0
"""OverlayFS mounts with metadata-only layers whose file data lies in data-only layers.

What belongs here: the mount and its traps.  What does not: which layers, and making upper and work
directories.  Linux documentation, filesystems/overlayfs: "Metadata only copy up", "Data-only lower layers".
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsecd.linux import mount as mounts
from dsecd.linux import syscalls

#: More lower layers than this are refused by the kernel.
MAX_LAYERS = 500

#: What mountinfo shows as the source of our mounts.
_SOURCE = "dsec"


def mount(
    *, lower: Sequence[Path], data: Sequence[Path], upper: Path | None, work: Path | None, fsuid: int | None,
    volatile: bool = False,
) -> int:
    """Stack `lower` (first is on top) over `data` directories under a writable `upper`: a detached mount fd.

    Without `upper` the mount is read-only and needs at least two layers in all.  `fsuid` is the id, outside,
    that owns upper and work when they are idmapped: OverlayFS keeps the mounter's ids for its own work, and
    an id that the mapping does not know cannot create files (EOVERFLOW).  Layers must be attached somewhere
    in the calling thread's mount namespace; they may be detached afterwards.

    `volatile` ignores fsync in the mount, and unmounting it writes nothing back: with 50 MB just written that
    took 0.3 ms instead of up to 30.  A power loss may then damage upper, so the kernel refuses the same work
    directory a second time until forget_volatile.

    Raises OSError with the kernel's reason; EROFS if the kernel mounted read-only what was to be writable.
    """
    options: list[tuple[str, str | None]] = []
    with contextlib.ExitStack() as stack:
        def add(key: str, path: Path) -> None:
            options.append((key, os.fspath(stack.enter_context(mounts.source_path(path)))))

        for path in lower:
            add("lowerdir+", path)
        for path in data:
            add("datadir+", path)
        if upper is not None and work is not None:
            add("upperdir", upper)
            add("workdir", work)
        elif upper is not None or work is not None:
            raise ValueError("overlay: upper and work go together")
        if volatile:
            options.append(("volatile", None))
        # With a writable upper, metacopy=on refuses redirect_dir=follow (EINVAL); on is not allowed without
        # one.
        options += [("metacopy", "on"), ("redirect_dir", "on" if upper is not None else "follow")]
        try:
            with acting_as(fsuid) if fsuid is not None else contextlib.nullcontext():
                fd = mounts.new_mount("overlay", source=_SOURCE, options=options)
        except OSError as error:
            if error.filename != _SOURCE:
                raise  # It names the option and the layer that was refused.
            raise OSError(error.errno, error.strerror, os.fspath(upper or (*lower, Path())[0])) from error
    if upper is not None and os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        # When the kernel cannot create its directory below work, it only notes that in its log and goes on.
        os.close(fd)
        text = "mount overlay: the kernel made it read-only (its directory in work could not be created)"
        raise OSError(errno.EROFS, text, os.fspath(work or ""))
    return fd


def forget_volatile(work: Path) -> None:
    """Allow `work` of an earlier volatile mount to be mounted again; absent is fine.

    Only after the file system has been synchronized, or when the content need not have survived a power loss.
    """
    mark = work / "work" / "incompat" / "volatile"
    (mark / "dirty").unlink(missing_ok=True)
    try:
        mark.rmdir()
    except FileNotFoundError:
        return


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """The calling thread acts on files as `uid`, keeping its capabilities, until the block ends."""
    before = syscalls.prctl(syscalls.PR_GET_SECUREBITS)
    # Without this the switch to a uid other than 0 takes CAP_DAC_OVERRIDE and its like away.
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, before | syscalls.SECBIT_NO_SETUID_FIXUP)
    try:
        old_gid, old_uid = syscalls.setfsgid(uid), syscalls.setfsuid(uid)
        try:
            if syscalls.setfsuid(-1) != uid or syscalls.setfsgid(-1) != uid:
                text = f"setfsuid {uid}: not permitted (CAP_SETUID or CAP_SETGID is missing)"
                raise PermissionError(errno.EPERM, text)
            yield
        finally:
            syscalls.setfsuid(old_uid)
            syscalls.setfsgid(old_gid)
    finally:
        syscalls.prctl(syscalls.PR_SET_SECUREBITS, before)
