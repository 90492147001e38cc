# SPDX-License-Identifier: Apache-2.0
"""An agent that says nothing while somebody waits for it; the tests do what the clock would."""

import asyncio

from dsecd.backends.agentlink.link import AgentLink
from dsecd.backends.agentlink.pulse import Pulse
from tests.support.agent_story import OK, PING, lost, play, started, until
from tests.support.fake_agent import FakeAgent


def watch(link: AgentLink) -> Pulse:
    return Pulse(link._conn, interval_s=3600)


def test_silent_agent_is_asked_and_then_given_up() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        pulse = watch(link)
        task = asyncio.ensure_future(link.usage())
        await agent.receive()
        pulse.beat()
        await agent.receive(PING)
        assert not task.done()
        pulse.beat()
        error = await lost(task)
        assert error.violation is None  # it may be connected to again
        await until(lambda: len(agent.lost) == 1)
        assert await agent.hung_up()

    play(story)


def test_agent_that_answers_keeps_a_silent_command() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        channel, _start = await started(agent, link)
        pulse = watch(link)
        for _hour in range(5):
            pulse.beat()
            ping = await agent.receive(PING)
            heard = link._conn.heard
            await agent.send(OK, ping.channel)
            while link._conn.heard == heard:
                await asyncio.sleep(0)
            pulse.beat()
        assert agent.lost == []
        await channel.detach()

    play(story)


def test_nobody_who_waits_no_question() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        pulse = watch(link)
        for _hour in range(5):
            pulse.beat()
        assert await agent.quiet()
        assert agent.lost == []

    play(story)


def test_agent_that_does_not_read_is_given_up() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        pulse = watch(link)
        conn = link._conn
        while not conn.paused:
            conn.send(b"\0" * 65536)
        task = asyncio.ensure_future(link.usage())
        await asyncio.sleep(0)
        pulse.beat()
        pulse.beat()
        await lost(task)

    play(story)
