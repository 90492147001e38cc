# SPDX-License-Identifier: Apache-2.0
"""libdsec against a daemon in memory: what it sends, what it raises, what it repeats and what it never does twice."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import AsyncClient, AsyncSandbox, Client, Sandbox
from libdsec import types as t
from libdsec.errors import (
    Conflict,
    ConnectionFailed,
    ExecFailed,
    ExecNotStarted,
    ExecTimeout,
    InfraError,
    InvalidSpec,
    NoCapacity,
    NotFound,
    SandboxLost,
    WrongState,
)
from libdsec.routes import ROUTES
from tests.support.fake_commands import pattern
from tests.support.fake_daemon import FakeDaemon
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        yield fake


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(daemon.socket, retry_s=5) as made:
        yield made


@pytest.fixture
def box(client: Client) -> Iterator[Sandbox]:
    with Sandbox(image="debian:trixie", client=client) as sandbox:
        yield sandbox


def calls(daemon: FakeDaemon, name: str) -> list[dict[str, str]]:
    return [arguments for seen, arguments in daemon.seen if seen == name]


# --- one definition ----------------------------------------------------------------------------------------------


def test_the_synchronous_form_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/unasync.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_every_route_is_a_method_and_both_forms_have_the_same_names(kind: type) -> None:
    for route in ROUTES:
        if route.name != "exec_stream":  # Sandbox.popen and Sandbox.attach
            assert callable(getattr(kind, route.name)), route.name


def test_both_forms_have_the_same_public_names() -> None:
    for one, other in ((Client, AsyncClient), (Sandbox, AsyncSandbox)):
        names = {name for name in dir(one) if not name.startswith("_")}
        assert names == {name for name in dir(other) if not name.startswith("_")}


def test_importing_the_contract_loads_no_client() -> None:
    code = "import sys, libdsec.types, libdsec.errors, libdsec.routes; sys.exit('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# --- life --------------------------------------------------------------------------------------------------------


def test_sandbox_lives_as_long_as_its_block(daemon: FakeDaemon, client: Client) -> None:
    with Sandbox(image="debian:trixie", labels={"job": "7"}, client=client, workdir="/srv") as sandbox:
        assert daemon.boxes[sandbox.id].info.spec.labels == {"job": "7"}
        assert daemon.boxes[sandbox.id].info.spec.workdir == "/srv"
    assert daemon.boxes == {}


def test_handle_to_an_existing_sandbox_deletes_nothing(daemon: FakeDaemon, client: Client) -> None:
    info = client.create(t.SandboxSpec(image="debian:trixie"), id="mine")
    with Sandbox.get("mine", client=client) as sandbox:
        assert sandbox.info == info
    assert list(daemon.boxes) == ["mine"]
    with pytest.raises(NotFound):
        Sandbox.get("other", client=client)


def test_sandbox_without_a_block(daemon: FakeDaemon, client: Client) -> None:
    sandbox = Sandbox(image="debian:trixie", client=client)
    with pytest.raises(WrongState, match="not created yet"):
        sandbox.exec("true")
    assert sandbox.create().create().exec("echo", "hi").text == "hi\n"
    sandbox.delete()
    sandbox.delete()
    assert daemon.boxes == {}


def test_an_error_in_the_block_is_not_hidden_by_a_failing_delete(daemon: FakeDaemon) -> None:
    def fail() -> None:
        with Client(daemon.socket, retry_s=0) as client, Sandbox(image="debian:trixie", client=client):
            daemon.down()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        fail()
    assert "could not be deleted" in caught.value.__notes__[0]
    daemon.up()


def test_life_cycle_calls(box: Sandbox) -> None:
    assert box.pause().state is t.State.PAUSED
    with pytest.raises(WrongState) as caught:
        box.start()
    assert caught.value.details == {"state": "paused", "required": "stopped"}
    assert (box.usage().id, box.usage().processes) == (box.id, 4)
    assert box.resume().state is t.State.RUNNING
    assert box.stop(grace_s=0).state is t.State.STOPPED
    assert box.wait("stopped", "failed", timeout_s=1).state is t.State.STOPPED
    with pytest.raises(WrongState):
        box.usage()
    assert box.start().state is t.State.RUNNING
    assert box.update(labels={"a": "b"}).spec.labels == {"a": "b"}
    assert box.refresh().spec.labels == {"a": "b"}


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(InvalidSpec) as caught:
        Sandbox(image="debian:trixie", ttl_s=-1, hostname="-", colour="red")  # type: ignore[call-arg]
    assert {error["path"] for error in caught.value.details["errors"]} == {
        "spec.ttl_s",
        "spec.hostname",
        "spec.colour",
    }


@pytest.mark.parametrize("id", ["..", "a/b", "", "A", "a?b"])
def test_an_id_never_becomes_another_path(daemon: FakeDaemon, client: Client, id: str) -> None:
    with pytest.raises(InvalidSpec):
        client.delete(id)
    assert daemon.seen == []


def test_batch_items_all_carry_keys(daemon: FakeDaemon, client: Client) -> None:
    items = [t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie")) for _ in range(3)]
    done = client.finish(client.create_batch(items))
    assert len(done.result) == 3
    assert len(daemon.keys) == 3


# --- what is repeated --------------------------------------------------------------------------------------------


def test_create_whose_answer_was_lost_makes_one_sandbox(daemon: FakeDaemon, client: Client) -> None:
    client.version()
    daemon.faults["create"] = ["cut", "lose"]
    with Sandbox(image="debian:trixie", client=client):
        assert len(daemon.boxes) == 1
    assert len(calls(daemon, "create")) == 3
    assert daemon.boxes == {}


def test_same_key_with_another_request_is_a_conflict(client: Client) -> None:
    client.create(t.SandboxSpec(image="debian:trixie"), idempotency_key="k")
    with pytest.raises(Conflict):
        client.create(t.SandboxSpec(image="debian:bookworm"), idempotency_key="k")


def test_no_capacity_is_waited_out_and_bounded(daemon: FakeDaemon, client: Client) -> None:
    daemon.faults["create"] = [NoCapacity("start 'big': no room"), NoCapacity("start 'big': no room")]
    client.create(t.SandboxSpec(image="debian:trixie"))
    assert len(calls(daemon, "create")) == 3
    # One that the daemon had wait for room has waited long enough.
    daemon.faults["create"] = [NoCapacity("create 'big': the host is short of memory", waited_s=30.0)]
    with pytest.raises(NoCapacity):
        client.create(t.SandboxSpec(image="debian:trixie"))
    daemon.faults["create"] = [NoCapacity("start 'big': no room", retryable=False)]
    with pytest.raises(NoCapacity):
        client.create(t.SandboxSpec(image="debian:trixie"))
    with Client(daemon.socket, retry_s=0.3) as hasty:
        daemon.faults["create"] = [NoCapacity("start 'big': no room")] * 1000
        with pytest.raises(NoCapacity):
            hasty.create(t.SandboxSpec(image="debian:trixie"))


def test_a_change_that_has_no_key_is_not_repeated(daemon: FakeDaemon, box: Sandbox) -> None:
    daemon.faults["pause"] = ["cut"]
    with pytest.raises(ConnectionFailed) as caught:
        box.pause()
    assert caught.value.retryable
    assert len(calls(daemon, "pause")) == 1


def test_other_errors_are_not_repeated(daemon: FakeDaemon, client: Client) -> None:
    with pytest.raises(NotFound):
        client.create(t.SandboxSpec(image="nothing"))
    assert len(calls(daemon, "create")) == 1


def test_requests_wait_for_a_daemon_that_restarts(daemon: FakeDaemon, box: Sandbox) -> None:
    daemon.down()
    timer = threading.Timer(0.3, daemon.up)
    timer.start()
    assert box.exec("echo", "back").text == "back\n"
    timer.join()


def test_a_daemon_that_is_not_there_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_SOCKET", str(tmp_path / "none"))
    began = time.monotonic()
    with Client() as client, pytest.raises(ConnectionFailed) as caught:
        client.version()
    assert time.monotonic() - began < 20  # it would try again for 30 s
    assert caught.value.message == f"connect to {tmp_path / 'none'}: No such file or directory"
    assert "systemctl start dsecd.socket" in (caught.value.hint or "")


def test_a_late_answer_is_no_exec_timeout(daemon: FakeDaemon, client: Client) -> None:
    info = client.create(t.SandboxSpec(image="debian:trixie"))
    with Client(daemon.socket, timeout_s=0.5, retry_s=0.2) as hurried:
        with pytest.raises(ConnectionFailed) as caught:
            hurried.request("exec", body=t.ExecRequest(argv=("sleep",), exec_id="e"), id=info.id)
        assert "did not answer in time" in caught.value.message
        until(lambda: "e" in daemon.boxes[info.id].execs)
        daemon.on_loop(daemon.boxes[info.id].execs["e"].end)


def test_answers_that_are_no_answers_are_internal_errors(daemon: FakeDaemon, client: Client) -> None:
    async def nonsense(request: object) -> dict[str, str]:
        return {"hello": "there"}

    daemon.on_version = nonsense  # type: ignore[method-assign,assignment]
    with pytest.raises(InfraError, match="read the answer of 'version'"):
        client.version()


# --- exec --------------------------------------------------------------------------------------------------------


def test_exec_takes_arguments_or_one_list(box: Sandbox) -> None:
    assert box.exec("echo", "a b", "c").stdout == b"a b c\n"
    assert box.exec(["echo", "a b", "c"]).text == "a b c\n"


def test_status_is_a_result_unless_checked(box: Sandbox) -> None:
    assert box.exec("exit", "3").returncode == 3
    assert box.exec("die", "15").returncode == -15
    with pytest.raises(ExecFailed) as caught:
        box.exec("exit", "3", check=True)
    assert caught.value.result.stderr == b"exiting\n"
    assert "it ended with status 3" in caught.value.message
    with pytest.raises(ExecFailed, match="SIGTERM"):
        box.exec("die", "15", check=True)


def test_timeout_raises_always_and_keeps_the_output(box: Sandbox) -> None:
    with pytest.raises(ExecTimeout) as caught:
        box.exec("late", timeout_s=1)
    assert caught.value.stdout == b"before the deadline\n"
    with pytest.raises(InvalidSpec, match="timeout_s"):
        box.exec("echo", timeout_s=0)


def test_a_command_killed_by_its_own_signal_did_not_time_out(box: Sandbox) -> None:
    assert box.exec("die", "9", timeout_s=1).signal == 9


def test_a_command_that_went_down_with_its_sandbox_has_no_result(box: Sandbox) -> None:
    with pytest.raises(SandboxLost):
        box.exec("shutdown")


def test_command_that_cannot_start(box: Sandbox) -> None:
    with pytest.raises(ExecNotStarted) as caught:
        box.exec("nonesuch")
    assert caught.value.details["reason"] == "not-found"


def test_any_bytes_come_through(box: Sandbox) -> None:
    data = os.urandom(1 << 20)
    assert box.exec("cat", stdin=data).stdout == data
    assert box.exec("cat", stdin="ein Öl").text == "ein Öl"
    assert box.exec("raw", "f09f98").text == "�"


def test_truncation_is_said(box: Sandbox) -> None:
    result = box.exec("emit", "5000", max_output_bytes=100)
    assert (result.stdout, result.stdout_truncated, result.stdout_bytes) == (pattern(100), True, 5000)


def test_large_input_is_streamed(daemon: FakeDaemon, box: Sandbox) -> None:
    data = os.urandom(6 << 20)
    result = box.exec("cat", stdin=data)
    assert result.stdout == data
    assert calls(daemon, "exec") == []


def test_exec_whose_answer_was_lost_runs_once(daemon: FakeDaemon, box: Sandbox) -> None:
    daemon.faults["exec"] = ["cut"]
    assert box.exec("echo", "once").text == "once\n"
    assert daemon.started == 1
    assert len(calls(daemon, "exec")) == 1


def test_exec_that_was_never_read_is_sent_again(daemon: FakeDaemon, box: Sandbox) -> None:
    daemon.faults["exec"] = ["lose"]
    assert box.exec("echo", "once").text == "once\n"
    assert daemon.started == 1
    assert len(calls(daemon, "exec")) == 2


def test_exec_in_a_deleted_sandbox(daemon: FakeDaemon, box: Sandbox) -> None:
    daemon.faults["exec"] = ["lose"]
    daemon.boxes.clear()
    with pytest.raises(NotFound):
        box.exec("echo")


# --- streams -----------------------------------------------------------------------------------------------------


def collect(stream: object) -> bytes:
    return b"".join(data for name, data in stream if name == "stdout")  # type: ignore[attr-defined]


@pytest.mark.parametrize("cuts", [[], [0], [1000, 0, 2500], [100_000], [5000] * 12])
def test_every_byte_once_whatever_breaks(daemon: FakeDaemon, box: Sandbox, cuts: list[int]) -> None:
    daemon.stream_cuts = list(cuts)
    with box.popen("emit", "100000") as stream:
        assert collect(stream) == pattern(100_000)
        assert stream.ended
        assert stream.info.exit_code == 0
    assert daemon.stream_cuts == []
    assert daemon.started == 1


def test_stream_survives_a_daemon_that_restarts(daemon: FakeDaemon, box: Sandbox) -> None:
    stream = box.popen("reader", pty=True)
    command = daemon.boxes[box.id].execs[stream.exec_id]

    def say(text: bytes) -> None:
        command.stdout += text
        command.changed.set()

    daemon.on_loop(lambda: say(b"one\n"))
    assert stream.read() == ("stdout", b"one\n")
    daemon.down()
    command.stdout += b"two\n"
    timer = threading.Timer(0.3, daemon.up)
    timer.start()
    assert stream.read() == ("stdout", b"two\n")
    timer.join()
    daemon.on_loop(command.end)
    assert stream.read() is None
    assert stream.wait().exit_code == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cwd": "relative"}, "exec.cwd: must be an absolute path"),
        ({"exec_id": "a b"}, "exec.exec_id: must be 1 to 64 of A-Z, a-z, 0-9, '_' and '-'"),
        ({"nosuch": 1}, "exec.nosuch: unknown field"),
        ({"env": {"A": "b\0"}}, "exec.env.A: must not contain a NUL byte"),
    ],
)
def test_what_is_wrong_is_said_in_words(box: Sandbox, fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        box.exec("true", **fields)  # type: ignore[arg-type]
    assert caught.value.message == message


def test_a_reader_waits_while_a_writer_attaches_again(
    daemon: FakeDaemon, box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is gone for a moment, and only the writer has noticed: to the reader that is no end."""
    with box.popen("reader", pty=True) as stream:
        command = daemon.boxes[box.id].execs[stream.exec_id]
        attaching, go_on = threading.Event(), threading.Event()
        connect = stream._connect

        def slowly() -> None:
            attaching.set()
            assert go_on.wait(10)
            connect()

        monkeypatch.setattr(stream, "_connect", slowly)
        assert stream._socket is not None
        stream._socket.close()
        writer = threading.Thread(target=stream.resize, args=(30, 90))
        writer.start()
        assert attaching.wait(10)
        threading.Timer(0.1, go_on.set).start()
        command.stdout += b"more"
        assert stream.read() == ("stdout", b"more")
        writer.join()


