# SPDX-License-Identifier: Apache-2.0
"""What flows through the API: commands and events over WebSockets, contents of files."""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio import client
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from dsecd.api import exec_stream
from dsecd.api.bodies import ExtentReader
from dsecd.core.execs import StreamOutput
from libdsec import types as t
from libdsec.errors import BackendFailed, InvalidSpec, SandboxLost
from libdsec.frames import Extents, extent
from tests.support.fake_core import Api, FakeStream
from tests.unit.api.test_requests import http, raw, run

EXTENTS = {"Content-Type": "application/x-dsec-extents"}
START = t.StreamStart(start=t.ExecRequest(argv=("x",)), stdin=True).model_dump_json()
END = t.ExecInfo(exec_id="x1", pid=42, running=False, exit_code=3)


def connect(api: Api, path: str = "/v1/sandboxes/s/execs/stream") -> client.connect:
    return unix_connect(
        str(api.socket), f"ws://dsec{path}", compression=None, ping_interval=None, max_size=1 << 22
    )


async def script(*events: StreamOutput | t.ExecInfo | Exception) -> AsyncIterator[StreamOutput | t.ExecInfo]:
    for event in events:
        if isinstance(event, Exception):
            raise event
        yield event
    await asyncio.Event().wait()


async def frames(socket: ClientConnection) -> tuple[list[bytes | str], int | None]:
    """All messages until it is closed, and the close code."""
    found: list[bytes | str] = []
    try:
        while True:
            found.append(await socket.recv())
    except ConnectionClosed:
        return found, socket.close_code


# --- commands
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ('{"start": {"argv": ["cat"], "stdin": "eA=="}}', "start.stdin: is not for a stream"),
        ('{"start": {"argv": ["cat"]}, "stdout_offset": 3}', "go with 'attach'"),
        ('{"start": {"argv": ["cat"]}, "attach": "x"}', "exactly one of 'start' and 'attach'"),
        ("{}", "exactly one of 'start' and 'attach'"),
    ],
)
def test_what_a_first_message_cannot_ask_for_is_refused_and_starts_nothing(
    tmp_path: Path, message: str, words: str
) -> None:
    async def body(api: Api) -> None:
        api.execs.stream = FakeStream(script(END))
        async with connect(api) as socket:
            await socket.send(message)
            found, code = await frames(socket)
        assert code == 1011
        (text,) = found
        answer = json.loads(text)
        assert (answer["code"], words in answer["message"]) == ("invalid-spec", True), answer

    run(tmp_path, body)


