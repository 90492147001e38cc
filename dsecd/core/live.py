# SPDX-License-Identifier: Apache-2.0
"""Live: one sandbox in the daemon's memory.

What belongs here: the record, the box and who waits for them, and what commands inherit from image and
spec. What does not: moving it from state to state (``lifecycle.py``), finding it (``sandboxes.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsecd.backends.agentlink.link import AgentLink
from dsecd.backends.agentlink.records import StartRequest
from dsecd.backends.base import Backend, Box
from dsecd.core.bounds import check_user
from dsecd.core.records import Record
from libdsec import errors
from libdsec.types import ExecRequest, ImageInfo, SandboxSpec, State

_UNLIMITED = (1 << 64) - 1
#: How long a call waits for a sandbox that is being taken over; an agent that does not answer is given up before.
_TAKEOVER_S = 90.0

# include/uapi/asm-generic/resource.h
_RLIMITS = {
    "cpu": 0, "fsize": 1, "data": 2, "stack": 3, "core": 4, "rss": 5, "nproc": 6, "nofile": 7, "memlock": 8, "as": 9,
    "locks": 10, "sigpending": 11, "msgqueue": 12, "nice": 13, "rtprio": 14, "rttime": 15,
}  # fmt: skip


@dataclass(frozen=True)
class Defaults:
    """What a command gets when its request does not say: image first, then the sandbox's spec."""

    env: Mapping[str, str]
    user: str
    workdir: str

    @classmethod
    def of(cls, spec: SandboxSpec, images: Sequence[ImageInfo], workspace: ImageInfo | None) -> Defaults:
        """``images`` lowest layer first: the environment of a higher one wins."""
        env: dict[str, str] = {}
        for image in images:
            for pair in image.config.env:
                name, equals, value = pair.partition("=")
                if equals:
                    env[name] = value
        env.update(spec.env)
        base = images[0].config
        workdir = spec.workdir or (workspace.prefix if workspace is not None else base.workdir)
        return cls(env=env, user=spec.user or base.user, workdir=workdir or "")


@dataclass(eq=False)
class Live:
    """Everything about one sandbox; used on the event loop's thread only."""

    record: Record
    box: Box
    backend: Backend
    defaults: Defaults
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: bool = False  # nothing of it is left
    unsaved: bool = False  # the database does not have the record as it is: its disk was full
    watch_fd: int | None = None  # pidfd of its init, while watched
    deletion: asyncio.Task[None] | None = None
    creation: asyncio.Task[None] | None = None
    takeover: asyncio.Task[None] | None = None  # from an earlier daemon; done once it is known what became of it
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return self.record.id

    def changed(self) -> None:
        """Wake everybody who waits for another state."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self) -> None:
        await self._changed.wait()

    async def link(self, doing: str) -> AgentLink:
        """The connection to its agent, waited for while it is taken over from an earlier daemon.

        Raises WrongState unless it runs, SandboxLost while the agent is unreachable.
        """
        return await self._reached(doing, State.RUNNING)

    async def file_link(self, doing: str) -> AgentLink:
        """As ``link``, also while it is paused: the agent itself is never frozen."""
        return await self._reached(doing, State.RUNNING, State.PAUSED)

    async def _reached(self, doing: str, *states: State) -> AgentLink:
        self.require(doing, *states)
        if self.box.link is None and self.takeover is not None:
            # Whoever calls has just been told by nobody that there is another daemon: its commands ran all the time.
            await asyncio.wait([self.takeover], timeout=_TAKEOVER_S)
            self.require(doing, *states)
        if self.box.link is None:
            raise errors.SandboxLost(f"{doing} '{self.id}': its agent does not answer", retryable=True)
        return self.box.link

    def require(self, doing: str, *states: State) -> None:
        """Raise WrongState unless it is in one of the states."""
        state = self.record.state
        if state in states:
            return
        wanted = " or ".join(states)
        reason = f" ({self.record.reason})" if self.record.reason else ""
        hint = {
            State.STOPPED: f"dsecctl start {self.id}",
            State.FAILED: f"dsecctl start {self.id}",
            State.PAUSED: f"dsecctl resume {self.id}",
        }.get(state)
        raise errors.WrongState(
            f"{doing} '{self.id}': it is {state}{reason}, not {wanted}",
            hint=hint, state=str(state), required=list(states),
        )  # fmt: skip

    def user(self, asked: str | None, doing: str) -> str:
        """Whom a call is for. Raises InvalidSpec for a number that is no id in it."""
        if asked is None:
            return self.defaults.user
        check_user(asked, self.backend.ids, f"{doing} '{self.id}'")
        return asked

    def start_request(self, request: ExecRequest, exec_id: str, *, stdin_open: bool) -> StartRequest:
        """What the agent is asked for a command: the request over the defaults."""
        user = self.user(request.user, "exec in")
        env = {**self.defaults.env, **request.env}
        return StartRequest(
            exec_id=exec_id,
            argv=list(request.argv),
            env=[f"{name}={value}" for name, value in env.items()],
            cwd=request.cwd or self.defaults.workdir,
            user=user,
            pty=request.pty,
            rows=request.rows,
            cols=request.cols,
            stdin_open=stdin_open,
            rlimits=[
                (_RLIMITS[name], _rlimit(limit.soft), _rlimit(limit.hard)) for name, limit in request.rlimits.items()
            ],
            umask=request.umask,
            timeout_ms=_ms(request.timeout_s),
            idle_timeout_ms=_ms(request.idle_timeout_s),
            buffer_bytes=request.buffer_bytes,
            keep_ms=int(request.keep_s * 1000),
            cgroup=() if request.limits is None else tuple(self.backend.exec_limits(request.limits).items()),
        )


def _rlimit(value: int) -> int:
    return _UNLIMITED if value < 0 else value


def _ms(seconds: float | None) -> int:
    """Never 0 for a timeout that was asked for: 0 means none to the agent."""
    return 0 if seconds is None else max(1, round(seconds * 1000))
