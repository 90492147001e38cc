# SPDX-License-Identifier: Apache-2.0
"""EROFS images: made by mkfs.erofs from a tar of headers, mounted straight from the file.

What belongs here: the flags, and the mount.  What does not: which files an image holds and where their data
is.
"""

import errno
import os
from pathlib import Path

from dsecd.linux import mount as mounts
from dsecd.linux import proc

#: The UUID of every image, so that the same tree makes the same bytes.
IMAGE_UUID = "6473ec00-0000-4000-8000-000000000001"


def make_index(headers: Path, image: Path, *, timeout_s: float = 600) -> None:
    """Write the metadata image of a "headerball": a PAX tar whose members have sizes but no content.  Blocks.

    The result is a function of `headers` alone, byte by byte.  Regular files become size-correct stubs whose
    `trusted.overlay.*` attributes (PAX records `SCHILY.xattr.NAME`) tell OverlayFS where the data is; read
    without OverlayFS they are zeros.  Raises ProcessFailed with what mkfs.erofs said; no image is left then.

    Where mkfs.erofs 1.8.6 differs from what a writer of tar archives expects:

    - A directory that has no member of its own, the root ("." or "./") too, gets mode 0777 and owner 0.
    - The fraction of a PAX `mtime` counts nanoseconds: "7.5" is 7 s and 5 ns, and more than nine digits spoil
      the seconds.  Write nine digits, always; before 1970 the fraction is added, so -5.25 s is "-6.750000000".
    - A hard link must come after the member it names (else "No such file or directory").
    - An absolute name crashes it; ".." is resolved, not refused; of two members with one name the last wins.
    - The name of an attribute ends at its first "=".  Attributes outside user., trusted., security. and the POSIX
      ACLs are dropped without a word, and one file's may take about 32,000 bytes in all ("Input/output error").
      `LIBARCHIVE.xattr` records are refused.
    - An id above 4,294,967,295 is cut to its low 32 bits.
    - `.wh.` names stay ordinary files (no --aufs): whiteouts must be character devices 0/0.
    """
    argv: list[str | Path] = [
        "mkfs.erofs", "--quiet",
        # -T alone would give every file that time; --mkfs-time restricts it to the superblock.
        "-T0", "--mkfs-time", f"-U{IMAGE_UUID}",
        "--tar=headerball", image, headers,
    ]
    try:
        proc.run_blocking(argv, timeout_s=timeout_s)
    except BaseException:
        image.unlink(missing_ok=True)
        raise


def make_whole(tree: Path, image: Path, *, timeout_s: float = 3600) -> None:
    """Write an image that holds a directory tree with its content, for a machine that maps it.  Blocks.

    Nothing is compressed, and no file lies inside its inode: only whole blocks can be mapped (DAX).  Raises
    ProcessFailed with what mkfs.erofs said; no image is left then.
    """
    argv: list[str | Path] = [
        "mkfs.erofs", "--quiet", "-T0", "--mkfs-time", f"-U{IMAGE_UUID}", "-b4096", "-Enoinline_data",
        image, tree,
    ]
    try:
        proc.run_blocking(argv, timeout_s=timeout_s)
    except BaseException:
        image.unlink(missing_ok=True)
        raise


def mount(image: Path) -> int:
    """Read-only mount of an image file, without a loop device: a detached mount fd.

    Needs Linux 6.12 with CONFIG_EROFS_FS_BACKED_BY_FILE.  Raises OSError: ENOTBLK where the kernel lacks
    that, EINVAL if the file is no EROFS image or its file system cannot back one.
    """
    with mounts.source_path(image) as source:
        try:
            return mounts.new_mount("erofs", source=source, options={"ro": None})
        except OSError as error:
            if error.errno != errno.ENOTBLK:
                raise
            text = "mount erofs: block devices only here (needs 6.12 with CONFIG_EROFS_FS_BACKED_BY_FILE)"
            raise OSError(error.errno, text, os.fspath(image)) from error
