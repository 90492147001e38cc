# SPDX-License-Identifier: Apache-2.0
"""Id ranges: which 65,536 host ids belong to which sandbox.

What belongs here: handing out numbers of ranges, lowest first. What does not: user namespaces. The
database's rows say which are taken; a range comes back only when nothing of its sandbox is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from libdsec import errors


class Ranges:
    """Numbers 0 to ``count`` - 1, each with one holder."""

    def __init__(self, count: int, taken: Iterable[int] = ()) -> None:
        self._count = count
        self._taken = set(taken)
        self._next = max(self._taken, default=-1) + 1
        self._free = [number for number in range(self._next) if number not in self._taken]

    def take(self) -> int:
        """The lowest free number. Raises NoCapacity when there is none."""
        if self._free:
            number = heapq.heappop(self._free)
        elif self._next < self._count:
            number, self._next = self._next, self._next + 1
        else:
            raise errors.NoCapacity(
                f"allocate an id range: all {self._count} are in use", hint="delete sandboxes, or raise 'uid_ranges'"
            )
        self._taken.add(number)
        return number

    def give(self, number: int) -> None:
        """Take it back; giving twice is a bug and raises KeyError."""
        self._taken.remove(number)
        heapq.heappush(self._free, number)
