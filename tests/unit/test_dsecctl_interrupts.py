# SPDX-License-Identifier: Apache-2.0
"""dsecctl that starts, and is told to end: during imports, in a finalizer, cleaning up; with streams that are none."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dsecctl.cli import cli
from libdsec import types as t
from libdsec.errors import NotFound
from tests.support.fake_daemon import FakeDaemon
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]

#: Sends itself ctrl-C when something of dsecctl imports pydantic, which takes it a good part of a second.
_DURING_IMPORT = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "pydantic":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["ps"]
runpy.run_module("dsecctl", run_name="__main__")
"""

#: Is interrupted in a finalizer, where Python drops exceptions, and then does what takes long.
_IN_A_FINALIZER = """
import os, signal, sys, time
from dsecctl.interrupts import end_in_order
class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
end_in_order()
try:
    Dying()
    time.sleep(120)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        yield fake


def python(program: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=150, check=False)


def test_a_command_starts_without_what_only_the_http_library_s_own_command_line_needs() -> None:
    argv = [sys.executable, "-X", "importtime", "-m", "dsecctl", "ps", "--help"]
    told = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stderr
    imported = {line.rpartition("|")[2].strip() for line in told.splitlines()}
    assert {"httpx", "dsecctl.commands.create"} <= imported
    assert not {name for name in imported if name.partition(".")[0] == "rich"}


def test_an_interrupt_during_imports_ends_it_without_a_word() -> None:
    done = python(_DURING_IMPORT)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_an_interrupt_in_a_finalizer_is_not_lost() -> None:
    began = time.monotonic()
    done = python(_IN_A_FINALIZER)
    assert (done.returncode, done.stderr) == (130, b"")
    assert time.monotonic() - began < 60


def test_interrupts_go_to_the_command(daemon: FakeDaemon) -> None:
    daemon.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie"), id="web"))
    command = [sys.executable, "-m", "dsecctl", "--socket", daemon.socket, "exec", "--id", "e", "web", "sleep"]
    execs = daemon.boxes["web"].execs
    with subprocess.Popen(command, cwd=ROOT) as running:
        # It heeds this one, too, from when it hands signals on.
        until(lambda: "e" in execs and caught(running.pid, signal.SIGQUIT))
        running.send_signal(signal.SIGINT)
        until(lambda: execs["e"].signals == [2])
        running.send_signal(signal.SIGTERM)
        assert running.wait() == 128 + 15


def caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: proc_pid_status(5)."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(mask >> (number - 1) & 1)


def test_a_terminal_that_is_closed_behind_an_interrupt_does_not_keep_the_sandbox(daemon: FakeDaemon) -> None:
    create, delete, begun = daemon.on_create, daemon.on_delete, []
    interrupted = threading.Event()

    async def slow_create(request: Any) -> t.Sandbox:
        made = await create(request)
        await asyncio.to_thread(interrupted.wait, 60)
        await asyncio.sleep(1)
        return made

    async def slow_delete(request: Any) -> dict[str, Any]:
        begun.append(request.path)
        await asyncio.sleep(1)
        return await delete(request)

    daemon.on_create, daemon.on_delete = slow_create, slow_delete  # type: ignore[method-assign]
    command = [sys.executable, "-m", "dsecctl", "--socket", daemon.socket, "run", "debian:trixie", "sleep"]
    with subprocess.Popen(command, cwd=ROOT) as running:
        until(lambda: bool(daemon.boxes))
        running.send_signal(signal.SIGINT)
        interrupted.set()
        until(lambda: bool(begun))
        running.send_signal(signal.SIGHUP)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        assert not daemon.boxes


def test_what_a_sandbox_says_in_an_error_does_not_drive_the_terminal(daemon: FakeDaemon) -> None:
    async def hostile(request: Any) -> t.Sandbox:
        raise NotFound("inspect 'web': \x1b]0;title\x07\x1b[2J", hint="see \x9b2J")

    daemon.on_inspect = hostile  # type: ignore[method-assign]
    for arguments in (["inspect", "web"], ["inspect", "web", "web2"], ["exec", "web", "true"]):
        done = CliRunner(mix_stderr=False).invoke(cli, ["--socket", daemon.socket, *arguments])
        assert "inspect 'web': ?]0;title??[2J" in done.stderr
        assert not set("\x1b\x07\x9b") & set(done.stderr)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_empty(daemon: FakeDaemon, closed: str) -> None:
    daemon.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie"), id="web"))
    for words in ("ps", "exec -i web cat"):
        command = f"exec {sys.executable} -m dsecctl --socket {daemon.socket} {words} {closed}"
        done = subprocess.run(
            ["sh", "-c", command], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_output_that_cannot_be_written_is_one_error(daemon: FakeDaemon) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "dsecctl", "--socket", daemon.socket, "ps"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, b"dsecctl: ps: No space left on device\n")
