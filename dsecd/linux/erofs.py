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
    `trusted.overlay.*` attributes (PAX records `SCHILY.xattr.NAME`) tell OverlayFS where the data is.
    Raises ProcessFailed with what mkfs.erofs said; no image is left then.
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
