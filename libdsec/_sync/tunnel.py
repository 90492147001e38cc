# SPDX-License-Identifier: Apache-2.0
# Made by tools/unasync.py from libdsec/_async; edit that.
"""A connection into a sandbox.

Here: bytes in and out, and their ends. Not here: asking for one (``calls.py``), listening for programs (``dsecctl``).
"""

from __future__ import annotations

import json

from libdsec._sync.primitives import WebSocket
from libdsec.errors import from_wire


class Tunnel:
    """A connection to a port of a sandbox; close it when done."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    @classmethod
    def open(cls, socket: WebSocket) -> Tunnel:
        """Wait until it is made. Raises what the daemon says otherwise."""
        try:
            _text(socket.receive())
        except BaseException:
            socket.close()
            raise
        return cls(socket)

    def send(self, data: bytes) -> None:
        """Send some bytes; waits while the other side does not read."""
        if data:
            self._socket.send(data)

    def end(self) -> None:
        """Nothing more will be sent; the other side may go on."""
        self._socket.send(b"")

    def receive(self) -> bytes:
        """Some bytes; none at the end. Raises ConnectionFailed when the connection breaks."""
        message = self._socket.receive()
        if isinstance(message, str):
            _text(message)
        return message if isinstance(message, bytes) else b""

    def close(self) -> None:
        """Give it up; harmless when it is closed."""
        self._socket.close()


def _text(message: bytes | str) -> None:
    """The daemon's words: that the connection is there, or an error."""
    told = json.loads(message)
    if "code" in told:
        raise from_wire(told)
