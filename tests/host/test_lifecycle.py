# SPDX-License-Identifier: Apache-2.0
"""The life of a sandbox through the API of a real daemon; effects are read from the kernel or from inside."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from libdsec import AsyncClient, Client, Sandbox
from libdsec.errors import (
    AlreadyExists,
    Conflict,
    ExecNotStarted,
    FeatureMissing,
    InvalidSpec,
    NotFound,
    SandboxLost,
    TimedOut,
    WrongState,
)
from libdsec.types import CreateRequest, ExecReason, ExecRequest, Limits, SandboxSpec
from tests.support import cgroups
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.slowdeath import held_in_exit
from tests.support.waiting import until

IMAGE = "debian:trixie"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        with running.client() as client:
            client.finish(client.image_import(name=IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected
        for sandbox in connected.list_all():
            connected.delete(sandbox.id)


def sh(client: Client, sandbox_id: str, script: str) -> str:
    result = client.exec(sandbox_id, ExecRequest(argv=("sh", "-c", script)))
    assert result.exit_code == 0, result
    return result.text


def spec(**more: object) -> SandboxSpec:
    return SandboxSpec.model_validate({"image": IMAGE, **more})


def test_stop_keeps_files_and_start_runs_again(client: Client) -> None:
    sandbox = client.create(spec())
    sh(client, sandbox.id, "echo kept > /root/file; touch /tmp/gone")
    assert client.stop(sandbox.id, grace_s=1).state == "stopped"
    with pytest.raises(WrongState, match="it is stopped") as caught:
        client.exec(sandbox.id, ExecRequest(argv=("true",)))
    assert caught.value.hint == f"dsecctl start {sandbox.id}"
    assert client.stop(sandbox.id).state == "stopped"
    assert client.start(sandbox.id).state == "running"
    assert client.start(sandbox.id).state == "running"
    assert sh(client, sandbox.id, "cat /root/file; ls /tmp") == "kept\n"


def test_stop_kills_what_outlives_the_grace_and_its_exec_says_so(daemon: Daemon, client: Client) -> None:
    sandbox = client.create(spec())
    stubborn = ExecRequest(argv=("sh", "-c", "trap '' TERM; touch /root/deaf; while :; do sleep 1; done"))
    with daemon.client() as waiting, ThreadPoolExecutor() as pool:
        running = pool.submit(waiting.exec, sandbox.id, stubborn)
        sh(client, sandbox.id, "until [ -e /root/deaf ]; do sleep 0.02; done")
        assert client.stop(sandbox.id, grace_s=0.2).state == "stopped"
        assert running.result(30).reason == ExecReason.SHUTDOWN


def test_stop_lets_processes_clean_up(client: Client) -> None:
    sandbox = client.create(spec())
    script = "trap 'echo bye > /root/bye; exit' TERM; touch /root/ready; while :; do sleep 0.05; done"
    client.exec_start(sandbox.id, ExecRequest(argv=("sh", "-c", script)))
    until(lambda: sh(client, sandbox.id, "ls /root").split() == ["ready"])
    client.stop(sandbox.id, grace_s=10)
    client.start(sandbox.id)
    assert sh(client, sandbox.id, "cat /root/bye") == "bye\n"


def test_pause_freezes_commands_and_nothing_else(daemon: Daemon, client: Client) -> None:
    sandbox = client.create(spec())
    client.exec_start(sandbox.id, ExecRequest(argv=("sh", "-c", "while :; do echo x; sleep 0.01; done"), exec_id="x"))
    assert client.pause(sandbox.id).state == "paused"
    events = (daemon.cgroup_dir / f"sandbox-{sandbox.id}" / "run" / "cgroup.events").read_text()
    assert "frozen 1" in events
    # The agent, which is not frozen, may still read what was in the pipe.
    until(lambda: stands_still(client, sandbox.id, "x"))
    first = client.exec_output(sandbox.id, "x").end
    time.sleep(0.3)
    assert client.exec_output(sandbox.id, "x").end == first
    with pytest.raises(WrongState, match="it is paused"):
        client.exec(sandbox.id, ExecRequest(argv=("true",)))
    assert client.stat(sandbox.id, "/etc/passwd").type == "file"
    assert client.pause(sandbox.id).state == "paused"
    assert client.resume(sandbox.id).state == "running"
    until(lambda: client.exec_output(sandbox.id, "x").end > first)


def stands_still(client: Client, sandbox_id: str, exec_id: str) -> bool:
    """Whether nothing comes of a command for a moment in which much would."""
    first = client.exec_output(sandbox_id, exec_id).end
    time.sleep(0.3)
    return client.exec_output(sandbox_id, exec_id).end == first


def test_its_first_process_is_called_what_it_is(daemon: Daemon, client: Client) -> None:
    sandbox = client.create(spec())
    assert sh(client, sandbox.id, "cat /proc/1/comm") == "dsec-agent\n"
    pid = cgroups.first_process(daemon.cgroup_dir / f"sandbox-{sandbox.id}")
    shown = subprocess.run(["ps", "-o", "comm=", "-p", str(pid)], capture_output=True, text=True, check=True)
    assert shown.stdout == "dsec-agent\n"


def _cpu_us(cgroup: Path) -> dict[str, int]:
    """cpu.stat as the kernel tells it to this process."""
    return {key: int(value) for key, value in map(str.split, (cgroup / "cpu.stat").read_text().splitlines())}


def _number(file: Path) -> int | None:
    return int(file.read_text()) if file.exists() else None


def test_usage_is_what_the_kernel_counts(daemon: Daemon, client: Client) -> None:
    sandbox = client.create(spec())
    cgroup = daemon.cgroup_dir / f"sandbox-{sandbox.id}"
    # The agent has a child for its first moments, which moves it into its cgroup.
    until(lambda: client.usage(sandbox.id).processes == 1)
    fresh = client.usage(sandbox.id)
    assert (fresh.processes, fresh.execs_running, fresh.execs_total) == (1, 0, 0)
    for _ in range(3):
        client.exec_start(sandbox.id, ExecRequest(argv=("sleep", "1000")))
    sh(client, sandbox.id, "dd if=/dev/zero of=/dev/null bs=64M count=1")
    burned = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; cut -d ' ' -f 14,15 /proc/$$/stat"
    ticks = sum(map(int, sh(client, sandbox.id, burned).split()))  # of 10 ms each: proc_pid_stat(5)

    before = _cpu_us(cgroup)
    used = client.usage(sandbox.id)
    after = _cpu_us(cgroup)
    assert (used.execs_running, used.execs_total) == (3, 5)
    pids = [pid for file in cgroup.rglob("cgroup.procs") for pid in file.read_text().split()]
    assert used.processes == len(pids) == 4
    assert used.cpu_usage_us is not None
    assert fresh.cpu_usage_us is not None
    assert before["usage_usec"] <= used.cpu_usage_us <= after["usage_usec"]
    assert before["user_usec"] <= used.cpu_user_us <= after["user_usec"]
    assert before["system_usec"] <= used.cpu_system_us <= after["system_usec"]
    assert used.cpu_usage_us - fresh.cpu_usage_us > (ticks - 2) * 10_000 > 0
    assert 64 << 10 <= used.max_rss_kib < 80 << 10
    # Without a controller the kernel has no such file.
    assert (used.memory_current_bytes is None) == (_number(cgroup / "memory.current") is None)
    assert used.pids_current == _number(cgroup / "pids.current")

    client.pause(sandbox.id)
    paused = client.usage(sandbox.id)
    assert (paused.processes, paused.execs_running, paused.execs_total) == (4, 3, 5)
    client.stop(sandbox.id, grace_s=0)
    with pytest.raises(WrongState, match="read the usage of .*: it is stopped"):
        client.usage(sandbox.id)
    client.start(sandbox.id)
    assert client.usage(sandbox.id).execs_total == 0


@pytest.mark.parametrize("state", ["running", "paused", "stopped", "failed"])
def test_delete_is_legal_in_every_state_and_idempotent(daemon: Daemon, client: Client, state: str) -> None:
    sandbox = client.create(spec())
    if state == "paused":
        client.pause(sandbox.id)
    elif state == "stopped":
        client.stop(sandbox.id, grace_s=0)
    elif state == "failed":
        kill_init(daemon, sandbox.id)
        client.wait(sandbox.id, ["failed"], wait_s=60)
    client.delete(sandbox.id)
    client.delete(sandbox.id)
    with pytest.raises(NotFound, match="no such sandbox"):
        client.inspect(sandbox.id)
    assert daemon.residue() == []


def kill_init(daemon: Daemon, sandbox_id: str) -> None:
    """SIGKILL to everything in the sandbox, behind the daemon's back."""
    (daemon.cgroup_dir / f"sandbox-{sandbox_id}" / "cgroup.kill").write_text("1")


