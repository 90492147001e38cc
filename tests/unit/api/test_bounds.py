# SPDX-License-Identifier: Apache-2.0
"""What one user's requests may cost the daemon: memory for bodies, time to look at them."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.api import call as calls
from dsecd.api.room import crowded
from dsecd.core.principal import Principal, from_peer
from tests.support.fake_core import Api, serving

LIMIT_S = 90
BODY = 300_000


def run(directory: Path, uid: int, body: Callable[[Api], Awaitable[None]], **options: Any) -> None:
    def authenticate(_sock: socket.socket) -> Principal:
        return from_peer(uid, uid, 7, frozenset(), admin_gid=None)

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), serving(directory, authenticate=authenticate, **options) as api:
            await body(api)

    asyncio.run(main())


def head(path: str, length: int) -> bytes:
    fields = f"Host: d\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


class Sender:
    """A connection with a request whose body arrives as the test sends it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    @classmethod
    async def begin(cls, api: Api, announced: int) -> Sender:
        self = cls(*await asyncio.open_unix_connection(str(api.socket)))
        self.writer.write(head("/v1/sandboxes", announced))
        return self

    async def send(self, count: int) -> None:
        self.writer.write(b" " * count)
        await self.writer.drain()

    async def answer(self) -> dict[str, Any]:
        heads = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        length = next(int(line.partition(":")[2]) for line in heads if line.startswith("content-length:"))
        found: dict[str, Any] = json.loads(await self._reader.readexactly(length))
        self.writer.transport.abort()
        return found


def test_what_had_arrived_of_a_body_goes_with_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Piece(bytearray):
        """What a body is kept in: bytes themselves cannot be watched."""

    kept: list[weakref.ref[Piece]] = []
    read = calls.read_body

    async def watched(request: Any, limit: int, take: Callable[[int], None]) -> bytes:
        arrived = Piece(b"in the frame, as the pieces are")
        kept.append(weakref.ref(arrived))
        return await read(request, limit, take)

    async def body(api: Api) -> None:
        sender = await Sender.begin(api, 2 * BODY)
        await sender.send(BODY)
        while not kept:
            await asyncio.sleep(0.01)
        assert kept[0]() is not None
        sender.writer.transport.abort()
        for _ in range(1000):
            if kept[0]() is None:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("a request without a client keeps its body")

    monkeypatch.setattr(calls, "read_body", watched)
    gc.disable()  # which would find it some time, maybe hours later
    try:
        run(tmp_path, 1000, body)
    finally:
        gc.enable()


@pytest.mark.parametrize("uid", [0, 1000])
def test_a_user_has_only_so_much_held_but_root(tmp_path: Path, uid: int) -> None:
    async def body(api: Api) -> None:
        first, second = [await Sender.begin(api, 2 * BODY) for _ in range(2)]
        await first.send(BODY)
        held = api.server.dispatcher._room._held
        while held[uid] < BODY:
            await asyncio.sleep(0.01)
        await second.send(BODY)
        if uid == 0:
            await second.send(BODY)
            assert (await second.answer())["code"] == "invalid-spec"  # nothing but blanks
            first.writer.transport.abort()
            return
        refused = await second.answer()
        assert (refused["code"], refused["retryable"]) == ("no-capacity", True)
        assert "uid 1000" in refused["message"]
        assert "limits.max_body_bytes_per_user" in refused["hint"]
        # What the first one had is given back when it goes.
        first.writer.transport.abort()
        while held[uid]:
            await asyncio.sleep(0.01)
        third = await Sender.begin(api, BODY)
        await third.send(BODY)
        assert (await third.answer())["code"] == "invalid-spec"

    run(tmp_path, uid, body, max_body_bytes_per_user=BODY + BODY // 2)


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/v1/sandboxes/s/execs", b'{"argv":[' + b"0," * 3_000_000 + b"0]}"),
        ("/v1/sandboxes", b"{" + b",".join(b'"k%d":1' % n for n in range(500_000)) + b"}"),
    ],
    ids=["a list", "fields"],
)
def test_a_body_of_very_many_values_is_refused_before_they_are_looked_at(
    tmp_path: Path, path: str, document: bytes
) -> None:
    async def body(api: Api) -> None:
        reader, writer = await asyncio.open_unix_connection(str(api.socket))
        writer.write(head(path, len(document)) + document)
        began = time.process_time()
        assert b" 413 " in await reader.readline()
        # Of the whole process. Looking at all of them takes more than ten times as long.
        assert time.process_time() - began < 2
        writer.close()

    run(tmp_path, 1000, body)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(alphabet='",\\a', max_size=4)
    return st.lists(inner, max_size=6) | st.dictionaries(keys, inner, max_size=6)


_JSON = st.recursive(st.none() | st.text(alphabet='",\\[a]{}', max_size=8), containers, max_leaves=40)


def separators(value: Any) -> int:
    """Commas between values, counted by another road than the text."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(0, len(inner) - 1) + sum(map(separators, inner))


@given(_JSON)
def test_values_are_counted_and_what_is_in_strings_is_not(value: Any) -> None:
    text = json.dumps(value, separators=(",", ":")).encode()
    commas, strings = separators(value), text.replace(b'\\\\', b"").replace(b'\\"', b"").count(b'"') // 2
    for most in range(max(0, commas - 2), commas + 3):
        assert crowded(text, most) == (commas > most or (text.count(b",") > most and strings > 2 * most))
