# SPDX-License-Identifier: Apache-2.0
"""The one door for subprocesses: argv lists in, a typed result or ProcessFailed out.

What belongs here: starting a program, bounding its time and output, and reaping it.  What does not: which
program to run and what its output means.

Programs are started with posix_spawn(3): it is a vfork, so its cost does not grow with the daemon's memory;
the child inherits the namespaces and working directory of the calling *thread*; and its file actions put file
descriptors at exact numbers in the child without touching the same numbers in this process, which dup2 in a
process with threads cannot do safely.

A command is finished when its own process has exited.  Waiting for its pipes to close would wait for
grandchildren: `crun run --detach` leaves some behind that keep stdout and stderr open.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import os
import select
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsecd.linux import syscalls

log = logging.getLogger(__name__)

#: What a program's environment is unless the caller gives another: nothing of the daemon's own leaks into it.
MINIMAL_ENV: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}

#: How long a killed process may take to go away before it is left to be reaped later.
KILL_GRACE_S = 5.0

_READ_BYTES = 1 << 16
_TAIL_BYTES = 2048

# Python ignores SIGPIPE and SIGXFSZ, and an ignored signal stays ignored across exec; whoever started the
# daemon may have ignored the others (nohup).
_DEFAULT_SIGNALS = (
    signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM,
    signal.SIGCHLD,
)


@dataclass(frozen=True)
class Completed:
    """What a finished command left: the first bytes of stdout and the last of stderr, up to the limit."""

    argv: tuple[str, ...]
    returncode: int
    stdout: bytes
    stderr: bytes
    #: Whether output beyond the limit was read and thrown away.
    truncated: bool = False


class ProcessFailed(Exception):
    """A command exited with a status other than 0, or was killed by a signal (negative returncode)."""

    def __init__(self, argv: Sequence[str], returncode: int, stderr: bytes | str = b"") -> None:
        text = stderr if isinstance(stderr, str) else stderr[-_TAIL_BYTES:].decode("utf-8", "replace")
        self.argv = tuple(argv)
        self.returncode = returncode
        self.stderr = text.strip()
        super().__init__(f"run {_brief(self.argv)}: {self._outcome()}{self._last_words()}")

    def _outcome(self) -> str:
        if self.returncode >= 0:
            return f"exit status {self.returncode}"
        try:
            return f"killed by {signal.Signals(-self.returncode).name}"
        except ValueError:
            return f"killed by signal {-self.returncode}"

    def _last_words(self) -> str:
        lines = [line for line in self.stderr.splitlines() if line.strip()][-3:]
        return ": " + " | ".join(line.strip() for line in lines) if lines else ""


class ProcessTimedOut(ProcessFailed):
    """A command was still running after `timeout_s` seconds; its process group got SIGKILL."""

    def __init__(self, argv: Sequence[str], timeout_s: float, stderr: bytes | str = b"") -> None:
        self.timeout_s = timeout_s
        super().__init__(argv, -signal.SIGKILL, stderr)

    def _outcome(self) -> str:
        return f"still running after {self.timeout_s:g} s, killed"


def _brief(argv: Sequence[str]) -> str:
    text = shlex.join(argv)
    return text if len(text) <= 160 else text[:157] + "..."


class _Sink:
    """Our end of a pipe, read without blocking; keeps at most `limit` bytes, the first or the last ones."""

    def __init__(self, fd: int, limit: int, *, keep_last: bool) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.limit = limit
        self.keep_last = keep_last
        self.data = bytearray()
        self.truncated = False
        self.open = True

    def read(self, budget: int) -> None:
        """Take what is there now, about `budget` bytes at most: a writer may never stop."""
        while self.open and budget > 0:
            try:
                chunk = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self.close()
            budget -= len(chunk)
            self._keep(chunk)

    def _keep(self, chunk: bytes) -> None:
        room = self.limit - len(self.data)
        self.truncated = self.truncated or len(chunk) > room
        if self.keep_last:
            self.data += chunk
            del self.data[: max(0, len(self.data) - self.limit)]
        else:
            self.data += chunk[: max(0, room)]

    def close(self) -> None:
        if self.open:
            self.open = False
            os.close(self.fd)


class _Child:
    """A started process, its pidfd and the pipes it writes to; nothing here blocks."""

    def __init__(self, argv: tuple[str, ...], pid: int, sinks: Sequence[_Sink]) -> None:
        self.argv = argv
        self.pid = pid
        self.sinks = tuple(sinks)
        # Not a race: the pid cannot be used again before we reap it.
        self.pidfd = syscalls.pidfd_open(pid)
        self.returncode: int | None = None
        self.started = time.monotonic()

    def fds(self) -> list[int]:
        return [self.pidfd, *(sink.fd for sink in self.sinks if sink.open)]

    def step(self) -> bool:
        """Read what the pipes hold and reap if it has exited; whether it has."""
        done = self.reap()
        for sink in self.sinks:
            # Once it has exited, all it wrote is in the pipe: one pipe full is the bounded drain.
            sink.read(1 << 20)
        return done

    def reap(self) -> bool:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode is not None

    def kill(self) -> None:
        """SIGKILL to its process group, whose number cannot be reused while the leader is unreaped."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def stderr(self) -> bytes:
        return bytes(self.sinks[-1].data) if self.sinks else b""

    def completed(self, *, check: bool) -> Completed:
        assert self.returncode is not None
        took_ms = (time.monotonic() - self.started) * 1000
        log.debug("ran %s: status %d, took_ms=%.1f", shlex.join(self.argv), self.returncode, took_ms)
        if check and self.returncode != 0:
            raise ProcessFailed(self.argv, self.returncode, self.stderr())
        return Completed(
            self.argv, self.returncode, bytes(self.sinks[0].data) if self.sinks else b"", self.stderr(),
            any(sink.truncated for sink in self.sinks),
        )


