# SPDX-License-Identifier: Apache-2.0
"""Commands over the agent link, told by agents that are honest, hostile or slow."""

import asyncio
import os

import pytest

from dsecd.backends.agentlink.link import (
    AgentError,
    AgentLink,
    Collected,
    Exit,
    ExitKind,
    ExitReason,
    Output,
    StartRequest,
)
from tests.support.agent_story import (
    ATTACH,
    ATTACHED,
    CLOSE,
    CREDIT,
    DATA,
    EOF,
    ERROR,
    EXIT,
    INFO,
    INPUT,
    MORE,
    OK,
    OUTPUT,
    PING,
    READY,
    START,
    STARTED,
    lost,
    play,
    started,
    until,
)
from tests.support.fake_agent import TAGS as TAG
from tests.support.fake_agent import (
    FakeAgent,
    exit_fields,
    field,
    fields,
    file_fields,
    make_frame,
    output,
)

# ---------------------------------------------------------------------------------------------------- honest commands


def test_start_writes_what_was_asked() -> None:
    request = StartRequest(
        "id-1", ["sh", b"\xff"], ["A=b", b"C=\xfe"], "/w", "me:us", True, 24, 80, True,
        [(7, 64, 2**64 - 1)], 0o077, 5, 6, 4096, 7,
    )  # fmt: skip

    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.start(request, attach=True, window=1000))
        frame = await agent.receive(START)
        assert frame.fields[TAG["argv"]] == [b"sh", b"\xff"]
        assert frame.fields[TAG["env"]] == [b"A=b", b"C=\xfe"]
        assert frame.fields[TAG["rlimit"]] == [bytes.fromhex("07000000 4000000000000000 ffffffffffffffff")]
        texts = {"id": b"id-1", "cwd": b"/w", "user": b"me:us"}
        assert {name: frame.fields[TAG[name]] for name in texts} == {k: [v] for k, v in texts.items()}
        numbers = {
            "flags": 7, "rows": 24, "cols": 80, "umask": 0o077, "timeout_ms": 5, "idle_timeout_ms": 6,
            "buffer_bytes": 4096, "keep_ms": 7, "credit": 1000,
        }  # fmt: skip
        assert {name: frame.number(TAG[name]) for name in numbers} == numbers
        await agent.send(STARTED, frame.channel, fields(pid=5, credit=0))
        assert (await task).pid == 5

    play(story)


def test_large_start_is_split() -> None:
    argv = ["x" * 100_000, "y" * 50_000, "z" * 10]

    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.start(StartRequest("e", argv), attach=True))
        payload = b""
        while True:
            header = await agent._exactly(12)
            assert header[4] == START
            payload += await agent._exactly(int.from_bytes(header[:4], "little"))
            if not header[5] & MORE:
                break
        for argument in argv:
            assert field(TAG["argv"], argument) in payload
        await agent.send(STARTED, int.from_bytes(header[8:], "little"), fields(pid=5, credit=0))
        await task

    play(story)


def test_request_over_four_mebibytes_is_refused_here() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        with pytest.raises(AgentError, match="too-large"):
            await link.start(StartRequest("e", ["x" * (4 << 20)]), attach=True)
        assert await agent.quiet()

    play(story)


@pytest.mark.parametrize(
    "request_",
    [
        StartRequest("e", []),
        StartRequest("e e", ["true"]),
        StartRequest("e", ["a\0b"]),
        StartRequest("e", ["true"], rlimits=[(0, -1, 0)]),
    ],
)
def test_impossible_requests_are_refused_here(request_: StartRequest) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        with pytest.raises(ValueError, match=r"argument|id|NUL|limit"):
            await link.start(request_, attach=True)
        assert await agent.quiet()

    play(story)


def test_error_instead_of_started() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.start(StartRequest("e", ["nope"]), attach=True))
        frame = await agent.receive(START)
        await agent.send(ERROR, frame.channel, fields(code="not-found", errno=2, message="no nope"))
        with pytest.raises(AgentError) as caught:
            await task
        assert (caught.value.code, caught.value.errno, caught.value.message) == ("not-found", 2, "no nope")
        assert await agent.quiet()  # a channel that has ended is not closed again

    play(story)


