# SPDX-License-Identifier: Apache-2.0
"""Connections to ports inside, against an agent that says whatever a test tells it to."""

import asyncio
import socket
import struct

import pytest

from dsecd.backends.agentlink.link import AgentError, AgentLink
from tests.support.agent_story import CLOSE, CREDIT, DATA, EOF, ERROR, INPUT, OK, PING, READY, play
from tests.support.fake_agent import FakeAgent, Frame, fields

DIAL, PORT = 0x3B, 65
_WINDOW = 262_144


def data(offset: int, content: bytes) -> bytes:
    return struct.pack("<Q", offset) + content


async def dialled(agent: FakeAgent, link: AgentLink, credit: int = 1000) -> tuple[socket.socket, Frame]:
    task = asyncio.ensure_future(link.machine.dial(8000))
    frame = await agent.receive(DIAL)
    assert (frame.number(PORT), frame.number(19)) == (8000, _WINDOW)
    await agent.send(READY, frame.channel, fields(credit=credit))
    return await task, frame


async def heard(sock: socket.socket) -> bytes:
    async with asyncio.timeout(60):
        return await asyncio.get_running_loop().sock_recv(sock, 1 << 20)


def test_both_directions_with_credit_and_both_ends() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        sock, frame = await dialled(agent, link, credit=3)
        await agent.send(DATA, frame.channel, data(0, b"hello"))
        assert await heard(sock) == b"hello"
        sock.send(b"abcde")
        assert (await agent.receive(INPUT)).payload == b"abc"
        assert await agent.quiet()  # no credit is left
        await agent.send(CREDIT, frame.channel, fields(stream=0, bytes=100))
        assert (await agent.receive(INPUT)).payload == b"de"
        sock.shutdown(socket.SHUT_WR)
        last = await agent.receive(INPUT)
        assert (last.payload, last.flags) == (b"", EOF)
        await agent.send(DATA, frame.channel, data(5, b"!"))
        await agent.send(DATA, frame.channel, data(6, b""))
        await agent.send(OK, frame.channel)
        assert await heard(sock) == b"!"
        assert await heard(sock) == b""
        sock.close()

    play(story)


def test_who_does_not_read_is_sent_no_more_than_its_window_and_a_client_that_goes_is_told() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        sock, frame = await dialled(agent, link)
        for number in range(8):  # all of the window, which the socket does not take whole
            await agent.send(DATA, frame.channel, data(number << 15, bytes(1 << 15)))
        read = 0
        while read < _WINDOW:
            read += len(await heard(sock))
        granted = 0
        while granted < _WINDOW // 2:
            granted += (await agent.receive(CREDIT)).number(21)
        sock.close()
        while (closing := await agent.receive()).kind != CLOSE:
            assert closing.kind in (INPUT, CREDIT)
        await agent.receive(PING)

    play(story)


def test_nobody_listens() -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        task = asyncio.ensure_future(link.machine.dial(9))
        frame = await agent.receive(DIAL)
        await agent.send(ERROR, frame.channel, fields(code="refused", errno=111, message="no"))
        with pytest.raises(AgentError) as caught:
            await task
        assert caught.value.code == "refused"

    play(story)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([(DATA, data(1, b"x"))], id="a gap"),
        pytest.param([(DATA, data(0, b"xy")), (DATA, data(1, b"z"))], id="offset goes back"),
        pytest.param([(DATA, b"\0\0")], id="cut short"),
        pytest.param([(DATA, data(n << 15, bytes(1 << 15))) for n in range(32)], id="beyond credit"),
        pytest.param([(DATA, data(0, b"")), (DATA, data(0, b"x"))], id="after its end"),
        pytest.param([(READY, fields(credit=1))], id="ready twice"),
        pytest.param([(CREDIT, fields(stream=0, bytes=64 << 20))], id="absurd credit"),
    ],
)
def test_violations_end_the_connection(said: list[tuple[int, bytes]]) -> None:
    async def story(agent: FakeAgent, link: AgentLink) -> None:
        sock, frame = await dialled(agent, link)
        for kind, payload in said:
            await agent.send(kind, frame.channel, payload)
        assert await agent.hung_up()
        assert agent.lost[0].violation
        while await heard(sock):
            pass
        sock.close()

    play(story)
