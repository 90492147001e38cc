# SPDX-License-Identifier: Apache-2.0
"""User namespaces kept for a while by the id range they map.

What belongs here: the cache. What does not: which range belongs to whom (``dsecd.core``).

A user namespace maps a fixed range, says nothing about a sandbox and cannot be changed, so the next sandbox
of the same range uses the same one to show its layers through; making one costs a process.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator

from dsecd.linux import userns

_KEPT = 256


class UsernsPool:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, int] = OrderedDict()

    @contextlib.contextmanager
    def borrow(self, uid_base: int) -> Iterator[int]:
        """fd of a user namespace that maps 0… to ``uid_base``…, the caller's own for the length of the block."""
        with self._lock:
            fd = self._kept.pop(uid_base, None)
        if fd is None:
            fd = userns.create(uid_base)
        try:
            yield fd
        finally:
            self._keep(uid_base, fd)

    def _keep(self, uid_base: int, fd: int) -> None:
        with self._lock:
            surplus = [self._kept.pop(uid_base)] if uid_base in self._kept else []
            self._kept[uid_base] = fd
            while len(self._kept) > _KEPT:
                surplus.append(self._kept.popitem(last=False)[1])
        for old in surplus:
            os.close(old)
