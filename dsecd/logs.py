# SPDX-License-Identifier: Apache-2.0
"""The log: one line per fact on standard error, as the journal likes it.

Here: the format. Not here: what is logged.

Under systemd each line begins with its priority (``<6>``, sd-daemon(3)) and has no time, which the journal
adds itself.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback

from dsecd.api.dispatch import REQUEST_ID

# sd-daemon(3), from syslog(3)
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7))


class Formatter(logging.Formatter):
    """``time LEVEL module: message request=…``; with a traceback, its lines follow, marked alike."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        # A client's text must not make lines of its own.
        text = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        line = f"{record.name}: {text}"
        if (request_id := REQUEST_ID.get()) and "request=" not in text:
            line += f" request={request_id}"
        if not self._journal:
            line = f"{self.formatTime(record)} {record.levelname} {line}"
        lines = [line]
        if record.exc_info and record.exc_info[1] is not None:
            lines += "".join(traceback.format_exception(record.exc_info[1])).splitlines()
        mark = f"<{_priority(record.levelno)}>" if self._journal else ""
        return "\n".join(mark + part for part in lines)


def _priority(level: int) -> int:
    return next((number for least, number in _PRIORITIES if level >= least), 7)


def to_journal() -> bool:
    """Whether standard error is the journal's (systemd.exec(5)); the variable alone may be inherited."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def set_up(level: str) -> None:
    """Log to standard error from now on."""
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter(journal=to_journal()))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Its debug lines tell of every poll of the loop.
    logging.getLogger("asyncio").setLevel(logging.WARNING)
