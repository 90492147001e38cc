# SPDX-License-Identifier: Apache-2.0
"""Deadlines: calling something when a sandbox's time has come.

What belongs here: one heap and one task for all of them. What does not: what happens then. A deadline that
was moved stays in the heap and is ignored when it comes up, so moving one costs as much as adding one.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable

#: Wall clocks can be set: look at least this often.
_LONGEST_SLEEP_S = 30.0


class Expiry:
    """Deadlines of sandboxes by their ids."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._changed = asyncio.Event()

    def at(self, when: float, sandbox_id: str) -> None:
        """Its time comes at ``when``, seconds of time.time()."""
        heapq.heappush(self._heap, (when, sandbox_id))
        if self._heap[0] == (when, sandbox_id):
            self._changed.set()

    async def run(self, due: Callable[[str], Awaitable[None]]) -> None:
        """Await ``due(id)`` for each id whose time has come; it looks whether the deadline still holds. Runs until
        cancelled."""
        while True:
            while self._heap and self._heap[0][0] <= time.time():
                await due(heapq.heappop(self._heap)[1])
            self._changed.clear()
            delay = min(_LONGEST_SLEEP_S, self._heap[0][0] - time.time()) if self._heap else _LONGEST_SLEEP_S
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, delay))
            except TimeoutError:
                continue
