# SPDX-License-Identifier: Apache-2.0
"""Environments as one EROFS image each, which virtual machines map: base, workspace and toolkits merged.

What belongs here: building them once, and keeping them while somebody uses them. What does not: the layers that they
are made of (``dsecd.core.images``), the devices that show them to guests (``dsecd.vmm``).

An environment's file is named by its layers, and whoever uses it holds a hard link: the links are the count of its
users, which no crash can falsify. All machines of an environment map the same file, so its pages are in the host's
memory once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

from dsecd.backends import files
from dsecd.backends.plan import in_thread
from dsecd.linux import erofs, mount, mountns, overlay
from dsecd.vmm.base import ALIGN_BYTES

_BUILDS_AT_ONCE = 2


class Environments:
    """The directory of all environments of this host; used on the event loop's thread."""

    def __init__(self, directory: Path, *, objects_dir: Path, stage: Path, launch_ns: int, kept_bytes: int) -> None:
        """``kept_bytes``: how much of what nobody uses is kept, for the next who would."""
        self._directory = directory
        self._objects_dir = objects_dir
        self._stage = stage
        self._launch_ns = launch_ns
        self._kept_bytes = kept_bytes
        self._locks: dict[str, asyncio.Lock] = {}
        self._builds = asyncio.Semaphore(_BUILDS_AT_ONCE)
        self._threads: Executor = mountns.FreshThreads()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        stage.mkdir(mode=0o700, parents=True, exist_ok=True)
        for partial in directory.glob("*.tmp"):  # of an earlier daemon
            partial.unlink()

    async def link(self, layers: Sequence[Path], target: Path) -> None:
        """Make ``target`` a link to the environment of mounted layers, top first, which is built unless it is there.

        Raises OSError, proc.ProcessFailed.
        """
        name = _name(layers)
        async with self._locks.setdefault(name, asyncio.Lock()):
            path = self._directory / name
            if not path.exists():
                async with self._builds:
                    await in_thread(self.drop_unused)
                    await in_thread(self._build, tuple(layers), path, executor=self._threads)
            await in_thread(_link, path, target)

    def drop_unused(self) -> None:
        """Remove those that nobody uses, the ones used longest ago first, until few enough bytes are left. Blocks."""
        kept = 0
        found = [(path, path.stat()) for path in self._directory.iterdir() if path.suffix != ".tmp"]
        for path, status in sorted(found, key=lambda pair: pair[1].st_mtime, reverse=True):
            if status.st_nlink > 1:
                continue
            kept += status.st_size
            if kept > self._kept_bytes:
                path.unlink()

    def _build(self, layers: Sequence[Path], path: Path) -> None:
        """Blocks. Runs in one of mountns.FreshThreads, which it changes."""
        partial = path.with_suffix(".tmp")
        with contextlib.ExitStack() as stack:
            clones = [stack.enter_context(files.closing(mount.clone_tree(layer))) for layer in layers]
            mountns.enter_copy(self._launch_ns)
            with files.closing(mount.new_mount("tmpfs", source="dsec", options=[("mode", "0700")])) as tmpfs:
                mount.attach(tmpfs, self._stage)
            lower = [self._stage / f"layer{number}" for number in range(len(clones))]
            for place in (*lower, self._stage / "root"):
                place.mkdir()
            for clone, place in zip(clones, lower, strict=True):
                mount.attach(clone, place)
            tree = overlay.mount(lower=lower, data=[self._objects_dir], upper=None, work=None, fsuid=None)
            with files.closing(tree):
                mount.attach(tree, self._stage / "root")
            try:
                erofs.make_whole(self._stage / "root", partial)
                with partial.open("r+b") as image:
                    size = image.seek(0, os.SEEK_END)
                    image.truncate(-(-size // ALIGN_BYTES) * ALIGN_BYTES)
                    os.fsync(image.fileno())
                partial.chmod(0o444)
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)


def _link(path: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    os.utime(path)
    target.hardlink_to(path)


def _name(layers: Sequence[Path]) -> str:
    """Layers are mounted at places that are named by their digests."""
    return hashlib.sha256("\n".join(layer.name for layer in layers).encode()).hexdigest()[:32]