def test_death_is_noticed_and_a_failed_sandbox_keeps_its_files(daemon: Daemon, client: Client) -> None:
    sandbox = client.create(spec())
    sh(client, sandbox.id, "echo kept > /root/file")
    kill_init(daemon, sandbox.id)
    failed = client.wait(sandbox.id, ["failed"], wait_s=60)
    assert failed.reason == "crash"
    assert not (daemon.cgroup_dir / f"sandbox-{sandbox.id}").exists()
    client.start(sandbox.id)
    assert sh(client, sandbox.id, "cat /root/file") == "kept\n"


def test_a_death_that_takes_long_is_a_death_and_no_lost_agent(daemon: Daemon, client: Client) -> None:
    sandbox = client.create(spec())
    client.exec_start(sandbox.id, ExecRequest(argv=("sleep", "600")))
    group = daemon.cgroup_dir / f"sandbox-{sandbox.id}"
    agent = cgroups.first_process(group)
    sleeper = next(int(pid) for file in (group / "run").rglob("cgroup.procs") for pid in file.read_text().split())
    with held_in_exit(sleeper):
        os.kill(agent, signal.SIGKILL)
        time.sleep(2)  # longer than the daemon tries to reach the agent again
        # The connection is closed, the process still there.
        assert Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    assert client.wait(sandbox.id, ["failed"], wait_s=60).reason == "crash"


