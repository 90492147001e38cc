# SPDX-License-Identifier: Apache-2.0
"""How dsecctl ends when it is told to: ctrl-C, SIGTERM, SIGHUP.

Here: handlers of signals outside of an attachment. Not here: signals that go to a command in a sandbox
(``terminal.py``), exit statuses (``cli.py``).

Nothing is imported here that takes long: until everything else is, nothing was begun, and a signal may simply end us.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

#: What ends us; one that was ignored when we were started (nohup, a job of a script) stays ignored.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: How many times ctrl-C has to be pressed until cleaning up is given up.
_PATIENCE = 3
_RAISE_AGAIN_AFTER_S = 0.01

_told: list[int] = []


def heeded() -> list[signal.Signals]:
    """Those of the ending signals that nobody told us to ignore."""
    return [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def end_at_once() -> None:
    """For the time of imports: Python's own ctrl-C is a traceback, or is lost in an extension that is being set up."""
    if signal.SIGINT in heeded():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_in_order() -> None:
    """From now on the first signal ends us by way of every ``finally``: what was made for one command goes with it.

    Those that follow leave that alone: a terminal that is closed sends SIGHUP behind a ctrl-C.
    """
    for number in heeded():
        signal.signal(number, _leave)
    signal.signal(signal.SIGALRM, _again)
    sys.unraisablehook = _not_lost


def _leave(number: int, _frame: FrameType | None) -> None:
    _told.append(number)
    if len(_told) == 1 or (number == signal.SIGINT and _told.count(number) >= _PATIENCE):
        raise _end(number)


def _again(_number: int, _frame: FrameType | None) -> None:
    raise _end(_told[0])


def _end(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _not_lost(unraisable: Any) -> None:
    """Python drops what is raised in a finalizer or a callback of C, with a traceback; a signal has to get through."""
    if _told and isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
        signal.setitimer(signal.ITIMER_REAL, _RAISE_AGAIN_AFTER_S)
    else:
        sys.__unraisablehook__(unraisable)
