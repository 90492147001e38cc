# SPDX-License-Identifier: Apache-2.0
"""The process dsec-dns: its command line, its parts put together, and its end.

Here: starting and stopping, the log, systemd. Not here: what it does (``proxy``).

It has no configuration of its own: where to listen and whom to ask comes from the daemon, with the policies.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import sdnotify

from dsecd import __version__
from dsecd.dns.frames import Settings
from dsecd.dns.link import Link, WrongVersion
from dsecd.dns.listeners import Listeners
from dsecd.dns.lookup import Lookup
from dsecd.dns.proxy import Proxy
from dsecd.dns.table import Table
from dsecd.dns.upstream import RESOLV_CONF, Upstream

log = logging.getLogger(__name__)

LINK = Path("/run/dsec/dns.sock")
#: Starting it anew is what helps, since the program has been replaced.
EX_VERSION = 75
_PULSE_S = 2.0
# sd-daemon(3), from syslog(3)
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}


def main(argv: Sequence[str] | None = None) -> int:
    """Answer until SIGTERM or SIGINT; the exit status."""
    arguments = _parser().parse_args(argv)
    _set_up_log(arguments.log_level)
    # Each question under way has a socket, as has each connection.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    status = 0
    try:
        asyncio.run(_Process(arguments.link, arguments.daemon_uid, arguments.resolv_conf).run())
    except* WrongVersion as group:
        log.warning("%s; ending, to be started anew", group.exceptions[0])
        status = EX_VERSION
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dsec-dns", description="Answers DNS queries of sandboxes for dsecd.")
    for name, kind, default, metavar, text in (
        ("--link", Path, LINK, "SOCKET", "the daemon's"),
        ("--daemon-uid", int, 0, "UID", "whom to believe that it is the daemon"),
        ("--resolv-conf", Path, RESOLV_CONF, "FILE", "the host's servers, unless the daemon names others"),
    ):
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)s)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--version", action="version", version=f"dsec-dns {__version__}")
    return parser


class _Stopped(Exception):
    """A signal said so."""


class _Process:
    """All parts of it."""

    def __init__(self, link: Path, daemon_uid: int, resolv_conf: Path) -> None:
        self._table = Table()
        self._upstream = Upstream(resolv_conf)
        self._link = Link(link, daemon_uid, self._table, self._heard)
        self._proxy: Proxy | None = None
        self._listeners: Listeners | None = None
        self._settings = Settings(listen=())
        self._complaint = ""

    async def run(self) -> None:
        """Until a signal says stop.  Raises WrongVersion, in a group."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        try:
            async with asyncio.TaskGroup() as group:
                lookup = Lookup(self._upstream, group)
                self._proxy = Proxy(self._table, lookup, self._link)
                self._listeners = Listeners(self._proxy, group)
                for task in (self._link.run(), self._link.tell(), self._pulse()):
                    group.create_task(task)
                log.info("started version=%s pid=%d", __version__, os.getpid())
                _notify("READY=1")
                await stop.wait()
                _notify("STOPPING=1")
                raise _Stopped
        except* _Stopped:
            log.info("stopped")
        finally:
            if self._listeners is not None:
                self._listeners.close()

    def _heard(self, settings: Settings) -> None:
        self._settings = settings
        self._upstream.configured = settings.upstreams
        assert self._proxy is not None
        self._proxy.grace_s = settings.grace_s
        self._listen()

    def _listen(self) -> None:
        assert self._listeners is not None
        try:
            self._listeners.listen(self._settings.listen)
            self._complaint = ""
        except OSError as error:
            if str(error) != self._complaint:
                log.error("%s; trying again and again", error)
            self._complaint = str(error)

    async def _pulse(self) -> None:
        """Feed systemd's watchdog, and listen where that was not possible before."""
        while True:
            await asyncio.sleep(_PULSE_S)
            self._listen()
            _notify("WATCHDOG=1")


def _set_up_log(level: str) -> None:
    """One line per fact on standard error; with its priority when that is the journal (sd-daemon(3))."""
    logging.basicConfig(level=level.upper(), handlers=[logging.StreamHandler(sys.stderr)], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    journal = "JOURNAL_STREAM" in os.environ
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Formatter(journal=journal))


class _Formatter(logging.Formatter):
    def __init__(self, *, journal: bool) -> None:
        super().__init__("%(name)s: %(message)s" if journal else "%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        # Nothing that came from outside makes lines of its own.
        text = super().format(record).replace("\n", "\\n").replace("\r", "\\r")
        return f"<{_PRIORITIES.get(record.levelno, 6)}>{text}" if self._journal else text


def _notify(state: str) -> None:
    sdnotify.SystemdNotifier().notify(state)
