# SPDX-License-Identifier: Apache-2.0
"""Waiting for a condition that is about to become true, with a limit that only a fault reaches."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], limit_s: float = 60.0, tell: Callable[[], str] = str) -> None:
    """Return when it holds; fail when it does not within `limit_s` seconds, with what `tell` says. Blocks."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s {tell()}"
        time.sleep(0.02)
