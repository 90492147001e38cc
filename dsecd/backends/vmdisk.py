# SPDX-License-Identifier: Apache-2.0
"""The disks that virtual machines write to: raw, sparse files with an empty ext4 in them.

What belongs here: making one. What does not: the device that shows it to a guest (``dsecd.vmm``).

Each is a copy of a template of its size, which takes no time: an empty file system is a few hundred KiB of data.
"""

from __future__ import annotations

import os
from pathlib import Path

from dsecd.linux import proc, sparse

_MKFS_S = 60.0
# A small journal: a monitor may be killed at any moment, and what was synced is to be there at the next start. Tables
# are left unwritten, to keep the file sparse.
_MKFS = (
    "mkfs.ext4", "-q", "-F", "-O", "^resize_inode", "-J", "size=4", "-m", "0",
    "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard",
)  # fmt: skip


def make(template_dir: Path, target: Path, size_bytes: int) -> None:
    """Make a disk. Blocks. Raises OSError, proc.ProcessFailed; FileExistsError when there is one."""
    template = template_dir / f"disk-{size_bytes}.ext4"
    if not template.exists():
        _make_template(template, size_bytes)
    sparse.copy(template, target)


def _make_template(template: Path, size_bytes: int) -> None:
    template.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = template.with_suffix(f".{os.getpid()}.tmp")
    try:
        with partial.open("xb") as file:
            file.truncate(size_bytes)
        proc.run_blocking([*_MKFS, partial], timeout_s=_MKFS_S)
        partial.rename(template)
    finally:
        partial.unlink(missing_ok=True)
