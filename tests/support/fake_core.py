# SPDX-License-Identifier: Apache-2.0
"""The API served on a real Unix socket over services that tests script.

Here: fakes of what the API calls, with events, operations and store being the real ones. Not here: proof of
anything about sandboxes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from dsecd import listen
from dsecd.api.handlers import HANDLERS
from dsecd.api.server import Server
from dsecd.core.events import Events
from dsecd.core.execs import StreamOutput
from dsecd.core.operations import Operations, Report
from dsecd.core.principal import Principal, of_socket
from dsecd.core.schema import MIGRATIONS
from dsecd.core.services import Core
from dsecd.core.store import Store
from dsecd.core.tasks import Tasks
from libdsec import memory as m
from libdsec import snapshots as snap
from libdsec import types as t
from libdsec.errors import NotFound
from libdsec.routes import ROUTES, Route

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def sandbox(sandbox_id: str = "sb-1", state: t.State = t.State.RUNNING) -> t.Sandbox:
    return t.Sandbox(
        id=sandbox_id, state=state, spec=t.SandboxSpec(image="base"), owner_uid=0, created_at=NOW
    )


def info(path: str, size: int) -> t.FileInfo:
    name = path.rpartition("/")[2]
    return t.FileInfo(name=name, type="file", mode=0o644, uid=0, gid=0, size_bytes=size, mtime_ns=0)


@dataclass
class FakeSandboxes:
    """``hook`` is awaited by every call with the call's name and arguments; what it returns is the answer."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    hook: Callable[..., Any] | None = None

    async def _answer(self, name: str, *arguments: Any) -> t.Sandbox:
        self.calls.append((name, arguments))
        if self.hook is not None:
            found = await self.hook(name, *arguments)
            if found is not None:
                return cast(t.Sandbox, found)
        return sandbox()

    async def create(self, principal: Principal, request: t.CreateRequest) -> t.Sandbox:
        return await self._answer("create", principal, request)

    async def create_batch(
        self, principal: Principal, request: t.BatchCreateRequest, report: Report
    ) -> list[t.BatchItem]:
        report({"done": 1})
        return [t.BatchItem(sandbox=await self._answer("create", principal, item)) for item in request.items]

    def list(self, principal: Principal, **wanted: Any) -> t.SandboxList:
        self.calls.append(("list", (principal, wanted)))
        return t.SandboxList(sandboxes=(sandbox(),))

    def get(self, principal: Principal, sandbox_id: str) -> t.Sandbox:
        self.calls.append(("get", (principal, sandbox_id)))
        if sandbox_id == "none":
            raise NotFound(f"inspect {sandbox_id!r}: no such sandbox")
        return sandbox(sandbox_id)

    async def usage(self, principal: Principal, sandbox_id: str) -> t.SandboxUsage:
        self.calls.append(("usage", (principal, sandbox_id)))
        return t.SandboxUsage(
            id=sandbox_id, processes=3, execs_running=1, execs_total=2, cpu_user_us=30, cpu_system_us=4, max_rss_kib=5,
            cpu_usage_us=34,
        )  # fmt: skip

    async def stop(self, principal: Principal, sandbox_id: str, request: t.StopRequest) -> t.Sandbox:
        return await self._answer("stop", principal, sandbox_id, request)

    async def fork(self, principal: Principal, sandbox_id: str, request: snap.ForkRequest) -> t.SandboxList:
        return t.SandboxList(sandboxes=(await self._answer("fork", principal, sandbox_id, request),))

    async def pause(self, principal: Principal, sandbox_id: str) -> t.Sandbox:
        return await self._answer("pause", principal, sandbox_id)


class FakeStream:
    """A command: its output is what the test puts into ``events``; what the API does with it is recorded."""

    exec_id = "x1"
    pid = 42

    def __init__(self, events: AsyncIterator[StreamOutput | t.ExecInfo]) -> None:
        self._events = events
        self.did: list[tuple[Any, ...]] = []
        self.consumed_bytes = 0
        self.detached = asyncio.Event()
        self.stdin_gate = asyncio.Event()
        self.stdin_gate.set()
        self.acted = asyncio.Event()

    async def next(self) -> StreamOutput | t.ExecInfo:
        return await anext(self._events)

    def consumed(self, stream: int, size: int) -> None:
        del stream
        self.consumed_bytes += size

    async def _record(self, *what: Any) -> None:
        self.did.append(what)
        self.acted.set()

    async def write_stdin(self, data: bytes) -> None:
        await self.stdin_gate.wait()
        await self._record("stdin", data)

    async def close_stdin(self) -> None:
        await self._record("eof")

    async def resize(self, rows: int, cols: int) -> None:
        await self._record("resize", rows, cols)

    async def signal(self, signum: int, tree: bool) -> None:
        await self._record("signal", signum, tree)

    async def detach(self) -> None:
        self.detached.set()