def test_events_come_in_order_and_exit_last() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, frame = await started(agent, link)
        ch = frame.channel
        await agent.send_bytes(
            make_frame(OUTPUT, ch, output(1, 0, b"ab"))
            + make_frame(OUTPUT, ch, output(2, 0, b"E"))
            + make_frame(OUTPUT, ch, output(1, 2, b"c"))
            + make_frame(EXIT, ch, exit_fields("e", 3, 1, kind=2, status=9, reason=1))
        )
        events = [event async for event in channel.events()]
        assert events[:-1] == [Output(1, 0, b"ab"), Output(2, 0, b"E"), Output(1, 2, b"c")]
        last = events[-1]
        assert isinstance(last, Exit)
        assert (last.kind, last.status, last.reason) == (ExitKind.SIGNALLED, 9, ExitReason.TIMEOUT)
        assert (last.total_out, last.total_err, last.cpu_user_us, last.finished_ns) == (3, 1, 10, 50)
        assert channel.offsets == (3, 1)
        assert await channel.next() is last
        assert await agent.quiet()

    play(story)


def test_waiting_pieces_are_joined_and_bounded() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, frame = await started(agent, link, window=8192)
        flood = b"".join(
            make_frame(OUTPUT, frame.channel, output(stream, i, b"%d" % (i % 10)))
            for i in range(8192)
            for stream in (1, 2)
        )
        await agent.send_bytes(flood + make_frame(EXIT, frame.channel, exit_fields("e", 8192, 8192)))
        await until(lambda: channel._exit is not None)
        assert len(channel._pieces) <= 513
        got: dict[int, bytes] = {1: b"", 2: b""}
        async for event in channel.events():
            if isinstance(event, Output):
                assert event.offset == len(got[event.stream])
                got[event.stream] += event.data
        assert got[1] == got[2] == bytes(b"0123456789" * 820)[:8192]

    play(story)


def test_credit_is_given_back_by_halves_of_the_window() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, frame = await started(agent, link, window=1000)
        await agent.send(OUTPUT, frame.channel, output(2, 0, bytes(1000)))
        event = await channel.next()
        assert isinstance(event, Output)
        channel.consumed(2, 499)
        assert await agent.quiet()
        channel.consumed(2, 1)
        credit = await agent.receive(CREDIT)
        assert (credit.channel, credit.number(TAG["stream"]), credit.number(TAG["bytes"])) == (
            frame.channel, 2, 500,
        )  # fmt: skip
        with pytest.raises(ValueError, match="more than were received"):
            channel.consumed(2, 501)

    play(story)


def test_collect_keeps_the_beginning_and_drains_the_rest() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, frame = await started(agent, link, window=1000)
        ch = frame.channel
        await agent.send(OUTPUT, ch, output(1, 0, b"a" * 1000))
        await asyncio.sleep(0.01)
        task = asyncio.ensure_future(channel.collect(1500))
        offset, credit = 1000, 0
        while offset < 20_000:
            while not credit:
                frame = await agent.receive(CREDIT)
                assert frame.number(TAG["stream"]) == 1
                credit += frame.number(TAG["bytes"])
            await agent.send(OUTPUT, ch, output(1, offset, b"b" * credit))
            offset, credit = offset + credit, 0
        await agent.send(OUTPUT, ch, output(2, 0, b"err"))
        await agent.send(EXIT, ch, exit_fields("e", offset, 3))
        result = await task
        assert isinstance(result, Collected)
        assert result.stdout == b"a" * 1000 + b"b" * 500
        assert (result.stdout_truncated, result.stdout_total) == (True, offset)
        assert (result.stderr, result.stderr_truncated, result.stderr_total) == (b"err", False, 3)

    play(story)


def test_attach_tells_where_it_begins() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.attach("e", offset_out=10, offset_err=5, window=64))
        frame = await agent.receive(ATTACH)
        asked = {"offset_out": 10, "offset_err": 5, "credit": 64}
        assert {name: frame.number(TAG[name]) for name in asked} == asked
        await agent.send(ATTACHED, frame.channel, fields(running=1, offset_out=30, offset_err=5, credit=0))
        channel = await task
        assert channel.offsets == (30, 5)
        await agent.send(OUTPUT, frame.channel, output(1, 30, b"x"))
        await agent.send(EXIT, frame.channel, exit_fields("e", 31, 5))
        result = await channel.collect(10)
        assert (result.stdout, result.stdout_truncated) == (b"x", False)

    play(story)


def test_attach_behind_the_end_is_invalid_but_keeps_the_link() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.attach("e", offset_out=99))
        frame = await agent.receive(ATTACH)
        await agent.send(ATTACHED, frame.channel, fields(running=1, offset_out=30, offset_err=0, credit=0))
        with pytest.raises(AgentError, match="invalid"):
            await task
        assert (await agent.receive(CLOSE)).channel == frame.channel

    play(story)


