# SPDX-License-Identifier: Apache-2.0
"""`dsecctl trace`: what a real program in a sandbox does is shown, another sandbox's doings are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from libdsec import Client
from libdsec.types import ExecRequest, SandboxSpec
from tests.support.daemon import Daemon
from tests.support.imports import import_python

IMAGE = "debian:python"
_DSECCTL = Path(__file__).resolve().parents[2] / "bin/dsecctl"
#: Opens, connects and executes what its argument names, and fails at each of them once.
_PROGRAM = r"""
import os, socket, subprocess, sys
tag = sys.argv[1]
open(f"/tmp/{tag}", "w").close()
for path in (f"/nowhere/{tag}", f"/tmp/\x1b[31m{tag}\n"):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
    except OSError:
        pass
for family, address in ((socket.AF_INET, ("127.0.0.1", 4711)), (socket.AF_INET6, ("::1", 4712))):
    with socket.socket(family) as s:
        s.connect_ex(address)
with socket.socket(socket.AF_UNIX) as s:
    s.connect_ex(f"\0{tag}")
subprocess.run(["/bin/echo", tag, "two words"], stdout=subprocess.DEVNULL)
try:
    os.execv(f"/nowhere/{tag}", [tag])
except OSError:
    pass
print(os.getpid())
"""


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
def tracing(daemon: Daemon, box: str, *options: str, as_json: bool = True) -> Iterator[subprocess.Popen[str]]:
    """The command, attached."""
    command = [str(_DSECCTL), "--socket", str(daemon.socket), *(["--json"] if as_json else []), "trace", *options, box]
    # Into a file, so that it never waits for who reads.
    shown = (daemon.runtime_dir / "shown").open("w+")
    process = subprocess.Popen(command, stdout=shown, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="")
            if "until ctrl-c" in line:
                break
        else:
            raise AssertionError("it did not begin")
        yield process
    finally:
        process.kill()
        process.communicate()
        shown.close()


def ended(daemon: Daemon, process: subprocess.Popen[str]) -> str:
    """What it has shown by its end, when nothing more comes and ctrl-c is pressed."""
    path, size = daemon.runtime_dir / "shown", -1
    while (now := path.stat().st_size) != size:
        size = now
        time.sleep(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    return path.read_text()


def run(client: Client, box: str, tag: str) -> int:
    """Run the program; its number in the sandbox."""
    done = client.exec(box, ExecRequest(argv=("python3", "-c", _PROGRAM, tag), timeout_s=60))
    assert done.exit_code == 0, done
    return int(done.text)


def found(events: list[dict[str, Any]], **fields: object) -> list[dict[str, Any]]:
    return [event for event in events if all(event.get(name) == value for name, value in fields.items())]


def test_all_that_a_program_does_is_shown_and_nothing_of_its_neighbours(daemon: Daemon, client: Client) -> None:
    box, other = (client.create(SandboxSpec(image=IMAGE)).id for _ in range(2))
    with tracing(daemon, box) as process:
        before = time.time()
        run(client, other, "theirs")
        inside = run(client, box, "ours")
        subprocess.run(["cat", "/etc/hostname"], stdout=subprocess.DEVNULL, check=True)
        events = [json.loads(line) for line in ended(daemon, process).splitlines()]
    mine = found(events, inside_pid=inside)
    (opened,) = found(mine, kind="open", path="/tmp/ours")
    assert {"O_WRONLY", "O_CREAT", "O_TRUNC", "O_CLOEXEC"} == set(opened["flags"])
    assert (opened["error"], opened["fd"] > 2, opened["comm"]) == ("", True, "python3")
    assert abs(time.mktime(time.strptime(opened["at"][:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone - before) < 30
    (missing,) = found(mine, kind="open", path="/nowhere/ours")
    assert (missing["error"], set(missing["flags"])) == ("ENOENT", {"O_RDONLY", "O_NOFOLLOW", "O_CLOEXEC"})
    assert found(mine, kind="open", path="/tmp/\x1b[31mours\n", error="ENOENT")
    for family, address, port in (("inet", "127.0.0.1", 4711), ("inet6", "::1", 4712)):
        assert found(mine, kind="connect", family=family, address=address, port=port, error="ECONNREFUSED")
    assert found(mine, kind="connect", family="unix", path="@ours", error="ECONNREFUSED")
    assert found(mine, kind="exec", path="/nowhere/ours", argv=["ours"], error="ENOENT")
    assert found(events, kind="exec", path="/bin/echo", argv=["/bin/echo", "ours", "two words"], error="")
    # Host's numbers are others than inside, and one process has one.
    assert len({event["pid"] for event in mine}) == 1 and mine[0]["pid"] != inside
    text = json.dumps(events)
    assert "theirs" not in text and "/etc/hostname" not in text
    assert found(events, kind="lost") == []


def test_chosen_kinds_alone_are_shown_and_control_characters_are_not(daemon: Daemon, client: Client) -> None:
    box = client.create(SandboxSpec(image=IMAGE)).id
    with tracing(daemon, box, "--open", as_json=False) as process:
        run(client, box, "ours")
        shown = ended(daemon, process)
    assert {line.split()[4] for line in shown.splitlines()} == {"open"}
    assert "\x1b" not in shown and r'"/tmp/\u001b[31mours\n"' in shown
    assert not [line for line in shown.splitlines() if not line.strip()]


def test_it_ends_with_the_sandbox(daemon: Daemon, client: Client) -> None:
    box = client.create(SandboxSpec(image=IMAGE)).id
    with tracing(daemon, box, "--exec") as process:
        client.delete(box)
        assert process.wait(30) == 0


def test_what_cannot_be_shown_is_counted(daemon: Daemon, client: Client) -> None:
    box = client.create(SandboxSpec(image=IMAGE)).id
    flood = "import os\nfor _ in range(20000):\n try: os.open('/nowhere', 0)\n except OSError: pass\n"
    with tracing(daemon, box, "--open") as process:
        os.kill(process.pid, signal.SIGSTOP)
        client.exec(box, ExecRequest(argv=("python3", "-c", flood), timeout_s=60))
        os.kill(process.pid, signal.SIGCONT)
        events = [json.loads(line) for line in ended(daemon, process).splitlines()]
    seen, lost = len(found(events, path="/nowhere")), sum(event["count"] for event in found(events, kind="lost"))
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
