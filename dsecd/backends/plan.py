# SPDX-License-Identifier: Apache-2.0
"""Plans: the steps that make a sandbox, each with its undo.

What belongs here: running steps forwards, and backwards when one fails or when everything is to go. What
does not: what the steps do.

A step's ``do`` makes something whose name derives from the sandbox's id; its ``undo`` removes that
something whether it is there, half there or not, also in another process than the one that made it. So the
same list serves creation, its failure, deletion, and cleaning up after a daemon that was killed between any
two instructions.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

Action = Callable[[], Awaitable[None]]
#: Called before and after every step with "<plan>/<step>/<do or undo>/<before or after>"; tests stop the daemon there.
Checkpoint = Callable[[str], None]


async def nothing() -> None:
    """The undo of a step that leaves nothing behind."""


def no_checkpoint(_name: str) -> None:
    """The checkpoint of normal operation."""


@dataclass(frozen=True)
class Step:
    """One thing to do and how to take it back."""

    name: str
    about: str
    do: Action
    undo: Action = nothing

    def describe(self) -> str:
        return f"{self.name}: {self.about}"


def points(plan: str, steps: Sequence[Step]) -> list[str]:
    """Every checkpoint that performing and undoing the plan passes, in the order of performing then undoing."""
    forward = [f"{plan}/{step.name}/do/{when}" for step in steps for when in ("before", "after")]
    backward = [f"{plan}/{step.name}/undo/{when}" for step in reversed(steps) for when in ("before", "after")]
    return forward + backward


async def in_thread(function: Callable[..., T], *args: object, executor: Executor | None = None) -> T:
    """Run what blocks in a thread.  Cancelled, it waits for the thread first: an undo must not race with its do."""
    future = asyncio.get_running_loop().run_in_executor(executor, functools.partial(function, *args))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # seen: asyncio need not log it
        raise


async def perform(plan: str, steps: Sequence[Step], checkpoint: Checkpoint = no_checkpoint) -> None:
    """Do all steps in order. When one fails, or the task is cancelled, undo it and those before, then raise."""
    for number, step in enumerate(steps):
        try:
            checkpoint(f"{plan}/{step.name}/do/before")
            began = time.perf_counter()
            await step.do()
            log.debug("plan=%s step=%s took_ms=%.2f", plan, step.name, (time.perf_counter() - began) * 1000)
            checkpoint(f"{plan}/{step.name}/do/after")
        except BaseException as error:
            log.warning("plan=%s step=%s failed: %s", plan, step.name, error)
            # The undo must run to its end even when this task is cancelled again meanwhile.
            await asyncio.shield(undo(plan, steps[: number + 1], checkpoint))
            raise


async def undo(plan: str, steps: Sequence[Step], checkpoint: Checkpoint = no_checkpoint) -> list[Exception]:
    """Undo all steps, last first. One that fails does not keep the others from being undone; failures are returned."""
    failures: list[Exception] = []
    for step in reversed(steps):
        try:
            checkpoint(f"{plan}/{step.name}/undo/before")
            began = time.perf_counter()
            await step.undo()
            log.debug("plan=%s undo=%s took_ms=%.2f", plan, step.name, (time.perf_counter() - began) * 1000)
            checkpoint(f"{plan}/{step.name}/undo/after")
        # Broad: a boundary between steps; whatever one raises, the next must still be undone.
        except Exception as error:  # noqa: BLE001
            log.warning("plan=%s step=%s could not be undone: %s", plan, step.name, error)
            failures.append(error)
    return failures
