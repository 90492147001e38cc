# SPDX-License-Identifier: Apache-2.0
"""A client of one Firecracker process's API: typed requests in, typed answers or a FirecrackerError out.

What belongs here: one call, from the request to the checked answer.  What does not: the order of calls
(machine), what may be asked (models).

The process on the other side runs a guest and may have been taken over by it, so nothing it says is trusted:
the socket must belong to the process we started, answers are bounded in size and time, and what they hold is
checked.  Each call has a connection of its own, because after one that Firecracker could not parse, answers no
longer belong to the calls they follow.
"""

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Any, TypeVar

from dsecd.linux import peercred, pidfd, unixsocket
from dsecd.vmm.firecracker import models
from dsecd.vmm.firecracker.errors import (
    BadAnswer,
    CallRefused,
    CallTimedOut,
    FirecrackerError,
    NotAnswering,
    TooOld,
)

A = TypeVar("A", bound=models.Answer)

CALL_TIMEOUT_S = 10.0
#: What Firecracker itself accepts as a body unless told otherwise.
REQUEST_LIMIT_BYTES = 51_200
_HEAD_LIMIT_BYTES = 8 << 10
_BODY_LIMIT_BYTES = 256 << 10
_FAULT_LIMIT = 600


@dataclass(frozen=True)
class Endpoint:
    """Where the API of one process is, and whose it must be."""

    root_fd: int  # the directory that the process has as its root
    socket: str  # path below it
    uid: int
    process: pidfd.Process


class Api:
    """The API of one process. Calls may overlap; Firecracker handles them one after the other."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._version: models.Version | None = None

    async def version(self) -> models.Version:
        """Which release answers, asked once.  Raises TooOld below `models.OLDEST`."""
        if self._version is None:
            text = (await self.get(models.VersionAnswer)).firecracker_version
            try:
                found = models.parse_version(text)
            except ValueError as error:
                raise BadAnswer("GET /version", str(error)) from error
            if found < models.OLDEST:
                raise TooOld("use Firecracker", models.version_text(models.OLDEST), models.version_text(found))
            self._version = found
        return self._version

    async def send(self, request: models.Request, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Make a call that changes something; `204 No Content` is the only good answer."""
        payload = json.dumps(models.body(request)).encode()
        if models.needs(request)[0] > models.OLDEST:
            models.check_version(request, await self.version())
        status, content = await self._call(request.METHOD, request.path(), payload, timeout_s)
        if status != 204 or content:
            raise BadAnswer(request.what(), f"status {status} with {len(content)} bytes, expected 204 with none")

    async def get(self, kind: type[A], *, timeout_s: float = CALL_TIMEOUT_S) -> A:
        """Ask for something."""
        what = f"GET {kind.PATH}"
        status, content = await self._call("GET", kind.PATH, b"", timeout_s)
        found = _json(content)
        if status != 200 or not isinstance(found, dict):
            raise BadAnswer(what, f"status {status} with {content[:80]!r}, expected 200 with a JSON object")
        return kind.read(found)

    async def _call(self, method: str, path: str, payload: bytes, timeout_s: float) -> tuple[int, bytes]:
        what = f"{method} {path}"
        if len(payload) > REQUEST_LIMIT_BYTES:
            raise BadAnswer(what, f"the request has {len(payload)} bytes, Firecracker takes {REQUEST_LIMIT_BYTES}")
        try:
            async with asyncio.timeout(timeout_s):
                with await self._connect(what, timeout_s) as sock:
                    status, content = await _exchange(sock, _request(method, path, payload), what)
        except FirecrackerError:
            raise
        except TimeoutError as error:
            raise CallTimedOut(what, f"no answer after {timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            raise NotAnswering(what, str(error) or type(error).__name__) from error
        if status >= 400:
            raise CallRefused(what, status, _fault(content))
        return status, content

    async def _connect(self, what: str, timeout_s: float) -> socket.socket:
        there = self._endpoint
        sock = await unixsocket.connect_beneath(there.root_fd, there.socket, timeout_s=timeout_s)
        peer = peercred.peer(sock)
        if (peer.uid, peer.pid) != (there.uid, there.process.pid):
            sock.close()
            raise NotAnswering(
                what, f"the API socket is that of process {peer.pid} of uid {peer.uid}, "
                f"expected process {there.process.pid} of uid {there.uid}",
            )  # fmt: skip
        return sock


def _request(method: str, path: str, payload: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
    if method != "GET":
        head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
    return head.encode("ascii") + b"\r\n" + payload


async def _exchange(sock: socket.socket, request: bytes, what: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(sock=sock, limit=_HEAD_LIMIT_BYTES)
    try:
        writer.write(request)
        # A process that answers before it has read everything, or dies, still may have said why.
        head = await reader.readuntil(b"\r\n\r\n")
        status, size = _head(head, what)
        return status, await reader.readexactly(size)
    except asyncio.LimitOverrunError as error:
        raise BadAnswer(what, f"the answer's head is larger than {_HEAD_LIMIT_BYTES} bytes") from error
    except asyncio.IncompleteReadError as error:
        raise EOFError(f"the connection ended after {len(error.partial)} bytes of the answer") from error
    finally:
        writer.transport.abort()


def _head(head: bytes, what: str) -> tuple[int, int]:
    """Status and length of the body, out of what precedes it."""
    first, *rest = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or words[0] not in ("HTTP/1.1", "HTTP/1.0") or not _is_digits(words[1], 3):
        raise BadAnswer(what, f"{first[:80]!r} is not the first line of an HTTP answer")
    size = 0
    for line in rest:
        name, _, value = line.partition(":")
        if name.lower() == "transfer-encoding":
            raise BadAnswer(what, "the answer has a transfer encoding, which Firecracker never uses")
        if name.lower() == "content-length":
            if not _is_digits(value.strip(), 9):
                raise BadAnswer(what, f"content length {value.strip()[:40]!r}")
            size = int(value)
    if size > _BODY_LIMIT_BYTES:
        raise BadAnswer(what, f"the answer has {size} bytes, {_BODY_LIMIT_BYTES} are the most that is read")
    return int(words[1]), size


def _is_digits(text: str, most: int) -> bool:
    return 0 < len(text) <= most and text.isascii() and text.isdigit()


def _json(content: bytes) -> Any:
    try:
        # Not strict: the HTTP server's own errors hold line ends as they are.
        return json.loads(content, strict=False)
    # RecursionError: brackets nested deeper than the parser's stack.
    except (ValueError, RecursionError):
        return None


def _fault(content: bytes) -> str:
    """The explanation in an error's body: `fault_message` from the API, `error` from the HTTP server below it."""
    found = _json(content)
    text = content.decode("utf-8", "replace")
    if isinstance(found, dict):
        text = str(found.get("fault_message") or found.get("error") or text)
    return "".join(char if char.isprintable() else " " for char in text[:_FAULT_LIMIT])