@dataclass
class FakeExecs:
    stream: FakeStream | None = None
    opened: list[t.StreamStart] = field(default_factory=list)
    result: t.ExecResult = field(
        default_factory=lambda: t.ExecResult(
            exec_id="x1", pid=42, running=False, exit_code=0, stdout=b"\xff\0hi"
        )
    )

    async def run(self, _principal: Principal, _sandbox_id: str, request: t.ExecRequest) -> t.ExecResult:
        return self.result.model_copy(update={"stdout": request.stdin or self.result.stdout})

    async def open_stream(
        self, _principal: Principal, _sandbox_id: str, request: t.StreamStart
    ) -> FakeStream:
        self.opened.append(request)
        if self.stream is None:
            raise NotFound("attach: no such exec")
        return self.stream


class FakeGet:
    def __init__(
        self, path: str, size: int, parts: Sequence[tuple[int, bytes]], fail: Exception | None
    ) -> None:
        self.info = info(path, size)
        self._parts = parts
        self._fail = fail
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        for part in self._parts:
            yield part
        if self._fail is not None:
            raise self._fail

    async def aclose(self) -> None:
        self.closed = True


class FakePut:
    def __init__(self, path: str, offset: int) -> None:
        self.path = path
        self.offset = offset
        self.written: list[tuple[int, bytes]] = []
        self.committed: int | None = None
        self.closed = asyncio.Event()
        self.began = asyncio.Event()

    async def write(self, offset: int, data: bytes) -> None:
        self.written.append((offset, data))
        self.began.set()

    async def commit(self, size: int) -> t.FileInfo:
        self.committed = size
        return info(self.path, size)

    async def aclose(self) -> None:
        self.closed.set()


@dataclass
class FakeFiles:
    size: int = 0
    parts: Sequence[tuple[int, bytes]] = ()
    fail: Exception | None = None
    part_offset: int = 0
    got: FakeGet | None = None
    put: FakePut | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def open_get(
        self, _principal: Principal, _id: str, path: str, user: str | None, offset: int, length: int
    ) -> FakeGet:
        self.asked.append({"path": path, "user": user, "offset": offset, "length": length})
        self.got = FakeGet(path, self.size, self.parts, self.fail)
        return self.got

    async def open_put(self, _principal: Principal, _id: str, **wanted: Any) -> FakePut:
        self.asked.append(wanted)
        self.put = FakePut(wanted["path"], self.part_offset)
        return self.put

    async def stat(
        self, _principal: Principal, _id: str, path: str, user: str | None, *, follow: bool
    ) -> t.FileInfo:
        self.asked.append({"path": path, "user": user, "follow": follow})
        return info("x", 1)


class FakeImages:
    def list(self, _principal: Principal) -> tuple[t.ImageInfo, ...]:
        return ()


class FakeSnapshots:
    def list(self, _principal: Principal) -> snap.SnapshotList:
        return snap.SnapshotList(snapshots=())


class FakeMemory:
    """Answers with what it was asked for as the names of sandboxes."""

    async def report(
        self, principal: Principal, names: Sequence[str], *, after: str | None, limit: int
    ) -> m.MemoryReport:
        host = m.HostMemory(
            total_bytes=limit, available_bytes=5, swap_total_bytes=0, swap_used_bytes=0, reclaim="off",
            reclaimed_bytes=0,
        )  # fmt: skip
        shown = [*names, *([after] if after else [])]
        return m.MemoryReport(host=host, sandboxes=tuple(m.SandboxMemory(id=i, reclaimed_bytes=0) for i in shown))


class FakeHost:
    def version(self) -> t.VersionInfo:
        return t.VersionInfo(version="0", started_at=NOW, generation=1)


@dataclass
class Api:
    """A served API and what stands behind it."""

    socket: Path
    server: Server
    sandboxes: FakeSandboxes
    execs: FakeExecs
    files: FakeFiles
    events: Events
    operations: Operations
    store: Store


@asynccontextmanager
async def serving(
    directory: Path,
    *,
    authenticate: Callable[[socket.socket], Principal] | None = None,
    routes: Sequence[Route] = ROUTES,
    max_request_bytes: int = 1 << 30,
    max_body_bytes_per_user: int = 1 << 30,
    max_connections_per_user: int = 1000,
    mode: int = 0o600,
) -> AsyncIterator[Api]:
    """Serve on ``directory/sock`` until the block ends."""
    store, tasks = Store.open(directory / "db", MIGRATIONS), Tasks()
    events, operations = Events(store, boot_id="boot"), Operations(store, tasks)
    sandboxes, execs, files = FakeSandboxes(), FakeExecs(), FakeFiles()
    fakes = {
        "sandboxes": sandboxes,
        "forks": sandboxes,
        "snapshots": FakeSnapshots(),
        "execs": execs,
        "files": files,
        "images": FakeImages(),
        "host": FakeHost(),
        "memory": FakeMemory(),
    }
    core = Core(events=events, operations=operations, **cast(Any, fakes))
    server = Server(
        core, routes, HANDLERS, authenticate or (lambda sock: of_socket(sock, admin_gid=None)),
        max_request_bytes=max_request_bytes, max_body_bytes_per_user=max_body_bytes_per_user,
        max_connections_per_user=max_connections_per_user,
    )  # fmt: skip
    path = directory / "sock"
    await server.start(listen.bound(path, mode, "no-such-group"))
    try:
        yield Api(path, server, sandboxes, execs, files, events, operations, store)
    finally:
        events.close()
        await server.close(0.5)
        await tasks.close()
        store.close()
