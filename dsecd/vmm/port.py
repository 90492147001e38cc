# SPDX-License-Identifier: Apache-2.0
"""Connections over a virtio-serial port, which has no notion of them.

What belongs here: the prelude that begins one, on the host's side (``agent/port.c`` is the other). What does not: where
the port's socket is, and what is said afterwards.

A port is one stream in each direction for all of the machine's life; what a former daemon or an interrupted frame left
in it lies before the prelude, and is thrown away.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

_MAGIC = b"\x7fdsec-connect-1\n"
KEY_BYTES = 16
#: More than everything that can be on its way: the agent's queues, the driver's and QEMU's.
_STALE_BYTES = 4 << 20
#: How long one connection may stay without an answer before another is tried: at first, and at most.
_PATIENCE_S, _PATIENCE_MAX_S = 2.0, 16.0

Connect = Callable[[], Awaitable[socket.socket]]


async def dial(connect: Connect, key: bytes, *, patience_s: float = _PATIENCE_S) -> socket.socket:
    """A connection that has begun, over one of the sockets that ``connect`` gives. Tries until it is cancelled.

    A prelude or its answer can be lost with what a monitor throws away for a host that left, and a monitor can be deaf
    in one direction until the next host comes. No state of either end outlives the next prelude that arrives, so
    another try is all that it takes; each waits longer, should the guest be slow. Raises ConnectionError, OSError.
    """
    while True:
        sock = await connect()
        try:
            async with asyncio.timeout(patience_s):
                await begin(sock, key)
            return sock
        except TimeoutError:
            sock.close()
            patience_s = min(2 * patience_s, _PATIENCE_MAX_S)
        except BaseException:  # whatever ends the attempt, the descriptor goes with it
            sock.close()
            raise


async def begin(sock: socket.socket, key: bytes) -> None:
    """Begin a connection and wait until the agent answers it. Raises ConnectionError, OSError.

    ``key`` is secret, and always the same for a machine: the agent believes the first it hears, and only that later.
    """
    loop = asyncio.get_running_loop()
    prelude = _MAGIC + key + os.urandom(KEY_BYTES)
    await loop.sock_sendall(sock, prelude)
    seen, stale = b"", 0
    while stale < _STALE_BYTES:
        wanted = len(prelude) - _overlap(seen, prelude)
        if wanted == 0:
            return
        # Never more than what completes the prelude, if it is that: what follows is not ours to read.
        piece = await loop.sock_recv(sock, wanted)
        if not piece:
            raise ConnectionResetError("the virtual machine closed the agent's port")
        stale += len(piece)
        seen = (seen + piece)[-len(prelude) :]
    raise ConnectionAbortedError("the agent's port says everything but who it is")


def _overlap(seen: bytes, prelude: bytes) -> int:
    """How long an end of what was seen is a beginning of the prelude."""
    return next(n for n in range(min(len(seen), len(prelude)), -1, -1) if seen.endswith(prelude[:n]))
