# SPDX-License-Identifier: Apache-2.0
"""Reaching a port of the guest through the Unix socket of Firecracker's vsock device.

What belongs here: the handshake that turns a connection to that socket into one to a port.  What does not: what
is said on it afterwards.

The host says `CONNECT <port>`, and `OK <its own port>` comes back once the guest has accepted; when nobody listens
there, Firecracker hangs up without a word.  docs/vsock.md of Firecracker.
"""

import asyncio
import re
import socket

from dsecd.linux import unixsocket
from dsecd.vmm.firecracker.errors import BadAnswer, CallTimedOut, ConnectRefused, NotAnswering

_ANSWER = re.compile(rb"OK ([0-9]{1,10})\n")
_ANSWER_LIMIT_BYTES = 32


async def connect(root_fd: int, path: str, port: int, *, timeout_s: float) -> socket.socket:
    """A non-blocking stream to `port` of the guest, through the socket at `path` below a process's root.

    Raises ConnectRefused when nobody listens there, NotAnswering when there is no such socket, CallTimedOut when
    the guest does not say yes or no, BadAnswer.
    """
    what = f"connect to port {port} of the guest"
    try:
        async with asyncio.timeout(timeout_s):
            sock = await unixsocket.connect_beneath(root_fd, path, timeout_s=timeout_s)
            try:
                await _shake_hands(sock, port, what)
            except BaseException:
                sock.close()
                raise
            return sock
    except TimeoutError as error:
        raise CallTimedOut(what, f"no answer after {timeout_s:g} s") from error
    except (ConnectRefused, BadAnswer):
        raise
    except OSError as error:
        raise NotAnswering(what, str(error)) from error


async def _shake_hands(sock: socket.socket, port: int, what: str) -> None:
    loop = asyncio.get_running_loop()
    answer = b""
    try:
        await loop.sock_sendall(sock, b"CONNECT %d\n" % port)
        # Byte by byte: what follows the line is already the guest's.
        while not answer.endswith(b"\n") and len(answer) < _ANSWER_LIMIT_BYTES:
            byte = await loop.sock_recv(sock, 1)
            if not byte:
                raise ConnectRefused(what, "nobody listens there")
            answer += byte
    except ConnectionError as error:
        if isinstance(error, ConnectRefused):
            raise
        raise ConnectRefused(what, str(error)) from error
    if _ANSWER.fullmatch(answer) is None:
        raise BadAnswer(what, f"{answer!r} is not the answer of a vsock device")
