# SPDX-License-Identifier: Apache-2.0
"""The daemon's agent link: greeting, release of channels, loss of the connection."""

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from dsecd.backends.agentlink import connection
from dsecd.backends.agentlink.link import (
    AgentError,
    AgentLink,
    LinkLost,
    StartRequest,
    connect,
)
from tests.support.agent_story import (
    CLOSE,
    CREDIT,
    ERROR,
    FILE_STAT,
    HELLO_OK,
    INFO,
    OK,
    OUTPUT,
    PING,
    START,
    lost,
    play,
    started,
    until,
)
from tests.support.fake_agent import (
    FakeAgent,
    fields,
    file_fields,
    make_frame,
    output,
)

# ----------------------------------------------------------------------------------------------------------- greeting


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
        make_frame(HELLO_OK, 0, fields(protocol=1, version="1", generation=7)) + make_frame(OK, 5),
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


# --------------------------------------------------------------------------------------------------- release and loss


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
        assert link._conn.channels.keys() == {0}

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


def test_fence_answered_by_something_else() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, _ = await started(agent, link)
        await channel.detach()
        await agent.receive(CLOSE)
        await agent.send(CREDIT, (await agent.receive(PING)).channel, fields(stream=0, bytes=1))
        assert await agent.hung_up()
        assert agent.lost[0].violation

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
        assert link._conn.channels.keys() == {0}

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
