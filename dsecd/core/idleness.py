# SPDX-License-Identifier: Apache-2.0
"""Whose memory is worth a look: sandboxes that idle, or have grown, by what their cgroups count.

Here: remembering what was read of each, and choosing who is next. Not here: reading it and reclaiming
(``reclaim.py``). Nothing here waits or asks the kernel; times are given.

A sandbox that uses next to no processor touches next to no memory: that is read from one file, and is what most
sandboxes do most of the time. So idle ones come first, the largest of them before the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

#: Of one processor: above it a sandbox is at work.
BUSY_PERMIL = 10
#: Memory may grow so much after a turn without making another one worth while.
_GROWTH_BYTES, _GROWTH_PERCENT = 8 << 20, 10
#: What was left after a turn may have become cold meanwhile: looked at after so long, then twice, up to the second.
_AGAIN_S, _AGAIN_MOST_S = 30.0, 600.0


@dataclass(frozen=True)
class Reading:
    """What a sandbox's cgroup counts."""

    memory_bytes: int
    cpu_us: int


@dataclass
class _Seen:
    reading: Reading
    at: float
    first_at: float
    busy_at: float  # when it was last seen at work, or first seen at all
    left_bytes: int | None = None  # after its last turn, None before the first
    turn_at: float = 0.0
    idle_then: bool = False  # in its last turn
    running: bool = False  # its turn
    again_s: float = _AGAIN_S  # from that one to the next


class Idleness:
    """What is known of all sandboxes that may be reclaimed from."""

    def __init__(self, *, idle_s: float, min_bytes: int) -> None:
        self._idle_s = idle_s
        self._min_bytes = min_bytes
        self._seen: dict[str, _Seen] = {}

    def note(self, sandbox_id: str, reading: Reading, now: float) -> None:
        """It was read."""
        seen = self._seen.get(sandbox_id)
        # Counters that fall are those of another life of the sandbox.
        if seen is None or reading.cpu_us < seen.reading.cpu_us:
            self._seen[sandbox_id] = _Seen(reading, now, first_at=now, busy_at=now)
            return
        used_us = reading.cpu_us - seen.reading.cpu_us
        if used_us > (now - seen.at) * BUSY_PERMIL * 1000:
            seen.busy_at = now
        seen.reading, seen.at = reading, now

    def keep(self, sandbox_ids: Collection[str]) -> None:
        """All others are gone."""
        for gone in self._seen.keys() - set(sandbox_ids):
            del self._seen[gone]

    def idle(self, sandbox_id: str) -> bool:
        """Whether it has used next to no processor for long enough, as far as is known."""
        seen = self._seen.get(sandbox_id)
        return seen is not None and seen.at - seen.busy_at >= self._idle_s

    def idle_for_s(self, sandbox_id: str) -> float | None:
        """For how long it has idled, None when it is not known."""
        seen = self._seen.get(sandbox_id)
        return None if seen is None else seen.at - seen.busy_at

    def next(self, number: int, *, idle_only: bool) -> list[str]:
        """Who is to have a turn now, at most ``number``: the idle before the others, the larger before the smaller."""
        worth = [
            (self.idle(name), seen.reading.memory_bytes, name)
            for name, seen in self._seen.items()
            if self._worth(name, seen) and (self.idle(name) or not idle_only)
        ]
        return [name for _idle, _bytes, name in sorted(worth, reverse=True)[:number]]

    def begin(self, sandbox_id: str) -> None:
        """Its turn begins: it is not chosen again before that ends."""
        seen = self._seen[sandbox_id]
        seen.running, seen.idle_then = True, self.idle(sandbox_id)

    def end(self, sandbox_id: str, now: float, *, left_bytes: int | None = None) -> None:
        """Its turn has ended; what is left, unless the turn changed nothing."""
        if seen := self._seen.get(sandbox_id):
            grown = seen.left_bytes is None or self._grown(seen)
            seen.again_s = _AGAIN_S if grown else min(2 * seen.again_s, _AGAIN_MOST_S)
            seen.running, seen.turn_at = False, now
            seen.left_bytes = seen.reading.memory_bytes if left_bytes is None else left_bytes

    def _worth(self, name: str, seen: _Seen) -> bool:
        if seen.running or seen.reading.memory_bytes < self._min_bytes:
            return False
        if seen.left_bytes is None:
            # One that was just made, or just met by a new daemon, has shown nothing yet.
            return seen.at - seen.first_at >= self._idle_s
        fell_idle = self.idle(name) and not seen.idle_then
        return self._grown(seen) or fell_idle or seen.at - seen.turn_at > seen.again_s

    def _grown(self, seen: _Seen) -> bool:
        left = seen.left_bytes or 0
        return seen.reading.memory_bytes - left > _GROWTH_BYTES + left * _GROWTH_PERCENT // 100