# Children that were killed and still lived KILL_GRACE_S later: stuck in the kernel, on a dead mount say.
_unreaped: list[_Child] = []
_unreaped_lock = threading.Lock()


def _leave_to_later(child: _Child) -> None:
    child.close()
    with _unreaped_lock:
        _unreaped.append(child)


def _reap_left_over() -> None:
    with _unreaped_lock:
        _unreaped[:] = [child for child in _unreaped if not child.reap()]


def _spawn_at(
    path: str, argv: tuple[str, ...], env: Mapping[str, str], fds: Mapping[int, int], *, null_stdin: bool
) -> int:
    """posix_spawn with child fd N being our fd `fds[N]`, for every N, and no other fd above the highest N."""
    top = max(fds) + 1
    lifted: list[int] = []
    actions: list[tuple[int, int, int] | tuple[int, int, str, int, int] | tuple[int, int]] = []
    if null_stdin:
        actions.append((os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0))
    try:
        for number, fd in sorted(fds.items()):
            source = fd
            if fd != number and fd < top:
                # The dup2 for a lower number could overwrite it in the child before it is used.
                source = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, top)
                lifted.append(source)
            # Onto itself, this clears close-on-exec in the child (glibc 2.29).
            actions.append((os.POSIX_SPAWN_DUP2, source, number))
        if sys.version_info >= (3, 13):
            actions.append((os.POSIX_SPAWN_CLOSEFROM, top))
        return os.posix_spawn(
            path, argv, env, file_actions=actions, setpgroup=0, setsigmask=(), setsigdef=_DEFAULT_SIGNALS
        )
    finally:
        for fd in lifted:
            os.close(fd)


def _resolve(program: str, env: Mapping[str, str]) -> str:
    if "/" in program:
        return program
    search = env.get("PATH", MINIMAL_ENV["PATH"])
    found = shutil.which(program, path=search)
    if found is None:
        raise FileNotFoundError(2, f"run: no such program in {search}", program)
    return found


