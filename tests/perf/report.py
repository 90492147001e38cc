# SPDX-License-Identifier: Apache-2.0
"""Figures: samples of ours and of a peer, taken in the same run, and the promise about their ratio.

Here: the record of one comparison, its verdict and its printing. Not here: taking samples.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Side:
    """Samples in milliseconds, and the command that a reader can repeat."""

    name: str
    command: str
    samples_ms: tuple[float, ...]

    def p(self, percent: int) -> float:
        ordered = sorted(self.samples_ms)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples_ms)


@dataclass(frozen=True)
class Figure:
    """One promise: ``ours`` takes at most ``limit`` times what ``peer`` takes, by mean or median."""

    name: str
    ours: Side
    peer: Side
    limit: float
    by: str = "p50"
    wanted_n: int = 1
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        if self.by == "mean":
            return self.ours.mean / self.peer.mean
        return self.ours.p(50) / self.peer.p(50)

    @property
    def verdict(self) -> str:
        """PASS or FAIL; PENDING when fewer samples were taken than the promise names, so that it proves nothing."""
        if min(len(self.ours.samples_ms), len(self.peer.samples_ms)) < self.wanted_n:
            return "PENDING"
        return "PASS" if self.ratio <= self.limit else "FAIL"

    def to_json(self) -> dict[str, Any]:
        sides = {
            side.name: {"command": side.command, "n": len(side.samples_ms), "samples_ms": side.samples_ms}
            for side in (self.ours, self.peer)
        }
        return {
            "figure": self.name, "by": self.by, "ratio": self.ratio, "limit": self.limit, "verdict": self.verdict,
            "sides": sides, "note": self.note, **self.extra,
        }  # fmt: skip

    def lines(self) -> list[str]:
        rows = [f"{self.verdict:7} {self.name}: ratio {self.ratio:.3f} by {self.by}, at most {self.limit:g}"]
        for side in (self.ours, self.peer):
            rows.append(
                f"        {side.name:24} n={len(side.samples_ms):<5} p50 {side.p(50):9.2f} ms  p10 {side.p(10):9.2f}  "
                f"p90 {side.p(90):9.2f}  max {side.p(100):9.2f}   {side.command}"
            )
        if self.note:
            rows.append(f"        {self.note}")
        return rows
