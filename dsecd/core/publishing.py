# SPDX-License-Identifier: Apache-2.0
"""Ports of sandboxes on the host's loopback.

What belongs here: listening for as long as a sandbox exists, and passing connections on. What does not: how a
connection gets into a sandbox (``dsecd.backends``), who may ask for what (``registry.py``).

Nothing is opened for it in the sandbox's network. While it is paused, connections are made and wait; while it is
stopped, and where nobody listens in there, they are reset. A daemon that starts binds the same ports anew, before it
does anything else with sandboxes; descriptors kept by systemd would need another way for daemons without it, and who
connects meanwhile would not be answered either.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import struct
from collections import defaultdict
from dataclasses import dataclass, replace

from dsecd.core.ledger import Ledger
from dsecd.core.live import Live
from dsecd.core.tasks import Tasks
from libdsec import errors
from libdsec.ports import Published, parse
from libdsec.types import State

log = logging.getLogger(__name__)

#: Of one sandbox at a time; those beyond are reset.
CONNECTIONS_MAX = 256
#: Ports below it are a matter of the administrator's.
_FIRST_OF_ALL = 1024
_READ_BYTES = 1 << 16
_BACKLOG = 128
_RETRY_S = 2.0
# struct linger of socket(7): a close is a reset.
_RESET = struct.pack("ii", 1, 0)
_OPEN = (State.RUNNING, State.PAUSED)


@dataclass
class _Door:
    published: Published
    sock: socket.socket
    server: asyncio.Server | None = None

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.sock.close()


class Publishing:
    """All published ports. For the event loop's thread."""

    def __init__(self, tasks: Tasks, ledger: Ledger) -> None:
        self._tasks = tasks
        self._ledger = ledger
        self._doors: dict[str, list[_Door]] = {}
        self._connections: defaultdict[str, set[asyncio.StreamWriter]] = defaultdict(set)

    def bind(self, live: Live) -> None:
        """Take the ports of its spec, all or none, and write those that were chosen into it.

        Whoever connects waits until ``serve``. Raises Conflict for one that is taken, Denied, Refused.
        """
        if not live.record.spec.publish or live.id in self._doors:
            return
        with contextlib.ExitStack() as undo:
            doors = []
            for text in live.record.spec.publish:
                door = _bound(parse(text), live)
                undo.callback(door.close)
                doors.append(door)
            undo.pop_all()
        self._doors[live.id] = doors
        chosen = tuple(str(door.published) for door in doors)
        live.record.spec = live.box.spec = live.record.spec.model_copy(update={"publish": chosen})

    def bind_again(self, live: Live) -> None:
        """The same for one that an earlier daemon made; ports that somebody has taken meanwhile are tried again, and
        the sandbox says so until it has them all."""
        try:
            self.bind(live)
        except errors.DsecError as error:
            live.record.unpublished = _why(error)
            log.warning("sandbox=%s its ports are not published: %s", live.id, live.record.unpublished)
            self._ledger.tell("sandbox.unpublished", live, error=live.record.unpublished)
            self._tasks.spawn(f"publish {live.id}", self._try_again(live))

    async def serve(self, live: Live) -> None:
        """Answer who connects from now on."""
        for door in self._doors.get(live.id, ()):
            if door.server is None:
                take = functools.partial(self._connected, live, door.published.port)
                door.server = await asyncio.start_server(take, sock=door.sock, limit=_READ_BYTES, backlog=_BACKLOG)

    def close(self, sandbox_id: str) -> None:
        """Give its ports back and end its connections."""
        for door in self._doors.pop(sandbox_id, ()):
            door.close()
        for writer in self._connections.pop(sandbox_id, ()):
            writer.transport.abort()

    def close_all(self) -> None:
        """The daemon ends."""
        for sandbox_id in list(self._doors):
            self.close(sandbox_id)

    async def _try_again(self, live: Live) -> None:
        while live.id not in self._doors:
            await asyncio.sleep(_RETRY_S)
            if live.gone or live.record.state is State.DELETING:
                return
            try:
                self.bind(live)
            except errors.DsecError as error:
                live.record.unpublished = _why(error)
        live.record.unpublished = None
        self._ledger.tell("sandbox.published", live)
        await self.serve(live)

    async def _connected(
        self, live: Live, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connections = self._connections[live.id]
        if len(connections) >= CONNECTIONS_MAX:
            _reset(writer)
            return
        connections.add(writer)
        try:
            if live.record.state not in _OPEN or live.gone:
                raise errors.WrongState(f"connect to port {port} of '{live.id}': it is {live.record.state}")
            inside = await asyncio.open_connection(sock=await live.backend.dial(live.box, port), limit=_READ_BYTES)
            try:
                await _pass((reader, writer), inside)
            finally:
                inside[1].close()
        except (errors.DsecError, OSError) as error:
            log.debug("sandbox=%s port=%d: %s", live.id, port, error)
            _reset(writer)
        finally:
            connections.discard(writer)
            writer.close()


def _why(error: errors.DsecError) -> str:
    """What is wrong, what becomes of it, and what can be done."""
    port = error.details.get("port")
    todo = "" if port is None else f"; end what has the port (ss -ltnp 'sport = :{port}' names it)"
    return f"{error.message}{todo}; all its ports are tried again every {_RETRY_S:.0f} s"


def any_free(publish: tuple[str, ...]) -> tuple[str, ...]:
    """The same ports of a sandbox, at ports of the host that nobody has."""
    return tuple(str(replace(parse(text), host_port=0)) for text in publish)


def _bound(published: Published, live: Live) -> _Door:
    doing = f"publish '{published}' of '{live.id}'"
    if 0 < published.host_port < _FIRST_OF_ALL and live.record.owner_uid != 0:
        raise errors.Denied(f"{doing}: ports below {_FIRST_OF_ALL} are root's", hint="choose a higher host port")
    family = socket.AF_INET6 if published.address.version == 6 else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # Connections of an earlier daemon that linger are no reason not to listen.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((str(published.address), published.host_port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise errors.Conflict(
                f"{doing}: somebody listens on that port of the host already",
                hint="choose another host port, or 0 for any free one", port=published.host_port,
            ) from error  # fmt: skip
        hint = "choose a host port from 1024 on" if error.errno == errno.EACCES else None
        raise errors.Refused(f"{doing}: {error.strerror}", hint=hint, errno=error.errno) from error
    return _Door(replace(published, host_port=sock.getsockname()[1]), sock)


async def _pass(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter], other: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Bytes both ways, until both have ended or one breaks. What one side does not take, the other cannot send."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_flow(one[0], other[1]))
            group.create_task(_flow(other[0], one[1]))
    except ExceptionGroup as group_error:
        raise group_error.exceptions[0] from None


async def _flow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_READ_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
