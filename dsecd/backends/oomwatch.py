# SPDX-License-Identifier: Apache-2.0
"""Noticing that the kernel killed something in a sandbox for want of memory.

What belongs here: watching the sandboxes' memory.events with one descriptor for all of them. What does not: what is
made of it (``dsecd.core``); a command's own end, which its agent tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsecd.linux import cgroup, inotify

log = logging.getLogger(__name__)

#: Kills that follow each other within this time are told together.
_TOGETHER_S = 0.1


@dataclass
class _Watched:
    path: Path
    tell: Callable[[int], None]
    seen: int


class OomWatch:
    """Calls back with the number of kills since the start, whenever it has risen. For the event loop's thread."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._by_watch: dict[int, _Watched] = {}
        self._by_path: dict[Path, int] = {}
        self._dirty: set[int] = set()

    def add(self, group: Path, tell: Callable[[int], None]) -> None:
        """Watch a cgroup and all below it; without the controller, or twice, nothing happens."""
        path = group / "memory.events"
        if path in self._by_path:
            return
        if self._fd is None:
            self._fd = inotify.create()
            asyncio.get_running_loop().add_reader(self._fd, self._changed)
        try:
            watch = inotify.watch(self._fd, path)
        except OSError as error:
            if error.errno != errno.ENOENT:
                log.warning("kills for want of memory are not noticed: %s", error)
            return
        self._by_path[path] = watch
        self._by_watch[watch] = _Watched(path, tell, _kills(path))

    def remove(self, group: Path) -> None:
        """The cgroup has gone or is about to; one that is not watched is fine."""
        watch = self._by_path.pop(group / "memory.events", None)
        if watch is None or self._fd is None:
            return
        del self._by_watch[watch]
        # The kernel may have dropped it together with the file.
        with contextlib.suppress(OSError):
            inotify.unwatch(self._fd, watch)

    def _changed(self) -> None:
        assert self._fd is not None
        if not self._dirty:
            asyncio.get_running_loop().call_later(_TOGETHER_S, self._look)
        for watch in inotify.changes(self._fd):
            self._dirty |= set(self._by_watch) if watch == inotify.OVERFLOW else {watch}

    def _look(self) -> None:
        dirty, self._dirty = self._dirty, set()
        for watched in [self._by_watch[watch] for watch in dirty if watch in self._by_watch]:
            kills = _kills(watched.path)
            if kills > watched.seen:
                watched.seen = kills
                watched.tell(kills)


def _kills(path: Path) -> int:
    return cgroup.read_keyed(path.parent, path.name).get("oom_kill", 0)
