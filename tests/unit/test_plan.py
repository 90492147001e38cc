# SPDX-License-Identifier: Apache-2.0
"""Plans under cancellation: what was begun is waited for before it is undone."""

import asyncio
import threading

import pytest

from dsecd.backends.plan import Step, in_thread, perform, undo


def test_a_step_in_a_thread_is_not_undone_before_the_thread_has_ended() -> None:
    began, go = threading.Event(), threading.Event()
    happened: list[str] = []

    def work() -> None:
        began.set()
        go.wait(10)
        happened.append("done")

    async def do() -> None:
        await in_thread(work)

    async def take_back() -> None:
        happened.append("undone")

    async def main() -> None:
        task = asyncio.ensure_future(perform("create", [Step("work", "work in a thread", do, take_back)]))
        await asyncio.to_thread(began.wait, 10)
        # The daemon ends: more than one cancellation may come.
        for _number in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        assert happened == []
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert happened == ["done", "undone"]


def test_what_a_thread_raises_comes_out() -> None:
    def work() -> None:
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        asyncio.run(in_thread(work))


def test_an_undo_that_fails_keeps_no_other_from_being_undone() -> None:
    happened: list[str] = []

    async def nothing() -> None:
        """The step itself does not matter."""

    async def fail() -> None:
        raise OSError(16, "busy")

    async def first() -> None:
        happened.append("first")

    steps = [Step("first", "goes last", nothing, first), Step("second", "cannot go", nothing, fail)]
    failures = asyncio.run(undo("delete", steps))
    assert (happened, [str(failure) for failure in failures]) == (["first"], ["[Errno 16] busy"])