def test_what_ended_a_stream_is_told_to_reader_and_writer(daemon: FakeDaemon, box: Sandbox) -> None:
    stream = box.popen("reader", pty=True)
    del daemon.boxes[box.id].execs[stream.exec_id]
    assert stream._socket is not None
    stream._socket.close()
    for use in (lambda: stream.resize(30, 90), stream.read):
        with pytest.raises(NotFound):
            use()


def test_stream_gives_up_in_time(daemon: FakeDaemon, box: Sandbox) -> None:
    with box.popen("reader", reconnect_s=0.3) as stream:
        daemon.down()
        with pytest.raises(ConnectionFailed):
            stream.read()
        daemon.up()


def test_lost_output_is_an_error_and_never_a_gap(daemon: FakeDaemon, box: Sandbox) -> None:
    box.client.exec_start(box.id, t.ExecRequest(argv=("emit", "9000"), exec_id="e"))
    daemon.boxes[box.id].execs["e"].oldest = 4000
    with box.attach("e") as stream, pytest.raises(InfraError, match="4000 bytes after offset 0") as caught:
        stream.read()
    assert caught.value.details["lost_bytes"] == 4000
    with box.attach("e", allow_gap=True) as stream:
        assert collect(stream) == pattern(9000)[4000:]
        assert stream.missed_bytes == 4000
    with box.attach("e", stdout_offset=5000) as stream:
        assert collect(stream) == pattern(9000)[5000:]
        assert stream.offsets == (9000, 0)


