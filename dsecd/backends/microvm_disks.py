# SPDX-License-Identifier: Apache-2.0
"""What of a microVM survives a stop: the disk that it writes to, and its link to its environment.

What belongs here: one method for each step and one for its undo, which works from the box's id alone. What does not:
what runs (``microvm_steps.py``), how disks and environments are made (``vmdisk.py``, ``environments.py``).
"""

from __future__ import annotations

from pathlib import Path

from dsecd.backends import vmdisk
from dsecd.backends.base import Box, Site, translated
from dsecd.backends.environments import Environments
from dsecd.backends.plan import in_thread
from dsecd.backends.trash import Trash
from dsecd.linux import sparse

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

    def disk(self, box: Box) -> Path:
        return self.directory / box.id / "disk"

    def environment(self, box: Box) -> Path:
        return self.directory / box.id / "environment"

    async def make(self, box: Box) -> None:
        with translated(f"create '{box.id}'"):
            await in_thread(self._make, box)

    def _make(self, box: Box) -> None:
        (self.directory / box.id).mkdir(mode=0o700)
        vmdisk.make(self._templates, self.disk(box), self._settings.disk_bytes)

    async def trash(self, box: Box) -> None:
        with translated(f"remove the files of '{box.id}'"):
            await self._trash.take(self.directory / box.id, _TRASH_WAIT_S)

    async def link_environment(self, box: Box) -> None:
        with translated(f"create '{box.id}'"):
            await self._environments.link(box.layers, self.environment(box))
            if not self._settings.share_layers:
                await in_thread(_unshare, self.environment(box))


def _unshare(path: Path) -> None:
    """Give a sandbox a file of its own. Blocks."""
    copy = path.with_suffix(".own")
    sparse.copy(path, copy, 0o444)
    copy.rename(path)