def test_a_command_in_a_sandbox_that_dies_is_an_infrastructure_error(daemon: Daemon, client: Client) -> None:
    sandbox = client.create(spec())

    async def main() -> None:
        async with AsyncClient(socket=daemon.socket) as concurrent:
            task = asyncio.create_task(concurrent.exec(sandbox.id, ExecRequest(argv=("sleep", "60"))))
            await asyncio.sleep(0.5)
            kill_init(daemon, sandbox.id)
            with pytest.raises((SandboxLost, WrongState)):
                await task

    asyncio.run(main())


def test_fifty_equal_creates_make_one_sandbox(daemon: Daemon, client: Client) -> None:
    async def main() -> set[str]:
        async with AsyncClient(socket=daemon.socket) as concurrent:
            calls = [concurrent.create(spec(), idempotency_key="job-1") for _number in range(50)]
            return {sandbox.id for sandbox in await asyncio.gather(*calls)}

    assert len(asyncio.run(main())) == 1
    assert len(client.list_all()) == 1
    with pytest.raises(Conflict, match="the key was used with another request"):
        client.create(spec(labels={"other": "yes"}), idempotency_key="job-1")


def test_an_id_is_taken_once(client: Client) -> None:
    client.create(spec(), id="web")
    with pytest.raises(AlreadyExists, match="sandbox exists since") as caught:
        client.create(spec(), id="web")
    assert "dsecctl rm web" in (caught.value.hint or "")


def test_ids_that_look_like_kernel_files_are_ordinary(client: Client) -> None:
    for name in ("cgroup.procs", "a" * 63, "memory.max", "0.--"):
        client.create(spec(), id=name)
        assert sh(client, name, "echo ok") == "ok\n"


def test_ttl_deletes_and_time_paused_does_not_count(client: Client) -> None:
    held = client.create(spec(ttl_s=600))
    client.pause(held.id)
    began = time.monotonic()
    short = client.create(spec(ttl_s=2))
    until(lambda: short.id not in {s.id for s in client.list_all()})
    assert client.inspect(held.id).expires_at is None
    paused_s = time.monotonic() - began
    resumed = client.resume(held.id)
    assert held.expires_at is not None
    assert resumed.expires_at is not None
    assert paused_s - 0.1 <= (resumed.expires_at - held.expires_at).total_seconds() < 500
    client.update(held.id, ttl_s=1)
    with pytest.raises(NotFound):
        client.wait(held.id, ["deleting", "stopped"], wait_s=60)
        client.wait(held.id, ["stopped"], wait_s=60)


def test_ttl_survives_a_restart_and_is_never_shortened(daemon: Daemon, client: Client) -> None:
    sandbox = client.create(spec(ttl_s=3600))
    daemon.restart()
    assert client.inspect(sandbox.id).expires_at == sandbox.expires_at
    client.exec(sandbox.id, ExecRequest(argv=("true",)))
    assert client.inspect(sandbox.id).expires_at == sandbox.expires_at


def test_list_filters_and_pages(client: Client) -> None:
    for number in range(5):
        client.create(spec(labels={"job": "a" if number < 3 else "b", "n": str(number)}), id=f"s{number}")
    client.stop("s0", grace_s=0)
    ids = [s.id for s in client.list(label=["job=a"]).sandboxes]
    assert ids == ["s0", "s1", "s2"]
    assert [s.id for s in client.list(label=["job=a"], state=["stopped"]).sandboxes] == ["s0"]
    assert [s.id for s in client.list(label=["job", "n=4"]).sandboxes] == ["s4"]
    page = client.list(limit=2)
    assert ([s.id for s in page.sandboxes], page.next) == (["s0", "s1"], "s1")
    assert [s.id for s in client.list(after="s1").sandboxes] == ["s2", "s3", "s4"]


