# SPDX-License-Identifier: Apache-2.0
"""A program that does what `dsecctl trace` shows, the command at work beside it, and what it has to have shown.

Here: what a test of the checkout and one of the installed package share. Not here: daemons and images.
"""

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libdsec import Client
from libdsec.types import ExecRequest
from tests.support.waiting import until

#: Opens, connects and executes what its argument names, and fails at each of them once.
PROGRAM = r"""
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
_QUIET_S = 1.0


@dataclass
class Tracer:
    """The command, attached."""

    process: subprocess.Popen[str]
    shown: Path
    said: str = ""  # on standard error, until it had begun

    def ended(self) -> str:
        """What it has shown by its end, when nothing more comes and ctrl-c is pressed."""
        size = -1
        while (now := self.shown.stat().st_size) != size:
            size = now
            time.sleep(_QUIET_S)
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=60)
        return self.shown.read_text()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.ended().splitlines()]

    def has_shown(self, text: str, limit_s: float = 60.0) -> None:
        """Wait until it has."""
        until(lambda: text in self.shown.read_text(), limit_s)


@contextmanager
def tracing(dsecctl: Sequence[str], folder: Path, box: str, *options: str, as_json: bool = True) -> Iterator[Tracer]:
    """While the block lasts, from when it shows everything; ``folder`` is for its output."""
    command = [*dsecctl, *(["--json"] if as_json else []), "trace", *options, box]
    shown = folder / "shown"
    # Into a file, so that it never waits for who reads.
    with shown.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True)
    tracer = Tracer(process, shown)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            tracer.said += line
            if "until ctrl-c" in line:
                break
        else:
            raise AssertionError(f"it did not begin: {tracer.said}")
        print(tracer.said)
        yield tracer
    finally:
        process.kill()
        process.communicate()


def run(client: Client, box: str, tag: str) -> int:
    """Run the program; its number in the sandbox."""
    done = client.exec(box, ExecRequest(argv=("python3", "-c", PROGRAM, tag), timeout_s=120))
    assert done.exit_code == 0, done
    return int(done.text)


def found(events: list[dict[str, Any]], **fields: object) -> list[dict[str, Any]]:
    return [event for event in events if all(event.get(name) == value for name, value in fields.items())]


def check_all_is_shown_and_nothing_of_others(tracer: Tracer, client: Client, box: str, other: str) -> None:
    """The program in the traced sandbox, the same in another one and a command of the host's."""
    before = time.time()
    run(client, other, "theirs")
    inside = run(client, box, "ours")
    subprocess.run(["cat", "/etc/hostname"], stdout=subprocess.DEVNULL, check=True)
    tracer.has_shown('"/nowhere/ours", "argv"')
    events = tracer.events()
    mine = found(events, inside_pid=inside)
    (opened,) = found(mine, kind="open", path="/tmp/ours")
    assert {"O_WRONLY", "O_CREAT", "O_TRUNC", "O_CLOEXEC"} == set(opened["flags"])
    assert (opened["error"], opened["fd"] > 2, opened["comm"]) == ("", True, "python3")
    assert abs(time.mktime(time.strptime(opened["at"][:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone - before) < 120
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
