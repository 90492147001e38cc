# SPDX-License-Identifier: Apache-2.0
"""The daemon's agent link against an agent that is honest, hostile, slow or gone, as each test needs."""

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dsecd.backends.agentlink import connection
from dsecd.backends.agentlink.link import (
    AgentError,
    AgentLink,
    Collected,
    ExecChannel,
    Exit,
    ExitKind,
    ExitReason,
    LinkLost,
    Output,
    StartRequest,
    connect,
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

HELLO_OK, STARTED, ATTACHED, OK, ERROR = 0x14, 0x15, 0x16, 0x1E, 0x1F
START, ATTACH, CREDIT, INPUT, PING, CLOSE, PEEK = 0x02, 0x03, 0x04, 0x05, 0x0B, 0x0C, 0x0E
OUTPUT, EXIT, INFO, DATA, COMMIT, READY = 0x10, 0x12, 0x13, 0x21, 0x23, 0x29
FILE_GET, FILE_PUT, FILE_STAT, FILE_LIST = 0x20, 0x22, 0x24, 0x25
EOF, MORE = 1, 2

Story = Callable[[FakeAgent, AgentLink], Coroutine[Any, Any, None]]


def play(story: Story) -> None:
    """Runs a story with a greeted link; nothing may be left running or unread in the loop afterwards."""

    async def main() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(context))
        async with FakeAgent() as agent:
            link = await agent.linked()
            async with asyncio.timeout(60):
                await story(agent, link)
            await link.close()
        gc.collect()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert problems == []

    asyncio.run(main())


async def started(
    agent: FakeAgent, link: AgentLink, *, window: int = 65536, credit: int = 0, exec_id: str = "e"
) -> tuple[ExecChannel, Frame]:
    """A command that the agent says it has started, and its START."""
    request = StartRequest(exec_id, ["true"], stdin_open=credit > 0)
    task = asyncio.ensure_future(link.start(request, attach=True, window=window))
    frame = await agent.receive(START)
    await agent.send(STARTED, frame.channel, fields(pid=5, credit=credit))
    return await task, frame


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop turn until the condition holds."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


async def lost(waiting: Awaitable[object]) -> LinkLost:
    """Awaits the loss of the link and returns it."""
    with pytest.raises(LinkLost) as caught:
        await waiting
    return caught.value


# ------------------------------------------------------------------------------------------------------- greeting


def greeting(answer: bytes) -> tuple[BaseException, list[LinkLost]]:
    """How connecting fails when the agent answers HELLO so."""

    async def main() -> tuple[BaseException, list[LinkLost]]:
        async with FakeAgent() as agent:
            task = asyncio.ensure_future(agent.connect())
            await agent.receive(0x01)
            await agent.send_bytes(answer)
            with pytest.raises((AgentError, LinkLost)) as caught:
                await task
            assert await agent.hung_up()
            return caught.value, agent.lost

    return asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        make_frame(HELLO_OK, 0, fields(protocol=2, version="1", generation=7)),
        make_frame(HELLO_OK, 0, fields(protocol=1, version="1", generation=8)),
        make_frame(HELLO_OK, 0, fields(protocol=1, version="v" * 65, generation=7)),
        make_frame(HELLO_OK, 0, fields(version="1")),
        make_frame(HELLO_OK, 1, fields(protocol=1, version="1", generation=7)),
        make_frame(OK, 0),
        make_frame(ERROR, 0, fields(code="Not A Code", errno=0)),
        make_frame(ERROR, 0, fields(code="x", errno=2**40)),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_greeting_that_is_none(answer: bytes) -> None:
    error, told = greeting(answer)
    assert isinstance(error, LinkLost)
    assert error.violation
    assert told == []  # the caller of connect knows already


def test_stale_generation_is_the_agents_error() -> None:
    error, _ = greeting(make_frame(ERROR, 0, fields(code="stale-generation", errno=0, message="seen 9")))
    assert isinstance(error, AgentError)
    assert (error.code, error.message) == ("stale-generation", "seen 9")


def test_second_greeting_is_a_violation() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.ping(30))
        await agent.receive(PING)
        await agent.send(HELLO_OK, 0, fields(protocol=1, version="1", generation=7))
        assert (await lost(task)).violation

    play(story)


def test_silent_agent_times_out(tmp_path: Path) -> None:
    """A listener that never accepts: connecting works, the greeting does not come."""
    path = tmp_path / "s"

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            with pytest.raises(TimeoutError):
                await connect(path, generation=1, timeout_s=0.05, on_lost=print)

    asyncio.run(main())


def test_full_backlog_is_waited_for(tmp_path: Path) -> None:
    """A Unix socket whose backlog is full answers EAGAIN and reports itself writable: it is not connected."""
    path = tmp_path / "s"

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
            listener.bind(str(path))
            listener.listen(0)
            first.connect(str(path))
            task = asyncio.ensure_future(connect(path, generation=1, timeout_s=20, on_lost=print))
            await asyncio.sleep(0.02)
            listener.accept()[0].close()
            accepted, _ = await asyncio.to_thread(listener.accept)
            with accepted:
                accepted.setblocking(True)
                hello = await asyncio.to_thread(accepted.recv, 1000)
                assert hello[4] == 0x01
                accepted.sendall(make_frame(HELLO_OK, 0, fields(protocol=1, version="1", generation=1)))
                link = await task
                await link.close()

    asyncio.run(main())


def test_no_listener(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(FileNotFoundError):
            await connect(tmp_path / "none", generation=1, timeout_s=20, on_lost=print)

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ honest commands


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
    "request_", [StartRequest("e", []), StartRequest("e e", ["true"]), StartRequest("e", ["a\0b"])]
)
def test_impossible_requests_are_refused_here(request_: StartRequest) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        with pytest.raises(ValueError, match=r"argument|id|NUL"):
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


