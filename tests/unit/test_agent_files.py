# SPDX-License-Identifier: Apache-2.0
"""One-answer calls and file transfers over the agent link, with honest and hostile answers."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from dsecd.backends.agentlink.link import (
    AgentError,
    AgentLink,
    LinkLost,
    StartRequest,
)
from tests.support.agent_story import (
    ATTACHED,
    CLOSE,
    COMMIT,
    CREDIT,
    DATA,
    ERROR,
    EXIT,
    FILE_GET,
    FILE_PUT,
    INFO,
    OK,
    OUTPUT,
    PEEK,
    PING,
    READY,
    STARTED,
    lost,
    play,
)
from tests.support.fake_agent import TAGS as TAG
from tests.support.fake_agent import (
    FakeAgent,
    Frame,
    exit_fields,
    field,
    fields,
    file_fields,
    make_frame,
    output,
)


async def answered(
    agent: FakeAgent, asked: Coroutine[Any, Any, Any], *said: tuple[int, bytes]
) -> tuple[Frame, Any]:
    """The request that `asked` sends and what it returns when the agent says these frames."""
    task = asyncio.ensure_future(asked)
    frame = await agent.receive()
    await agent.send_bytes(b"".join(make_frame(kind, frame.channel, payload) for kind, payload in said))
    return frame, await task


RUNNING = fields(id="a", running=1, pid=4, offset_out=1, offset_err=2, started_ns=3)


def test_records_are_read() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        ended = exit_fields("b", 5, 6) + fields(running=0, pid=9, offset_out=5, offset_err=6)
        _, execs = await answered(agent, link.list_execs(), (INFO, RUNNING), (INFO, ended), (OK, b""))
        assert [(e.exec_id, e.running, e.pid, e.offset_out, e.exit is None) for e in execs] == [
            ("a", True, 4, 1, True), ("b", False, 9, 5, False),
        ]  # fmt: skip
        info = file_fields(mode=0o120777, target=b"\xff", size=2**40)
        frame, got = await answered(agent, link.stat("/l", "me", follow=True), (INFO, info), (OK, b""))
        assert (frame.fields[TAG["path"]], frame.fields[TAG["user"]]) == ([b"/l"], [b"me"])
        assert frame.number(TAG["flags"]) == 1
        assert (got.mode, got.uid, got.size, got.target) == (0o120777, 1, 2**40, b"\xff")
        page = [(INFO, file_fields(name=n)) for n in (b"x", b"\xfe")]
        _, (entries, cursor) = await answered(agent, link.list_dir("/"), *page, (OK, fields(cursor=8)))
        assert ([e.name for e in entries], cursor) == ([b"x", b"\xfe"], 8)
        usage = fields(pid_count=3, execs_running=1, execs_total=2)
        _, counters = await answered(agent, link.usage(), (INFO, usage), (OK, b""))
        assert (counters.pid_count, counters.execs_running, counters.execs_total) == (3, 1, 2)

    play(story)


def test_peek_reads_held_output() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        frame, got = await answered(
            agent,
            link.peek("e", 2, 10, 100),
            (OUTPUT, output(2, 20, b"ab")),
            (OUTPUT, output(2, 22, b"c")),
            (OK, fields(start=20, end=30)),
        )
        assert (frame.kind, frame.number(TAG["stream"]), frame.number(TAG["bytes"])) == (PEEK, 2, 100)
        assert (got.data, got.offset, got.start, got.end) == (b"abc", 20, 20, 30)
        _, got = await answered(agent, link.peek("e", 1, 10, 100), (OK, fields(start=0, end=10)))
        assert (got.data, got.offset, got.end) == (b"", 10, 10)
        # The ring may lose its oldest bytes while they are being told.
        moved = [
            (OUTPUT, output(1, 10, b"abc")),
            (OUTPUT, output(1, 20, b"de")),
            (OK, fields(start=21, end=30)),
        ]
        _, got = await answered(agent, link.peek("e", 1, 10, 100), *moved)
        assert (got.data, got.offset, got.start, got.end) == (b"de", 20, 21, 30)

    play(story)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        pytest.param("stat", [(OK, b"")], id="answer without its record"),
        pytest.param("stat", [(INFO, file_fields())] * 2, id="two records for one"),
        pytest.param("stat", [(INFO, file_fields(mode=2**20))], id="mode of no file"),
        pytest.param("stat", [(INFO, file_fields(size=2**63))], id="size of no file"),
        pytest.param("stat", [(INFO, file_fields(target=bytes(4097)))], id="target longer than a path"),
        pytest.param("stat", [(INFO, file_fields() + field(999, bytes(9000)))], id="huge record"),
        pytest.param("stat", [(OUTPUT, output(1, 0, b"x"))], id="output for a stat"),
        pytest.param("ping", [(INFO, file_fields())], id="record for a ping"),
        pytest.param("execs", [(INFO, RUNNING)] * 2049, id="flood of commands"),
        pytest.param("exec", [(INFO, RUNNING)] * 2, id="two commands for one"),
        pytest.param(
            "execs", [(INFO, fields(id="a/b", running=1, offset_out=0, offset_err=0))], id="wrong id"
        ),
        pytest.param("dir", [(INFO, file_fields(name=b"n"))] * 11, id="more entries than the limit"),
        pytest.param("dir", [(INFO, file_fields(name=b"../n"))], id="entry outside the directory"),
        pytest.param("dir", [(INFO, file_fields())], id="entry without a name"),
        pytest.param("dir", [(OK, field(57, b"xx"))], id="cursor that is no number"),
        pytest.param("peek", [(OUTPUT, output(1, 10, bytes(101)))], id="peek of more than asked"),
        pytest.param("peek", [(OUTPUT, output(2, 10, b"x"))], id="peek of another stream"),
        pytest.param("peek", [(OUTPUT, output(1, 9, b"x"))], id="peek before the offset"),
        pytest.param(
            "peek", [(OUTPUT, output(1, 10, b"xy")), (OUTPUT, output(1, 11, b"x"))], id="peek goes back"
        ),
        pytest.param("peek", [(OUTPUT, output(1, 10, b""))] * 2, id="peek of nothing twice"),
        pytest.param("peek", [(OK, fields(start=5, end=4))], id="ring that ends before it starts"),
        pytest.param(
            "peek", [(OUTPUT, output(1, 10, b"x")), (OK, fields(start=0, end=10))], id="ring too short"
        ),
        pytest.param("peek", [(OK, b"")], id="peek without bounds"),
        pytest.param("get", [(OK, b"")], id="download without a record"),
        pytest.param("get", [(OK, file_fields())], id="download with its record in the end"),
        pytest.param("get", [(DATA, bytes(9))], id="data before its record"),
        pytest.param("put", [(OK, b"")], id="upload that ends before it began"),
        pytest.param("put", [(CREDIT, fields(stream=0, bytes=1))], id="credit before ready"),
        pytest.param("put", [(READY, fields(offset=2**63, credit=1))], id="resume behind any file's end"),
    ],
)
def test_violations_in_answers(asked: str, said: list[tuple[int, bytes]]) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        requests: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "stat": lambda: link.stat("/"),
            "ping": lambda: link.ping(60),
            "execs": link.list_execs,
            "exec": lambda: link.list_execs("a"),
            "dir": lambda: link.list_dir("/", limit=10),
            "peek": lambda: link.peek("e", 1, 10, 100),
            "get": lambda: link.get_file("/f").open(),
            "put": lambda: link.put_file("/f"),
        }
        with pytest.raises(LinkLost) as caught:
            await answered(agent, requests[asked](), *said)
        assert caught.value.violation
        assert await agent.hung_up()

    play(story)


def test_download_gives_extents_and_credit() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        reader = link.get_file(b"/f\xff", offset=5, length=5000, window=2000)
        task = asyncio.ensure_future(reader.open())
        frame = await agent.receive(FILE_GET)
        assert frame.fields[TAG["path"]] == [b"/f\xff"]
        assert [frame.number(TAG[n]) for n in ("offset", "bytes", "credit")] == [5, 5000, 2000]
        await agent.send(INFO, frame.channel, file_fields(size=9000))
        assert (await task).size == 9000
        await agent.send(DATA, frame.channel, bytes.fromhex("0500000000000000") + b"a" * 1500)
        await agent.send(DATA, frame.channel, bytes.fromhex("a00f000000000000") + b"b" * 500)
        pieces = [await anext(reader), await anext(reader)]
        assert pieces == [(5, b"a" * 1500), (4000, b"b" * 500)]
        credit = await agent.receive(CREDIT)
        assert (credit.number(TAG["stream"]), credit.number(TAG["bytes"])) == (0, 1500)
        assert reader.end is None
        await agent.send(OK, frame.channel, fields(end=5005))
        assert [piece async for piece in reader] == []
        assert reader.end == 5005
        await reader.aclose()
        assert await agent.quiet() or (await agent.receive()).kind == CREDIT

    play(story)


def data(offset: int, size: int) -> bytes:
    """The payload of a DATA."""
    return offset.to_bytes(8, "little") + bytes(size)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([data(4, 1)], id="before the range"),
        pytest.param([data(100, 6)], id="behind the range"),
        pytest.param([data(5, 10), data(14, 1)], id="offset goes back"),
        pytest.param([data(5, 65)], id="beyond credit"),
        pytest.param([data(5, 0)], id="empty"),
        pytest.param([b"\0\0"], id="cut short"),
        pytest.param([data(5 + 2 * i, 1) for i in range(20)], id="crumbs"),
    ],
)
def test_violations_of_a_download(said: list[bytes]) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        reader = link.get_file("/f", offset=5, length=100, window=64)
        task = asyncio.ensure_future(reader.open())
        frame = await agent.receive(FILE_GET)
        await agent.send(INFO, frame.channel, file_fields(size=9000))
        await task
        await agent.send_bytes(b"".join(make_frame(DATA, frame.channel, payload) for payload in said))
        assert await agent.hung_up()
        error = await lost(anext(reader))
        assert error.violation
        assert agent.lost[0].violation == error.violation

    play(story)


def test_a_download_of_many_is_no_longer_than_they_can_be() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        reader = link.many.get("/d", ["a", "b/\u00e9"], 100, "me")
        task = asyncio.ensure_future(reader.open())
        frame = await agent.receive(FILE_GET)
        assert frame.fields[TAG["name"]] == [b"a\0b/\xc3\xa9\0"]
        assert frame.number(TAG["bytes"]) == 100
        await agent.send(INFO, frame.channel, file_fields())
        await task
        await agent.send(DATA, frame.channel, data(0, 240))
        assert await anext(reader) == (0, bytes(240))
        await agent.send(DATA, frame.channel, data(240, 1))
        assert (await lost(anext(reader))).violation

    play(story)


@pytest.mark.parametrize("names", [[], ["a\0b"], ["x" * 4000] * 15])
def test_impossible_names_are_refused_here(names: list[str]) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        with pytest.raises(ValueError, match="names|NUL"):
            link.many.get("/d", names, 100)
        assert await agent.quiet()

    play(story)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (INFO, file_fields()),
        (READY, fields(offset=0, credit=1)),
        (CREDIT, fields(stream=0, bytes=1)),
        (OK, fields(end=4)),
    ],
)
def test_frames_with_no_place_in_a_download(kind: int, payload: bytes) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        reader = link.get_file("/f", offset=5)
        task = asyncio.ensure_future(reader.open())
        frame = await agent.receive(FILE_GET)
        await agent.send(INFO, frame.channel, file_fields())
        await task
        await agent.send(kind, frame.channel, payload)
        assert (await lost(anext(reader))).violation

    play(story)


def test_closing_a_download_midway() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        async with link.get_file("/f") as reader:
            task = asyncio.ensure_future(anext(reader))
            frame = await agent.receive(FILE_GET)
            await agent.send(INFO, frame.channel, file_fields())
            await agent.send(DATA, frame.channel, data(0, 2))
            await task
        assert (await agent.receive(CLOSE)).channel == frame.channel
        with pytest.raises(AgentError, match="aborted"):  # an end would look like the file's
            await anext(reader)

    play(story)


def test_upload_honours_credit_and_commits() -> None:
    content = os.urandom(150_000)

    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(
            link.put_file("/f", user="me", mode=0o600, umask=0o077, parents=True, exclusive=True, part="p1")
        )
        frame = await agent.receive(FILE_PUT)
        assert [frame.number(TAG[n]) for n in ("mode", "umask", "flags")] == [0o600, 0o077, 7]
        assert frame.fields[TAG["part"]] == [b"p1"]
        await agent.send(READY, frame.channel, fields(offset=1000, credit=100_000))
        writer = await task
        assert writer.offset == 1000
        writing = asyncio.ensure_future(writer.write(1000, content))
        got = b""
        while len(got) < 100_000:
            piece = await agent.receive(DATA)
            assert int.from_bytes(piece.payload[:8], "little") == 1000 + len(got)
            got += piece.payload[8:]
        assert len(got) == 100_000
        assert await agent.quiet()
        await agent.send(CREDIT, frame.channel, fields(stream=0, bytes=100_000))
        while len(got) < len(content):
            got += (await agent.receive(DATA)).payload[8:]
        await writing
        assert got == content
        committing = asyncio.ensure_future(writer.commit(151_000))
        assert (await agent.receive(COMMIT)).number(TAG["size"]) == 151_000
        await agent.send(OK, frame.channel, file_fields(size=151_000))
        info = await committing
        assert info is not None
        assert info.size == 151_000
        await writer.aclose()
        assert await agent.quiet()

    play(story)


async def uploading(agent: FakeAgent, link: AgentLink, credit: int) -> tuple[Any, Frame]:
    """An upload that is ready."""
    task = asyncio.ensure_future(link.put_file("/f"))
    frame = await agent.receive(FILE_PUT)
    await agent.send(READY, frame.channel, fields(offset=0, credit=credit))
    return await task, frame


def test_upload_that_fails_midway() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        writer, frame = await uploading(agent, link, 10)
        writing = asyncio.ensure_future(writer.write(0, bytes(20)))
        await agent.receive(DATA)
        await agent.send(ERROR, frame.channel, fields(code="no-space", errno=28))
        with pytest.raises(AgentError, match="no-space"):
            await writing
        with pytest.raises(AgentError, match="no-space"):
            await writer.commit(20)

    play(story)


@pytest.mark.parametrize("how", ["aclose", "cancel"])
def test_upload_given_up(how: str) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        writer, frame = await uploading(agent, link, 10)
        writing = asyncio.ensure_future(writer.write(0, bytes(20)))
        await agent.receive(DATA)
        if how == "cancel":
            writing.cancel()
        else:
            await writer.aclose()
        with pytest.raises((asyncio.CancelledError, ValueError)):
            await writing
        assert (await agent.receive(CLOSE)).channel == frame.channel
        with pytest.raises(ValueError, match="over"):
            await writer.commit(10)

    play(story)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [(OK, b""), (READY, fields(offset=0, credit=1)), (DATA, data(0, 1)), (INFO, file_fields())],
)
def test_violations_of_an_upload(kind: int, payload: bytes) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        writer, frame = await uploading(agent, link, 0)
        writing = asyncio.ensure_future(writer.write(0, b"x"))
        await agent.send(kind, frame.channel, payload)
        assert (await lost(writing)).violation

    play(story)


@pytest.mark.parametrize("path", ["relative", "", "/nul\0", "/" + "x" * 4096])
def test_impossible_paths_are_refused_here(path: str) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        with pytest.raises(ValueError, match=r"absolute|NUL"):
            await link.stat(path)
        assert await agent.quiet()

    play(story)


def test_ping_times_out_and_lets_go() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        with pytest.raises(TimeoutError):
            await link.ping(0.01)
        await agent.receive(PING)
        await agent.receive(CLOSE)

    play(story)


@pytest.mark.parametrize("seed", range(20))
def test_random_answers_end_in_loss_or_an_answer(seed: int) -> None:
    """Well-formed frames of random kinds and payloads on the open channels never raise anything else."""
    random = Random(seed)
    payloads = [
        b"", fields(pid=5, credit=9), output(1, 0, b"abc"), output(2, 0, b"x"), exit_fields("e", 3, 1), RUNNING,
        file_fields(), file_fields(name=b"n"), data(0, 3), fields(code="io-error"), fields(stream=0, bytes=3),
        fields(start=0, end=3), fields(offset=0, credit=9), random.randbytes(30),
    ]  # fmt: skip
    kinds = [OUTPUT, EXIT, INFO, STARTED, ATTACHED, OK, ERROR, DATA, READY, CREDIT]

    async def story(agent: FakeAgent, link: AgentLink) -> None:
        async def run() -> None:
            await (await link.start(StartRequest("e", ["true"]), attach=True)).collect(5)

        async def get() -> None:
            async for _ in link.get_file("/f"):
                pass

        async def put() -> None:
            writer = await link.put_file("/f")
            await writer.write(0, bytes(30))
            await writer.commit(30)

        calls = [
            run(),
            get(),
            put(),
            link.stat("/"),
            link.list_execs(),
            link.list_dir("/"),
            link.peek("e", 1, 0, 9),
        ]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)
        for _ in range(300):
            await agent.send(random.choice(kinds), random.randint(1, 7), random.choice(payloads))
            await asyncio.sleep(0)
        agent.hang_up()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert not isinstance(result, BaseException) or isinstance(result, (LinkLost, AgentError)), result

    play(story)
