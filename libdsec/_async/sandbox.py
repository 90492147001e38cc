# SPDX-License-Identifier: Apache-2.0
"""The comfortable form: a sandbox as an object that is deleted when its block ends.

Here: life and commands. Not here: files (``contents.py``, ``tree.py``), streams (``stream.py``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

from libdsec import connection as c
from libdsec import types as t
from libdsec._async.calls import POLL_S
from libdsec._async.client import AsyncClient
from libdsec._async.primitives import beside, sleep
from libdsec._async.stream import AsyncExecStream
from libdsec._async.tree import AsyncFiles
from libdsec._async.tunnel import AsyncTunnel
from libdsec.errors import DsecError, TimedOut, WrongState
from libdsec.frames import StreamName
from libdsec.options import (
    Collected,
    ExecOptions,
    Readable,
    SpecOptions,
    as_bytes,
    exec_request,
    new_sandbox_id,
    pieces,
    settle,
)
from libdsec.snapshots import Snapshot

#: Input up to this much travels in the request itself.
BUFFERED_STDIN_BYTES = 4 << 20


class AsyncLife:
    """What all sandboxes can do but run commands and hold files: the state machine."""

    client: AsyncClient
    _info: t.Sandbox | None
    _id: str | None

    @property
    def id(self) -> str:
        """Its id. Raises WrongState before it is created."""
        if self._info is None:
            raise WrongState(
                "use a sandbox: it is not created yet", hint="use it in a with block, or call its create()"
            )
        return self._info.id

    @property
    def info(self) -> t.Sandbox:
        """What the daemon said of it last; ``refresh`` asks again."""
        if self._info is None or not self.id:
            raise WrongState("look at a sandbox: it is not created yet")
        return self._info

    async def refresh(self) -> t.Sandbox:
        """Ask the daemon what it is now."""
        return self._keep(await self.client.inspect(self.id))

    async def usage(self) -> t.SandboxUsage:
        """CPU, memory and processes, running or paused; which figures are the sandbox's own word: SandboxUsage.

        Raises WrongState, SandboxLost.
        """
        return await self.client.usage(self.id)

    async def network(self) -> t.NetworkState:
        """What it may reach, and what was refused."""
        return await self.client.network(self.id)

    async def forward(self, port: int) -> AsyncTunnel:
        """A connection to a TCP port on its loopback; it needs no network for it. Raises Refused."""
        return await self.client.forward(self.id, port)

    async def pause(self) -> t.Sandbox:
        """Freeze its processes."""
        return self._keep(await self.client.pause(self.id))

    async def resume(self) -> t.Sandbox:
        """Thaw its processes."""
        return self._keep(await self.client.resume(self.id))

    async def stop(self, *, grace_s: float = 5.0) -> t.Sandbox:
        """End its processes (SIGTERM, ``grace_s`` seconds later SIGKILL) and keep its files."""
        return self._keep(await self.client.stop(self.id, grace_s=grace_s))

    async def start(self, *, wait_s: float | None = None) -> t.Sandbox:
        """Run it again after ``stop``; waits up to ``wait_s`` for the host to have room."""
        return self._keep(await self.client.start(self.id, wait_s=wait_s))

    async def update(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        limits: t.Limits | None = None,
        lift: Sequence[t.LimitName] = (),
        network: t.Policy | None = None,
    ) -> t.Sandbox:
        """Change labels, TTL (seconds from now), limits or network; what is None stays, ``lift`` takes limits off."""
        given = dict(labels) if labels is not None else None
        return self._keep(
            await self.client.update(
                self.id, labels=given, ttl_s=ttl_s, limits=limits, lift=lift, network=network
            )
        )

    async def wait(self, *states: str, timeout_s: float | None = None) -> t.Sandbox:
        """Wait until it is in one of the states. Raises TimedOut after ``timeout_s``; None waits for ever."""
        left_s = timeout_s
        while True:
            step_s = POLL_S if left_s is None else min(POLL_S, max(left_s, 0.0))
            try:
                return self._keep(await self.client.wait(self.id, states, wait_s=step_s))
            except TimedOut:
                if left_s is not None:
                    left_s -= step_s
                    if left_s <= 0:
                        raise

    async def delete(self) -> None:
        """Delete it in any state; again is no error."""
        if self._info is not None:
            await self.client.delete(self._info.id)

    def _keep(self, info: t.Sandbox) -> t.Sandbox:
        self._info = info
        return info


class AsyncSandbox(AsyncLife, AsyncFiles):
    """One sandbox.

    ``async with AsyncSandbox(image="debian:trixie") as sandbox`` creates it on entering and deletes it on leaving;
    without a block, ``create()`` and ``delete()`` do. ``get(id)`` is a handle to one that exists: leaving its block
    deletes nothing.
    """

    def __init__(
        self,
        *,
        image: str,
        backend: str = "container",
        workspace: str | None = None,
        toolkits: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        labels: Mapping[str, str] | None = None,
        id: str | None = None,
        idempotency_key: str | None = None,
        wait_s: float | None = None,
        client: AsyncClient | None = None,
        **more: Unpack[SpecOptions],
    ) -> None:
        spec = c.build(
            t.SandboxSpec,
            "spec",
            image=image,
            backend=backend,
            workspace=workspace,
            toolkits=tuple(toolkits),
            env=dict(env or {}),
            ttl_s=ttl_s,
            labels=dict(labels or {}),
            **more,
        )
        self._wish(spec, id, idempotency_key, wait_s)
        self._connect(client)

    def _wish(
        self, spec: t.SandboxSpec | None, id: str | None, idempotency_key: str | None, wait_s: float | None = None
    ) -> None:
        self._spec = spec
        self._wait_s = wait_s
        # With a key of the caller's own the request must be the same each time, so no id is made up for it.
        self._id = id or (None if idempotency_key else new_sandbox_id())
        self._id_is_ours = id is None and idempotency_key is None
        self._key = idempotency_key or c.new_key()
        self._owned = spec is not None

    def _connect(self, client: AsyncClient | None) -> None:
        self.client = client if client is not None else AsyncClient()
        self._own_client = client is None
        self._info = None

    @classmethod
    async def get(cls, id: str, *, client: AsyncClient | None = None) -> Self:
        """A handle to a sandbox that exists. Raises NotFound."""
        self = cls.__new__(cls)
        self._wish(None, id, None)
        self._connect(client)
        try:
            self._info = await self.client.inspect(id)
        except BaseException:
            await self.close()
            raise
        return self

    @classmethod
    def of(
        cls,
        spec: t.SandboxSpec,
        *,
        id: str | None = None,
        idempotency_key: str | None = None,
        wait_s: float | None = None,
        client: AsyncClient | None = None,
    ) -> Self:
        """One to be created from a finished spec."""
        self = cls.__new__(cls)
        self._wish(spec, id, idempotency_key, wait_s)
        self._connect(client)
        return self

    async def fork(self, count: int = 1, *, ids: Sequence[str] = ()) -> list[Self]:
        """Copies of it as it runs, which go on by themselves: handles to them, whose ``delete`` is the caller's.

        Each has random numbers, clock, host name and machine id of its own before a process of it goes on; connections
        and what processes remember are as they were. Raises what kept a copy from being made; then there is none.
        """
        made = (await self.client.fork(self.id, count=count, ids=ids)).sandboxes
        return [await type(self).get(one.id, client=self.client) for one in made]

    async def snapshot(self, name: str) -> Snapshot:
        """Save it under a name as it runs or is paused, with memory and files; it goes on afterwards.

        Raises FeatureMissing where its backend cannot, AlreadyExists, WrongState, NoCapacity; then nothing is left.
        """
        return await self.client.snapshot_create(self.id, name)

    @classmethod
    async def from_snapshot(
        cls, name: str, count: int = 1, *, ids: Sequence[str] = (), client: AsyncClient | None = None
    ) -> list[Self]:
        """Sandboxes that begin as a snapshot is, as with ``fork``: all or none, and whose ``delete`` is the caller's.

        Raises NotFound, FeatureMissing with what differs when this host is another than the snapshot needs.
        """
        own = client or AsyncClient()
        try:
            made = (await own.clone(name, count=count, ids=ids)).sandboxes
        finally:
            if client is None:
                await own.close()
        return [await cls.get(one.id, client=client) for one in made]

    async def create(self) -> Self:
        """Create it, unless it is. Raises InvalidSpec, NotFound (image), NoCapacity, FeatureMissing, BackendFailed."""
        if self._info is not None or self._spec is None:
            return self
        try:
            self._info = await self.client.create(
                self._spec, id=self._id, idempotency_key=self._key, wait_s=self._wait_s
            )
        except DsecError:
            raise
        except BaseException:
            await self._undo_creation(self._spec)
            raise
        return self

    async def _undo_creation(self, spec: t.SandboxSpec) -> None:
        """After an interruption: the daemon may be creating it, and nobody else knows."""
        try:
            if not self._id_is_ours:
                # Somebody else's may have this name: only the answer to our own request tells.
                self._id = (await self.client.create(spec, id=self._id, idempotency_key=self._key)).id
            await self.client.delete(self._id or "")
        except DsecError:
            pass  # nothing was created, or nobody is there to delete it

    async def close(self) -> None:
        """Release the connections; the sandbox goes on."""
        if self._own_client:
            await self.client.close()

    async def __aenter__(self) -> Self:
        try:
            return await self.create()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._owned:
                await self.delete()
        except DsecError as error:
            if exc is None:
                raise
            exc.add_note(f"and sandbox '{self.id}' could not be deleted: {error.message}")
        finally:
            await self.close()

    async def exec(
        self,
        *command: str | Sequence[str],
        check: bool = False,
        stdin: bytes | str | Readable | None = None,
        **options: Unpack[ExecOptions],
    ) -> t.ExecResult:
        """Run a command to its end: ``exec("ls", "-l")`` or ``exec(["ls", "-l"])``, no shell.

        A non-zero status is a result, and raises ExecFailed with ``check``. Raises ExecTimeout (``result`` has what it
        printed before) at ``timeout_s`` or ``idle_timeout_s``, ExecNotStarted, and InfraError when the failure is not
        the command's. Output beyond ``max_output_bytes`` per stream is dropped and said so in the result; so is what
        the command's own buffer could not hold when the daemon restarted meanwhile. Cancelling kills the command.
        """
        if isinstance(stdin, bytes | str | None) and len(stdin or b"") <= BUFFERED_STDIN_BYTES:
            request = exec_request(command, stdin=as_bytes(stdin), **options)
            result = await self._exec_buffered(request)
        else:
            request = exec_request(command, **options)
            result = await self._exec_with_input(request, stdin)
        settle(self.id, request.argv, result, check=check)
        return result

    async def _exec_buffered(self, request: t.ExecRequest) -> t.ExecResult:
        try:
            return await self.client.exec(self.id, request)
        except DsecError:
            raise
        except BaseException:
            # Interrupted or cancelled: nobody waits for the command any more, as with subprocess.run.
            await self._kill(request.exec_id or "")
            raise

    async def _kill(self, exec_id: str) -> None:
        try:
            await self.client.exec_signal(self.id, exec_id, 9, tree=True)
        except DsecError:
            pass  # it has ended, or never began

    async def _exec_with_input(
        self, request: t.ExecRequest, stdin: bytes | str | Readable | None
    ) -> t.ExecResult:
        """A buffered exec whose input is too large for one request."""
        start = t.StreamStart(start=request, stdin=True)
        output = Collected(request.max_output_bytes)
        async with await AsyncExecStream(self.client, self.id, start).open() as stream:

            async def feed() -> None:
                for piece in pieces(stdin):
                    await stream.write(piece)
                await stream.close_stdin()

            async with beside(feed):
                async for name, data in stream:
                    output.add(name, data)
            return output.result(stream.info)

    async def popen(
        self,
        *command: str | Sequence[str],
        stdin: bool = False,
        pty: bool = False,
        rows: int = 24,
        cols: int = 80,
        reconnect_s: float = 30.0,
        **options: Unpack[ExecOptions],
    ) -> AsyncExecStream:
        """Start a command and follow it: ``async with await sandbox.popen("make") as stream``; see ExecStream.

        With ``stdin`` the stream's ``write`` and ``close_stdin`` feed it; with ``pty`` it has a terminal.
        Raises ExecNotStarted.
        """
        request = exec_request(command, pty=pty, rows=rows, cols=cols, **options)
        start = t.StreamStart(start=request, stdin=stdin)
        return await AsyncExecStream(self.client, self.id, start, reconnect_s=reconnect_s).open()

    async def attach(
        self,
        exec_id: str,
        *,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        stdin: bool = False,
        allow_gap: bool = False,
        reconnect_s: float = 30.0,
    ) -> AsyncExecStream:
        """Follow a command that runs or has ended, from the given byte offsets on.

        Raises NotFound; reading raises InfraError when bytes after the offsets are gone, unless ``allow_gap``.
        """
        start = t.StreamStart(
            attach=exec_id, stdout_offset=stdout_offset, stderr_offset=stderr_offset, stdin=stdin
        )
        stream = AsyncExecStream(self.client, self.id, start, reconnect_s=reconnect_s, allow_gap=allow_gap)
        return await stream.open()

    async def logs(
        self, exec_id: str = "main", *, follow: bool = False
    ) -> AsyncIterator[tuple[StreamName, bytes]]:
        """What a command printed, as far as it is still held; with ``follow`` also what it prints until it ends.

        Disturbs no reader that is attached. Between the two streams the order is not known.
        """
        offsets: dict[StreamName, int] = {"stdout": 0, "stderr": 0}
        pause_s = 0.05
        while True:
            moved = False
            running = False
            for name in offsets:
                piece = await self.client.exec_output(self.id, exec_id, stream=name, offset=offsets[name])
                running = running or piece.running
                offsets[name] = piece.offset + len(piece.data)
                if piece.data:
                    moved = True
                    yield name, piece.data
            if not moved and not (running and follow):
                return
            if not moved:
                await sleep(pause_s)
            pause_s = 0.05 if moved else min(pause_s * 1.5, 1.0)
