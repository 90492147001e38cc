# SPDX-License-Identifier: Apache-2.0
"""The log: one entry per fact, to the journal with fields, else one line on standard error.

Here: the forms. Not here: what is logged.

A message that says ``sandbox=%s`` has its value as the field ``DSEC_SANDBOX`` in the journal, and so on for every
name, so that ``journalctl DSEC_SANDBOX=web`` finds it. One that says ``event=%s`` gets a MESSAGE_ID, the same for
each event of the kind. Fields come from the arguments of the message: what is written in a client's text is none.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import socket
import sys
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path

from dsecd.api.dispatch import REQUEST_ID

# sd-daemon(3), from syslog(3)
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7))
_JOURNAL = Path("/run/systemd/journal/socket")
#: Names of kinds of events as MESSAGE_ID: version 5 UUIDs in this namespace.
MESSAGE_IDS = uuid.UUID("1b1fe533-4dfd-4ade-8a56-a53df6de0434")
#: A conversion of a format string, and the name that it is given; "%%" is none.
_CONVERSION = re.compile(r"(?:\b([a-z_]+)=)?%(?:%|[#0\- +]*\d*(?:\.\d+)?([a-z]))")


class Formatter(logging.Formatter):
    """``module: message request=…``, outside the journal after time and level; a traceback follows in lines alike."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        first, *others = text(record).split("\n")
        if not self._journal:
            return "\n".join([f"{self.formatTime(record)} {record.levelname} {first}", *others])
        return "\n".join(f"<{_priority(record.levelno)}>{line}" for line in (first, *others))


class JournalHandler(logging.Handler):
    """Entries with fields, by the journal's own protocol; what it does not take at once goes to ``otherwise``."""

    def __init__(self, path: Path, otherwise: logging.Handler) -> None:
        """Raises OSError when there is no journal."""
        super().__init__()
        self._otherwise = otherwise
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        # Now, as the daemon works in another mount namespace later; systemd keeps the socket while journald restarts.
        self._socket.connect(os.fspath(path))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._socket.send(b"".join(_encoded(name, value) for name, value in _fields(record)))
        except OSError:  # its queue is full, the entry is too large for one datagram, or it is gone
            self._otherwise.handle(record)

    def close(self) -> None:
        self._socket.close()
        super().close()


def text(record: logging.LogRecord) -> str:
    """The message with its module and request; below it the traceback, if there is one."""
    # A client's text must not make lines of its own.
    message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
    line = f"{record.name}: {message}"
    if (request_id := REQUEST_ID.get()) and "request=" not in message:
        line += f" request={request_id}"
    lines = [line]
    if record.exc_info and record.exc_info[1] is not None:
        lines += "".join(traceback.format_exception(record.exc_info[1])).splitlines()
    return "\n".join(lines)


@functools.lru_cache
def message_id(event: str) -> str:
    """MESSAGE_ID of a kind of event: systemd.journal-fields(7)."""
    return uuid.uuid5(MESSAGE_IDS, event).hex


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    yield "MESSAGE", text(record)
    yield "PRIORITY", str(_priority(record.levelno))
    yield "SYSLOG_IDENTIFIER", "dsecd"
    yield "CODE_FILE", record.pathname
    yield "CODE_LINE", str(record.lineno)
    yield "CODE_FUNC", record.funcName or ""
    named = dict(_named(record))
    if request_id := REQUEST_ID.get():
        named.setdefault("request", request_id)
    if event := named.get("event"):
        yield "MESSAGE_ID", message_id(event)
    for name, value in named.items():
        yield f"DSEC_{name.upper()}", value


def _named(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    """The arguments that the message's format gives a name."""
    conversions = [found for found in _CONVERSION.finditer(str(record.msg)) if found[2]]
    if isinstance(record.args, tuple) and len(conversions) == len(record.args):
        for found, value in zip(conversions, record.args, strict=True):
            if found[1]:
                yield found[1], str(value)


def _encoded(name: str, value: str) -> bytes:
    """A field as the journal's native protocol has it: a value of several lines with its length in front."""
    data = value.encode(errors="backslashreplace")  # names of files need not be UTF-8
    if b"\n" not in data:
        return name.encode() + b"=" + data + b"\n"
    return name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"


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
    """Log to the journal, if standard error is, or to standard error from now on."""
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter(journal=to_journal()))
    if to_journal():
        try:
            handler = JournalHandler(_JOURNAL, handler)
        except OSError:
            pass  # lines will do
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Its debug lines tell of every poll of the loop.
    logging.getLogger("asyncio").setLevel(logging.WARNING)