def test_attach_to_nothing(box: Sandbox) -> None:
    with pytest.raises(NotFound):
        box.attach("none")


def test_stream_of_a_command_that_cannot_start(box: Sandbox) -> None:
    with pytest.raises(ExecNotStarted):
        box.popen("nonesuch")


def test_input_output_and_resize(daemon: FakeDaemon, box: Sandbox) -> None:
    with box.popen("cat", stdin=True, pty=True) as stream:
        stream.write("hello\n")
        assert stream.read() == ("stdout", b"hello\n")
        stream.resize(50, 132)
        stream.close_stdin()
        assert stream.wait(check=True).stdout_bytes == 6
        assert daemon.boxes[box.id].execs[stream.exec_id].sizes == [(50, 132)]


@pytest.mark.parametrize("acknowledged", [False, True])
def test_input_that_may_be_lost_is_an_error(daemon: FakeDaemon, box: Sandbox, acknowledged: bool) -> None:
    daemon.acknowledge_stdin = acknowledged
    stream = box.popen("cat", stdin=True)
    stream.write("hello\n")
    assert stream.read() == ("stdout", b"hello\n")
    command = daemon.boxes[box.id].execs[stream.exec_id]
    if acknowledged:
        command.stdout += b"more"
        daemon.on_loop(command.changed.set)
        assert stream.read() == ("stdout", b"more")
    daemon.down()
    daemon.up()
    if acknowledged:
        daemon.on_loop(command.end)
        assert stream.wait().exit_code == 0
    else:
        with pytest.raises(InfraError, match="standard input was under way"):
            stream.read()


