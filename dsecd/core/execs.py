# SPDX-License-Identifier: Apache-2.0
"""Commands in sandboxes.

What belongs here: starting, following, reading and signalling execs on behalf of a principal. What does
not: the agent's protocol (``dsecd.backends.agentlink``), WebSocket frames (``dsecd.api``). The agent keeps
execs and their output, so nothing here survives or needs to.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dsecd.backends.agentlink.execs import ExecChannel
from dsecd.backends.agentlink.link import AgentLink
from dsecd.backends.agentlink.records import (
    Collected,
    ExecRecord,
    Exit,
    ExitKind,
    ExitReason,
    LinkLost,
    Output,
)
from dsecd.core import translate
from dsecd.core.live import Live
from dsecd.core.principal import Principal
from dsecd.core.registry import Registry
from libdsec import errors
from libdsec.types import (
    ExecInfo,
    ExecList,
    ExecOutput,
    ExecReason,
    ExecRequest,
    ExecResult,
    ResizeRequest,
    SignalRequest,
    StreamStart,
)

_REASONS = {
    ExitReason.ENDED: ExecReason.EXITED,
    ExitReason.TIMEOUT: ExecReason.TIMEOUT,
    ExitReason.IDLE_TIMEOUT: ExecReason.IDLE_TIMEOUT,
    ExitReason.KILLED: ExecReason.KILLED,
    ExitReason.SHUTDOWN: ExecReason.SHUTDOWN,
    ExitReason.OOM: ExecReason.OOM,
}
_STREAMS = {"stdout": 1, "stderr": 2}


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """Bytes of stream 1 (stdout) or 2 (stderr)."""

    stream: int
    offset: int
    data: bytes


class ExecStream:
    """A command that somebody follows. Leaving it (``detach``) does not end the command."""

    def __init__(self, live: Live, channel: ExecChannel) -> None:
        self._live = live
        self._channel = channel
        self.exec_id = channel.exec_id
        self.pid = channel.pid

    async def next(self) -> StreamOutput | ExecInfo:
        """The next piece of output, or the end: an ExecInfo, always last."""
        with translate.execs(f"follow exec '{self.exec_id}' of '{self._live.id}'"):
            event = await self._channel.next()
        if isinstance(event, Output):
            return StreamOutput(event.stream, event.offset, event.data)
        return ExecInfo.model_construct(None, **_ended(event, self.pid))

    def consumed(self, stream: int, size: int) -> None:
        """The client has taken so many bytes: the command may produce as many more."""
        self._channel.consumed(stream, size)

    async def write_stdin(self, data: bytes) -> None:
        with translate.execs(f"write to exec '{self.exec_id}'"):
            await self._channel.write_stdin(data)

    async def close_stdin(self) -> None:
        with translate.execs(f"close stdin of exec '{self.exec_id}'"):
            await self._channel.close_stdin()

    async def resize(self, rows: int, cols: int) -> None:
        with translate.execs(f"resize exec '{self.exec_id}'"):
            link = await self._live.link("resize an exec of")
            await link.resize(self.exec_id, rows, cols)

    async def signal(self, signum: int, tree: bool) -> None:  # noqa: FBT001
        with translate.execs(f"signal exec '{self.exec_id}'"):
            link = await self._live.link("signal an exec of")
            await link.signal(self.exec_id, signum, tree=tree)

    async def detach(self) -> None:
        await self._channel.detach()


class Execs:
    """Execs of all sandboxes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def run(self, principal: Principal, sandbox_id: str, request: ExecRequest) -> ExecResult:
        """Run a command to its end; keeps the first ``max_output_bytes`` of each stream and counts the rest."""
        live = self._registry.find(principal, sandbox_id, "exec in")
        channel = await self._start(live, request, stdin=request.stdin is not None)
        return await self._collect(live, channel, request.stdin, request.max_output_bytes)

    async def start(self, principal: Principal, sandbox_id: str, request: ExecRequest) -> ExecInfo:
        """Start a command and leave it; its output waits inside."""
        live = self._registry.find(principal, sandbox_id, "exec in")
        channel = await self._start(live, request, stdin=request.stdin is not None)
        try:
            if request.stdin is not None:
                await self._feed(live, channel, request.stdin)
            return ExecInfo(exec_id=channel.exec_id, pid=channel.pid, running=True, started_at=datetime.now(UTC))
        finally:
            await channel.detach()

    async def open_stream(self, principal: Principal, sandbox_id: str, request: StreamStart) -> ExecStream:
        """Start a command, or attach to one, and follow it."""
        live = self._registry.find(principal, sandbox_id, "exec in")
        if request.start is not None:
            channel = await self._start(live, request.start, stdin=request.stdin)
        else:
            assert request.attach is not None
            with translate.execs(f"attach to exec '{request.attach}' of '{sandbox_id}'"):
                link = await live.file_link("attach in")
                channel = await link.attach(
                    request.attach, offset_out=request.stdout_offset, offset_err=request.stderr_offset
                )
        return ExecStream(live, channel)

    async def list(self, principal: Principal, sandbox_id: str) -> ExecList:
        link = await self._link(principal, sandbox_id, "list execs of")
        with translate.execs(f"list execs of '{sandbox_id}'"):
            return ExecList(execs=tuple(_info(record) for record in await link.list_execs()))

    async def inspect(self, principal: Principal, sandbox_id: str, exec_id: str) -> ExecInfo:
        return _info(await self._record(principal, sandbox_id, exec_id, "inspect an exec of"))

    async def wait(
        self, principal: Principal, sandbox_id: str, exec_id: str, wait_s: float, max_output_bytes: int
    ) -> ExecResult:
        """Output and status of an exec that has ended or ends within ``wait_s``. Raises TimedOut otherwise.

        Its output is read without attaching, so a reader that is attached keeps it.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        pause = 0.01
        while (record := await self._record(principal, sandbox_id, exec_id, "wait for an exec of")).running:
            if asyncio.get_running_loop().time() >= deadline:
                raise errors.TimedOut(f"wait for exec '{exec_id}' of '{sandbox_id}': still running after {wait_s:g} s")
            await asyncio.sleep(pause)
            pause = min(0.25, pause * 1.5)
        link = await self._link(principal, sandbox_id, "read an exec of")
        with translate.execs(f"read exec '{exec_id}' of '{sandbox_id}'"):
            out, out_lost = await _held(link, exec_id, 1, max_output_bytes)
            err, err_lost = await _held(link, exec_id, 2, max_output_bytes)
        return ExecResult.model_construct(
            **_info(record).model_dump(), stdout=out, stderr=err,
            stdout_truncated=out_lost or len(out) < record.offset_out,
            stderr_truncated=err_lost or len(err) < record.offset_err,
        )  # fmt: skip

    async def output(
        self, principal: Principal, sandbox_id: str, exec_id: str, stream: str, offset: int, limit: int
    ) -> ExecOutput:
        """A piece of what the sandbox still holds of a stream."""
        if stream not in _STREAMS:
            raise errors.InvalidSpec(f"read exec '{exec_id}': stream must be stdout or stderr, got '{stream}'")
        record = await self._record(principal, sandbox_id, exec_id, "read an exec of")
        link = await self._link(principal, sandbox_id, "read an exec of")
        with translate.execs(f"read exec '{exec_id}' of '{sandbox_id}'"):
            peeked = await link.peek(exec_id, _STREAMS[stream], offset, limit)
        return ExecOutput.model_construct(
            data=peeked.data, offset=peeked.offset, end=peeked.end, running=record.running
        )  # fmt: skip

    async def signal(self, principal: Principal, sandbox_id: str, exec_id: str, request: SignalRequest) -> None:
        link = await self._link(principal, sandbox_id, "signal an exec of")
        with translate.execs(f"signal exec '{exec_id}' of '{sandbox_id}'"):
            await link.signal(exec_id, request.signal, tree=request.tree)

    async def resize(self, principal: Principal, sandbox_id: str, exec_id: str, request: ResizeRequest) -> None:
        link = await self._link(principal, sandbox_id, "resize an exec of")
        with translate.execs(f"resize exec '{exec_id}' of '{sandbox_id}'"):
            await link.resize(exec_id, request.rows, request.cols)

    async def forget(self, principal: Principal, sandbox_id: str, exec_id: str) -> None:
        link = await self._link(principal, sandbox_id, "forget an exec of")
        with translate.execs(f"forget exec '{exec_id}' of '{sandbox_id}'"):
            await link.forget(exec_id)

    # --- parts -------------------------------------------------------------------------------------------------------

    async def _link(self, principal: Principal, sandbox_id: str, doing: str) -> AgentLink:
        return await self._registry.find(principal, sandbox_id, doing).file_link(doing)

    async def _record(self, principal: Principal, sandbox_id: str, exec_id: str, doing: str) -> ExecRecord:
        link = await self._link(principal, sandbox_id, doing)
        with translate.execs(f"{doing} '{sandbox_id}': exec '{exec_id}'"):
            found = await link.list_execs(exec_id)
        if not found:
            raise errors.NotFound(f"{doing} '{sandbox_id}': no exec '{exec_id}'")
        return found[0]

    async def _start(self, live: Live, request: ExecRequest, *, stdin: bool) -> ExecChannel:
        link = await live.link("exec in")
        exec_id = request.exec_id or f"x{secrets.token_hex(8)}"
        with translate.starting(f"exec in '{live.id}'", request.argv):
            return await link.start(live.start_request(request, exec_id, stdin_open=stdin), attach=True)

    async def _collect(self, live: Live, channel: ExecChannel, stdin: bytes | None, limit: int) -> ExecResult:
        try:
            if stdin:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._feed(live, channel, stdin))
                    task = group.create_task(channel.collect(limit))
                collected = task.result()
            else:
                if stdin is not None:
                    await channel.close_stdin()
                collected = await channel.collect(limit)
        except* LinkLost as group_error:
            raise errors.SandboxLost(
                f"exec in '{live.id}': the sandbox was lost while '{channel.exec_id}' ran", exec_id=channel.exec_id
            ) from group_error
        return _result(collected, channel.pid)

    async def _feed(self, live: Live, channel: ExecChannel, stdin: bytes) -> None:
        with translate.execs(f"write to exec '{channel.exec_id}' of '{live.id}'"):
            await channel.write_stdin(stdin)
            await channel.close_stdin()


async def _held(link: AgentLink, exec_id: str, stream: int, limit: int) -> tuple[bytes, bool]:
    """The oldest ``limit`` bytes still held, and whether older ones are gone."""
    pieces: list[bytes] = []
    offset = size = 0
    lost = False
    while size < limit:
        peeked = await link.peek(exec_id, stream, offset, min(1 << 20, limit - size))
        lost = lost or peeked.offset > offset
        if not peeked.data:
            break
        pieces.append(peeked.data)
        size += len(peeked.data)
        offset = peeked.offset + len(peeked.data)
    return b"".join(pieces), lost


def _utc_ns(at: int) -> datetime | None:
    # The agent's clock is the sandbox's: one that is out of range is no time at all.
    try:
        return datetime.fromtimestamp(at / 1e9, UTC) if at else None
    except (OverflowError, ValueError, OSError):
        return None


def _ended(end: Exit, pid: int) -> dict[str, Any]:
    exited = end.kind is ExitKind.EXITED
    return {
        "exec_id": end.exec_id, "pid": pid, "running": False,
        "exit_code": end.status if exited else None, "signal": None if exited else end.status,
        "reason": _REASONS[end.reason], "stdout_bytes": end.total_out, "stderr_bytes": end.total_err,
        "stdout_dropped_bytes": end.dropped_out, "stderr_dropped_bytes": end.dropped_err,
        "cpu_user_us": end.cpu_user_us, "cpu_system_us": end.cpu_system_us, "max_rss_kib": end.max_rss_kib,
        "oom_kills": end.oom_kills, "started_at": _utc_ns(end.started_ns), "finished_at": _utc_ns(end.finished_ns),
    }  # fmt: skip


def _info(record: ExecRecord) -> ExecInfo:
    if record.exit is not None:
        return ExecInfo.model_construct(None, **_ended(record.exit, record.pid))
    return ExecInfo(
        exec_id=record.exec_id, pid=record.pid, running=True, stdout_bytes=record.offset_out,
        stderr_bytes=record.offset_err, started_at=_utc_ns(record.started_ns),
    )  # fmt: skip


def _result(collected: Collected, pid: int) -> ExecResult:
    return ExecResult.model_construct(
        None, **_ended(collected.exit, pid), stdout=collected.stdout, stderr=collected.stderr,
        stdout_truncated=collected.stdout_truncated, stderr_truncated=collected.stderr_truncated,
    )  # fmt: skip
