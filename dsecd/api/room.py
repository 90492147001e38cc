# SPDX-License-Identifier: Apache-2.0
"""How much of one user's requests the daemon holds, and how much work a body may make before anybody has looked at it.

Here: counting, both. Not here: reading bodies (``call.py``), connections (``server.py``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from libdsec.errors import NoCapacity

#: The rest of a JSON string and its closing quote. Possessive: nothing is remembered to come back to.
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class Room:
    """Bytes of bodies held for each user. Root is not limited."""

    def __init__(self, bytes_per_user: int) -> None:
        self._most = bytes_per_user
        self._held: Counter[int] = Counter()

    @contextmanager
    def of(self, uid: int) -> Iterator[Callable[[int], None]]:
        """For one request: a function that takes so many bytes, until the block ends. It raises NoCapacity."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            held = self._held[uid]
            if uid != 0 and held + count > self._most:
                raise NoCapacity(
                    f"read the body: requests of uid {uid} that are under way have {held} bytes, and this one "
                    f"{count} more; at most {self._most} are held for one user",
                    hint="send fewer large requests at once, or raise limits.max_body_bytes_per_user",
                )
            taken += count
            self._held[uid] += count

        try:
            yield take
        finally:
            self._held[uid] -= taken
            if self._held[uid] <= 0:
                del self._held[uid]


def crowded(data: bytes, most: int) -> bool:
    """Whether a JSON document has more than ``most`` values.

    What is checked value by value costs microseconds for each, and holds up everybody; a long string costs nothing.
    """
    # Each value but the first of its object or array has a comma before it, and strings may have more.
    if data.count(b",") <= most:
        return False
    commas = strings = at = 0
    while commas <= most and strings <= 2 * most:
        quote = data.find(b'"', at)
        commas += data.count(b",", at, quote if quote >= 0 else len(data))
        end = _STRING.match(data, quote + 1) if quote >= 0 else None
        if end is None:
            return commas > most
        strings += 1
        at = end.end()
    return True
