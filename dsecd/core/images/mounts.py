# SPDX-License-Identifier: Apache-2.0
"""Metadata images mounted once per host, for all sandboxes that use them.

What belongs here: mounting and unmounting them at places named by their digest.  What does not: stacking them.

The directory that holds the mounts is for root only, and the mounts are nosuid and nodev: a set-uid program of an image
must not become one of the host.
"""

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from dsecd.backends.plan import in_thread
from dsecd.linux import erofs, mount, syscalls
from libdsec.errors import NotFound, Refused

SHORT_DIGEST = 24
_ATTRS = syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV


class LayerMounts:
    """All mounts below one directory.  Used on the event loop; what blocks runs in threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._locks: dict[str, asyncio.Lock] = {}
        #: What is mounted for certain; what an earlier daemon mounted is found out when it is first asked for.
        self._mounted: set[Path] = set()

    def place(self, digest: str) -> Path:
        """Where a layer is mounted when it is."""
        return self.directory / digest[:SHORT_DIGEST]

    def _lock(self, digest: str) -> asyncio.Lock:
        return self._locks.setdefault(digest[:SHORT_DIGEST], asyncio.Lock())

    async def mount(self, digest: str, image: Path) -> Path:
        """Mount a layer unless it is, in the calling process's mount namespace.  Raises NotFound, Refused."""
        place = self.place(digest)
        async with self._lock(digest):
            if place not in self._mounted:
                if not await in_thread(os.path.ismount, place):
                    await in_thread(_mount, image, place)
                self._mounted.add(place)
        return place

    async def unmount(self, digest: str) -> None:
        """Unmount a layer if it is mounted.  Sandboxes that use it keep their own reference to the file system."""
        async with self._lock(digest):
            self._mounted.discard(self.place(digest))
            await in_thread(_unmount, self.place(digest))

    async def unmount_others(self, wanted: Callable[[], Iterable[str]]) -> None:
        """Unmount every layer that is not wanted, whoever mounted it.

        `wanted` is asked again under each layer's lock: who mounts a layer has made it wanted before.
        """
        for short in await in_thread(_present, self.directory):
            async with self._lock(short):
                if short not in {digest[:SHORT_DIGEST] for digest in wanted()}:
                    self._mounted.discard(self.place(short))
                    await in_thread(_unmount, self.place(short))


def _mount(image: Path, place: Path) -> None:
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.parent.chmod(0o700)
    place.mkdir(mode=0o755, exist_ok=True)
    try:
        fd = erofs.mount(image)
    except OSError as error:
        place.rmdir()
        if error.errno == errno.ENOENT:
            raise NotFound(f"mount image {place.name}: its metadata image is gone") from error
        raise Refused(f"mount image {place.name}: {error.strerror}", errno=error.errno) from error
    try:
        mount.set_attrs(fd, attr_set=_ATTRS)
        mount.attach(fd, place)
    finally:
        os.close(fd)


def _unmount(place: Path) -> None:
    while os.path.ismount(place):
        mount.detach(place)
    with contextlib.suppress(FileNotFoundError):
        place.rmdir()


def _present(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