# ---------------------------------------------------------------------------------------------------------- stdin


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


# ------------------------------------------------------------------------------------------------ release and loss


def test_cancelled_requests_are_closed_and_late_answers_ignored() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.stat("/x"))
        frame = await agent.receive(FILE_STAT)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert (await agent.receive(CLOSE)).channel == frame.channel
        fence = await agent.receive(PING)
        # All this was on its way when CLOSE was sent.
        await agent.send(INFO, frame.channel, file_fields())
        await agent.send(OK, frame.channel)
        await agent.send(OK, fence.channel)
        ping = asyncio.ensure_future(link.ping(60))
        await agent.send(OK, (await agent.receive(PING)).channel)
        await ping
        assert link._conn._channels.keys() == {0}

    play(story)


def test_frames_behind_the_fence_are_a_violation() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, frame = await started(agent, link)
        await channel.detach()
        await agent.receive(CLOSE)
        await agent.send(OUTPUT, frame.channel, output(1, 0, b"on its way"))
        await agent.send(OK, (await agent.receive(PING)).channel)
        ping = asyncio.ensure_future(link.ping(60))
        await agent.receive(PING)
        await agent.send(OUTPUT, frame.channel, output(1, 10, b"too late"))
        assert (await lost(ping)).violation

    play(story)


def test_closes_share_one_fence_at_a_time() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channels = [(await started(agent, link, exec_id=f"e{i}"))[0] for i in range(5)]
        for channel in channels:
            await channel.detach()
        kinds = [(await agent.receive()).kind for _ in range(6)]
        assert kinds == [CLOSE, PING, CLOSE, CLOSE, CLOSE, CLOSE]
        fence = link._conn._fence
        assert fence is not None
        await agent.send(OK, fence.number)
        second = await agent.receive(PING)
        await agent.send(OK, second.channel)
        await until(lambda: link._conn._fence is None)
        assert link._conn._channels.keys() == {0}

    play(story)


def test_closed_channel_that_floods_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ABANDONED_BYTES", 100_000)

    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, frame = await started(agent, link)
        await channel.detach()
        for _ in range(2):
            await agent.send(OUTPUT, frame.channel, output(1, 0, bytes(60_000)))
        await agent.hung_up()
        assert agent.lost[0].violation

    play(story)


@pytest.mark.parametrize("what", ["next", "collect"])
def test_cancelled_readers_detach(what: str) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, frame = await started(agent, link)
        waiting = channel.next() if what == "next" else channel.collect(10)
        task = asyncio.ensure_future(waiting)
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert (await agent.receive(CLOSE)).channel == frame.channel
        with pytest.raises(AgentError, match="detached"):
            await channel.next()

    play(story)


def test_cancelled_start_is_closed() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.start(StartRequest("e", ["true"]), attach=True))
        frame = await agent.receive(START)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert (await agent.receive(CLOSE)).channel == frame.channel

    play(story)


def test_loss_reaches_everybody_once() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        reading, _ = await started(agent, link, exec_id="a")
        collecting, _ = await started(agent, link, exec_id="b")
        writing, _ = await started(agent, link, exec_id="c")
        waiting = [
            asyncio.ensure_future(awaitable)
            for awaitable in (
                reading.next(), collecting.collect(10), writing.write_stdin(b"x"), link.stat("/"),
                link.list_execs(), link.put_file("/f"), link.get_file("/f").open(), link.attach("z"),
                link.start(StartRequest("d", ["true"]), attach=True), link.peek("a", 1, 0, 10),
            )
        ]  # fmt: skip
        for _ in range(5):
            await asyncio.sleep(0)
        agent.hang_up()
        for task in waiting:
            assert (await lost(task)).violation is None
        assert (await lost(reading.next())).violation is None
        assert (await lost(link.ping(60))).violation is None
        assert len(agent.lost) == 1

    play(story)


def test_own_close_is_not_reported() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, _ = await started(agent, link)
        await link.close()
        await link.close()
        await lost(channel.next())
        assert await agent.hung_up()
        assert agent.lost == []

    play(story)


def test_agent_may_say_why_it_hangs_up() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.ping(60))
        await agent.receive(PING)
        await agent.send(ERROR, 0, fields(code="superseded", errno=0))
        error = await lost(task)
        assert error.violation is None
        assert "superseded" in error.reason

    play(story)


def test_too_many_open_channels_are_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_OPEN_CHANNELS", 3)

    async def story(agent: FakeAgent, link: AgentLink) -> None:
        await started(agent, link, exec_id="a")
        await started(agent, link, exec_id="b")
        with pytest.raises(AgentError, match="busy"):
            await link.ping(60)

    play(story)


# ----------------------------------------------------------------------------------- violations: running commands

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


# --------------------------------------------------------------------------------------- one-answer calls and files


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
        pytest.param("peek", [(OUTPUT, output(1, 10, b"x")), (OUTPUT, output(1, 12, b"x"))], id="peek jumps"),
        pytest.param("peek", [(OK, fields(start=5, end=4))], id="ring that ends before it starts"),
        pytest.param(
            "peek", [(OUTPUT, output(1, 10, b"x")), (OK, fields(start=0, end=10))], id="ring too short"
        ),
        pytest.param("peek", [(OK, b"")], id="peek without bounds"),
        pytest.param("get", [(OK, b"")], id="download without a record"),
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
        await agent.send(OK, frame.channel)
        assert [piece async for piece in reader] == []
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