def test_start_without_attach_is_let_go() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.start(StartRequest("e", ["daemon"]), attach=False))
        frame = await agent.receive(START)
        assert frame.number(TAG["flags"]) == 0
        assert TAG["credit"] not in frame.fields
        await agent.send(STARTED, frame.channel, fields(pid=9, credit=0))
        channel = await task
        assert channel.pid == 9
        assert (await agent.receive(CLOSE)).channel == frame.channel

    play(story)


def test_takeover_reaches_the_reader() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, frame = await started(agent, link)
        task = asyncio.ensure_future(channel.next())
        await agent.send(ERROR, frame.channel, fields(code="detached", errno=0, message="another reader"))
        with pytest.raises(AgentError, match="detached"):
            await task
        with pytest.raises(AgentError, match="detached"):
            await channel.next()

    play(story)


# -------------------------------------------------------------------------------------------------------------- stdin


def test_stdin_waits_for_credit_and_ends() -> None:
    data = os.urandom(200_000)

    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, frame = await started(agent, link, credit=70_000)

        async def feed() -> None:
            await channel.write_stdin(data)
            await channel.close_stdin()
            await channel.close_stdin()

        task = asyncio.ensure_future(feed())
        got, granted = b"", 70_000
        while True:
            piece = await agent.receive(INPUT)
            got += piece.payload
            assert len(got) <= granted
            if piece.flags & EOF:
                break
            if len(got) == granted < len(data):
                assert await agent.quiet()
                granted += 65_000
                await agent.send(CREDIT, frame.channel, fields(stream=0, bytes=65_000))
        await task
        assert got == data
        with pytest.raises(ValueError, match="closed"):
            await channel.write_stdin(b"x")
        assert await agent.quiet()

    play(story)


def test_stdin_after_the_end_is_dropped() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, frame = await started(agent, link, credit=1)
        task = asyncio.ensure_future(channel.write_stdin(b"abc"))
        await agent.receive(INPUT)
        await agent.send(EXIT, frame.channel, exit_fields("e"))
        await task
        await channel.write_stdin(b"more")
        await channel.close_stdin()
        assert await agent.quiet()

    play(story)


def test_agent_that_does_not_read_stops_the_writer() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, _ = await started(agent, link, credit=64 << 20)
        task = asyncio.ensure_future(channel.write_stdin(bytes(32 << 20)))
        await asyncio.sleep(0.05)
        assert not task.done()
        transport = link._conn._transport
        assert transport is not None
        assert transport.get_write_buffer_size() < 256 << 10
        # Requests queue up behind it, and credit does not add to the buffer.
        waiting = asyncio.ensure_future(link.ping(60))
        await asyncio.sleep(0)
        before = transport.get_write_buffer_size()
        channel._windows[0].take(60_000)
        channel.consumed(1, 40_000)
        assert transport.get_write_buffer_size() == before
        seen = []
        while CREDIT not in seen or PING not in seen:
            frame = await agent.receive()
            seen.append(frame.kind)
            if frame.kind == PING:
                await agent.send(OK, frame.channel)
        await waiting
        drain = asyncio.ensure_future(agent.hung_up())
        await task
        await link.close()
        await drain

    play(story)


# --------------------------------------------------------------------------------------- violations: running commands

