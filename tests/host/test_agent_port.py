# SPDX-License-Identifier: Apache-2.0
"""The agent over a port, one stream for its whole life: every new connection reaches it, whatever the last one left.

Here: agent/port.c and dsecd/vmm/port.py on the two ends of a socket pair, which is the port. Not here: a real port in a
real machine, of which the host's side is also told late and deaf for a while (test_microvm.py).
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.backends.agentlink import AgentLink, LinkLost, StartRequest, connect_socket
from dsecd.backends.agentlink.pulse import INTERVAL_S
from dsecd.vmm import port
from tests.support.agent_process import BUILDS, CHECKOUT, build
from tests.support.waiting import until

_MAGIC = b"\x7fdsec-connect-1\n"
_KEY = bytes(range(16))
_HELLO_S = 5.0  # how long an agent waits for the HELLO of whoever connects to a socket
_TRY_S = 60.0


class Port:
    """An agent with a port, and the host's end of it."""

    def __init__(self, program: str) -> None:
        self.end, theirs = socket.socketpair()
        self.end.setblocking(False)
        with theirs:
            command = [str(CHECKOUT / "build/agent" / program), f"--listen-fd={theirs.fileno()}", "--port"]
            self.agent = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def stop(self) -> None:
        self.agent.kill()
        self.agent.wait()
        self.end.close()

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.end, data)

    async def dial(self) -> socket.socket:
        """As the daemon does, which tries again when a prelude is lost among what a former host left."""
        async with asyncio.timeout(_TRY_S):
            return await port.dial(self._connect, _KEY)

    async def _connect(self) -> socket.socket:
        await self._throw_away()
        return self.end.dup()

    async def _throw_away(self) -> None:
        """What a monitor does with what is said to a host that left; else there is no room for another's words."""
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.05):
                    await asyncio.get_running_loop().sock_recv(self.end, 1 << 16)

    async def link(self) -> AgentLink:
        sock = await self.dial()
        return await connect_socket(sock, generation=1, timeout_s=_TRY_S, on_lost=lambda _lost: None)

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.agent.pid}/fd").iterdir()))


@pytest.fixture(scope="module", params=["plain", "asan"])
def serial(request: pytest.FixtureRequest) -> Iterator[Port]:
    build()
    port = Port(BUILDS[request.param])
    yield port
    port.stop()


def prelude() -> bytes:
    return _MAGIC + _KEY + os.urandom(16)


async def leave_something(serial: Port, dice: random.Random) -> None:
    """What a host may have done when it was killed."""
    way = dice.randrange(4)
    if way == 0:  # many that came and went before anything was read, and the next comes before that, too
        serial.agent.send_signal(signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.1, serial.agent.send_signal, signal.SIGCONT)
        await serial.write(b"".join(prelude() for _ in range(dice.randrange(1, 40))))
    elif way == 1:
        await serial.write(prelude()[: dice.randrange(1, 48)])
    elif way == 2:  # in the middle of a frame, said or heard
        link = await serial.link()
        flood = StartRequest(f"f{time.monotonic_ns()}", ["head", "-c", "300000", "/dev/zero"])
        await link.start(flood, attach=True)
        await link.close()
        await serial.write(b"\x00\x40\x00\x00" + dice.randbytes(dice.randrange(9000)))
    else:  # all the answers wait, since nobody reads
        link = await serial.link()
        await link.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await serial.write(_PING * 20_000)


_PING = b"\x00\x00\x00\x00\x0b\x00\x00\x00\x00\x00\x00\x00"


def test_a_new_connection_reaches_the_agent_whatever_the_last_left(serial: Port) -> None:
    async def main() -> None:
        dice = random.Random(7)
        await (await serial.link()).close()
        before = serial.descriptors()
        for _ in range(60):
            await leave_something(serial, dice)
            link = await serial.link()
            await asyncio.wait_for(link.ping(_TRY_S), _TRY_S)
            await link.close()
        # One may be a command's that still writes.
        await asyncio.to_thread(until, lambda: serial.descriptors() <= before + 1)

    asyncio.run(main())


def test_a_connection_that_the_agent_gives_up_is_told_at_once(serial: Port) -> None:
    """Asking whether it lives takes longer than the test waits, and nobody asks while nobody waits for the agent."""

    async def main() -> None:
        for _ in range(5):
            lost: asyncio.Future[LinkLost] = asyncio.get_running_loop().create_future()
            sock = await serial.dial()
            link = await connect_socket(sock, generation=1, timeout_s=_TRY_S, on_lost=lost.set_result)
            await asyncio.wait_for(link.ping(_TRY_S), _TRY_S)
            await serial.write(b"\xff" * 12)  # no frame
            assert "the agent closed the connection: ended" in str(await asyncio.wait_for(lost, INTERVAL_S - 5))
            with pytest.raises(LinkLost):
                await link.ping(_TRY_S)
        link = await serial.link()
        await asyncio.wait_for(link.ping(_TRY_S), _TRY_S)
        await link.close()

    asyncio.run(main())


def test_a_hello_may_come_late(serial: Port) -> None:
    """Nobody could tell the host that it was not waited for."""

    async def main() -> None:
        sock = await serial.dial()
        await asyncio.sleep(_HELLO_S + 0.5)
        link = await connect_socket(sock, generation=1, timeout_s=_TRY_S, on_lost=lambda _lost: None)
        await link.close()

    asyncio.run(main())