def test_output_comes_in_frames_and_the_end_is_the_last(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        stream = api.execs.stream = FakeStream(
            script(StreamOutput(1, 0, b"out"), StreamOutput(2, 5, b"\0err"), StreamOutput(1, 3, b"more"), END)
        )
        async with connect(api) as socket:
            await socket.send(START)
            found, code = await frames(socket)
        started, *middle, end = (message for message in found if isinstance(message, bytes))
        assert started[0] == 0x10
        assert t.ExecInfo.model_validate_json(started[1:]) == t.ExecInfo(exec_id="x1", pid=42, running=True)
        assert middle == [
            b"\x11" + struct.pack("<Q", 0) + b"out",
            b"\x12" + struct.pack("<Q", 5) + b"\0err",
            b"\x11" + struct.pack("<Q", 3) + b"more",
        ]
        assert end[0] == 0x1F
        assert t.ExecInfo.model_validate_json(end[1:]) == END
        assert code == 1000
        assert stream.consumed_bytes == 11
        assert stream.detached.is_set()
        assert api.execs.opened == [t.StreamStart.model_validate_json(START)]

    run(tmp_path, body)


def test_what_the_client_sends_reaches_the_command(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        stream = api.execs.stream = FakeStream(script())
        async with connect(api) as socket:
            await socket.send(START)
            await socket.recv()
            await socket.send(b"\x00abc")
            assert await socket.recv() == b"\x13" + struct.pack("<Q", 3)
            await socket.send(b"\x00de")
            assert await socket.recv() == b"\x13" + struct.pack("<Q", 5)
            await socket.send(b'\x02{"rows": 50, "cols": 132}')
            await socket.send(b'\x03{"signal": 9, "tree": true}')
            await socket.send(b"\x01")
            while len(stream.did) < 5:
                stream.acted.clear()
                await stream.acted.wait()
            await socket.send(b"\x04")
            assert (await frames(socket))[1] == 1000
        assert stream.did[:2] == [("stdin", b"abc"), ("stdin", b"de")]
        assert set(stream.did[2:]) == {("resize", 50, 132), ("signal", 9, True), ("eof",)}
        assert stream.detached.is_set()

    run(tmp_path, body)


def test_a_signal_passes_input_that_the_command_does_not_read(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        stream = api.execs.stream = FakeStream(script())
        stream.stdin_gate.clear()
        async with connect(api) as socket:
            await socket.send(START)
            for _ in range(3):
                await socket.send(b"\x00" + bytes(1000))
            await socket.send(b'\x03{"signal": 2}')
            await stream.acted.wait()
            assert stream.did == [("signal", 2, False)]

    run(tmp_path, body)


def test_a_slow_client_holds_the_command_back(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[StreamOutput | t.ExecInfo]:
        for offset in itertools.count(0, 65536):
            yield StreamOutput(1, offset, bytes(65536))

    async def body(api: Api) -> None:
        stream = api.execs.stream = FakeStream(endless())
        reader, writer = await asyncio.open_unix_connection(str(api.socket), limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        key = "GET /v1/sandboxes/s/execs/stream HTTP/1.1\r\nHost: d\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        writer.write(
            (key + "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + "A" * 22 + "==\r\n\r\n").encode()
        )
        message = START.encode()
        writer.write(b"\x81" + (b"\xfe" + struct.pack(">H", len(message))) + bytes(4) + message)
        seen = -1
        while stream.consumed_bytes != seen or seen == 0:
            seen = stream.consumed_bytes
            await asyncio.sleep(0.1)
        assert 0 < seen < 4 << 20  # what socket buffers hold, and then no more
        writer.transport.abort()
        await stream.detached.wait()
        del reader

    run(tmp_path, body)


def test_a_client_that_vanishes_detaches(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        stream = api.execs.stream = FakeStream(script())
        async with connect(api) as socket:
            await socket.send(START)
            await socket.recv()
            assert not stream.detached.is_set()
            socket.transport.abort()
            await stream.detached.wait()

    run(tmp_path, body)


def test_a_failure_is_told_as_text(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        stream = api.execs.stream = FakeStream(
            script(StreamOutput(1, 0, b"x"), SandboxLost("follow exec 'x1': the sandbox died", exec_id="x1"))
        )
        async with connect(api) as socket:
            await socket.send(START)
            found, code = await frames(socket)
        assert isinstance(found[-1], str)
        wire = json.loads(found[-1])
        assert (wire["code"], wire["details"]) == ("sandbox-lost", {"exec_id": "x1"})
        assert wire["request_id"]
        assert code == 1011
        assert stream.detached.is_set()
        api.execs.stream = None
        async with connect(api) as socket:
            await socket.send('{"attach": "x9"}')
            found, code = await frames(socket)
        assert [json.loads(message)["code"] for message in found] == ["not-found"]
        assert code == 1011

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([b"\x00abc"], "invalid-spec"),
        (['{"bogus": 1}'], "invalid-spec"),
        ([START, b"\x77"], "invalid-spec"),
        ([START, b""], "invalid-spec"),
        ([START, "text"], "invalid-spec"),
        ([START, b'\x02{"rows": 0, "cols": 1}'], "invalid-spec"),
    ],
)
def test_wrong_messages_end_the_conversation(tmp_path: Path, messages: list[bytes | str], code: str) -> None:
    async def body(api: Api) -> None:
        stream = api.execs.stream = FakeStream(script())
        async with connect(api) as socket:
            for message in messages:
                await socket.send(message)
            found, close_code = await frames(socket)
        assert isinstance(found[-1], str)
        assert json.loads(found[-1])["code"] == code
        assert close_code == 1011
        assert stream.detached.is_set() is (messages[0] == START)

    run(tmp_path, body)


def test_a_message_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        stream = api.execs.stream = FakeStream(script())
        async with connect(api) as socket:
            await socket.send(START)
            await socket.send(b"\x00" + bytes(2 << 20))
            _, code = await frames(socket)
        assert code == 1009
        await stream.detached.wait()
        assert stream.did == []

    run(tmp_path, body)


def test_a_client_that_says_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_stream, "START_TIMEOUT_S", 0.05)

    async def body(api: Api) -> None:
        async with connect(api) as socket:
            found, code = await frames(socket)
        assert [json.loads(message)["code"] for message in found] == ["invalid-spec"]
        assert code == 1011

    run(tmp_path, body)


def test_refusals_before_the_handshake_are_http_errors(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        for path, status in (("/v1/sandboxes/UPPER/execs/stream", 422), ("/v1/version", 405)):
            with pytest.raises(InvalidStatus) as caught:
                async with connect(api, path):
                    pass
            assert caught.value.response.status_code == status
            assert json.loads(caught.value.response.body or b"")["code"] == "invalid-spec"

    run(tmp_path, body)


def test_stopping_closes_streams_with_going_away(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        stream = api.execs.stream = FakeStream(script())
        async with connect(api) as socket, connect(api, "/v1/events/stream") as events:
            await socket.send(START)
            await socket.recv()
            api.events.close()
            async with asyncio.TaskGroup() as group:
                group.create_task(api.server.close(0.5))
                first = group.create_task(frames(socket))
                second = group.create_task(frames(events))
            assert first.result() == ([], 1001)
            assert second.result()[1] in (1000, 1001)
        assert stream.detached.is_set()

    run(tmp_path, body)


# --- events
# ------------------------------------------------------------------------------------------------------


def test_events_stream_from_where_the_client_was(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        for name in ("a", "b"):
            api.events.emit("sandbox.created", name)
        await api.store.write(lambda _db: None)
        async with connect(api, "/v1/events/stream?since=1") as old, connect(api, "/v1/events/stream") as new:
            assert json.loads(await old.recv())["subject"] == "b"
            api.events.emit("sandbox.created", "c")
            for socket in (old, new):
                event = t.Event.model_validate_json(await socket.recv())
                assert (event.seq, event.subject) == (3, "c")

    run(tmp_path, body)


# --- files
# -------------------------------------------------------------------------------------------------------


def test_a_download_is_the_file_with_its_holes_as_zeros(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        api.files.size, api.files.parts = 200_010, [(3, b"abc"), (200_000, b"xyz")]
        async with http(api) as http_client:
            answer = await http_client.get("/v1/sandboxes/s/files?path=/f")
        assert answer.content == bytes(3) + b"abc" + bytes(199_994) + b"xyz" + bytes(7)
        assert answer.headers["X-Dsec-Size"] == "200010"
        assert t.FileInfo.model_validate_json(answer.headers["X-Dsec-Info"]).name == "f"
        assert api.files.got is not None
        assert api.files.got.closed

    run(tmp_path, body)


def test_a_part_of_a_file_ends_where_it_was_asked_to(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        api.files.size, api.files.parts = 100, [(12, b"ab")]
        async with http(api) as http_client:
            answer = await http_client.get("/v1/sandboxes/s/files?path=/f&offset=10&length=8")
            assert answer.content == bytes(2) + b"ab" + bytes(4)
            api.files.parts = []
            assert (
                await http_client.get("/v1/sandboxes/s/files?path=/f&offset=95&length=10")
            ).content == bytes(5)
            assert (await http_client.get("/v1/sandboxes/s/files?path=/f&offset=200")).content == b""
        assert api.files.asked[0] == {"path": "/f", "user": None, "offset": 10, "length": 8}

    run(tmp_path, body)


def test_extents_leave_the_holes_out(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        api.files.size, api.files.parts = 1 << 40, [(5, b"abc"), (1 << 39, b"x")]
        async with http(api) as http_client:
            answer = await http_client.get(
                "/v1/sandboxes/s/files?path=/f", headers={"Accept": EXTENTS["Content-Type"]}
            )
        assert answer.content == extent(5, b"abc") + extent(1 << 39, b"x") + extent(1 << 40, b"")
        assert answer.headers["Content-Type"] == EXTENTS["Content-Type"]

    run(tmp_path, body)


@pytest.mark.parametrize("parts", [[], [(0, b"abc")]])
def test_a_download_that_fails_on_the_way_is_broken_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parts: list[tuple[int, bytes]]
) -> None:
    async def body(api: Api) -> None:
        api.files.size, api.files.parts, api.files.fail = 100, parts, BackendFailed("read: I/O error")
        request = b"GET /v1/sandboxes/s/files?path=/f HTTP/1.1\r\nHost: d\r\n\r\n"
        head, _, content = (await raw(api, request)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert content == b"".join(b"%x\r\n%s\r\n" % (len(data), data) for _, data in parts)  # no last chunk
        assert api.files.got is not None
        assert api.files.got.closed

    run(tmp_path, body)
    assert "answer broken off path=/v1/sandboxes/s/files: read: I/O error" in caplog.text
    assert "request failed" not in caplog.text


@pytest.mark.parametrize(
    ("content", "headers", "query", "written", "size"),
    [
        (b"hello", {}, "", b"hello", 5),
        (b"hello", {}, "&size=10", b"hello", 10),
        (b"", {}, "", b"", 0),
        (extent(2, b"ab") + extent(100, b"c"), EXTENTS, "", b"abc", 101),
        (extent(2, b"ab") + extent(100, b""), EXTENTS, "", b"ab", 100),
        (extent(0, b""), EXTENTS, "&size=7", b"", 7),
    ],
)
def test_an_upload_is_committed_with_its_size(
    tmp_path: Path, content: bytes, headers: dict[str, str], query: str, written: bytes, size: int
) -> None:
    async def body(api: Api) -> None:
        async with http(api) as http_client:
            answer = await http_client.put(
                f"/v1/sandboxes/s/files?path=/d/f{query}", content=content, headers=headers
            )
        assert answer.status_code == 200
        assert answer.json()["size_bytes"] == size
        assert api.files.put is not None
        assert b"".join(data for _, data in api.files.put.written) == written
        assert api.files.put.committed == size

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (extent(2, b"ab")[:-1], "body: the last extent is cut short"),
        (extent(2, b"ab") + b"\0", "body: the last extent is cut short"),
        (extent(2, b"ab") + extent(3, b"c"), "body: an extent at 3 comes after 4"),
    ],
)
def test_wrong_extents_upload_nothing(tmp_path: Path, content: bytes, message: str) -> None:
    async def body(api: Api) -> None:
        async with http(api) as http_client:
            answer = await http_client.put("/v1/sandboxes/s/files?path=/f", content=content, headers=EXTENTS)
        assert (answer.status_code, answer.json()["message"]) == (422, message)
        assert api.files.put is not None
        assert api.files.put.committed is None
        assert api.files.put.closed.is_set()

    run(tmp_path, body)


def test_what_an_upload_asks_for_reaches_the_core(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        api.files.part_offset = 10
        query = "path=/f&user=me&mode=420&umask=63&parents=true&exclusive=1&mtime_ns=5&part=p&offset=10"
        async with http(api) as http_client:
            answer = await http_client.put(f"/v1/sandboxes/s/files?{query}", content=b"more")
            assert answer.json()["size_bytes"] == 14
            late = await http_client.put("/v1/sandboxes/s/files?path=/f&part=p&offset=11", content=b"more")
        assert (late.status_code, late.json()["code"], late.json()["details"]) == (
            409,
            "conflict",
            {"offset": 10},
        )
        assert api.files.asked[0] == {
            "path": "/f", "user": "me", "mode": 420, "umask": 63, "parents": True, "exclusive": True, "mtime_ns": 5,
            "part": "p",
        }  # fmt: skip
        assert api.files.asked[1]["umask"] == 0o022

    run(tmp_path, body)


def test_an_upload_whose_client_vanishes_is_not_committed(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        _, writer = await asyncio.open_unix_connection(str(api.socket))
        writer.write(
            b"PUT /v1/sandboxes/s/files?path=/f HTTP/1.1\r\nHost: d\r\nContent-Length: 100\r\n\r\nhello"
        )
        while api.files.put is None:
            await asyncio.sleep(0.01)
        await api.files.put.began.wait()
        writer.transport.abort()
        await api.files.put.closed.wait()
        assert api.files.put.committed is None

    run(tmp_path, body)


@given(
    parts=st.lists(st.tuples(st.integers(0, 1000), st.binary(max_size=40)), max_size=8),
    cuts=st.lists(st.integers(1, 50), min_size=1, max_size=20),
)
def test_extents_read_the_same_however_they_are_cut(parts: list[tuple[int, bytes]], cuts: list[int]) -> None:
    position, data, expected = 0, b"", bytearray(100_000)
    for skip, piece in parts:
        position += skip
        data += extent(position, piece)
        expected[position : position + len(piece)] = piece
        position += len(piece)
    reader, found, sizes = ExtentReader(), bytearray(100_000), itertools.cycle(cuts)
    theirs = Extents()
    while data:
        size = next(sizes)
        for offset, piece in reader.feed(data[:size]):
            found[offset : offset + len(piece)] = piece
        list(theirs.feed(data[:size]))
        data = data[size:]
    reader.finish()
    assert found == expected
    assert reader.offset == position
    assert theirs.complete


def test_extents_that_fall_are_refused() -> None:
    reader = ExtentReader()
    with pytest.raises(InvalidSpec, match="an extent at 0 comes after 10"):
        list(reader.feed(extent(10, b"") + extent(0, b"")))
