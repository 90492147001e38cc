# SPDX-License-Identifier: Apache-2.0
"""The supervisor of the daemon's background tasks.

Here: the only place that creates tasks, so that none is collected while it runs, none fails unseen and none
outlives the daemon. Not here: what they do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from libdsec.errors import DsecError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """Owns every background task until ``close``."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def spawn(self, name: str, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``coro`` in the background; an exception it ends with is logged and stays in the task."""
        if self._closed:
            coro.close()
            raise RuntimeError(f"start task {name!r}: the daemon is stopping")
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, DsecError):
            # An answer, not a bug: whoever waits for the task gets it.
            log.info("task failed task=%s error=%s", task.get_name(), error)
        else:
            log.error("task failed task=%s", task.get_name(), exc_info=error)

    @property
    def closed(self) -> bool:
        return self._closed

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self, grace_s: float = 10.0) -> None:
        """Cancel all and wait until they have ended, at most ``grace_s`` seconds; no task can be started any more."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=grace_s)
            for task in stuck:
                log.warning("task did not end task=%s grace_s=%g", task.get_name(), grace_s)
