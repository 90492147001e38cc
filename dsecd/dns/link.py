# SPDX-License-Identifier: Apache-2.0
"""This side of the connection to the daemon: hear of policies, ask for addresses to be opened.

Here: connecting again and again, whom to believe, requests and their answers. Not here: the words (``frames``).

While the daemon is away what was told stays true, and what was opened stays so until its time; asking for more
waits a little for a new daemon, and fails.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path

from dsecd.dns import frames
from dsecd.dns.addresses import Address
from dsecd.dns.table import Table
from dsecd.linux import peercred

log = logging.getLogger(__name__)

_RETRY_S = 0.2
#: A new daemon says hello at once.
_HELLO_S = 10.0
#: For the daemon to come back and to answer, together; a client's patience is five seconds (resolv.conf(5)).
OPEN_S = 2.0
_TELL_EVERY_S = 1.0


class WrongVersion(Exception):
    """The daemon speaks another version: this process is the old one, or the daemon is."""


class Link:
    """The connection, when there is one."""

    def __init__(self, path: Path, daemon_uid: int, table: Table, settings: Callable[[frames.Settings], None]) -> None:
        """Tables and settings are kept as the daemon at ``path`` says, if it runs as that user."""
        self._path = path
        self._daemon_uid = daemon_uid
        self._table = table
        self._settings = settings
        self._writer: asyncio.StreamWriter | None = None
        self._up = asyncio.Event()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[frozenset[Address]]] = {}

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    async def open(self, request: frames.Open) -> frozenset[Address]:
        """Those of the addresses that the daemon has opened; none when it is not there in time."""
        try:
            async with asyncio.timeout(OPEN_S):
                while True:
                    await self._up.wait()
                    try:
                        return await self._ask(request)
                    except ConnectionError:
                        continue  # the daemon went away meanwhile: the next one is asked again
        except TimeoutError:
            return frozenset()

    async def _ask(self, request: frames.Open) -> frozenset[Address]:
        number = next(self._numbers)
        answer: asyncio.Future[frozenset[Address]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(request.model_copy(update={"number": number}))
            return await answer
        finally:
            del self._waiting[number]

    def _send(self, message: frames.ToDaemon) -> None:
        if self._writer is None:
            raise ConnectionResetError
        self._writer.write(frames.pack(message))

    async def run(self) -> None:
        """Stay connected, for ever.  Raises WrongVersion."""
        complained = False
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError as error:
                if not complained:
                    log.warning("no daemon at %s: %s", self._path, error.strerror)
                complained = True
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                await self._serve(reader, writer)
            except (EOFError, ConnectionError):
                log.info("the daemon has closed the connection; %d sandboxes are known", len(self._table))
            except TimeoutError:
                log.error("connection to the daemon: it says nothing")
            except frames.LinkError as error:
                log.error("connection to the daemon: %s", error)
            finally:
                self._lost(writer)
            complained = False
            await asyncio.sleep(_RETRY_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = peercred.peer(writer.get_extra_info("socket"))
        if peer.uid != self._daemon_uid:
            raise frames.LinkError(f"the daemon should be uid {self._daemon_uid}, and is {peer.uid}")
        writer.write(frames.pack(frames.Hello(version=frames.VERSION)))
        async with asyncio.timeout(_HELLO_S):
            hello = await frames.read(reader, frames.TO_DNS)
        if not isinstance(hello, frames.Hello):
            raise frames.LinkError(f"expected 'hello', got {hello.kind!r}")
        if hello.version != frames.VERSION:
            raise WrongVersion(f"the daemon speaks version {hello.version}, this program {frames.VERSION}")
        self._table.begin()
        self._writer = writer
        while True:
            self._heard(await frames.read(reader, frames.TO_DNS))

    def _heard(self, message: frames.ToDns) -> None:
        match message:
            case frames.Policy():
                self._table.put(message)
            case frames.Forget():
                self._table.forget(message.sandbox)
            case frames.Opened():
                answer = self._waiting.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(frozenset(message.addresses))
            case frames.Mark():
                self._send(frames.Heard(number=message.number))
            case frames.Settings():
                self._settings(message)
            case frames.Synced():
                self._table.end()
                self._up.set()
                log.info("connected; the daemon knows %d sandboxes", len(self._table))
            case frames.Hello():
                raise frames.LinkError("'hello' came twice")

    async def tell(self) -> None:
        """Tell the daemon now and then what was refused, for ever; what it cannot be told now is told later."""
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            if self._writer is None or not self.is_up:
                continue
            for sandbox in self._table:
                if (denied := sandbox.usage.refused(sandbox.id)) is not None:
                    self._send(denied)

    def _lost(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        self._writer = None
        self._up.clear()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError())
