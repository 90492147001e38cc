# SPDX-License-Identifier: Apache-2.0
"""libdsec and dsecctl with a real daemon and real sandboxes: bytes, files, restarts, terminals."""

import asyncio
import hashlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import AsyncClient, AsyncSandbox, Client, Sandbox
from libdsec.errors import (
    ConnectionFailed,
    ExecNotStarted,
    ExecTimeout,
    InfraError,
    InvalidSpec,
    NotFound,
    SandboxLost,
)
from tests.support import machines
from tests.support.backends import KINDS, Kind
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

CHECKOUT = Path(__file__).resolve().parents[2]
IMAGE = "debian:trixie"
MIB = 1 << 20


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    found.require()
    return found


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(config=machines.config_if_any()) as running:
        with running.client() as client:
            client.finish(client.image_import(IMAGE, str(debian_tar()), kind="rootfs-tar"))
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as made:
        yield made


@pytest.fixture(scope="module")
def shared(daemon: Daemon) -> Iterator[list[str]]:
    """The id of a machine for all tests, once there is one: booting costs seconds where all is emulated."""
    yield (found := list[str]())
    with daemon.client() as client:
        for sandbox_id in found:
            client.delete(sandbox_id)


@pytest.fixture
def sandbox(client: Client, kind: Kind, shared: list[str]) -> Iterator[Sandbox]:
    if not kind.emulated:
        with Sandbox(image=IMAGE, client=client) as made:
            yield made
        return
    if not shared:
        shared.append(Sandbox(image=IMAGE, backend=kind.name, client=client).create().id)
    with Sandbox.get(shared[0], client=client) as made:
        yield made
        made.exec(sh("rm -rf /root/* /srv/*"))


def sh(text: str) -> list[str]:
    return ["sh", "-c", text]


# --- commands ----------------------------------------------------------------------------------------------------


def test_any_bytes_in_and_out(sandbox: Sandbox) -> None:
    data = os.urandom(MIB)
    assert sandbox.exec("cat", stdin=data).stdout == data


def test_large_input_arrives_whole(kind: Kind, sandbox: Sandbox) -> None:
    data = os.urandom(MIB) * kind.count(100)
    result = sandbox.exec("sha256sum", stdin=data, check=True)
    assert result.text.split()[0] == hashlib.sha256(data).hexdigest()
    # The end of input is not the end of the command.
    assert sandbox.exec(sh("sleep 0.2; exit 3"), stdin=b"").returncode == 3


def test_timeout_keeps_the_output_and_is_told_from_a_signal(sandbox: Sandbox) -> None:
    with pytest.raises(ExecTimeout) as caught:
        sandbox.exec(sh("echo before; sleep 60"), timeout_s=2)
    assert caught.value.stdout == b"before\n"
    with pytest.raises(ExecTimeout) as caught:
        sandbox.exec(sh("echo before; sleep 60"), idle_timeout_s=2)
    assert caught.value.stdout == b"before\n"
    with pytest.raises(ExecTimeout), sandbox.popen("sleep", "60", timeout_s=0.5) as stream:
        stream.wait()
    assert sandbox.exec(sh("kill -9 $$"), timeout_s=30).returncode == -9


def test_what_cannot_start(sandbox: Sandbox) -> None:
    for argv, options, reason in (
        (["nonesuch"], {}, "not-found"),
        (["/etc/passwd"], {}, "not-executable"),
        (["true"], {"user": "nonesuch"}, "no-such-user"),
        (["true"], {"cwd": "/nonesuch"}, "bad-cwd"),
    ):
        with pytest.raises(ExecNotStarted) as caught:
            sandbox.exec(argv, **options)  # type: ignore[arg-type]
        assert caught.value.details["reason"] == reason
    with pytest.raises(ExecNotStarted) as caught:
        sandbox.exec("nonesuch")
    assert caught.value.message == f"exec in '{sandbox.id}': start: nonesuch: No such file or directory"
    assert caught.value.hint is None
    with pytest.raises(ExecNotStarted) as caught:
        sandbox.exec("", "x")
    assert caught.value.message == f"exec in '{sandbox.id}': start: the name of the program is empty"
    assert "variable that is not set" in (caught.value.hint or "")
    with pytest.raises(ExecNotStarted) as caught:
        sandbox.exec("echo a | cat")
    assert "'sh', '-c'" in (caught.value.hint or "")


