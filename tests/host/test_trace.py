# SPDX-License-Identifier: Apache-2.0
"""`dsecctl trace`: what a real program in a sandbox does is shown, another sandbox's doings are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libdsec import Client
from libdsec.types import ExecRequest, SandboxSpec
from tests.support import traced
from tests.support.daemon import Daemon
from tests.support.imports import import_python
from tests.support.traced import Tracer, found, run
from tests.support.waiting import until

IMAGE = "debian:python"
_DSECCTL = Path(__file__).resolve().parents[2] / "bin/dsecctl"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        import_python(running, IMAGE)
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected
        for box in connected.list_all():
            connected.delete(box.id)


@contextmanager
def tracing(daemon: Daemon, box: str, *options: str, as_json: bool = True) -> Iterator[Tracer]:
    command = [str(_DSECCTL), "--socket", str(daemon.socket)]
    with traced.tracing(command, daemon.runtime_dir, box, *options, as_json=as_json) as tracer:
        yield tracer


def test_all_that_a_program_does_is_shown_and_nothing_of_its_neighbours(daemon: Daemon, client: Client) -> None:
    box, other = (client.create(SandboxSpec(image=IMAGE)).id for _ in range(2))
    with tracing(daemon, box) as tracer:
        traced.check_all_is_shown_and_nothing_of_others(tracer, client, box, other)


def test_chosen_kinds_alone_are_shown_and_control_characters_are_not(daemon: Daemon, client: Client) -> None:
    box = client.create(SandboxSpec(image=IMAGE)).id
    with tracing(daemon, box, "--open", as_json=False) as tracer:
        run(client, box, "ours")
        tracer.has_shown("[31mours")
        shown = tracer.ended()
    assert {line.split()[4] for line in shown.splitlines()} == {"open"}
    assert "\x1b" not in shown and r'"/tmp/\u001b[31mours\n"' in shown
    assert not [line for line in shown.splitlines() if not line.strip()]


def test_it_ends_with_the_sandbox(daemon: Daemon, client: Client) -> None:
    box = client.create(SandboxSpec(image=IMAGE)).id
    with tracing(daemon, box, "--exec") as tracer:
        client.delete(box)
        assert tracer.process.wait(60) == 0


def _seen_and_lost(text: str) -> tuple[int, int]:
    """How many attempts have been shown, and how many only counted; the last line may be half there."""
    events = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return len(found(events, path="/nowhere")), sum(event["count"] for event in found(events, kind="lost"))


def test_what_cannot_be_shown_is_counted(daemon: Daemon, client: Client) -> None:
    box = client.create(SandboxSpec(image=IMAGE)).id
    flood = "import os\nfor _ in range(20000):\n try: os.open('/nowhere', 0)\n except OSError: pass\n"
    with tracing(daemon, box, "--open") as tracer:
        os.kill(tracer.process.pid, signal.SIGSTOP)
        client.exec(box, ExecRequest(argv=("python3", "-c", flood), timeout_s=60))
        os.kill(tracer.process.pid, signal.SIGCONT)
        until(lambda: sum(_seen_and_lost(tracer.shown.read_text())) >= 20000, 120)
        seen, lost = _seen_and_lost(tracer.ended())
    assert lost > 0 and 20000 <= seen + lost < 22000


def test_who_is_not_root_is_refused_and_what_lacks_is_named(daemon: Daemon, client: Client) -> None:
    box = client.create(SandboxSpec(image=IMAGE)).id
    as_nobody = ["setpriv", "--reuid=65534", "--clear-groups", "--"]
    daemon.socket.chmod(0o666)
    for prefix, env, status, words in (
        (as_nobody, {}, 8, ""),
        ([], {"PYTHONPATH": str(_without_bcc(daemon))}, 6, "apt install python3-bpfcc"),
    ):
        command = [*prefix, str(_DSECCTL), "--socket", str(daemon.socket), "trace", box]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})
        assert (done.returncode, words in done.stderr) == (status, True), done.stderr


def _without_bcc(daemon: Daemon) -> Path:
    """A folder in which bcc is a module that cannot be imported."""
    folder = daemon.runtime_dir / "lacking"
    (folder / "bcc").mkdir(parents=True)
    (folder / "bcc/__init__.py").write_text("raise ImportError(\"No module named 'bcc'\")\n")
    return folder
