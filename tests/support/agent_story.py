# SPDX-License-Identifier: Apache-2.0
"""Stories: a greeted link, a scripted agent at its other end, and what the tests of the link share."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from dsecd.backends.agentlink.link import (
    AgentLink,
    ExecChannel,
    LinkLost,
    StartRequest,
)
from tests.support.fake_agent import (
    FakeAgent,
    Frame,
    fields,
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