def _memory_file(content: bytes) -> int:
    """An fd that reads as `content`: unlike a pipe it needs no one to feed it and cannot deadlock."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", buffering=0, closefd=False) as file:
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _spawn(
    argv: Sequence[str | Path], *, content: bytes | None, env: Mapping[str, str] | None, cwd: Path | None,
    pass_fds: Sequence[int], fd_map: Mapping[int, int] | None, stdio_to: int | None,
    output_limit_bytes: int, merge: bool = False,
) -> _Child:
    _reap_left_over()
    words = tuple(os.fspath(word) for word in argv)
    environment = MINIMAL_ENV if env is None else env
    path, spawned = _resolve(words[0], environment), words
    if cwd is not None:
        # posix_spawn has no working directory in Python; env(1) replaces itself by the program.
        path, spawned = _resolve("env", environment), ("env", f"--chdir={cwd}", "--", path, *words[1:])
    extra = {fd: fd for fd in pass_fds} | dict(fd_map or {})
    if extra and min(extra) < 3:
        raise ValueError(f"file descriptor {min(extra)} of the child is stdin, stdout or stderr")
    log.debug("run %s", shlex.join(words))
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        sinks: list[_Sink] = []
        fds = dict(extra)
        if content is not None:
            fds[0] = _memory_file(content)
            theirs.callback(os.close, fds[0])
        for number in (1, 2):
            if stdio_to is not None:
                fds[number] = stdio_to
            elif number == 2 and merge:
                fds[2] = fds[1]
            else:
                reader, fds[number] = os.pipe2(os.O_CLOEXEC)
                theirs.callback(os.close, fds[number])
                sinks.append(_Sink(reader, output_limit_bytes, keep_last=number == 2))
                ours.callback(sinks[-1].close)
        pid = _spawn_at(path, spawned, environment, fds, null_stdin=content is None)
        try:
            child = _Child(words, pid, sinks)
        except OSError:  # No pidfd: out of file descriptors.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        ours.pop_all()
    return child


def run_blocking(
    argv: Sequence[str | Path], *, input: bytes | None = None,
    timeout_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None, pass_fds: Sequence[int] = (),
    fd_map: Mapping[int, int] | None = None, stdio_to: int | None = None, check: bool = True,
    output_limit_bytes: int = 1 << 20,
) -> Completed:
    """Run a program and wait for it.  Blocks.  Runs in a thread, whose namespaces the program inherits.

    `env` replaces the minimal environment as a whole.  `pass_fds` keep their numbers in the child, `fd_map`
    says which of our fds becomes which number there; all others are closed.  `stdio_to` takes stdout and
    stderr instead of capturing them.  Raises ProcessFailed (with `check`), ProcessTimedOut, and OSError if it
    cannot be started.
    """
    child = _spawn(
        argv, content=input, env=env, cwd=cwd, pass_fds=pass_fds, fd_map=fd_map, stdio_to=stdio_to,
        output_limit_bytes=output_limit_bytes,
    )
    try:
        if not _wait_blocking(child, timeout_s):
            child.kill()
            _wait_blocking(child, KILL_GRACE_S)
            raise ProcessTimedOut(child.argv, timeout_s, child.stderr())
        return child.completed(check=check)
    finally:
        child.kill()
        if child.returncode is None:
            _leave_to_later(child)
        child.close()


def _wait_blocking(child: _Child, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not child.step():
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        poll = select.poll()
        for fd in child.fds():
            poll.register(fd, select.POLLIN)
        poll.poll(remaining * 1000)
    return True


async def run(
    argv: Sequence[str | Path], *, input: bytes | None = None,
    timeout_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None, pass_fds: Sequence[int] = (),
    fd_map: Mapping[int, int] | None = None, stdio_to: int | None = None, check: bool = True,
    output_limit_bytes: int = 1 << 20,
) -> Completed:
    """run_blocking for the event loop: same arguments, same results.

    Cancelled, it kills the process group.
    """
    child = _spawn(
        argv, content=input, env=env, cwd=cwd, pass_fds=pass_fds, fd_map=fd_map, stdio_to=stdio_to,
        output_limit_bytes=output_limit_bytes,
    )
    try:
        if not await _wait(child, timeout_s):
            child.kill()
            await _wait(child, KILL_GRACE_S)
            raise ProcessTimedOut(child.argv, timeout_s, child.stderr())
        return child.completed(check=check)
    finally:
        _finish(child)


async def stream_lines(
    argv: Sequence[str | Path], *, timeout_s: float, env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> AsyncIterator[str]:
    """Run a program and yield the lines of its stdout and stderr as they come, for work that shows progress.

    Raises at the end as `run` does.  Wrap it in contextlib.aclosing: leaving it early kills the process
    group.
    """
    child = _spawn(
        argv, content=None, env=env, cwd=cwd, pass_fds=(), fd_map=None, stdio_to=None,
        output_limit_bytes=1 << 20, merge=True,
    )
    deadline = time.monotonic() + timeout_s
    tail = b""
    try:
        done = False
        while not done:
            done = child.step()
            data = child.sinks[0].data
            lines = bytes(data).splitlines(keepends=True)
            data.clear()
            if lines and not done and not lines[-1].endswith((b"\n", b"\r")):
                data += lines.pop()
            for line in lines:
                tail = (tail + line)[-_TAIL_BYTES:]
                yield line.decode("utf-8", "replace").rstrip("\r\n")
            if not done and not await _readable(child.fds(), deadline - time.monotonic()):
                child.kill()
                await _wait(child, KILL_GRACE_S)
                raise ProcessTimedOut(child.argv, timeout_s, tail)
        if child.returncode:
            raise ProcessFailed(child.argv, child.returncode, tail)
    finally:
        _finish(child)


async def _wait(child: _Child, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not child.step():
        if not await _readable(child.fds(), deadline - time.monotonic()):
            return child.step()
    return True


async def _readable(fds: Sequence[int], timeout_s: float) -> bool:
    """Wait until one of `fds` can be read; False when `timeout_s` has passed first.

    A pidfd becomes readable when its process exits: no child watcher, no SIGCHLD handler, no thread.
    """
    if timeout_s <= 0:
        return False
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(True)

    def give_up() -> None:
        if not ready.done():
            ready.set_result(False)

    timer = loop.call_later(timeout_s, give_up)
    for fd in fds:
        loop.add_reader(fd, wake)
    try:
        return await ready
    finally:
        timer.cancel()
        for fd in fds:
            loop.remove_reader(fd)


def _finish(child: _Child) -> None:
    """End of an asynchronous run: close what is ours; kill what still runs and reap it once it has gone."""
    child.kill()
    if child.reap():
        child.close()
        return
    loop = asyncio.get_running_loop()

    def bury() -> None:
        if child.reap():
            loop.remove_reader(child.pidfd)
            child.close()

    for sink in child.sinks:
        sink.close()
    loop.add_reader(child.pidfd, bury)


@contextlib.contextmanager
def sleeper(namespaces: int, *, lifetime_s: int = 2) -> Iterator[int]:
    """Pid of a process without a program, in new `namespaces` (CLONE_NEW*), while the block lasts.

    Some namespaces (user, pid) cannot be made by a thread, and a fork of the daemon would copy its page
    tables and run Python in a child of a process with threads.  This clone shares our memory and only sleeps
    in C, which takes a tenth of the time of starting unshare(1).  Should the daemon be killed meanwhile, it
    ends by itself after `lifetime_s` seconds; until then it holds copies of the daemon's file descriptors.
    """
    stack = ctypes.create_string_buffer(64 << 10)
    # The child has our signal handlers and shares our memory: a signal delivered to it must not run them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        # No exit signal in the flags: no SIGCHLD, and no one else's wait() can reap it.
        pid = syscalls.clone_sleeper(namespaces | syscalls.CLONE_VM, stack, lifetime_s)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, syscalls.WALL)
