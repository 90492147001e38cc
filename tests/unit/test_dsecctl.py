# SPDX-License-Identifier: Apache-2.0
"""dsecctl against a daemon in memory: what it prints, its exit statuses, and that --json is JSON everywhere."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from dsecctl.app import App
from dsecctl.cli import cli
from dsecctl.commands import COMMANDS
from dsecctl.commands.files import Place
from dsecctl.output import one_line, size
from dsecctl.params import CPUS, DURATION, SIZE
from dsecctl.terminal import DetachKeys
from libdsec import types as t
from libdsec.errors import BY_CODE, NotFound, from_wire
from tests.support.fake_commands import pattern
from tests.support.fake_daemon import FakeDaemon
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        fake.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie", command=("echo", "ready")), id="web"))
        fake.events = [
            t.Event(seq=n, at="2026-03-01T10:12:00Z", kind="sandbox.created", subject=f"s{n}") for n in (1, 2)
        ]
        yield fake


def call(daemon: FakeDaemon, *arguments: str, stdin: bytes | None = None) -> Result:
    """Run dsecctl in this process."""
    return CliRunner(mix_stderr=False).invoke(cli, ["--socket", daemon.socket, *arguments], input=stdin)


def process(daemon: FakeDaemon, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    """Run dsecctl as a program."""
    environment = {**os.environ, "DSEC_SOCKET": daemon.socket}
    return subprocess.Popen([sys.executable, "-m", "dsecctl", *arguments], cwd=ROOT, env=environment, **more)


def main_of(daemon: FakeDaemon) -> Any:
    return daemon.boxes["web"].execs


# --- the list of commands ----------------------------------------------------------------------------------------


def every_command() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from ((f"{name} {sub}", command.commands[sub]) for sub in command.commands)
        else:
            yield name, command


def test_every_command_has_help_with_an_example_that_parses() -> None:
    for name, command in every_command():
        assert command.help, name
        example = getattr(command, "example", "").removeprefix('eval "$(').removesuffix(')"')
        words = shlex.split(re.sub(r"\$\(.*\)", "ID", example))
        assert words[: 1 + len(name.split())] == ["dsecctl", *name.split()]
        # Checks every value and calls nothing.
        command.make_context(name, words[1 + len(name.split()) :], obj=App()).close()
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.help, f"{name} {parameter.opts}"
                assert not parameter.help.rstrip(".").endswith(" "), name


def test_everything_asked_for_exists() -> None:
    wanted = (
        "run create exec ps inspect stats cp logs stop start rm pause resume wait update events host doctor api ops "
        "mem attach image completion kill execs net forward trace fork snapshot"
    )
    assert set(COMMANDS) == set(wanted.split())
    image = cli.get_command(click.Context(cli), "image")
    assert isinstance(image, click.Group)
    assert set(image.commands) == {"ls", "import", "build-debian", "pull", "tag", "rm", "inspect"}


def test_help_works_everywhere(daemon: FakeDaemon) -> None:
    for name, _ in every_command():
        done = call(daemon, *name.split(), "--help")
        assert done.exit_code == 0
        assert "\n  Example: " in done.stdout
    assert daemon.seen == []


_SNAPSHOTS = {"ls": (), "inspect": ("warm",), "rm": ("warm",)}
JSON_CALLS: dict[str, tuple[str, ...]] = {
    "run": ("run", "debian:trixie", "--", "echo", "hi"),
    "create": ("create", "--name", "n1", "debian:trixie"),
    "exec": ("exec", "web", "--", "echo", "hi"),
    "attach": (),  # a stream of bytes
    "logs": ("logs", "web"),
    "mem": ("mem",),
    "kill": ("kill", "web"),
    "execs": ("execs", "web"),
    "cp": ("cp", __file__, "web:/f"),
    "ps": ("ps",),
    "inspect": ("inspect", "web"),
    "net": ("net", "web"),
    **dict.fromkeys(("forward", "trace"), ()),  # go on until they are interrupted
    "stats": ("stats", "web"),
    "update": ("update", "web", "--label", "a=b"),
    "fork": ("fork", "--count", "2", "web"),
    **{name: (name, "web") for name in ("pause", "resume", "stop", "start")},
    "wait": ("wait", "--state", "running", "web"),
    "rm": ("rm", "web"),
    "snapshot create": ("snapshot", "create", "web", "warm"),
    **{f"snapshot {name}": ("snapshot", name, *names) for name, names in _SNAPSHOTS.items()},
    "image ls": ("image", "ls"),
    "image inspect": ("image", "inspect", "debian:trixie"),
    "image import": ("image", "import", "/some.tar", "x:1"),
    "image pull": ("image", "pull", "docker.io/library/python:3.12"),
    "image build-debian": ("image", "build-debian", "trixie"),
    "image tag": ("image", "tag", "debian:trixie", "y:1"),
    "image rm": ("image", "rm", "debian:trixie"),
    "host": ("host",),
    "doctor": ("doctor",),
    "events": ("events",),
    "ops": ("ops",),
    "api": ("api", "GET", "/v1/version"),
    "completion": ("completion", "zsh"),
}


def test_json_is_json_everywhere(daemon: FakeDaemon) -> None:
    assert set(JSON_CALLS) == {name for name, _ in every_command()}
    states = {"resume": t.State.PAUSED, "start": t.State.STOPPED}
    for name, arguments in JSON_CALLS.items():
        if not arguments:
            continue
        if "web" not in daemon.boxes:
            daemon.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie"), id="web"))
        box = daemon.boxes["web"]
        box.info = box.info.model_copy(update={"state": states.get(name, t.State.RUNNING)})
        done = call(daemon, "--json", *arguments)
        assert done.exit_code == (1 if name == "doctor" else 0), (name, done.stderr)
        if name in ("events", "logs"):
            found = [json.loads(text) for text in done.stdout.splitlines()]
            assert found, name
        else:
            json.loads(done.stdout)


def test_json_may_stand_behind_the_command(daemon: FakeDaemon) -> None:
    done = call(daemon, "ps", "--json")
    assert [box["id"] for box in json.loads(done.stdout)] == ["web"]
    assert call(daemon, "ps", "-q").stdout == "web\n"


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_each_error_has_its_message_hint_and_status(daemon: FakeDaemon, code: str) -> None:
    error = from_wire({"code": code, "message": "stop 'web': no", "hint": "do this", "retryable": False})
    daemon.faults["stop"] = [error]
    if not error.http_status:
        return
    done = call(daemon, "stop", "web")
    assert done.stderr == "dsecctl: stop 'web': no\n(hint: do this)\n"
    assert done.exit_code == error.exit_status
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("inspect", "none"), 4, "look up 'none': no such sandbox"),
        (("create", "--name", "web", "debian:trixie"), 5, "create 'web': sandbox exists since"),
        (("start", "web"), 5, "'web' is running, not stopped"),
        (("create", "--memory", "4096", "debian:trixie"), 2, "limits.memory_max_bytes: "),
        (("create", "--memory", "lots", "debian:trixie"), 2, "'lots' is no size"),
        (("wait", "--state", "failed", "--timeout", "0", "web"), 124, "wait for 'web'"),
        (("rm",), 2, "missing argument"),
        (("rm", "none"), 4, "rm 'none': no such sandbox"),
        (("frob",), 2, "no such command 'frob'"),
        (("cp", "a", "b"), 2, "exactly one of SRC and DST"),
        (("cp", "/nonesuch", "web:/x"), 1, "cp '/nonesuch': No such file or directory"),
        (("kill", "-s", "FOO", "web"), 2, "'FOO' is no signal"),
        (("image", "import", "/nowhere", "x:1"), 1, "import 'x': no such file"),
        (("run", "nothing", "--", "true"), 125, "no image 'nothing'"),
        (("run", "--frob", "debian:trixie"), 125, "no such option: --frob"),
        (("exec", "none", "true"), 125, "look up 'none': no such sandbox"),
        (("exec", "web"), 125, "missing argument 'COMMAND...'"),
        (("exec", "web", "--"), 125, "missing argument 'COMMAND...'"),
        (("exec", "web", "nonesuch"), 127, "exec 'nonesuch'"),
        (("exec", "web", "noexec"), 126, "exec 'noexec'"),
        (("exec", "--timeout", "1", "web", "late"), 124, "it was killed, its time was up"),
        (("exec", "web", "shutdown"), 125, "stopped while it ran"),
        (("exec", "-it", "web", "cat"), 125, "-t needs a terminal"),
        (("exec", "web", "exit", "4"), 4, ""),
        (("exec", "web", "die", "15"), 143, ""),
        (("run", "debian:trixie", "exit", "3"), 3, ""),
    ],
)
def test_statuses_and_messages(daemon: FakeDaemon, arguments: tuple[str, ...], status: int, text: str) -> None:
    done = call(daemon, *arguments)
    assert done.exit_code == status, done.stderr
    if text:
        assert "dsecctl: " in done.stderr
        assert text in done.stderr
        # One fact a line, and no full stop.
        assert not re.search(r"\.\n", done.stderr)
    assert "Traceback" not in done.stderr


def test_errors_are_json_too(daemon: FakeDaemon) -> None:
    done = call(daemon, "--json", "inspect", "none")
    assert json.loads(done.stderr)["code"] == "not-found"
    assert done.exit_code == 4


def test_no_daemon(tmp_path: Path) -> None:
    done = CliRunner(mix_stderr=False).invoke(cli, ["--socket", str(tmp_path / "s"), "ps"])
    assert done.exit_code == 3
    assert done.stderr.splitlines() == [
        f"dsecctl: connect to {tmp_path / 's'}: No such file or directory",
        "(hint: 'systemctl start dsecd.socket', or start 'dsecd' as root)",
    ]


def test_an_option_of_the_command_run_is_not_ours(daemon: FakeDaemon) -> None:
    done = call(daemon, "exec", "web", "echo", "--json", "-q", "--help")
    assert done.stdout == "--json -q --help\n"


# --- commands ----------------------------------------------------------------------------------------------------


def test_create_sends_what_the_options_say(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    (tmp_path / "env").write_text("# note\nB=from file\nA=overridden\n")
    done = call(
        daemon, "create", "--name", "n1", "--workspace", "ws:1", "--toolkit", "a:1", "--toolkit", "b:1", "-e", "A=1",
        "-e", "SECRET", "--env-file", str(tmp_path / "env"), "-u", "nobody", "-w", "/srv", "--memory", "512M",
        "--cpus", "1.5", "--pids", "64", "--tmp-size", "1G", "--read-only", "-l", "job=7", "--ttl", "1h30m",
        "--deny-write", "/srv/answers", "--deny-write", "/srv/*.key", "--deny-sockets", "inet", "--allow-raw-sockets",
        "debian:trixie", "--", "echo", "-n", "x",
    )  # fmt: skip
    assert (done.exit_code, done.stdout) == (0, "n1\n")
    spec = daemon.boxes["n1"].info.spec
    assert spec == t.SandboxSpec(
        image="debian:trixie", workspace="ws:1", toolkits=("a:1", "b:1"), command=("echo", "-n", "x"),
        env={"B": "from file", "A": "1", "SECRET": "s3cret"}, user="nobody", workdir="/srv", readonly_root=True,
        limits=t.Limits(memory_max_bytes=512 << 20, cpu_max_permil=1500, pids_max=64), tmp_size_bytes=1 << 30,
        labels={"job": "7"}, ttl_s=5400,
        apparmor=t.AppArmor(
            deny_write=("/srv/answers", "/srv/*.key"), deny_sockets=("inet",), allow_raw_sockets=True
        ),
    )  # fmt: skip


def test_run_deletes_its_sandbox_and_keeps_it_on_request(daemon: FakeDaemon) -> None:
    done = call(daemon, "run", "debian:trixie", "--", "echo", "hi")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "hi\n", "")
    assert set(daemon.boxes) == {"web"}
    done = call(daemon, "run", "--name", "kept", "--keep", "debian:trixie", "exit", "9")
    assert (done.exit_code, done.stderr) == (9, "exiting\nsandbox 'kept' is kept\n")
    assert set(daemon.boxes) == {"web", "kept"}
    assert call(daemon, "run", "--name", "web", "debian:trixie", "true").exit_code == 125
    assert "web" in daemon.boxes
    done = call(daemon, "run", "-d", "debian:trixie", "echo", "later")
    assert daemon.boxes[done.stdout.strip()].execs["main"].stdout == b"later\n"


def test_run_without_a_command_runs_the_images(daemon: FakeDaemon) -> None:
    assert call(daemon, "run", "debian:trixie").exit_code == 127  # the fake knows no /bin/sh
    assert ("image_inspect", {"ref": "debian:trixie"}) in daemon.seen


def test_output_comes_through_as_it_is(daemon: FakeDaemon) -> None:
    daemon.stream_cuts = [3000, 5000]
    done = call(daemon, "exec", "web", "emit", "50000")
    assert done.stdout_bytes == pattern(50_000)
    result = json.loads(call(daemon, "exec", "--json", "web", "raw", "ff00").stdout)
    assert base64.b64decode(result["stdout"]) == b"\xff\x00"


def test_exec_detached_then_attach_and_logs(daemon: FakeDaemon) -> None:
    assert call(daemon, "exec", "-d", "--id", "e1", "web", "emit", "5000").stdout == "e1\n"
    assert call(daemon, "attach", "web", "e1").stdout_bytes == pattern(5000)
    assert main_of(daemon)["e1"].signals == []
    assert call(daemon, "logs", "web").stdout == "ready\n"
    assert call(daemon, "logs", "-f", "web", "e1").stdout_bytes == pattern(5000)
    assert call(daemon, "kill", "-s", "hup", "web", "e1").exit_code == 0
    assert main_of(daemon)["e1"].signals == [1]


def test_ps_and_other_tables(daemon: FakeDaemon) -> None:
    call(daemon, "update", "web", "-l", "job=7")
    lines = call(daemon, "ps", "-l", "job=7").stdout.splitlines()
    assert lines[0].split() == ["ID", "STATE", "AGE", "BACKEND", "IMAGE", "PORTS", "LABELS"]
    assert re.fullmatch(r"web +running +\S+ \S+ +container +debian:trixie +job=7", lines[1])
    assert len(call(daemon, "ps", "-l", "job=8").stdout.splitlines()) == 1
    assert "debian:trixie  abababababab  /       180 MiB  9000" in call(daemon, "image", "ls").stdout
    host = call(daemon, "host").stdout
    assert "core-sched  no     isolation\n" in host
    assert "boot the kernel" not in host
    told = call(daemon, "host", "--verbose").stdout
    assert "\ncore-sched:\n  CONFIG_SCHED_CORE is off\n  boot the kernel of package dsec-kernel\n" in told
    done = call(daemon, "doctor")
    assert done.exit_code == 1
    assert "missing  feature kvm: /dev/kvm is missing\n" in done.stdout
    assert "wrong    residue: 1 stray mount\n         (hint: restart dsecd)\n" in done.stdout
    assert call(daemon, "events", "--since", "1").stdout.split()[3:5] == ["sandbox.created", "s2"]


def test_update_keeps_other_labels(daemon: FakeDaemon) -> None:
    call(daemon, "update", "web", "-l", "a=1", "-l", "b=2")
    call(daemon, "update", "web", "-l", "c=3", "--rm-label", "a")
    assert daemon.boxes["web"].info.spec.labels == {"b": "2", "c": "3"}


def test_stats_shows_what_is_known_of_those_named_or_of_all_that_run(daemon: FakeDaemon) -> None:
    for id in ("other", "idle"):
        daemon.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie"), id=id))
    call(daemon, "stop", "idle")
    shown = call(daemon, "stats").stdout
    assert [re.split("  +", line) for line in shown.splitlines()] == [
        ["ID", "CPU", "MEMORY", "TASKS", "PROCESSES", "EXECS", "LARGEST"],
        ["web", "1.75 s", "3.0 MiB", "9", "4", "0 of 1", "2.0 MiB"],
        ["other", "1.75 s", "-", "-", "4", "0 of 0", "2.0 MiB"],
    ]
    found = json.loads(call(daemon, "--json", "stats", "other").stdout)
    assert [(one["id"], one["cpu_usage_us"], one["pids_current"]) for one in found] == [("other", 1750000, None)]
    # Named ones are told about, whatever became of them; of all, those that ended meanwhile are left out.
    done = call(daemon, "-q", "stats", "none", "idle", "web")
    assert (done.exit_code, done.stdout) == (4, "web\n")
    assert "'idle': it is stopped" in done.stderr
    daemon.faults["usage"] = [NotFound("read the usage of 'web': no such sandbox")]
    done = call(daemon, "-q", "stats")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "other\n", "")


def test_many_at_once_go_on_after_an_error(daemon: FakeDaemon) -> None:
    daemon.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie"), id="other"))
    done = call(daemon, "pause", "none", "web", "other")
    assert (done.exit_code, done.stdout) == (4, "web\nother\n")
    assert call(daemon, "rm", "--all").exit_code == 0
    assert daemon.boxes == {}
    daemon.faults["image_remove"] = [NotFound("remove 'none': no such image")]
    done = call(daemon, "image", "rm", "none:1", "a:1", "b:1")
    assert (done.exit_code, done.stdout) == (4, "a:1\nb:1\n")
    assert done.stderr == "dsecctl: remove 'none': no such image\n"


def test_execs_lists_what_attach_and_logs_take(daemon: FakeDaemon) -> None:
    call(daemon, "exec", "-d", "--id", "e1", "web", "exit", "3")
    call(daemon, "exec", "-d", "--id", "e2", "web", "die", "9")
    call(daemon, "exec", "-d", "--id", "e3", "web", "sleep")
    rows = [line.split() for line in call(daemon, "execs", "web").stdout.splitlines()]
    assert rows[0] == ["EXEC", "STATE", "PID", "AGE", "STDOUT", "STDERR"]
    states = {row[0]: row[1:3] for row in rows[1:]}
    assert (states["main"], states["e1"], states["e2"]) == (["exit", "0"], ["exit", "3"], ["signal", "9"])
    assert states["e3"][0] == "running"
    assert call(daemon, "-q", "execs", "web").stdout.split() == ["main", "e1", "e2", "e3"]
    assert call(daemon, "execs", "none").exit_code == 4
    assert complete(daemon, "dsecctl logs web e", 3).split() == ["plain,e1", "plain,e2", "plain,e3"]


def test_cp_to_a_directory_that_is_not_there_names_it(daemon: FakeDaemon, tmp_path: Path) -> None:
    assert call(daemon, "cp", __file__, "web:/x").exit_code == 0
    done = call(daemon, "cp", "web:/x", str(tmp_path / "none" / "x"))
    assert (done.exit_code, done.stderr) == (1, f"dsecctl: cp '{tmp_path}/none/x': No such file or directory\n")


def test_cp_both_ways(daemon: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(pattern(1000))
    assert call(daemon, "cp", str(tmp_path / "d"), "web:/up").exit_code == 0
    assert call(daemon, "cp", str(tmp_path / "d" / "f"), "web:/up").exit_code == 0
    assert {"/up/f"} <= set(daemon.boxes["web"].files)
    assert call(daemon, "cp", "web:/up", str(tmp_path / "down")).exit_code == 0
    assert (tmp_path / "down" / "f").read_bytes() == pattern(1000)
    assert call(daemon, "cp", "web:/up/f", "-").stdout_bytes == pattern(1000)
    assert call(daemon, "cp", "web:/up/f", str(tmp_path)).exit_code == 0
    assert (tmp_path / "f").read_bytes() == pattern(1000)
    with process(daemon, "cp", "-", "web:/piped", stdin=subprocess.PIPE) as running:
        running.communicate(b"from stdin")
    assert daemon.boxes["web"].files["/piped"]["data"] == b"from stdin"
    os.mkfifo(tmp_path / "d" / "fifo")
    done = call(daemon, "cp", str(tmp_path / "d"), "web:/again")
    assert (done.exit_code, done.stderr) == (1, "dsecctl: cp 'fifo': left out: it is a fifo\n")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("web:/a", Place("/a", "web")),
        ("web:/a:b", Place("/a:b", "web")),
        ("web:a", Place("web:a")),
        ("./web:/a", Place("./web:/a")),
        ("/web:/a", Place("/web:/a")),
        ("-", Place("-")),
    ],
)
def test_places(text: str, place: Place) -> None:
    assert Place.parse(text) == place


def test_image_commands(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(daemon, "image", "import", "root.tar", "x:1", "--prefix", "/opt/x")
    assert done.exit_code == 0
    assert done.stderr.splitlines()[0] == "import x:1: reading, 50 B of 100 B"
    assert done.stdout == "debian:trixie\n"
    assert call(daemon, "-q", "image", "build-debian", "trixie", "--include", "a,b").stderr == ""


def test_image_import_changes_the_configuration_it_is_told_to(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "1")
    args = ("root.tar", "x:1", "-e", "A=b=c", "-e", "OURS", "-u", "1:2", "--entrypoint", "sh -c 'a b'", "-l", "k=v")
    assert call(daemon, "image", "import", *args).exit_code == 0
    assert call(daemon, "image", "pull", "x:1", "--cmd", "", "-w", "/srv").exit_code == 0
    assert call(daemon, "image", "pull", "oci:/layout:one", "y:1").exit_code == 0
    assert [request.source for request in daemon.imports[1:]] == ["docker://x:1", "oci:/layout:one"]
    change, pulled, _ = (request.config for request in daemon.imports)
    assert change == t.ImageConfigChange(
        env=("A=b=c", "OURS=1"), user="1:2", entrypoint=("sh", "-c", "a b"), labels={"k": "v"}
    )
    assert pulled == t.ImageConfigChange(cmd=(), workdir="/srv")
    assert call(daemon, "image", "import", "root.tar", "x:1").exit_code == 0
    assert daemon.imports[-1].config == t.ImageConfigChange()
    wrong = call(daemon, "image", "import", "root.tar", "x:1", "--cmd", "'")
    assert (wrong.exit_code, len(daemon.imports)) == (2, 4)
    assert "no closing quotation" in wrong.stderr.lower()


def test_events_follow_the_daemon_through_a_restart(daemon: FakeDaemon) -> None:
    with process(daemon, "events", "-f", "--since", "0", "--json", stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert [json.loads(running.stdout.readline())["seq"] for _ in range(2)] == [1, 2]
        daemon.down()
        daemon.events.append(t.Event(seq=3, at="2026-03-01T10:12:00Z", kind="daemon.started"))
        daemon.up()
        assert json.loads(running.stdout.readline())["seq"] == 3
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 130


def test_events_followed_without_since_begin_now(daemon: FakeDaemon) -> None:
    with process(daemon, "events", "-f", "--json", stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        until(lambda: ("events_stream", {"since": "2"}) in daemon.seen)
        daemon.events.append(t.Event(seq=3, at="2026-03-01T10:12:00Z", kind="daemon.started"))
        assert json.loads(running.stdout.readline())["seq"] == 3
        running.send_signal(signal.SIGINT)


def test_events_without_since_are_the_newest(daemon: FakeDaemon) -> None:
    daemon.events = [t.Event(seq=n, at="2026-03-01T10:12:00Z", kind="image.tagged") for n in range(1, 151)]

    def numbers(*arguments: str) -> list[int]:
        lines = call(daemon, "events", "--json", *arguments).stdout.splitlines()
        return [json.loads(line)["seq"] for line in lines]

    assert numbers() == list(range(51, 151))
    assert numbers("--limit", "2") == [149, 150]
    assert numbers("--since", "0") == list(range(1, 151))
    assert numbers("--since", "3", "--limit", "2") == [4, 5]


def test_api_is_the_api(daemon: FakeDaemon) -> None:
    body = json.dumps({"spec": {"image": "debian:trixie"}, "id": "raw"})
    assert json.loads(call(daemon, "api", "POST", "/v1/sandboxes", body).stdout)["id"] == "raw"
    assert json.loads(call(daemon, "api", "GET", "/v1/sandboxes/raw").stdout)["state"] == "running"
    done = call(daemon, "api", "get", "/v1/sandboxes/none")
    assert (done.exit_code, done.stdout) == (4, "")


# --- pipes and terminals -----------------------------------------------------------------------------------------


def test_input_is_passed_on_and_ends(daemon: FakeDaemon) -> None:
    with process(daemon, "exec", "-i", "web", "cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        out, _ = running.communicate(pattern(200_000))
    assert (running.returncode, out) == (0, pattern(200_000))


def test_a_reader_that_leaves_ends_the_command(daemon: FakeDaemon) -> None:
    with process(daemon, "exec", "--id", "e", "web", "emit", "9000000", stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.read(10)
        running.stdout.close()
        assert running.wait() == 141


def test_a_run_that_is_terminated_while_creating_leaves_no_sandbox(daemon: FakeDaemon) -> None:
    original = daemon.on_create
    terminated = threading.Event()

    async def slow(request: Any) -> t.Sandbox:
        made = await original(request)
        await asyncio.to_thread(terminated.wait, 60)
        await asyncio.sleep(1)
        return made

    daemon.on_create = slow  # type: ignore[method-assign]
    with process(daemon, "run", "debian:trixie", "sleep") as running:
        until(lambda: len(daemon.boxes) == 2)
        running.send_signal(signal.SIGTERM)
        terminated.set()
        assert running.wait() == 143
    assert set(daemon.boxes) == {"web"}


class Terminal:
    """dsecctl on a terminal of its own."""

    def __init__(self, daemon: FakeDaemon, *arguments: str) -> None:
        self.ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, (33, 101))
        self.before = termios.tcgetattr(self.theirs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "55")  # of another terminal, perhaps
            streams = {"stdin": self.theirs, "stdout": self.theirs, "stderr": subprocess.PIPE}
            self.process = process(daemon, *arguments, **streams)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            assert select.select([self.ours], [], [], 60)[0], data
            data += os.read(self.ours, 1000)
        return data

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def terminal(daemon: FakeDaemon) -> Iterator[Terminal]:
    opened = Terminal(daemon, "exec", "-it", "--id", "e", "web", "cat")
    yield opened
    opened.close()


def test_terminal_is_raw_sized_and_restored(daemon: FakeDaemon, terminal: Terminal) -> None:
    until(lambda: "e" in main_of(daemon) and main_of(daemon)["e"].sizes == [(33, 101)])
    # Raw: ctrl-c is a byte like others and comes back as such, nothing echoes twice.
    os.write(terminal.ours, b"a\x03\r")
    assert terminal.read(3) == b"a\x03\r"
    assert main_of(daemon)["e"].signals == []
    for size_, told in (((40, 120), (40, 120)), ((0, 0), (24, 80))):  # 0: nobody told the terminal its size
        termios.tcsetwinsize(terminal.theirs, size_)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        while main_of(daemon)["e"].sizes[-1] != told:  # the limit is pytest's
            time.sleep(0.02)
    daemon.on_loop(main_of(daemon)["e"].end)
    assert terminal.process.wait() == 0
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_detach_keys_leave_the_command_running(daemon: FakeDaemon, terminal: Terminal) -> None:
    until(lambda: "e" in main_of(daemon) and main_of(daemon)["e"].sizes)
    os.write(terminal.ours, b"hi\x10")
    terminal.read(2)
    os.write(terminal.ours, b"\x11")
    assert terminal.process.wait() == 0
    assert main_of(daemon)["e"].running
    assert main_of(daemon)["e"].signals == []
    assert termios.tcgetattr(terminal.theirs) == terminal.before
    assert terminal.process.stderr is not None
    text = terminal.process.stderr.read()
    said = re.search(rb"exec '(\w+)' is left running; go on with 'dsecctl attach -it web \1'", text)
    assert said is not None
    assert said[1].decode() in daemon.boxes["web"].execs


def test_terminal_is_restored_when_the_daemon_goes(daemon: FakeDaemon, terminal: Terminal) -> None:
    until(lambda: "e" in main_of(daemon) and main_of(daemon)["e"].sizes)
    del daemon.boxes["web"]
    daemon.down()
    daemon.up()
    assert terminal.process.wait() == 125
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_detach_keys() -> None:
    keys = DetachKeys()
    assert keys.filter(b"ab\x10") == (b"ab", False)
    assert keys.filter(b"c") == (b"\x10c", False)
    assert keys.filter(b"\x10") == (b"", False)
    assert keys.filter(b"\x10\x11x") == (b"\x10", True)


# --- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("512M", 512 << 20), ("1.5G", 3 << 29), ("64k", 65536), ("2GiB", 2 << 30), ("1TB", 1 << 40)],
)
def test_sizes(text: str, count: int) -> None:
    assert SIZE.convert(text, None, None) == count


@pytest.mark.parametrize("text", ["", "M", "-1", "1X", "1 2", "0x10", "9" * 400, "9" * 300 + "P"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter):
        SIZE.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("10m", 600), ("1h30m", 5400), ("2d", 172800), ("1h5s", 3605)]
)
def test_durations(text: str, seconds: float) -> None:
    assert DURATION.convert(text, None, None) == seconds


def test_what_is_no_duration_and_no_cpus() -> None:
    for text in ("", "m", "-5", "1x", "5m1h"):
        with pytest.raises(click.BadParameter):
            DURATION.convert(text, None, None)
    assert CPUS.convert("0.25", None, None) == 250
    for text in ("0", "inf", "nan", "-1"):
        with pytest.raises(click.BadParameter):
            CPUS.convert(text, None, None)


def test_sizes_for_people() -> None:
    assert [size(count) for count in (0, 1023, 1536, 180 << 20, 3 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "180 MiB", "3.0 TiB",
    ]  # fmt: skip


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert one_line("a\x1b[2Jb\nc") == "a?[2Jb?c"


# --- completion and manual ---------------------------------------------------------------------------------------


def complete(daemon: FakeDaemon, words: str, number: int) -> str:
    environment = {"_DSECCTL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    return subprocess.run(
        [sys.executable, "-c", "from dsecctl.cli import main; main()"],
        cwd=ROOT, env={**os.environ, **environment, "DSEC_SOCKET": daemon.socket},
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip


def test_completion_knows_commands_sandboxes_and_images(daemon: FakeDaemon) -> None:
    assert "plain,pause" in complete(daemon, "dsecctl pa", 1)
    assert complete(daemon, "dsecctl stop w", 2) == "plain,web\n"
    assert complete(daemon, "dsecctl run de", 2) == "plain,debian:trixie\n"
    daemon.down()
    assert complete(daemon, "dsecctl stop w", 2).strip() == ""
    daemon.up()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(daemon: FakeDaemon, shell: str) -> None:
    assert "_DSECCTL_COMPLETE" in call(daemon, "completion", shell).stdout