def test_leaving_the_block_kills_and_detach_does_not(daemon: FakeDaemon, box: Sandbox) -> None:
    with box.popen("sleep", exec_id="dies"):
        pass
    with box.popen("sleep", exec_id="lives") as stream:
        stream.detach()
    execs = daemon.boxes[box.id].execs
    assert (execs["dies"].signals, execs["dies"].running) == ([9], False)
    assert (execs["lives"].signals, execs["lives"].running) == ([], True)


def test_lines_are_whole_however_they_are_cut(box: Sandbox) -> None:
    text = "ein 🐟\r\nund noch einer\nohne Ende"
    with box.popen("raw", text.encode().hex()) as stream:
        assert list(stream.stdout) == ["ein 🐟", "und noch einer", "ohne Ende"]
    with box.popen("exit", "3") as stream:
        assert list(stream.stdout) == []
        assert stream.stderr_tail == b"exiting\n"
        with pytest.raises(ExecFailed):
            stream.wait(check=True)
    with box.popen("exit", "3") as stream:
        assert list(stream.lines()) == [("stderr", "exiting")]


def test_timeout_of_a_stream(box: Sandbox) -> None:
    with box.popen("late", timeout_s=1) as stream, pytest.raises(ExecTimeout):
        stream.wait()


def test_logs_are_those_of_main(client: Client) -> None:
    with Sandbox(image="debian:trixie", command=["echo", "ready"], client=client) as sandbox:
        assert list(sandbox.logs()) == [("stdout", b"ready\n")]