def test_batch_reports_each_item(client: Client) -> None:
    items = [CreateRequest(spec=spec(), id=f"b{number}") for number in range(6)]
    items.append(CreateRequest(spec=SandboxSpec(image="nothing:1")))
    results = client.finish(client.create_batch(items))
    assert [item["sandbox"]["id"] for item in results.result[:6]] == [f"b{number}" for number in range(6)]
    assert results.result[6]["error"]["code"] == "not-found"
    assert {s.state for s in client.list_all()} == {"running"}


def test_wait_times_out_with_the_state(client: Client) -> None:
    sandbox = client.create(spec())
    with pytest.raises(TimedOut, match="it is running after"):
        client.wait(sandbox.id, ["stopped"], wait_s=0.2)


def test_main_command_runs_on_create_and_on_start(client: Client) -> None:
    sandbox = client.create(spec(command=("sh", "-c", "echo started >> /root/starts; echo out; sleep 1000")))
    until(lambda: client.exec_output(sandbox.id, "main").data == b"out\n")
    client.stop(sandbox.id, grace_s=0)
    client.start(sandbox.id)
    until(lambda: sh(client, sandbox.id, "cat /root/starts") == "started\nstarted\n")


def test_environment_comes_from_image_then_sandbox_then_command(daemon: Daemon, client: Client) -> None:
    tree = daemon.state_dir / "overlay"
    tree.mkdir(exist_ok=True)
    (tree / "marker").write_text("x")
    config = {"env": ["A=image", "B=image", "C=image"]}
    imported = client.image_import(
        name="tool:1", source=str(tree), kind="directory", prefix="/opt/tool", config=config
    )
    client.finish(imported)
    sandbox = client.create(spec(toolkits=("tool:1",), env={"B": "sandbox", "C": "sandbox"}))
    result = client.exec(
        sandbox.id, ExecRequest(argv=("sh", "-c", "echo $A $B $C $HOME; ls /opt/tool"), env={"C": "exec"})
    )
    assert result.text == "image sandbox exec /root\nmarker\n"


def test_what_the_host_lacks_is_refused_by_name(client: Client) -> None:
    controllers = Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    if "memory" in controllers:
        pytest.skip("this host has the memory controller: limits are proved by the limit tests there")
    with pytest.raises(FeatureMissing, match=r"limit memory\.max: this host has no cgroup v2 controller memory"):
        client.create(spec(limits=Limits(memory_max_bytes=1 << 28)))
    with pytest.raises(FeatureMissing, match=r"class batch, which needs cpu\.idle: this host has no .* controller cpu"):
        client.create(spec(cpu_class="batch"))
    assert "pids.max" in client.create(spec()).off
    with pytest.raises(FeatureMissing, match="create with backend 'fullvm'"):
        client.create(spec(backend="fullvm"))


def test_all_faults_of_a_spec_come_at_once(client: Client) -> None:
    body = b'{"spec": {"image": "x", "hostname": "-", "ttl_s": -1, "colour": "red"}}'
    with pytest.raises(InvalidSpec) as caught:
        client.request("create", body=body)
    paths = {error["path"] for error in caught.value.details["errors"]}
    assert paths == {"spec.hostname", "spec.ttl_s", "spec.colour"}


def test_a_number_that_is_no_id_of_a_sandbox_is_refused_with_the_range(client: Client) -> None:
    wrong = "'.*70000.*': uids and gids of this sandbox are 0 to 65535"
    for user in ("70000", "0:70000", "4294967295"):
        with pytest.raises(InvalidSpec, match=wrong.replace("70000", user[-5:])):
            client.create(spec(user=user))
    box = client.create(spec()).id
    with pytest.raises(InvalidSpec, match=wrong):
        client.exec(box, ExecRequest(argv=("true",), user="70000:0"))
    with pytest.raises(InvalidSpec, match=wrong):
        client.stat(box, "/", user=":70000")
    assert client.exec(box, ExecRequest(argv=("id", "-u"), user="65535:65535")).text == "65535\n"
    # Only its own files know this one, so its agent says it.
    sh(client, box, "echo 'far:x:70000:70000::/:/bin/sh' >> /etc/passwd")
    with pytest.raises(ExecNotStarted, match="its ids are outside the sandbox's range"):
        client.exec(box, ExecRequest(argv=("true",), user="far"))
    with pytest.raises(InvalidSpec, match="its ids are outside the sandbox's range"):
        client.stat(box, "/", user="far")


