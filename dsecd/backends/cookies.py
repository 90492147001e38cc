# SPDX-License-Identifier: Apache-2.0
"""Core-scheduling cookies of sandboxes: who must not share a core's siblings with whom.

What belongs here: which cookie a sandbox gets, and getting it before its first process exists. What does not: the
calls (``dsecd.linux.coresched``).

The thread that starts a sandbox takes the cookie first; the runtime, the agent and every command inherit it. That
thread ends with the start, so the daemon itself never has one. By class, all of ``batch`` share one cookie, and
``latency`` has none, like the host: those two are what must not meet. The cookie lives as long as any process that has
it; it is taken from one that does, also by a daemon started later, and made anew only when there is none.
"""

from __future__ import annotations

import threading
from typing import Literal

from dsecd.backends.base import Box
from dsecd.linux import coresched, pidfd
from dsecd.linux.pidfd import Process

Mode = Literal["off", "class", "sandbox"]


def concern(mode: Mode, cpu_class: str) -> bool:
    """Whether sandboxes of the class are to have a cookie."""
    return mode == "sandbox" or (mode == "class" and cpu_class == "batch")


class Cookies:
    """For any thread. With ``mode`` off, nothing happens in here."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._lock = threading.Lock()
        #: Threads and processes with the cookie of batch, by sandbox; the newest last.
        self._batch: dict[str, Process] = {}

    def put_on(self, box: Box) -> None:
        """Give the calling thread the cookie that the box is to have. Raises OSError."""
        if not concern(self._mode, box.spec.cpu_class):
            return
        if self._mode == "sandbox":
            coresched.create()
            return
        with self._lock:
            # Held by this thread until a process of the sandbox does, so that no other start makes a second one.
            if not self._share():
                coresched.create()
            self._add(box.id, threading.get_native_id())

    def worn(self, box: Box, pid: int) -> None:
        """A process of the box exists. One that was started under another configuration shows by its cookie."""
        if self._mode != "class" or box.spec.cpu_class != "batch":
            return
        with self._lock:
            self._batch.pop(box.id, None)
            mine, known = _cookie(pid), self._newest()
            if mine and (known is None or _cookie(known.pid) == mine):
                self._add(box.id, pid)

    def forget(self, box: Box) -> None:
        """Nothing of the box runs any more."""
        with self._lock:
            self._batch.pop(box.id, None)

    def _add(self, box_id: str, tid: int) -> None:
        if (member := pidfd.identify(tid)) is not None:
            self._batch[box_id] = member

    def _newest(self) -> Process | None:
        """The newest that is alive; those that are not are dropped on the way."""
        while self._batch:
            box_id, member = next(reversed(self._batch.items()))
            if pidfd.is_alive(member):
                return member
            del self._batch[box_id]
        return None

    def _share(self) -> bool:
        """Take the cookie of one that has it; False when there is none."""
        while (member := self._newest()) is not None:
            try:
                coresched.share_from(member.pid)
            except ProcessLookupError:
                continue
            # Alive still, so it was the one that we meant; and its cookie is one.
            if pidfd.is_alive(member) and coresched.cookie():
                return True
            self._batch.popitem()
        return False


def _cookie(tid: int) -> int:
    try:
        return coresched.cookie(tid)
    except OSError:  # it has ended, or the kernel has no cookies
        return 0