def test_logs_follow_to_the_end_and_leave_the_reader_alone(daemon: FakeDaemon, box: Sandbox) -> None:
    with box.popen("sleep", exec_id="e"):
        command = daemon.boxes[box.id].execs["e"]
        command.stdout = b"early "

        def later() -> None:
            command.stdout += b"late"
            command.end()

        timer = threading.Timer(0.2, lambda: daemon.on_loop(later))
        timer.start()
        assert list(box.logs("e")) == [("stdout", b"early ")]
        assert b"".join(data for _, data in box.logs("e", follow=True)) == b"early late"
        timer.join()
    assert daemon.seen.count(("exec_stream", {"id": box.id})) == 1


# --- operations and events ---------------------------------------------------------------------------------------


def test_operation_is_followed_to_its_result(client: Client) -> None:
    seen: list[str] = []
    done = client.finish(
        client.image_import("x:1", "/some.tar"), progress=lambda operation: seen.append(operation.state)
    )
    assert t.ImageInfo.model_validate(done.result).names == ("debian:trixie",)
    assert seen == ["running", "done"]


def test_failed_operation_raises_its_error(client: Client) -> None:
    with pytest.raises(InfraError, match="no such file"):
        client.finish(client.image_import("x:1", "/nowhere"))


def test_events_stream_until_the_connection_breaks(daemon: FakeDaemon, client: Client) -> None:
    daemon.events = [t.Event(seq=n, at="2026-03-01T10:12:00Z", kind="sandbox.created") for n in (1, 2, 3)]
    seen: list[int] = []
    with pytest.raises(ConnectionFailed), client.events_stream(since=1) as events:
        seen.extend(event.seq for event in events)
    assert seen == [2, 3]
    assert [event.seq for event in client.events(since=2).events] == [3]