def test_stream_input_resize_and_signals(sandbox: Sandbox) -> None:
    with sandbox.popen("cat", stdin=True) as stream:
        stream.write(b"hello\n")
        assert stream.read() == ("stdout", b"hello\n")
        stream.close_stdin()
        assert stream.wait(check=True).exit_code == 0
    with sandbox.popen(sh("trap 'stty size' WINCH; echo on; while :; do sleep 0.05; done"), pty=True) as stream:
        lines = stream.stdout
        assert next(lines) == "on"
        stream.resize(50, 132)
        assert next(lines) == "50 132"
        stream.signal(15)
        assert stream.wait().signal == 15


def test_output_of_any_size_comes_whole_through_a_slow_reader(sandbox: Sandbox) -> None:
    wanted = hashlib.sha256(b"".join(b"%d\n" % number for number in range(1, 2_000_001))).hexdigest()
    found = hashlib.sha256()
    with sandbox.popen("seq", "2000000", buffer_bytes=64 * 1024) as stream:
        for number, (_, data) in enumerate(stream):
            found.update(data)
            if number == 10:
                time.sleep(0.5)
    assert found.hexdigest() == wanted


def test_leaving_a_stream_kills_the_command_and_detach_does_not(sandbox: Sandbox) -> None:
    with sandbox.popen("sleep", "1001"):
        pass
    with sandbox.popen("sleep", "1002") as stream:
        stream.detach()
    commands = sh("cat /proc/[0-9]*/cmdline 2> /dev/null | tr '\\0' ' '")
    until(lambda: "sleep 1001" not in sandbox.exec(commands).text)
    assert "sleep 1002" in sandbox.exec(commands).text


def test_deleting_the_sandbox_ends_what_runs_with_an_infrastructure_error(client: Client) -> None:
    with Sandbox(image=IMAGE, client=client) as doomed:
        timer = threading.Timer(0.5, client.delete, (doomed.id,))
        timer.start()
        with pytest.raises((SandboxLost, NotFound, InfraError)):
            doomed.exec("sleep", "60")
        timer.join()


# --- restarts ----------------------------------------------------------------------------------------------------


def test_streams_and_buffered_commands_survive_sigkill_of_the_daemon(daemon: Daemon, sandbox: Sandbox) -> None:
    results: list[bytes] = []
    program = sh("i=0; while [ $i -lt 300 ]; do echo line $i; echo err $i >&2; i=$((i+1)); sleep 0.01; done; exit 5")
    buffered = threading.Thread(target=lambda: results.append(sandbox.exec(program).stdout))
    buffered.start()
    out = {"stdout": b"", "stderr": b""}
    with sandbox.popen(program) as stream:
        restarts = 0
        for name, data in stream:
            out[name] += data
            if restarts < 2 and len(out["stdout"]) > 800 * (restarts + 1):
                restarts += 1
                daemon.restart()
        assert stream.wait().exit_code == 5
    assert restarts == 2
    assert out["stdout"] == b"".join(b"line %d\n" % number for number in range(300))
    assert out["stderr"] == b"".join(b"err %d\n" % number for number in range(300))
    buffered.join(60)
    assert results == [out["stdout"]]