def test_an_environment_that_no_command_could_have_is_refused_when_the_sandbox_is_made(client: Client) -> None:
    with pytest.raises(InvalidSpec, match=r"env: all variables, the image's too, take \d+ bytes, at most 1048576"):
        client.create(spec(env={f"V{number}": "x" * 100_000 for number in range(50)}))
    longest = "x" * (131_071 - len("V="))
    box = client.create(spec(env={"V": longest, "W": "y" * 100_000} | {f"V{i}": "z" * 90_000 for i in range(9)})).id
    assert sh(client, box, "printf %s \"$V\" | wc -c").strip() == str(len(longest))
    env = {"V": longest + "x"}
    with pytest.raises(InvalidSpec, match="variable 'V' has 131072 bytes with its name, execve"):
        client.request("create", body=json.dumps({"spec": {"image": IMAGE, "env": env}}).encode())
    with pytest.raises(InvalidSpec) as caught:
        client.request("exec", body=json.dumps({"argv": ["\u00e9" * 70_000], "env": env}).encode(), id=box)
    assert {error["path"] for error in caught.value.details["errors"]} >= {"argv[0]", "env"}


def test_readonly_root_and_sizes(client: Client) -> None:
    sandbox = client.create(spec(readonly_root=True, tmp_size_bytes=8 << 20, shm_size_bytes=1 << 20, hostname="box"))
    assert sh(client, sandbox.id, "hostname").strip() == "box"
    assert client.exec(sandbox.id, ExecRequest(argv=("touch", "/root/x"))).exit_code == 1
    sizes = sh(client, sandbox.id, "df -k --output=size /tmp /dev/shm | tail -n 2").split()
    assert sizes == ["8192", "1024"]


def test_exec_of_what_is_not_there_says_so(daemon: Daemon, client: Client) -> None:
    with Sandbox(image=IMAGE, client=client) as sandbox:
        from libdsec.errors import ExecNotStarted

        with pytest.raises(ExecNotStarted) as caught:
            sandbox.exec("/no/such/program")
        assert caught.value.details["reason"] == "not-found"
        with pytest.raises(ExecNotStarted) as caught:
            sandbox.exec("true", user="nosuchuser")
        assert caught.value.details["reason"] == "no-such-user"
        assert "no such user or group" in caught.value.message
        with pytest.raises(ExecNotStarted) as caught:
            sandbox.exec("true", cwd="/nowhere")
        assert caught.value.details["reason"] == "bad-cwd"


def test_events_tell_the_life_of_a_sandbox(client: Client) -> None:
    since = client.events(limit=10000).last
    sandbox = client.create(spec())
    client.pause(sandbox.id)
    client.resume(sandbox.id)
    client.delete(sandbox.id)
    # An event may follow the answer that it is about.
    deadline, kinds = time.monotonic() + 60, [""]
    while kinds[-1] != "sandbox.deleted" and time.monotonic() < deadline:
        events = client.events(since=since, limit=1000, wait_s=1).events
        kinds = [e.kind for e in events if e.subject == sandbox.id] or [""]
    assert kinds == [
        "sandbox.created", "sandbox.running", "sandbox.paused", "sandbox.resumed", "sandbox.deleting",
        "sandbox.deleted",
    ]  # fmt: skip


def test_the_longest_names_work_and_longer_ones_are_refused(client: Client) -> None:
    """FL-31: sockets and the host name have their own limits."""
    longest = "n" * 63
    labels = {"l" * 128: "v" * 128}
    assert client.create(spec(labels=labels), id=longest).spec.labels == labels
    assert sh(client, longest, "hostname") == f"{longest}\n"
    assert client.list(label=[f"{'l' * 128}={'v' * 128}"]).sandboxes[0].id == longest
    exec_id = "e" * 64
    assert client.exec(longest, ExecRequest(argv=("true",), exec_id=exec_id)).exec_id == exec_id
    name = f"{'i' * 120}:{'t' * 128}"
    assert name in client.image_tag(IMAGE, name).names
    client.delete(client.create(SandboxSpec(image=name)).id)
    client.image_remove(name)
    with pytest.raises(InvalidSpec, match="must be 1 to 63"):
        client.create(spec(), id="n" * 64)
    with pytest.raises(InvalidSpec, match="hostname: must be 1 to 63"):
        Sandbox(image=IMAGE, hostname="h" * 64, client=client)