# --- asyncio -----------------------------------------------------------------------------------------------------


def test_async_form(daemon: FakeDaemon) -> None:
    async def main() -> None:
        async with AsyncClient(daemon.socket) as client:
            async with AsyncSandbox(image="debian:trixie", client=client) as sandbox:
                assert (await sandbox.exec("echo", "hi")).text == "hi\n"
                daemon.stream_cuts = [10_000, 3000]
                async with await sandbox.popen("emit", "50000") as stream:
                    data = b"".join([data async for _, data in stream])
                assert data == pattern(50_000)
                assert (await sandbox.exec("cat", stdin=pattern(5 << 20))).stdout == pattern(5 << 20)
                async with await sandbox.popen("echo", "a\nb") as stream:
                    assert [line async for line in stream.stdout] == ["a", "b"]

    asyncio.run(main())
    assert daemon.boxes == {}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_many_at_once_leave_no_descriptor_behind(daemon: FakeDaemon) -> None:
    async def one(client: AsyncClient) -> None:
        async with AsyncSandbox(image="debian:trixie", client=client) as sandbox:
            assert (await sandbox.exec("echo", "x")).ok

    async def main() -> int:
        before = open_files()
        async with AsyncClient(daemon.socket) as client:
            await asyncio.gather(*(one(client) for _ in range(150)))
        # The daemon's own descriptors live in this process too; it closes them when it sees ours closed.
        await asyncio.to_thread(until, lambda: open_files() <= before + 2)
        return open_files() - before

    assert asyncio.run(main()) <= 2


def test_cancelled_tasks_release_what_they_held(daemon: FakeDaemon) -> None:
    async def follow(sandbox: AsyncSandbox) -> None:
        async with await sandbox.popen("sleep", exec_id="s") as stream:
            await stream.read()

    async def main() -> None:
        async with AsyncClient(daemon.socket) as client, AsyncSandbox(image="debian:trixie", client=client) as box:
            following = asyncio.create_task(follow(box))
            running = asyncio.create_task(box.exec("sleep", exec_id="e"))
            while daemon.started < 2:
                await asyncio.sleep(0.01)
            before = open_files()
            for task in (following, running):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await asyncio.to_thread(until, lambda: open_files() < before)
            execs = daemon.boxes[box.id].execs
            await asyncio.to_thread(until, lambda: execs["s"].signals and execs["e"].signals)
            assert (execs["s"].signals, execs["e"].signals) == ([9], [9])

    asyncio.run(main())


def test_a_creation_that_is_cut_short_leaves_no_sandbox(daemon: FakeDaemon) -> None:
    arrived, cancelled = threading.Event(), threading.Event()
    original = daemon.on_create

    async def slow(request: object) -> t.Sandbox:
        answer = await original(request)  # type: ignore[arg-type]
        arrived.set()
        await asyncio.to_thread(cancelled.wait)
        return answer

    daemon.on_create = slow  # type: ignore[method-assign]

    async def main() -> None:
        async with AsyncClient(daemon.socket) as client:
            task = asyncio.create_task(AsyncSandbox(image="debian:trixie", client=client).create())
            await asyncio.to_thread(arrived.wait)
            assert len(daemon.boxes) == 1
            task.cancel()
            cancelled.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert daemon.boxes == {}