def test_a_daemon_that_is_asked_to_stop_is_survived_too(daemon: Daemon, sandbox: Sandbox) -> None:
    results: list[bytes] = []
    program = sh("for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done")
    buffered = threading.Thread(target=lambda: results.append(sandbox.exec(program).stdout))
    buffered.start()
    with sandbox.popen(program) as stream:
        name, first = stream.read() or ("", b"")
        assert (name, first[:2]) == ("stdout", b"1\n")
        daemon.stop()
        daemon.start()
        assert first + b"".join(data for _, data in stream) == b"1\n2\n3\n4\n5\n6\n"
    buffered.join(60)
    assert results == [b"1\n2\n3\n4\n5\n6\n"]


def test_creation_across_a_restart_makes_one_sandbox(daemon: Daemon, client: Client) -> None:
    before = len(client.list_all())
    made: list[Sandbox] = []
    thread = threading.Thread(target=lambda: made.append(Sandbox(image=IMAGE, client=client).create()))
    thread.start()
    time.sleep(0.01)
    daemon.restart()
    thread.join(60)
    assert made[0].exec("echo", "alive").text == "alive\n"
    assert len(client.list_all()) == before + 1
    made[0].delete()


# --- files -------------------------------------------------------------------------------------------------------


def test_large_and_sparse_files_both_ways(sandbox: Sandbox, disk: Path) -> None:
    dense = os.urandom(MIB) * 40
    (disk / "dense").write_bytes(dense)
    with open(disk / "sparse", "wb") as file:
        file.truncate(1 << 30)
        file.seek(500 * MIB)
        file.write(b"middle")
    sandbox.put_file(disk / "dense", "/root/dense")
    sandbox.put_file(disk / "sparse", "/root/sparse")
    text = sandbox.exec("sha256sum", "/root/dense").text
    assert text.split()[0] == hashlib.sha256(dense).hexdigest()
    size, blocks = map(int, sandbox.exec("stat", "-c", "%s %b", "/root/sparse").text.split())
    assert (size, blocks < 2 * MIB // 512) == (1 << 30, True)
    sandbox.get_file("/root/dense", disk / "dense-back")
    sandbox.get_file("/root/sparse", disk / "sparse-back")
    assert (disk / "dense-back").read_bytes() == dense
    assert subprocess.run(["cmp", disk / "sparse", disk / "sparse-back"], check=False).returncode == 0
    assert (disk / "sparse-back").stat().st_blocks * 512 < 2 * MIB


_MEASURED = """
import resource, sys
from libdsec import Sandbox
with Sandbox(image=sys.argv[1]) as sandbox:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sandbox.put_file(sys.argv[2], "/root/f")
    sandbox.get_file("/root/f", sys.argv[2] + ".back")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_files_that_say_they_are_empty_come_whole(sandbox: Sandbox, disk: Path) -> None:
    """Those of /proc and of cgroups have no size: stat(2) says 0."""
    expected = sandbox.exec("cat", "/proc/filesystems").stdout
    assert len(expected) > 0
    assert sandbox.read("/proc/filesystems") == expected
    sandbox.get_file("/proc/filesystems", disk / "copy")
    assert (disk / "copy").read_bytes() == expected


def test_memory_does_not_grow_with_the_file(daemon: Daemon, disk: Path) -> None:
    block = os.urandom(MIB)
    with open(disk / "f", "wb") as file:
        file.writelines(block for _ in range(500))
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, IMAGE, str(disk / "f")], capture_output=True, text=True, check=True,
        cwd=CHECKOUT, env={**os.environ, "DSEC_SOCKET": str(daemon.socket)},
    )  # fmt: skip
    assert int(done.stdout) < 32 * 1024, "KiB"
    assert subprocess.run(["cmp", disk / "f", disk / "f.back"], check=False).returncode == 0


def test_transfers_survive_sigkill_of_the_daemon(
    kind: Kind, daemon: Daemon, sandbox: Sandbox, disk: Path
) -> None:
    data = os.urandom(MIB) * kind.count(200)
    (disk / "f").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()

    def kill_soon() -> threading.Timer:
        timer = threading.Timer(0.15, daemon.restart)
        timer.start()
        return timer

    timer = kill_soon()
    sandbox.put_file(disk / "f", "/root/f")
    timer.join()
    assert sandbox.exec("sha256sum", "/root/f").text.split()[0] == digest
    assert sandbox.exec(sh("ls -A /root | grep dsec-")).text == ""
    timer = kill_soon()
    sandbox.get_file("/root/f", disk / "back")
    timer.join()
    assert hashlib.sha256((disk / "back").read_bytes()).hexdigest() == digest


def test_trees_both_ways(sandbox: Sandbox, disk: Path) -> None:
    top = disk / "top"
    (top / "d" / "empty").mkdir(parents=True)
    (top / "d" / "run").write_text("#!/bin/sh\n")
    (top / "d" / "run").chmod(0o750)
    (top / "inside").symlink_to("d/run")
    (top / "outside").symlink_to("/etc/passwd")
    os.mkfifo(top / "fifo")
    report = sandbox.put(top, "/srv/tree")
    assert report.skipped == [("fifo", "it is a fifo")]
    listing = sandbox.exec(sh("cd /srv/tree && find . -printf '%y %m %p %l\\n' | sort"), check=True).text
    assert [line.rstrip() for line in listing.splitlines()] == [
        "d 755 .", "d 755 ./d", "d 755 ./d/empty", "f 750 ./d/run", "l 777 ./inside d/run",
        "l 777 ./outside /etc/passwd",
    ]  # fmt: skip
    back = sandbox.fetch("/srv/tree", disk / "back")
    assert back.skipped == [("outside", "symlink: it leads out of the tree, to '/etc/passwd'")]
    assert sorted(str(path.relative_to(disk / "back")) for path in (disk / "back").rglob("*")) == [
        "d", "d/empty", "d/run", "inside",
    ]  # fmt: skip
    assert os.readlink(disk / "back" / "inside") == "d/run"
    assert (disk / "back" / "d" / "run").stat().st_mode & 0o777 == 0o750


def _small_files(top: Path, count: int) -> None:
    for number in range(count):
        path = top / f"d{number % 5}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%04d" % number * 250)


def _half_files(sandbox: Sandbox, top: str) -> str:
    """What is under no name of its own, or not of the size of all."""
    return sandbox.exec("find", top, "-type", "f", "(", "-name", ".dsec-*", "-o", "!", "-size", "1000c", ")").text


def test_an_error_amid_a_tree_names_the_file_and_leaves_no_half_one(
    kind: Kind, sandbox: Sandbox, disk: Path
) -> None:
    count = kind.count(400)
    _small_files(disk / "top", count)
    wrong = f"d{(count - 5) % 5}/f{count - 5}"
    sandbox.mkdir(f"/srv/t/{wrong}", parents=True)
    with pytest.raises(InvalidSpec, match=f"'/srv/t/{wrong}'"):
        sandbox.put_tree(disk / "top", "/srv/t")
    assert _half_files(sandbox, "/srv/t") == ""
    sandbox.remove(f"/srv/t/{wrong}")
    report = sandbox.put_tree(disk / "top", "/srv/t")
    assert (report.files, report.skipped) == (count, [])
    sums = sandbox.exec(sh("cd /srv/t && find . -type f | sort | xargs cat | sha256sum"), check=True).text
    ordered = sorted(f"./{path.relative_to(disk / 'top')}" for path in (disk / "top").rglob("*") if path.is_file())
    expected = hashlib.sha256(b"".join((disk / "top" / path).read_bytes() for path in ordered)).hexdigest()
    assert sums.split()[0] == expected


def test_trees_of_small_files_survive_sigkill_of_the_daemon(
    kind: Kind, daemon: Daemon, sandbox: Sandbox, disk: Path
) -> None:
    count = kind.count(1000)
    _small_files(disk / "top", count)
    seen: list[str] = []

    def kill_amid(path: str) -> None:
        seen.append(path)
        if len(seen) == count // 2:
            daemon.restart()

    with daemon.client(retry_s=120) as patient:
        box = Sandbox.get(sandbox.id, client=patient)
        report = box.put_tree(disk / "top", "/srv/t", on_path=kill_amid)
        assert (report.files, report.directories, report.skipped) == (count, 5, [])
        until(lambda: _half_files(box, "/srv/t") == "")  # what was cut off is cleared away by who wrote it
        seen.clear()
        report = box.get_tree("/srv/t", disk / "back", on_path=kill_amid)
        assert (report.files, report.directories, report.skipped) == (count, 5, [])
    assert subprocess.run(["diff", "-r", disk / "top", disk / "back"], check=False).returncode == 0


def test_files_belong_to_whom_they_were_put_for(sandbox: Sandbox) -> None:
    sandbox.exec("chmod", "1777", "/srv", check=True)
    sandbox.write("/srv/a/b/c", b"x", user="nobody", parents=True, mode=0o640)
    text = sandbox.exec("stat", "-c", "%U %a", "/srv/a", "/srv/a/b", "/srv/a/b/c", check=True).text
    assert text.split("\n")[:3] == ["nobody 755", "nobody 755", "nobody 640"]
    assert [entry.name for entry in sandbox.list_dir("/srv/a/b")] == ["c"]


# --- connections -------------------------------------------------------------------------------------------------


def test_names_that_are_not_utf8_are_carried_both_ways(daemon: Daemon, tmp_path: Path) -> None:
    top = os.fsencode(tmp_path / "top")
    os.makedirs(top + b"/dir \xff/deep")
    for name in (b"/caf\xe9", b"/dir \xff/deep/\x80\n"):
        with open(top + name, "wb") as file:
            file.write(b"of " + name)
    os.symlink(b"caf\xe9", top + b"/\xfe link")
    with daemon.client() as client, Sandbox(image=IMAGE, client=client) as box:
        # The whole name must come through the command line as well.
        done = dsecctl(daemon, "--json", "cp", os.fsdecode(top), f"{box.id}:/root/tree")
        assert (done.returncode, done.stderr) == (0, b"")
        told = json.loads(done.stdout)
        assert (told["files"], told["directories"], told["symlinks"], told["skipped"]) == (2, 2, 1, [])
        script = "cd /root/tree && LC_ALL=C find . -print0 | sort -z && readlink -n *link"
        found = box.exec("sh", "-c", script).stdout.split(b"\0")
        names = [b".", b"./caf\xe9", b"./dir \xff", b"./dir \xff/deep", b"./dir \xff/deep/\x80\n", b"./\xfe link"]
        assert found == [*names, b"caf\xe9"]
        done = dsecctl(daemon, "cp", f"{box.id}:/root/tree", os.fsdecode(tmp_path / "back"))
        assert (done.returncode, done.stderr) == (0, b"")
        back = os.fsencode(tmp_path / "back")
        assert sorted(os.listdir(back)) == [b"caf\xe9", b"dir \xff", b"\xfe link"]
        assert os.readlink(back + b"/\xfe link") == b"caf\xe9"
        with open(back + b"/dir \xff/deep/\x80\n", "rb") as file:
            assert file.read() == b"of /dir \xff/deep/\x80\n"
        odd = os.fsdecode(b"/root/tree/caf\xe9")
        info = box.stat(odd)
        assert (info.name, info.name_bytes, info.fs_name) == ("caf\ufffd", b"caf\xe9", os.path.basename(odd))
        box.rename(odd, os.fsdecode(b"/root/tree/\xe8"))
        assert {entry.name_bytes for entry in box.list_dir("/root/tree")} == {b"\xe8", b"dir \xff", b"\xfe link"}
        with pytest.raises(InvalidSpec, match="path_bytes"):
            client.request("mkdir", body=b'{"path_bytes": "cmVsYXRpdmU="}', id=box.id)
        with pytest.raises(InvalidSpec, match="exactly one of 'path' and 'path_bytes'"):
            client.request("mkdir", body=b'{"path": "/a", "path_bytes": "L2E="}', id=box.id)


def test_a_file_of_a_tree_that_cannot_be_read_is_told_and_the_rest_is_copied(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.client() as client, Sandbox(image=IMAGE, client=client) as box:
        script = "mkdir /srv/t && cd /srv/t && for n in $(seq 60); do echo $n > f$n; done && chmod 0 f7 f33"
        assert box.exec("sh", "-c", script).ok
        report = box.get_tree("/srv/t", tmp_path / "t", user="nobody")
    assert {path for path, _ in report.skipped} == {"f7", "f33"}
    assert {path.name: path.read_text() for path in (tmp_path / "t").iterdir()} == {
        f"f{number}": f"{number}\n" for number in range(1, 61) if number not in (7, 33)
    }
    assert report.files == 58


#: ``dsecctl`` that comes to a file and goes no further: else the copy might end before it is interrupted.
_HALTING = """
import itertools, sys, time
from dsecctl.__main__ import main
from libdsec.local import TreeReport
paths = itertools.count(1)
TreeReport.at = lambda report, path: time.sleep(3600) if next(paths) > 3000 else None
sys.exit(main())
"""


def test_a_copy_that_is_interrupted_leaves_no_half_file(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.client() as client, Sandbox(image=IMAGE, client=client) as box:
        assert box.exec("sh", "-c", "mkdir /srv/t && cd /srv/t && seq 5000 | xargs touch").ok
        copying = subprocess.Popen(
            [sys.executable, "-c", _HALTING, "cp", f"{box.id}:/srv/t", str(tmp_path / "t")], cwd=CHECKOUT,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "DSEC_SOCKET": str(daemon.socket)},
        )  # fmt: skip
        begun = tmp_path / "t"
        until(lambda: copying.poll() is not None or (begun.is_dir() and len(os.listdir(begun)) > 20))
        copying.send_signal(signal.SIGINT)
        words = copying.communicate(timeout=60)[1]
    assert (copying.returncode, words.strip()) == (130, b"")
    names = os.listdir(tmp_path / "t")
    assert 0 < len(names) < 5000
    assert [name for name in names if name.endswith(".part")] == []


def test_no_descriptor_is_left_behind(daemon: Daemon) -> None:
    async def one(client: AsyncClient) -> None:
        async with AsyncSandbox(image=IMAGE, client=client) as box:
            assert (await box.exec("echo", "x")).ok
            async with await box.popen("sleep", "60") as stream:
                task = asyncio.create_task(stream.read())
                await asyncio.sleep(0.05)
                task.cancel()

    async def main() -> tuple[int, int]:
        before = len(os.listdir("/proc/self/fd"))
        async with AsyncClient(daemon.socket) as client:
            await asyncio.gather(*(one(client) for _ in range(20)))
        async with asyncio.timeout(60):
            while (after := len(os.listdir("/proc/self/fd"))) > before:
                await asyncio.sleep(0.05)
        return before, after

    before, after = asyncio.run(main())
    assert after <= before


def test_a_client_without_retries_says_at_once_that_the_daemon_is_gone(daemon: Daemon) -> None:
    with daemon.client(retry_s=0) as client:
        client.version()
        daemon.kill()
        with pytest.raises(ConnectionFailed):
            client.version()
        daemon.start()
        assert client.version().api == "v1"


# --- dsecctl -----------------------------------------------------------------------------------------------------


def dsecctl(daemon: Daemon, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "dsecctl", *words], input=stdin, capture_output=True, check=False, cwd=CHECKOUT,
        env={**os.environ, "DSEC_SOCKET": str(daemon.socket)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "status", "out", "err"),
    [
        (("--", "sh", "-c", "echo out; echo err >&2; exit 7"), 7, b"out\n", b"err\n"),
        (("nonesuch",), 127, b"", b"dsecctl: "),
        (("/etc/passwd",), 126, b"", b"dsecctl: "),
        (("sh", "-c", "kill -TERM $$"), 143, b"", b""),
    ],
)
def test_run_ends_with_the_commands_status(
    daemon: Daemon, words: tuple[str, ...], status: int, out: bytes, err: bytes
) -> None:
    before = dsecctl(daemon, "ps", "-q").stdout  # the machine that other tests share, where one has booted
    done = dsecctl(daemon, "run", IMAGE, *words)
    assert (done.returncode, done.stdout) == (status, out)
    assert done.stderr.startswith(err)
    assert dsecctl(daemon, "ps", "-q").stdout == before


def test_run_with_options(daemon: Daemon) -> None:
    done = dsecctl(daemon, "run", "--timeout", "3", IMAGE, "sh", "-c", "echo early; sleep 60")
    assert (done.returncode, done.stdout) == (124, b"early\n")
    done = dsecctl(daemon, "run", "-i", "-e", "A=b c", "-w", "/tmp", "-u", "nobody", IMAGE, "sh", "-c",
                   "id -un; pwd; echo $A; cat", stdin=b"from stdin")  # fmt: skip
    assert done.stdout == b"nobody\n/tmp\nb c\nfrom stdin"
    done = dsecctl(daemon, "run", IMAGE, "--", "cat")
    assert (done.returncode, done.stdout) == (0, b"")


def test_a_sandbox_by_the_command_line(daemon: Daemon, tmp_path: Path) -> None:
    assert dsecctl(daemon, "create", "--name", "web", IMAGE, "sh", "-c", "echo ready; sleep 600").stdout == b"web\n"
    (tmp_path / "f").write_text("content")
    assert dsecctl(daemon, "cp", str(tmp_path / "f"), "web:/srv/").returncode == 0
    assert dsecctl(daemon, "exec", "web", "cat", "/srv/f").stdout == b"content"
    assert dsecctl(daemon, "logs", "web").stdout == b"ready\n"
    for words, status in (
        (("pause", "web"), 0),
        (("pause", "nonesuch"), 4),
        (("exec", "nonesuch", "true"), 125),
        (("resume", "web"), 0),
        (("stop", "--grace", "0", "web"), 0),
        (("exec", "web", "true"), 125),
        (("start", "web"), 0),
        (("exec", "web", "test", "-e", "/srv/f"), 0),
        (("rm", "web"), 0),
        (("inspect", "web"), 4),
    ):
        done = dsecctl(daemon, *words)
        assert done.returncode == status, (words, done.stderr)


def test_a_shell_on_a_terminal(daemon: Daemon) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (33, 101))
    before = termios.tcgetattr(theirs)
    running = subprocess.Popen(
        [sys.executable, "-m", "dsecctl", "run", "-it", IMAGE, "bash", "--norc"], cwd=CHECKOUT,
        env={**os.environ, "DSEC_SOCKET": str(daemon.socket), "PS1": "$ "}, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    try:
        text = converse(ours, [(rb"# $", b"stty size; tty\r"), (rb"33 101\r\n/dev/pts/\d+\r\n.*# $", b"exit 9\r")])
        assert running.wait(120) == 9, text
        assert termios.tcgetattr(theirs) == before
    finally:
        running.kill()
        running.wait()
        os.close(ours)
        os.close(theirs)


def converse(terminal: int, steps: list[tuple[bytes, bytes]]) -> bytes:
    """Wait for each pattern, then type."""
    text = b""
    for pattern, answer in steps:
        while not re.search(pattern, text, re.DOTALL):
            assert select.select([terminal], [], [], 120)[0], text
            text += os.read(terminal, 4096)
        os.write(terminal, answer)
    return text
