# SPDX-License-Identifier: Apache-2.0
"""Trees on their way out: renamed at once, removed in threads that nobody has to wait for.

What belongs here: the directory of what is being removed and the threads that do it. What does not: how a hostile
tree is removed (``files.py``), which ones go (``container_steps.py``).

The threads are their own, and daemonic: a tree of a million files must keep neither a sandbox from starting nor the
daemon from ending. What is left then, the next daemon removes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dsecd.backends import files

log = logging.getLogger(__name__)

#: More than one, so that small trees do not wait for a large one.
_THREADS = 3


class Trash:
    """One directory of trees that go; the calls are the event loop's."""

    def __init__(self, directory: Path, remove: Callable[[Path], None] = files.remove_tree) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._remove = remove
        self._numbers = itertools.count()
        self._queue: queue.SimpleQueue[tuple[Path, concurrent.futures.Future[None]]] = queue.SimpleQueue()
        # What an earlier daemon had no time to remove.
        for left in sorted(directory.iterdir()):
            self._queue.put((left, concurrent.futures.Future()))
        for number in range(_THREADS):
            threading.Thread(target=self._run, name=f"trash-{number}", daemon=True).start()

    async def take(self, tree: Path, wait_s: float) -> None:
        """Take ``tree`` out of its place, and wait up to ``wait_s`` seconds until it is gone; absent is fine."""
        doomed = self._directory / f"{tree.name}.{time.monotonic_ns()}-{next(self._numbers)}"
        try:
            os.rename(tree, doomed)
        except FileNotFoundError:
            return
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._queue.put((doomed, done))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await asyncio.shield(asyncio.wrap_future(done))

    def _run(self) -> None:
        while True:
            tree, done = self._queue.get()
            try:
                self._remove(tree)
            # Broad: hostile code made the tree; whatever removing it meets, the thread goes on with the next one.
            except Exception as error:  # noqa: BLE001
                log.warning("not removed, left for the next start path=%s: %s", tree, error)
            # The loop that waits may be closed: the daemon ends.
            with contextlib.suppress(RuntimeError):
                done.set_result(None)
