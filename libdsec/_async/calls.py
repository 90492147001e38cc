# SPDX-License-Identifier: Apache-2.0
"""One method for each JSON route of ``ROUTES``, with its name and its types, in groups.

Here: arguments and answers. Not here: retries (``transport.py``), streams (``stream.py``), file bodies (``files.py``),
the comfortable form (``sandbox.py``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from libdsec import connection as c
from libdsec import snapshots as snap
from libdsec import types as t
from libdsec._async.primitives import WebSocket
from libdsec._async.transport import AsyncTransport
from libdsec._async.tunnel import AsyncTunnel
from libdsec.errors import ConnectionFailed, DsecError, NotFound, TimedOut, from_wire
from libdsec.memory import MemoryReport, SandboxMemory

#: The longest that one waiting request asks the daemon to block.
POLL_S = 60.0
#: How often an exec whose request was lost unread is sent again.
MAX_RESENDS = 4


class AsyncHostCalls(AsyncTransport):
    """The host, operations and events."""

    async def openapi(self) -> bytes:
        """The API as an OpenAPI document, JSON."""
        return await self.request("openapi")

    async def version(self) -> t.VersionInfo:
        """Version of the daemon."""
        return c.parse(t.VersionInfo, await self.request("version"), "version")

    async def host(self) -> t.HostReport:
        """What the host offers."""
        return c.parse(t.HostReport, await self.request("host"), "host")

    async def doctor(self) -> t.DoctorReport:
        """Check the host and look for residue."""
        return c.parse(t.DoctorReport, await self.request("doctor"), "doctor")

    async def memory(
        self, *, sandbox: Sequence[str] = (), after: str | None = None, limit: int | None = None
    ) -> MemoryReport:
        """Memory of the host and a page of the sandboxes that run or are paused, or of those named."""
        data = await self.request("memory", query={"sandbox": sandbox, "after": after, "limit": limit})
        return c.parse(MemoryReport, data, "memory")

    async def memory_all(self) -> MemoryReport:
        """All pages of ``memory``; the host as the last of them tells."""
        found: tuple[SandboxMemory, ...] = ()
        after: str | None = None
        while True:
            page = await self.memory(after=after)
            found += page.sandboxes
            if not page.next:
                return page.model_copy(update={"sandboxes": found})
            after = page.next

    async def operations(self) -> t.OperationList:
        """The operations the daemon knows."""
        return c.parse(t.OperationList, await self.request("operations"), "operations")

    async def operation(self, operation_id: str, *, wait_s: float | None = None) -> t.Operation:
        """One operation; blocks up to ``wait_s`` (at most 300) for a change."""
        data = await self.request("operation", query={"wait_s": wait_s}, operation_id=operation_id)
        return c.parse(t.Operation, data, "operation")

    async def operation_cancel(self, operation_id: str) -> t.Operation:
        """Cancel an operation."""
        data = await self.request("operation_cancel", operation_id=operation_id)
        return c.parse(t.Operation, data, "operation_cancel")

    async def events(
        self, *, since: int | None = None, limit: int | None = None, wait_s: float | None = None
    ) -> t.EventList:
        """Events after sequence number ``since``; blocks up to ``wait_s`` (at most 300) when there are none."""
        data = await self.request("events", query={"since": since, "limit": limit, "wait_s": wait_s})
        return c.parse(t.EventList, data, "events")

    @asynccontextmanager
    async def events_stream(self, *, since: int | None = None) -> AsyncIterator[AsyncIterator[t.Event]]:
        """Events as they happen, for ever: ``async with client.events_stream() as events: async for event in events``.

        Raises ConnectionFailed when the connection breaks; go on with ``since`` the last event's ``seq``.
        """
        socket = await self.websocket("events_stream", query={"since": since})
        try:
            yield _events(socket)
        finally:
            await socket.close()


async def _events(socket: WebSocket) -> AsyncIterator[t.Event]:
    while True:
        message = await socket.receive()
        data = message.encode() if isinstance(message, str) else message
        error = _error_body(data)
        if error is not None:
            raise error
        yield c.parse(t.Event, data, "events_stream")


def _error_body(data: bytes) -> DsecError | None:
    if b'"code"' not in data or b'"seq"' in data:
        return None
    return from_wire(c.parse(t.ErrorBody, data, "events_stream").model_dump())


class AsyncSandboxCalls(AsyncTransport):
    """Sandboxes."""

    async def create(
        self,
        spec: t.SandboxSpec,
        *,
        id: str | None = None,
        idempotency_key: str | None = None,
        wait_s: float | None = None,
    ) -> t.Sandbox:
        """Create a sandbox and start it. Carries a key always, so that a repeated request makes no second one.

        Raises NoCapacity when the host has had no room for it for ``wait_s`` (default: the daemon's, 30 s).
        """
        key = idempotency_key or c.new_key()
        request = c.build(t.CreateRequest, "", spec=spec, id=id, idempotency_key=key, wait_s=wait_s)
        return c.parse(t.Sandbox, await self.request("create", body=request), "create")

    async def create_batch(
        self, items: Sequence[t.CreateRequest], *, parallel: int | None = None
    ) -> t.Operation:
        """Create many; the operation's result is a list of BatchItem. Items without a key get one."""
        keyed = tuple(
            item if item.idempotency_key else item.model_copy(update={"idempotency_key": c.new_key()})
            for item in items
        )
        request = c.build(t.BatchCreateRequest, "", items=keyed, parallel=parallel)
        return c.parse(t.Operation, await self.request("create_batch", body=request), "create_batch")

    async def list(
        self,
        *,
        label: Sequence[str] = (),
        state: Sequence[str] = (),
        after: str | None = None,
        limit: int | None = None,
    ) -> t.SandboxList:
        """A page of sandboxes. ``label``: NAME=VALUE or NAME, all must match."""
        data = await self.request(
            "list", query={"label": label, "state": state, "after": after, "limit": limit}
        )
        return c.parse(t.SandboxList, data, "list")

    async def list_all(
        self, *, label: Sequence[str] = (), state: Sequence[str] = ()
    ) -> tuple[t.Sandbox, ...]:
        """All pages of ``list``."""
        found: tuple[t.Sandbox, ...] = ()
        after: str | None = None
        while True:
            page = await self.list(label=label, state=state, after=after)
            found += page.sandboxes
            if not page.next:
                return found
            after = page.next

    async def inspect(self, id: str) -> t.Sandbox:
        """One sandbox."""
        return c.parse(t.Sandbox, await self.request("inspect", id=id), "inspect")

    async def usage(self, id: str) -> t.SandboxUsage:
        """What it uses and has used, running or paused. Raises WrongState, SandboxLost."""
        return c.parse(t.SandboxUsage, await self.request("usage", id=id), "usage")

    async def network(self, id: str) -> t.NetworkState:
        """What it may reach, and what was refused. Raises NotFound."""
        return c.parse(t.NetworkState, await self.request("network", id=id), "network")

    async def forward(self, id: str, port: int) -> AsyncTunnel:
        """A connection to a TCP port on its loopback; the sandbox needs no network for it. Raises Refused."""
        return await AsyncTunnel.open(await self.websocket("forward", query={"port": port}, id=id))

    async def update(
        self,
        id: str,
        *,
        labels: dict[str, str] | None = None,
        ttl_s: float | None = None,
        limits: t.Limits | None = None,
        lift: Sequence[t.LimitName] = (),
        network: t.Policy | None = None,
    ) -> t.Sandbox:
        """Change labels, TTL (seconds from now), limits or network; what is None stays, ``lift`` takes limits off."""
        request = c.build(
            t.UpdateRequest, "", labels=labels, ttl_s=ttl_s, limits=limits, lift=tuple(lift), network=network
        )
        return c.parse(t.Sandbox, await self.request("update", body=request, id=id), "update")

    async def delete(self, id: str) -> None:
        """Delete in any state; a sandbox that does not exist is no error."""
        await self.request("delete", id=id)

    async def stop(self, id: str, *, grace_s: float = 5.0) -> t.Sandbox:
        """SIGTERM, ``grace_s`` seconds later SIGKILL; files are kept."""
        request = c.build(t.StopRequest, "", grace_s=grace_s)
        return c.parse(t.Sandbox, await self.request("stop", body=request, id=id), "stop")

    async def start(self, id: str, *, wait_s: float | None = None) -> t.Sandbox:
        """Run a stopped sandbox again. Raises NoCapacity when the host has had no room for it for ``wait_s``."""
        data = await self.request("start", query={"wait_s": wait_s}, id=id)
        return c.parse(t.Sandbox, data, "start")

    async def fork(self, id: str, *, count: int = 1, ids: Sequence[str] = ()) -> t.SandboxList:
        """Copy a running sandbox with all that runs in it, or make no copy: see ``AsyncSandbox.fork``."""
        request = c.build(snap.ForkRequest, "", count=count, ids=tuple(ids))
        return c.parse(t.SandboxList, await self.request("fork", body=request, id=id), "fork")

    async def pause(self, id: str) -> t.Sandbox:
        """Freeze its processes."""
        return c.parse(t.Sandbox, await self.request("pause", id=id), "pause")

    async def resume(self, id: str) -> t.Sandbox:
        """Thaw its processes."""
        return c.parse(t.Sandbox, await self.request("resume", id=id), "resume")

    async def wait(self, id: str, state: Sequence[str], *, wait_s: float | None = None) -> t.Sandbox:
        """Wait until it is in one of the states. Raises TimedOut after ``wait_s`` (at most 300)."""
        data = await self.request("wait", query={"state": state, "wait_s": wait_s}, id=id)
        return c.parse(t.Sandbox, data, "wait")


class AsyncSnapshotCalls(AsyncTransport):
    """Snapshots with names."""

    async def snapshot_create(self, sandbox: str, id: str) -> snap.Snapshot:
        """Save a sandbox that runs or is paused, with memory and files; it goes on. See ``AsyncSandbox.snapshot``."""
        data = await self.request("snapshot_create", body=c.build(snap.SnapshotRequest, "", id=id), id=sandbox)
        return c.parse(snap.Snapshot, data, "snapshot_create")

    async def snapshots(self) -> snap.SnapshotList:
        """All snapshots that the caller may see."""
        return c.parse(snap.SnapshotList, await self.request("snapshots"), "snapshots")

    async def snapshot_inspect(self, id: str) -> snap.Snapshot:
        """One snapshot, and the sandboxes that run from it."""
        return c.parse(snap.Snapshot, await self.request("snapshot_inspect", id=id), "snapshot_inspect")

    async def snapshot_remove(self, id: str) -> None:
        """Remove one. Raises NotFound, and Conflict while sandboxes run from it."""
        await self.request("snapshot_remove", id=id)

    async def clone(
        self,
        snapshot: str,
        *,
        count: int = 1,
        ids: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
    ) -> t.SandboxList:
        """Create sandboxes that begin as a snapshot is, or create none: see ``AsyncSandbox.from_snapshot``."""
        given = None if labels is None else dict(labels)
        request = c.build(snap.CloneRequest, "", count=count, ids=tuple(ids), labels=given, ttl_s=ttl_s)
        return c.parse(t.SandboxList, await self.request("clone", body=request, id=snapshot), "clone")


class AsyncExecCalls(AsyncTransport):
    """Commands in sandboxes."""

    async def exec(self, id: str, request: t.ExecRequest) -> t.ExecResult:
        """Run a command to its end, output buffered; whatever its status, it is a result.

        When the connection breaks, the command is found again by its exec id and not run twice. Raises ExecNotStarted,
        NotFound, WrongState, SandboxLost, ConnectionFailed.
        """
        if request.exec_id is None:
            request = request.model_copy(update={"exec_id": c.new_key()})
        for _ in range(MAX_RESENDS):
            lost: ConnectionFailed | None = None
            try:
                data = await self.request("exec", body=request, id=id, read_timeout_s=_exec_limit_s(request))
                return c.parse(t.ExecResult, data, "exec")
            except ConnectionFailed as exc:
                if not exc.details.get("sent", True):
                    raise
                lost = exc
            try:
                return await self._exec_ended(id, request)
            except NotFound:
                # The request was never read (or the sandbox is gone, which the next attempt tells). One whose answer
                # was merely late may be running: that one is not repeated.
                if lost.details.get("gave_up"):
                    raise lost from None
        raise ConnectionFailed(f"exec in '{id}': the connection broke {MAX_RESENDS} times", sent=True)

    async def _exec_ended(self, id: str, request: t.ExecRequest) -> t.ExecResult:
        exec_id = request.exec_id or ""
        while True:
            try:
                return await self.exec_wait(
                    id, exec_id, wait_s=POLL_S, max_output_bytes=request.max_output_bytes
                )
            except TimedOut:
                continue

    async def exec_start(self, id: str, request: t.ExecRequest) -> t.ExecInfo:
        """Start a command and return at once."""
        if request.exec_id is None:
            request = request.model_copy(update={"exec_id": c.new_key()})
        return c.parse(t.ExecInfo, await self.request("exec_start", body=request, id=id), "exec_start")

    async def exec_list(self, id: str) -> t.ExecList:
        """The execs a sandbox knows."""
        return c.parse(t.ExecList, await self.request("exec_list", id=id), "exec_list")

    async def exec_inspect(self, id: str, exec_id: str) -> t.ExecInfo:
        """One exec."""
        return c.parse(t.ExecInfo, await self.request("exec_inspect", id=id, exec_id=exec_id), "exec_inspect")

    async def exec_wait(
        self, id: str, exec_id: str, *, wait_s: float | None = None, max_output_bytes: int | None = None
    ) -> t.ExecResult:
        """Output and status of an exec once it has ended. Raises TimedOut when it has not within ``wait_s``."""
        query: dict[str, c.QueryValue] = {"wait_s": wait_s, "max_output_bytes": max_output_bytes}
        data = await self.request("exec_wait", query=query, id=id, exec_id=exec_id)
        return c.parse(t.ExecResult, data, "exec_wait")

    async def exec_output(
        self, id: str, exec_id: str, *, stream: str = "stdout", offset: int = 0, limit: int | None = None
    ) -> t.ExecOutput:
        """Read output at ``offset`` without attaching, at most ``limit`` bytes (1 MiB)."""
        query: dict[str, c.QueryValue] = {"stream": stream, "offset": offset, "limit": limit}
        data = await self.request("exec_output", query=query, id=id, exec_id=exec_id)
        return c.parse(t.ExecOutput, data, "exec_output")

    async def exec_signal(self, id: str, exec_id: str, signal: int, *, tree: bool = False) -> None:
        """Send a signal; ``tree`` (only SIGKILL) reaches every process of the exec."""
        request = c.build(t.SignalRequest, "", signal=signal, tree=tree)
        await self.request("exec_signal", body=request, id=id, exec_id=exec_id)

    async def exec_resize(self, id: str, exec_id: str, *, rows: int, cols: int) -> None:
        """Resize its terminal."""
        await self.request(
            "exec_resize", body=c.build(t.ResizeRequest, "", rows=rows, cols=cols), id=id, exec_id=exec_id
        )

    async def exec_forget(self, id: str, exec_id: str) -> None:
        """Drop the record of an ended exec."""
        await self.request("exec_forget", id=id, exec_id=exec_id)


def _exec_limit_s(request: t.ExecRequest) -> float | None:
    """How long to wait for the answer: the daemon ends the command at its deadline, so an answer later than that and a
    good margin means a daemon that hangs. Never reported as the command's own timeout."""
    return None if request.timeout_s is None else request.timeout_s + 4 * c.MARGIN_S


class AsyncFileCalls(AsyncTransport):
    """Files in sandboxes, but for their contents."""

    async def stat(self, id: str, path: str, *, user: str | None = None, follow: bool = False) -> t.FileInfo:
        """stat(2), of a symlink itself unless ``follow``."""
        query: dict[str, c.QueryValue] = {"path": path, "user": user, "follow": follow or None}
        return c.parse(t.FileInfo, await self.request("stat", query=query, id=id), "stat")

    async def list_dir(
        self,
        id: str,
        path: str,
        *,
        user: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> t.FileList:
        """A page of a directory."""
        query: dict[str, c.QueryValue] = {"path": path, "user": user, "cursor": cursor, "limit": limit}
        return c.parse(t.FileList, await self.request("list_dir", query=query, id=id), "list_dir")

    async def remove_file(
        self, id: str, path: str, *, user: str | None = None, recursive: bool = False
    ) -> None:
        """Remove a file, or with ``recursive`` a tree."""
        query: dict[str, c.QueryValue] = {"path": path, "user": user, "recursive": recursive or None}
        await self.request("remove_file", query=query, id=id)

    async def mkdir(
        self,
        id: str,
        path: str,
        *,
        mode: int = 0o777,
        umask: int = 0o022,
        parents: bool = False,
        user: str | None = None,
    ) -> None:
        """Make a directory."""
        where = c.path_fields("path", path)
        request = c.build(t.MkdirRequest, "", **where, mode=mode, umask=umask, parents=parents, user=user)
        await self.request("mkdir", body=request, id=id)

    async def rename(self, id: str, path: str, target: str, *, user: str | None = None) -> None:
        """Rename inside the sandbox, replacing ``target``."""
        fields = c.path_fields("path", path) | c.path_fields("target", target)
        await self.request("rename", body=c.build(t.RenameRequest, "", **fields, user=user), id=id)

    async def put_state(self, id: str, path: str, part: str, *, user: str | None = None) -> t.FileInfo:
        """How much of a resumable upload has arrived: ``size_bytes``."""
        query: dict[str, c.QueryValue] = {"path": path, "user": user, "part": part}
        return c.parse(t.FileInfo, await self.request("put_state", query=query, id=id), "put_state")


class AsyncImageCalls(AsyncTransport):
    """Images."""

    async def images(self) -> t.ImageList:
        """All images."""
        return c.parse(t.ImageList, await self.request("images"), "images")

    async def image_inspect(self, ref: str) -> t.ImageInfo:
        """One image."""
        return c.parse(t.ImageInfo, await self.request("image_inspect", query={"ref": ref}), "image_inspect")

    async def image_import(
        self,
        name: str,
        source: str,
        *,
        kind: t.SourceKind = "auto",
        reference: str | None = None,
        prefix: str = "/",
        config: t.ImageConfigChange | Mapping[str, Any] | None = None,
    ) -> t.Operation:
        """Import an image from a path on the host, or pull one (kind ``registry``).

        ``config`` changes what the source says about running it, and leaves what it does not name.
        """
        request = c.build(
            t.ImportRequest,
            "",
            name=name,
            source=source,
            kind=kind,
            reference=reference,
            prefix=prefix,
            config=config or t.ImageConfigChange(),
        )
        return c.parse(t.Operation, await self.request("image_import", body=request), "image_import")

    async def image_build_debian(self, request: t.BuildDebianRequest) -> t.Operation:
        """Build a base image from Debian's archive; result of the operation: ImageInfo."""
        data = await self.request("image_build_debian", body=request)
        return c.parse(t.Operation, data, "image_build_debian")

    async def image_tag(self, ref: str, name: str) -> t.ImageInfo:
        """Give an image another name."""
        data = await self.request("image_tag", body=c.build(t.TagRequest, "", ref=ref, name=name))
        return c.parse(t.ImageInfo, data, "image_tag")

    async def image_remove(self, ref: str) -> None:
        """Remove a name, or an image with all that only it holds."""
        await self.request("image_remove", query={"ref": ref})
