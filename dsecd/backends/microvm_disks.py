# SPDX-License-Identifier: Apache-2.0
"""What of a microVM survives a stop: the disk that it writes to, and its link to its environment.

What belongs here: one method for each step and one for its undo, which works from the box's id alone. What does not:
what runs (``microvm_steps.py``), how disks and environments are made (``vmdisk.py``, ``environments.py``).
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from dsecd.backends import vmdisk
from dsecd.backends.base import Box, Site, translated
from dsecd.backends.environments import Environments
from dsecd.backends.plan import in_thread
from dsecd.backends.trash import Trash
from dsecd.linux import sparse

#: What a machine is started with, beside its disk and its environment.
NOTED = "machine"
BOOT_FILES = ("kernel", "initramfs", NOTED)
_TRASH_WAIT_S = 5.0


class MicrovmDisks:
    """The directories of all microVMs below the state directory."""

    def __init__(self, site: Site) -> None:
        self._settings = site.machines
        self._templates = site.state_dir / "guest"
        self.directory = site.state_dir / "vms"
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._environments = Environments(
            site.state_dir / "environments", objects_dir=site.objects_dir, stage=site.runtime_dir / "compose",
            launch_ns=site.launch_ns, kept_bytes=self._settings.kept_environments_bytes,
        )  # fmt: skip
        self._trash = Trash(site.state_dir / "trash-vms")
        # Copies are made while their origin is being written and used; what an earlier daemon left there is nobody's.
        self._origins = site.state_dir / "origins"
        shutil.rmtree(self._origins, ignore_errors=True)
        self._origins.mkdir(mode=0o700)
        self._numbers = itertools.count()

    def disk(self, box: Box) -> Path:
        return self.directory / box.id / "disk"

    def environment(self, box: Box) -> Path:
        return self.directory / box.id / "environment"

    def boot_file(self, box: Box, name: str) -> Path:
        """What it was last started with: a copy of it has to be started with the same."""
        return self.directory / box.id / name

    async def make(self, box: Box) -> None:
        with translated(f"create '{box.id}'"):
            await in_thread(self._make, box)

    def _make(self, box: Box) -> None:
        (self.directory / box.id).mkdir(mode=0o700)
        if box.origin is not None:
            sparse.copy(box.origin / "disk", self.disk(box))
        else:
            vmdisk.make(self._templates, self.disk(box), self._settings.disk_bytes)

    async def trash(self, box: Box) -> None:
        with translated(f"remove the files of '{box.id}'"):
            await self._trash.take(self.directory / box.id, _TRASH_WAIT_S)

    async def link_environment(self, box: Box) -> None:
        with translated(f"create '{box.id}'"):
            if box.origin is not None:
                self.environment(box).hardlink_to(box.origin / "environment")
                return
            await self._environments.link(box.layers, self.environment(box))
            if not self._settings.share_layers:
                await in_thread(_unshare, self.environment(box))

    def begin_origin(self, box: Box) -> Path:
        """A directory with copies of its files, for a box that stands still. Blocks."""
        folder = self._origins / f"{box.id}-{next(self._numbers)}"
        folder.mkdir(mode=0o700)
        sparse.copy(self.disk(box), folder / "disk")
        for path in (self.environment(box), *(self.boot_file(box, name) for name in BOOT_FILES)):
            (folder / path.name).hardlink_to(path)
        return folder

    async def discard(self, origin: Path) -> None:
        await self._trash.take(origin, _TRASH_WAIT_S)


def _unshare(path: Path) -> None:
    """Give a sandbox a file of its own. Blocks."""
    copy = path.with_suffix(".own")
    sparse.copy(path, copy, 0o444)
    copy.rename(path)
