# SPDX-License-Identifier: Apache-2.0
"""QEMU's control protocol, as much of it as is used: one command after the other, events that are waited for.

What belongs here: framing, answers and their limits. What does not: which commands (``qemu.py``).
Source: QEMU's docs/interop/qmp-spec.rst.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, Self

from dsecd.vmm.base import VmmError

#: QEMU reads what a hostile guest says, so it may say anything itself.
_LINE_BYTES = 1 << 20
_LINES_MAX = 10_000


class Qmp:
    """One conversation: ``async with Qmp(sock) as qmp``. QEMU holds one at a time; others wait to be accepted."""

    def __init__(self, sock: socket.socket) -> None:
        """``sock``: a connected one, taken over."""
        self._sock = sock
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._sock, limit=_LINE_BYTES)
        try:
            await self._read()  # the greeting
            await self.execute("qmp_capabilities")
        except BaseException:  # whatever ends it, cancellation too: the descriptor goes with it
            self._writer.close()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._writer.close()

    async def execute(self, command: str, **arguments: object) -> Any:
        """Send a command and give its answer. Raises VmmError when QEMU refuses it or is gone."""
        message = {"execute": command} | ({"arguments": arguments} if arguments else {})
        self._writer.write(json.dumps(message).encode() + b"\n")
        return await self._answer(command)

    async def give(self, fd: int, number: int) -> str:
        """Hand a descriptor to QEMU as the only one of a set; the path by which commands name it."""
        message = {"execute": "add-fd", "arguments": {"fdset-id": number}}
        # Nothing waits in the stream's buffer: each command is answered before the next.
        socket.send_fds(self._sock, [json.dumps(message).encode() + b"\n"], [fd])
        await self._answer("add-fd")
        return f"/dev/fdset/{number}"

    async def _answer(self, command: str) -> Any:
        for _line in range(_LINES_MAX):
            answer = await self._read()
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                raise VmmError(f"{command}: {_text(answer['error'])}")
        raise VmmError(f"{command}: no answer in {_LINES_MAX} messages")

    async def _read(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError) as error:
            raise VmmError(f"read QEMU's answer: {error}") from error
        if not isinstance(message, dict):
            raise VmmError("read QEMU's answer: it is gone" if not line else "read QEMU's answer: not an object")
        return message


def _text(error: object) -> str:
    text = error.get("desc") if isinstance(error, dict) else None
    return str(text or "refused")[:500]
