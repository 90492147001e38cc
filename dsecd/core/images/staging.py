# SPDX-License-Identifier: Apache-2.0
"""The process that reads a source, as the store starts it.

What belongs here: its job, its limits, its progress and its answer. What does not: what it does
(`worker.py`), and what becomes of what it made (`publish.py`).
"""

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from dsecd.backends.plan import in_thread
from dsecd.core.images import worker
from dsecd.core.images.tree import Limits
from dsecd.linux import proc
from libdsec.errors import BackendFailed, NoCapacity, from_wire
from libdsec.types import ImportProgress

Progress = Callable[[ImportProgress], None]

_IMPORT_TIMEOUT_S = 24 * 3600.0
_ANSWER_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Settings:
    """What an operator can choose."""

    limits: Limits = field(default_factory=Limits)
    #: An import stops before it takes the last so many bytes of the disk.
    reserve_bytes: int = worker.RESERVE_BYTES


async def check_space(root: Path, reserve_bytes: int, source: str) -> None:
    """Raises NoCapacity when the disk is too full already for an import."""
    usage = await in_thread(shutil.disk_usage, root)
    if usage.free < reserve_bytes:
        raise NoCapacity(
            f"import {source!r}: {usage.free >> 20} MiB free in {root}, "
            f"{reserve_bytes >> 20} MiB are kept back", hint="remove images or add space",
        )


async def stage(
    staging: Path, objects: Path, settings: Settings, what: dict[str, object], progress: Progress
) -> worker.Staged:
    """Run the worker on a source; what it made lies in ``staging``. Raises what it says, and BackendFailed."""
    limits = settings.limits
    job = {
        **what, "staging": os.fspath(staging), "objects": os.fspath(objects),
        "max_entries": limits.max_entries, "max_bytes": limits.max_bytes,
        "reserve_bytes": settings.reserve_bytes,
    }
    async with _progress_pipe(progress) as fd:
        done = await proc.run(
            worker.command(), input=json.dumps(job).encode(), timeout_s=_IMPORT_TIMEOUT_S,
            env=worker.environment(), fd_map={worker.PROGRESS_FD: fd}, check=False,
            output_limit_bytes=_ANSWER_MAX_BYTES,
        )
    if done.returncode != 0 or done.truncated:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise BackendFailed(
            f"import {what['source']!r}: its process ended with status {done.returncode}"
            + (f": {last[0][:300]}" if last else "")
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise from_wire(answer["error"])
    return worker.Staged(**answer["staged"])


@contextlib.asynccontextmanager
async def _progress_pipe(progress: Progress) -> AsyncIterator[int]:
    """An fd for the worker to write its lines of progress to, which are handed on as they come."""
    loop = asyncio.get_running_loop()
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(writer, True)
    buffer = bytearray()

    def arrived() -> None:
        try:
            data = os.read(reader, 65536)
        except BlockingIOError:
            return
        buffer.extend(data)
        *lines, rest = bytes(buffer).split(b"\n")
        buffer[:] = rest
        for line in lines:
            # The process reads hostile bytes: what it says is checked like a stranger's word.
            with contextlib.suppress(ValueError):
                progress(ImportProgress.model_validate_json(line))

    loop.add_reader(reader, arrived)
    try:
        yield writer
        arrived()
    finally:
        loop.remove_reader(reader)
        os.close(reader)
        os.close(writer)
