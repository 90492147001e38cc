# SPDX-License-Identifier: Apache-2.0
"""Who may begin to run now, who waits for the host to have room, and who is told to come back.

What belongs here: the queue and its bounds. What does not: what room is (``pressure.py``); what a caller may do at all
(``principal.py``).

Nothing is counted against what sandboxes were promised: a host may hold many times the CPUs and memory it has, as long
as it does not suffer. What runs already is never touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Literal

from dsecd.core.pressure import Gauge, Reading, Shortage
from dsecd.core.tasks import Tasks
from libdsec import errors

log = logging.getLogger(__name__)

Mode = Literal["on", "observe", "off"]

#: While some wait: how often it is looked, and how many go in at a time. What they take shows only afterwards.
_LOOK_S = 0.1
_AT_A_TIME = 4
_HINT = "try again later, stop or delete sandboxes, or change 'admission' in dsecd.toml"


class Admission:
    """One door, first come, first served. For the event loop's thread."""

    def __init__(
        self, gauge: Gauge, tasks: Tasks, *, mode: Mode, max_waiting: int, tell: Callable[[Shortage | None], None]
    ) -> None:
        """``tell`` is called when the host becomes short of something, and with None when it is no more."""
        self.mode = mode
        self.refused = 0
        self._gauge = gauge
        self._tasks = tasks
        self._max_waiting = max_waiting
        self._tell = tell
        self._queue: deque[asyncio.Future[None]] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._short = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def look(self) -> Reading:
        """How the host is; whoever asks first after a change has it told."""
        reading = self._gauge.look()
        if (reading.shortage is not None) != self._short:
            self._short = reading.shortage is not None
            log.warning("host pressure: %s", reading.shortage or "over")
            self._tell(reading.shortage)
        return reading

    def is_open(self) -> bool:
        """Whether the next one goes in at once."""
        if self.mode == "off":
            return True
        return self.mode == "observe" if self.look().shortage is not None else not self._queue

    async def enter(self, doing: str, wait_s: float) -> None:
        """Return when there is room; does not even yield when there is. Raises NoCapacity after ``wait_s``."""
        if self.is_open():
            return
        if wait_s <= 0 or len(self._queue) >= self._max_waiting:
            raise self._refusal(doing, 0.0)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        if self._pump is None or self._pump.done():
            self._pump = self._tasks.spawn("admission", self._let_in())
        try:
            async with asyncio.timeout(wait_s):
                await place
        except TimeoutError as error:
            raise self._refusal(doing, wait_s) from error
        finally:
            if place in self._queue:
                self._queue.remove(place)

    async def _let_in(self) -> None:
        while self._queue:
            if self.look().shortage is None:
                for _ in range(min(_AT_A_TIME, len(self._queue))):
                    place = self._queue.popleft()
                    if not place.done():
                        place.set_result(None)
            await asyncio.sleep(_LOOK_S)

    def _refusal(self, doing: str, waited_s: float) -> errors.NoCapacity:
        self.refused += 1
        shortage = self._gauge.look().shortage
        queue = f"{len(self._queue)} wait" + (f", {self._max_waiting} may" if len(self._queue) else "")
        waited = f", also after {waited_s:g} s" if waited_s else ""
        if shortage is None:  # room again, and others before it
            text = f"{doing}: not its turn yet{waited}: {queue}"
            return errors.NoCapacity(text, hint=_HINT, waited_s=waited_s, retry_after_s=1)
        return errors.NoCapacity(
            f"{doing}: the host is short of {shortage.resource}{waited}: {shortage} ({queue})", hint=_HINT,
            resource=shortage.resource, measure=shortage.measure, percent=round(shortage.percent, 1),
            limit_percent=shortage.limit_percent, waited_s=waited_s, retry_after_s=shortage.retry_after_s,
        )  # fmt: skip