END = exit_fields("e", 3)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([(OUTPUT, output(1, 1, b"x"))], id="first offset is not 0"),
        pytest.param([(OUTPUT, output(1, 0, b"abc")), (OUTPUT, output(1, 2, b"c"))], id="offset goes back"),
        pytest.param([(OUTPUT, output(1, 0, b"abc")), (OUTPUT, output(1, 4, b"e"))], id="offset jumps"),
        pytest.param([(OUTPUT, output(1, 2**64 - 1, b"x"))], id="offset near the end of numbers"),
        pytest.param([(OUTPUT, output(1, 0, bytes(1001)))], id="more than the window"),
        pytest.param(
            [(OUTPUT, output(2, 0, bytes(600))), (OUTPUT, output(2, 600, bytes(401)))], id="beyond credit"
        ),
        pytest.param([(OUTPUT, output(0, 0, b"x"))], id="stream 0"),
        pytest.param([(OUTPUT, output(3, 0, b"x"))], id="stream 3"),
        pytest.param([(OUTPUT, output(1, 0, b""))], id="empty output"),
        pytest.param([(OUTPUT, b"\1\0")], id="output cut short"),
        pytest.param([(EXIT, END), (EXIT, END)], id="exit twice"),
        pytest.param([(EXIT, END), (OUTPUT, output(1, 0, b"abc"))], id="output after exit"),
        pytest.param([(OUTPUT, output(1, 0, b"abcd")), (EXIT, END)], id="totals below what was sent"),
        pytest.param([(EXIT, exit_fields("other", 3))], id="exit of another command"),
        pytest.param([(EXIT, b"")], id="empty exit"),
        pytest.param([(EXIT, END[:-3])], id="field cut short"),
        pytest.param([(STARTED, fields(pid=5))], id="started twice"),
        pytest.param([(ATTACHED, fields(running=1, offset_out=0, offset_err=0))], id="attached to a start"),
        pytest.param([(INFO, file_fields())], id="record on a command's channel"),
        pytest.param([(DATA, bytes(9))], id="file data on a command's channel"),
        pytest.param([(OK, b"")], id="ok on a command's channel"),
        pytest.param([(READY, fields(offset=0, credit=1))], id="ready on a command's channel"),
        pytest.param([(CREDIT, fields(stream=0, bytes=0))], id="credit of nothing"),
        pytest.param([(CREDIT, fields(stream=1, bytes=5))], id="credit for an output stream"),
        pytest.param([(CREDIT, fields(stream=0, bytes=2**60))], id="absurd credit"),
        pytest.param([(CREDIT, fields(stream=0, bytes=40 << 20))] * 2, id="credit that adds up"),
        pytest.param([(ERROR, b"")], id="error without a code"),
        pytest.param([(ERROR, fields(code="x", message="m" * 513))], id="error with a long message"),
        pytest.param([(PING, b"")], id="request from the agent"),
        pytest.param([(0x11, b"")], id="unknown type"),
    ],
)
def test_violations_of_a_running_command(said: list[tuple[int, bytes]]) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, frame = await started(agent, link, window=1000)
        await agent.send_bytes(b"".join(make_frame(kind, frame.channel, payload) for kind, payload in said))
        assert await agent.hung_up()
        assert [bool(error.violation) for error in agent.lost] == [True]
        if not any(kind == EXIT and payload == END for kind, payload in said[:-1]):
            assert (await lost(channel.next())).violation == agent.lost[0].violation
        await lost(link.ping(60))

    play(story)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (OUTPUT, output(1, 0, b"x")),
        (EXIT, exit_fields("e")),
        (ATTACHED, fields(running=1, offset_out=0, offset_err=0)),
        (CREDIT, fields(stream=0, bytes=1)),
        (OK, b""),
        (ATTACHED, fields(running=1, offset_out=0, offset_err=0, pid=1)),
        (STARTED, b""),
        (STARTED, fields(pid=2**23)),
        (STARTED, fields(pid=1, credit=2**50)),
        (STARTED, field(32, b"\1")),
    ],
)
def test_violations_instead_of_started(kind: int, payload: bytes) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.start(StartRequest("e", ["true"]), attach=True))
        frame = await agent.receive(START)
        await agent.send(kind, frame.channel, payload)
        assert (await lost(task)).violation

    play(story)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (STARTED, fields(pid=1)),
        (STARTED, fields(running=1, offset_out=0, offset_err=0, pid=1)),
        (ATTACHED, fields(running=2, offset_out=0, offset_err=0)),
        (ATTACHED, fields(running=1, offset_out=0)),
        (ATTACHED, fields(running=1, offset_out=2**63, offset_err=0)),
    ],
)
def test_violations_instead_of_attached(kind: int, payload: bytes) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.attach("e"))
        frame = await agent.receive(ATTACH)
        await agent.send(kind, frame.channel, payload)
        assert (await lost(task)).violation

    play(story)


@pytest.mark.parametrize("number", [1, 5, 2**31 - 1, 2**31, 2**32 - 1])
def test_agent_that_speaks_unasked(number: int) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        await agent.send(OK, number)
        assert await agent.hung_up()
        assert agent.lost[0].violation

    play(story)


def test_payload_over_the_limit_is_refused_at_its_header() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        _, frame = await started(agent, link)
        await agent.send_bytes((65537).to_bytes(4, "little") + bytes([OUTPUT, 0, 0, 0]) + bytes(4))
        assert await agent.hung_up()
        assert agent.lost[0].violation
        assert frame.channel

    play(story)
