# SPDX-License-Identifier: Apache-2.0
"""The prelude that begins a connection over a port, against a peer that answers late, in pieces, or never."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from dsecd.vmm import port

KEY = bytes(range(16))
_PRELUDE_BYTES = 48


def begun(answer: Callable[[bytes], bytes]) -> bytes:
    """What is left to read after ``begin`` with a peer that answers a prelude so."""

    async def main() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            loop = asyncio.get_running_loop()

            async def peer() -> None:
                prelude = await loop.sock_recv(theirs, 4096)
                assert len(prelude) == _PRELUDE_BYTES
                assert prelude[16:32] == KEY
                for byte in answer(prelude):
                    await loop.sock_sendall(theirs, bytes((byte,)))
                theirs.shutdown(socket.SHUT_WR)

            async with asyncio.TaskGroup() as group:
                group.create_task(peer())
                await port.begin(ours, KEY)
            return await loop.sock_recv(ours, 4096)

    return asyncio.run(main())


def test_what_lies_before_the_answer_is_thrown_away_and_nothing_behind_it() -> None:
    assert begun(lambda prelude: b"half a frame of the one before" + prelude + b"rest") == b"rest"
    assert begun(lambda prelude: prelude[:20] + prelude + b"rest") == b"rest"
    assert begun(lambda prelude: prelude) == b""


def test_an_answer_to_another_prelude_is_none() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        begun(lambda prelude: prelude[:-16] + bytes(16))
    assert isinstance(caught.value.exceptions[0], ConnectionResetError)


def test_who_is_not_answered_begins_another_connection() -> None:
    """The first is deaf, the second mute, the third answers."""
    tried: list[tuple[socket.socket, socket.socket]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Task[None]] = []

        async def answer(theirs: socket.socket) -> None:
            prelude = await loop.sock_recv(theirs, 4096)
            if len(tried) > 2:
                await loop.sock_sendall(theirs, prelude)

        async def connect() -> socket.socket:
            ours, theirs = socket.socketpair()
            for end in (ours, theirs):
                end.setblocking(False)
            tried.append((ours, theirs))
            if len(tried) > 1:
                answers.append(asyncio.create_task(answer(theirs)))
            return ours

        assert await port.dial(connect, KEY, patience_s=0.02) is tried[2][0]
        await asyncio.gather(*answers)

    asyncio.run(main())
    assert [ours.fileno() >= 0 for ours, _theirs in tried] == [False, False, True]
    for pair in tried:
        for end in pair:
            end.close()


def test_two_preludes_differ() -> None:
    seen: list[bytes] = []

    def answer(prelude: bytes) -> bytes:
        seen.append(prelude)
        return prelude

    begun(answer)
    begun(answer)
    assert seen[0] != seen[1]
    assert seen[0][:32] == seen[1][:32]
