# SPDX-License-Identifier: Apache-2.0
"""Daemons that are started again, without a new interpreter that reads half a thousand modules for each of them.

Here: a process that has imported the daemon and does nothing but fork children, each of which becomes a daemon by the
same ``main`` that ``python3 -m dsecd`` calls; and what a test holds of such a child, which is like a subprocess.Popen.
Not here: what daemons are started with (daemon.py, which starts the first of each state by its command line).
Tests that kill the daemon at every step of a plan start some hundreds of them.

Run: python -m tests.support.quick_start FD. Each line on the socket is a request in JSON, each answer a line.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CHECKOUT = Path(__file__).resolve().parents[2]


class Child:
    """A daemon that the process made: what tests use of subprocess.Popen."""

    def __init__(self, server: "Server", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._lock = threading.Lock()
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._ended(None if timeout is None else round(timeout * 1000))
        if status is None:
            raise subprocess.TimeoutExpired("dsecd", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        # By its descriptor, which leads to no other process even when this one ends just now.
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _ended(self, timeout_ms: int | None) -> int | None:
        if self.returncode is not None:
            return self.returncode
        waiting = select.poll()
        waiting.register(self._pidfd, select.POLLIN)
        if not waiting.poll(timeout_ms):
            return None
        with self._lock:
            if self.returncode is None:
                self.returncode = self._server.reap(self.pid)
                os.close(self._pidfd)
        return self.returncode


class Server:
    """The process that forks, as tests see it; it ends with them, when its socket closes."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())], stdin=subprocess.DEVNULL, cwd=_CHECKOUT,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._stream = ours.makefile("rw")
        self._lock = threading.Lock()

    def start(self, config: Path, *, log: Path, env: Mapping[str, str], netns: Path | None) -> Child:
        """A daemon with this configuration, in a directory, environment and network namespace as it would have."""
        request = {"config": str(config), "log": str(log), "env": dict(env), "netns": netns and str(netns)}
        return Child(self, self._ask(request))

    def reap(self, pid: int) -> int:
        """The status of a child that has ended, as subprocess counts it; once for each."""
        return self._ask({"reap": pid})

    def close(self) -> None:
        self._stream.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> int:
        with self._lock:
            self._stream.write(json.dumps(request) + "\n")
            self._stream.flush()
            return int(self._stream.readline())


@functools.cache
def server() -> Server:
    """The one of this run of tests."""
    made = Server()
    atexit.register(made.close)
    return made


def _serve(stream: socket.socket) -> None:
    from dsecd.daemon import main

    lines = stream.makefile("rw")
    for line in lines:
        request = json.loads(line)
        if "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        elif (answer := os.fork()) == 0:
            os._exit(_become(request, stream.fileno(), main))
        lines.write(f"{answer}\n")
        lines.flush()


def _become(request: dict[str, Any], channel: int, main: Any) -> int:
    os.close(channel)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["env"])
    if request["netns"] is not None:
        namespace = os.open(request["netns"], os.O_RDONLY | os.O_CLOEXEC)
        os.setns(namespace, os.CLONE_NEWNET)
        os.close(namespace)
    try:
        return int(main(["--config", request["config"]]))
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:  # noqa: BLE001 - told, as an interpreter would at its end
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
