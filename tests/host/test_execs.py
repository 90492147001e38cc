# SPDX-License-Identifier: Apache-2.0
"""Commands in real sandboxes through a real daemon: what others got wrong, numbered as in the field lessons (FL-n)."""

import asyncio
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import AsyncClient, Client, Sandbox
from libdsec.errors import ExecTimeout, InvalidSpec
from libdsec.types import ExecReason, ExecRequest, Limits, Rlimit
from tests.support import machines
from tests.support.backends import KINDS, Kind
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

IMAGE = "debian:trixie"


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    found.require()
    return found


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(config=machines.config_if_any()) as running:
        with running.client() as client:
            client.finish(client.image_import(name=IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        yield running


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def sandbox(client: Client, kind: Kind) -> Iterator[Sandbox]:
    with Sandbox(image=IMAGE, backend=kind.name, client=client) as running:
        yield running


def sh_text(sandbox: Sandbox, script: str) -> str:
    return sandbox.exec("sh", "-c", script).text


def rss_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")))


def test_fl1_output_of_short_commands_is_never_lost(kind: Kind, daemon: Daemon, sandbox: Sandbox) -> None:
    async def main() -> list[bytes]:
        gate = asyncio.Semaphore(64)
        async with AsyncClient(socket=daemon.socket) as concurrent:

            async def one() -> bytes:
                async with gate:
                    return (await concurrent.exec(sandbox.id, ExecRequest(argv=("printf", "X")))).stdout

            return await asyncio.gather(*(one() for _number in range(kind.count(2000))))

    assert set(asyncio.run(main())) == {b"X"}


def test_fl2_fl3_a_grandchild_with_stdout_neither_delays_nor_dies(sandbox: Sandbox) -> None:
    script = "(i=0; while :; do i=$((i+1)); echo noise; echo $i > /tmp/alive; sleep 0.1; done) & echo hi"
    # The grandchild ends never, so that a call which waits for it does not, either.
    result = sandbox.exec("sh", "-c", script, timeout_s=30)
    assert b"hi" in result.stdout.splitlines()
    assert result.exit_code == 0
    counted = "until grep . /tmp/alive; do :; done"  # for a moment it is empty
    first = int(sh_text(sandbox, counted))
    # Ten lines after its first it has met what a closed pipe would have told it.
    until(lambda: int(sh_text(sandbox, counted)) > first + 10, 60)


def test_fl4_exit_codes_survive_orphans(kind: Kind, daemon: Daemon, sandbox: Sandbox) -> None:
    async def main() -> list[int | None]:
        gate = asyncio.Semaphore(32)
        script = "(sleep 0.01 & ) ; exit 7"
        async with AsyncClient(socket=daemon.socket) as concurrent:

            async def one() -> int | None:
                async with gate:
                    result = await concurrent.exec(sandbox.id, ExecRequest(argv=("sh", "-c", script)))
                    return result.exit_code

            return await asyncio.gather(*(one() for _number in range(kind.count(500))))

    assert set(asyncio.run(main())) == {7}


def test_fl5_orphans_leave_no_zombies(kind: Kind, sandbox: Sandbox) -> None:
    script = f"i=0; while [ $i -lt {kind.count(300)} ]; do i=$((i+1)); (sleep 0 & ); done"
    sandbox.exec("sh", "-c", script, timeout_s=60)

    def zombies() -> list[str]:
        states = sandbox.exec("sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null").text.splitlines()
        return [line for line in states if line.rpartition(")")[2].split()[0] == "Z"]

    until(lambda: not zombies())


def test_fl6_a_timeout_kills_the_whole_tree_and_nothing_else(client: Client, sandbox: Sandbox) -> None:
    client.exec_start(sandbox.id, ExecRequest(argv=("sleep", "60"), exec_id="bystander"))
    script = "trap '' TERM; setsid sh -c 'trap \"\" TERM; while :; do sleep 1; done' & while :; do sleep 1; done"
    with pytest.raises(ExecTimeout):
        sandbox.exec("sh", "-c", script, timeout_s=0.5, exec_id="tree")
    # Inside it is mounted as well, with the sandbox's own cgroup as its root.
    members = "cat /sys/fs/cgroup/run/tree/cgroup.events 2>/dev/null || echo populated 0"
    until(lambda: "populated 0" in sh_text(sandbox, members))
    assert client.exec_inspect(sandbox.id, "bystander").running
    client.exec_signal(sandbox.id, "bystander", 9)


def test_fl7_fl8_timeouts_are_typed_server_side_and_keep_the_output(daemon: Daemon, sandbox: Sandbox) -> None:
    with pytest.raises(ExecTimeout) as caught:
        sandbox.exec("sh", "-c", "echo partial; echo err >&2; sleep 60", timeout_s=2)
    assert (caught.value.stdout, caught.value.stderr) == (b"partial\n", b"err\n")
    with pytest.raises(ExecTimeout) as caught:
        sandbox.exec("sh", "-c", "echo one; sleep 60", idle_timeout_s=0.5)
    assert caught.value.result.reason is ExecReason.IDLE_TIMEOUT
    assert sandbox.exec("sh", "-c", "kill -9 $$").returncode == -9
    with pytest.raises(InvalidSpec, match="timeout_s"):
        sandbox.exec("true", timeout_s=0)
    del daemon


def test_fl9_output_is_bytes(sandbox: Sandbox) -> None:
    data = os.urandom(1 << 20)
    sandbox.write("/tmp/random", data)
    assert sandbox.exec("cat", "/tmp/random", max_output_bytes=2 << 20).stdout == data
    assert sandbox.exec("printf", r"\360\237\230\200\377").text == "\U0001f600\N{REPLACEMENT CHARACTER}"


def test_fl10_truncation_is_told_and_memory_stays_bounded(kind: Kind, daemon: Daemon, sandbox: Sandbox) -> None:
    before = rss_kib(daemon.pid)
    size = kind.count(kind.count(2_000_000_000))
    result = sandbox.exec("sh", "-c", f"yes | head -c {size}", max_output_bytes=1 << 20, timeout_s=120)
    assert (len(result.stdout), result.stdout_truncated, result.stdout_bytes) == (1 << 20, True, size)
    assert rss_kib(daemon.pid) - before < 32 * 1024


def test_fl11_large_stdin_arrives_and_an_empty_one_ends_nothing(kind: Kind, sandbox: Sandbox) -> None:
    data = os.urandom(1 << 20) * kind.count(100)
    result = sandbox.exec("sha256sum", stdin=data, timeout_s=120)
    assert result.text.split()[0] == hashlib.sha256(data).hexdigest()
    assert sandbox.exec("sh", "-c", "cat; sleep 0.5; exit 3", stdin=b"").exit_code == 3


def test_fl12_output_is_held_whole_up_to_the_buffer_for_whoever_comes_later(client: Client, sandbox: Sandbox) -> None:
    for size in (20_000, 60_000, 900_000):
        exec_id = f"late-{size}"
        script = f"head -c {size} /dev/zero | tr '\\0' x"
        client.exec_start(sandbox.id, ExecRequest(argv=("sh", "-c", script), exec_id=exec_id))
        result = client.exec_wait(sandbox.id, exec_id, wait_s=30)
        assert result.stdout == b"x" * size
        assert (result.stdout_truncated, result.stdout_dropped_bytes) == (False, 0)


def test_fl13_no_shell_and_no_profile_come_between(sandbox: Sandbox) -> None:
    sandbox.write("/root/evil.sh", "echo hidden")
    result = sandbox.exec("bash", "-c", "echo $PATH", env={"PATH": "/opt/bin:/usr/bin:/bin"})
    assert result.text == "/opt/bin:/usr/bin:/bin\n"
    assert sandbox.exec("echo", "$HOME; `id`").text == "$HOME; `id`\n"
    assert sandbox.exec("sh", "-c", "echo $HOME", user="nobody").text == "/nonexistent\n"


def test_limits_users_and_umask_reach_the_command(sandbox: Sandbox) -> None:
    script = "id -u; id -g; umask; ulimit -n; pwd"
    result = sandbox.exec(
        "sh", "-c", script, user="daemon", umask=0o077, cwd="/usr", rlimits={"nofile": Rlimit(soft=64, hard=128)}
    )
    assert result.text.split() == ["1", "1", "0077", "64", "/usr"]


def test_a_command_has_no_descriptor_of_the_agent(sandbox: Sandbox) -> None:
    assert sandbox.exec("ls", "/proc/self/fd").text.split() == ["0", "1", "2", "3"]  # 3 is what ls reads


def stands_still(client: Client, sandbox_id: str, exec_id: str) -> bool:
    """Whether nothing comes of a command for a moment in which much would."""
    first = client.exec_output(sandbox_id, exec_id).end
    time.sleep(0.3)
    return client.exec_output(sandbox_id, exec_id).end == first


def test_a_pause_stops_commands_and_their_time_and_nothing_else(client: Client, sandbox: Sandbox) -> None:
    script = "while :; do echo x; sleep 0.01; done"
    client.exec_start(sandbox.id, ExecRequest(argv=("sh", "-c", script), exec_id="ticking", timeout_s=60))
    assert sandbox.pause().state == "paused"
    # The agent, which is not frozen, may still read what was in the pipe.
    until(lambda: stands_still(client, sandbox.id, "ticking"))
    first = client.exec_output(sandbox.id, "ticking").end
    time.sleep(0.3)
    assert client.exec_output(sandbox.id, "ticking").end == first
    assert client.stat(sandbox.id, "/etc/passwd").type == "file"
    assert sandbox.pause().state == "paused"
    assert sandbox.resume().state == "running"
    until(lambda: client.exec_output(sandbox.id, "ticking").end > first)
    client.exec_signal(sandbox.id, "ticking", 9)


def test_limits_of_one_command_hold_it_and_nobody_else(kind: Kind, sandbox: Sandbox) -> None:
    if not kind.emulated:
        return  # needs the host's controllers: tests/vm/inside/test_limits.py
    script = "for i in $(seq 30); do sleep 3 & done; wait"
    held = sandbox.exec("sh", "-c", script, limits=Limits(pids_max=10), timeout_s=60)
    assert b"fork" in held.stderr.lower()
    assert sandbox.exec("sh", "-c", script, timeout_s=60).stderr == b""
