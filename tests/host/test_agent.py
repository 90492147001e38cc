# SPDX-License-Identifier: Apache-2.0
"""The agent's execs: starting, output, input, ends, terminals. Files are in test_agent_files, hostile peers in
test_agent_protocol."""

import errno
import hashlib
import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent_client import ATTACH, PTY, STDIN, AgentClient, AgentError, ExecChannel, Field
from tests.support.agent_process import AgentProcess, build, running, state_of
from tests.support.waiting import until

EXITED, SIGNALLED = 1, 2
BY_ITSELF, TIMEOUT, IDLE, KILLED, SHUTDOWN = range(5)
MIB = 1 << 20


@pytest.fixture
def client(agent: AgentProcess) -> Iterator[AgentClient]:
    with agent.connect() as connection:
        yield connection


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """An exec id of this test's own."""
    return f"{request.node.originalname[5:40]}-{time.monotonic_ns() % 10**9}".replace("_", "-")


def ended(exec_: ExecChannel) -> tuple[int, int, int]:
    assert exec_.exit is not None
    return int(exec_.exit["KIND"]), int(exec_.exit["STATUS"]), int(exec_.exit["REASON"])


def sh(script: str) -> list[str | bytes]:
    return ["sh", "-c", script]


# ---- output and ends


def test_streams_are_apart_and_status_is_told(client: AgentClient, name: str):
    exec_ = client.run(sh("echo out; echo err >&2; exit 7"), id=name)
    assert (exec_.out, exec_.err, ended(exec_)) == (b"out\n", b"err\n", (EXITED, 7, BY_ITSELF))
    assert exec_.exit is not None
    assert (exec_.exit["TOTAL_OUT"], exec_.exit["TOTAL_ERR"]) == (4, 4)
    assert abs(int(exec_.exit["FINISHED_NS"]) - time.time_ns()) < 60e9
    assert int(exec_.exit["FINISHED_NS"]) >= int(exec_.exit["STARTED_NS"])


def test_death_by_a_signal_of_its_own_is_no_timeout(client: AgentClient, name: str):
    exec_ = client.run(sh("kill -KILL $$"), id=name, fields=[("TIMEOUT_MS", 60_000)])
    assert ended(exec_) == (SIGNALLED, signal.SIGKILL, BY_ITSELF)


def test_fast_exits_lose_no_output_fl1(agent: AgentProcess, client: AgentClient, name: str):
    count, at_once = 400 if agent.sanitized else 2000, 64
    waiting: list[ExecChannel] = []
    for i in range(count):
        waiting.append(client.start(["printf", "X"], id=f"{name}-{i}", fields=[("KEEP_MS", 1)]))
        if len(waiting) == at_once:
            exec_ = waiting.pop(0)
            exec_.wait()  # the client asserts that EXIT is the last frame of a channel
            assert (exec_.out, ended(exec_)) == (b"X", (EXITED, 0, BY_ITSELF))
    for exec_ in waiting:
        exec_.wait()
        assert exec_.out == b"X"
    assert not any(client.aside[c] for c in range(1, client.last_channel + 1)), "frames after EXIT"


def test_a_grandchild_holding_the_pipe_delays_nothing_fl2(client: AgentClient, name: str):
    begun = time.monotonic()
    exec_ = client.run(sh("sleep 300 & echo hi"), id=name)
    assert time.monotonic() - begun < 60
    assert (exec_.out, ended(exec_)) == (b"hi\n", (EXITED, 0, BY_ITSELF))
    client.request("SIGNAL", [("ID", name), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])


def test_what_is_left_behind_does_not_die_of_sigpipe_fl3(
    agent: AgentProcess, client: AgentClient, name: str, tmp_path: Path
):
    ticks = tmp_path / "ticks"
    loop = f"while :; do echo tick; echo tick >&2; echo >> {ticks}; sleep 0.05; done"
    exec_ = client.run(sh(f"({loop}) & echo started"), id=name, fields=[("KEEP_MS", 0)])
    assert exec_.out.replace(b"tick\n", b"") == b"started\n"
    until(lambda: ticks.exists() and ticks.stat().st_size >= 20)
    # Forgotten by now, but what it left can still be killed by the exec's name.
    until(lambda: name not in client.list())
    assert agent.processes_of(name)
    client.request("SIGNAL", [("ID", name), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])
    until(lambda: name not in agent.exec_cgroups())


def test_orphans_do_not_disturb_statuses_fl4(client: AgentClient, name: str):
    script = sh("(sh -c 'exit 3' & sh -c 'exit 0' &) ; exit 7")
    execs = [client.start(script, id=f"{name}-{i}", fields=[("KEEP_MS", 1)]) for i in range(500)]
    assert [ended(e) for e in execs if e.wait()] == [(EXITED, 7, BY_ITSELF)] * 500


def test_a_thousand_orphans_leave_no_zombie_fl5(agent: AgentProcess, client: AgentClient, name: str):
    exec_ = client.run(sh("for i in $(seq 1000); do (true &); done"), id=name, timeout_s=30)
    assert ended(exec_)[1] == 0
    until(lambda: not agent.children())
    until(lambda: name not in agent.exec_cgroups())


def test_non_utf8_bytes_come_back_unchanged_fl9(client: AgentClient, name: str, tmp_path: Path):
    (tmp_path / "data").write_bytes(os.urandom(MIB))
    exec_ = client.run(["cat", str(tmp_path / "data")], id=name)
    assert exec_.out == (tmp_path / "data").read_bytes()


# ---- what a command is given


@pytest.mark.parametrize(
    ("argv", "fields", "code", "errno_name"),
    [
        (["no-such-command"], [], "not-found", "ENOENT"),
        (["/no/such/file"], [], "not-found", "ENOENT"),
        (["/etc/passwd"], [], "not-executable", "EACCES"),
        (["/etc"], [], "not-executable", "EACCES"),
        (["true"], [("USER", "nobody-here")], "no-such-user", None),
        (["true"], [("USER", "root:no-such-group")], "no-such-user", None),
        (["true"], [("CWD", "/no/such/dir")], "bad-cwd", "ENOENT"),
        (["true"], [("CWD", "/etc/passwd")], "bad-cwd", "ENOTDIR"),
        (["true"], [("ENV", "NOEQUALS")], "invalid", None),
        (["true"], [("ENV", "PATH=/nowhere")], "not-found", "ENOENT"),
        ([b"tr\0ue"], [], "invalid", None),
        ([], [], "invalid", None),
    ],
)
def test_failing_starts_say_why(client: AgentClient, name: str, argv, fields, code, errno_name):
    with pytest.raises(AgentError) as caught:
        client.run(argv, id=name, fields=fields)
    assert caught.value.code == code
    if errno_name:
        assert caught.value.errno == getattr(errno, errno_name)
    # The name is free again at once.
    assert ended(client.run(["true"], id=name)) == (EXITED, 0, BY_ITSELF)


def test_the_working_directory_is_entered_as_the_user(client: AgentClient, name: str, tmp_path: Path):
    (tmp_path / "private").mkdir(mode=0o700)
    client.run(["true"], id=name, fields=[("CWD", str(tmp_path / "private"))])
    with pytest.raises(AgentError, match="^bad-cwd"):
        client.run(["true"], id=name + "2", fields=[("CWD", str(tmp_path / "private")), ("USER", "nobody")])


def test_a_used_id_is_refused(client: AgentClient, name: str):
    client.run(["true"], id=name)
    with pytest.raises(AgentError, match="^exists"):
        client.run(["true"], id=name)
    client.request("FORGET", [("ID", name)])
    client.run(["true"], id=name)


def test_environment_is_exactly_what_was_asked_fl13(client: AgentClient, name: str):
    exec_ = client.run(["/usr/bin/env", "-0"], id=name, fields=[("ENV", "A=1"), ("ENV", b"B=\xff=x y")])
    got = dict(line.split(b"=", 1) for line in exec_.out.rstrip(b"\0").split(b"\0"))
    assert got == {
        b"A": b"1",
        b"B": b"\xff=x y",
        b"HOME": b"/root",
        b"PATH": b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    exec_ = client.run(["/usr/bin/env"], id=name + "2", fields=[("ENV", "HOME=/x"), ("ENV", "PATH=/y")])
    assert exec_.out == b"HOME=/x\nPATH=/y\n"


def test_users_and_groups(client: AgentClient, name: str):
    def who(user: str) -> bytes:
        script = "echo $(id -u):$(id -g):$(id -G | tr ' ' ,):$HOME"
        return client.run(
            sh(script), id=f"{name}-{user.replace(':', '-')}", fields=[("USER", user)]
        ).out.strip()

    assert who("") == b"0:0:0:/root"
    assert who("nobody") == b"65534:65534:65534:/nonexistent"
    assert who("65534") == b"65534:65534:65534:/nonexistent"
    assert who("12345") == b"12345:0:0:/"
    assert who("12345:678") == b"12345:678:678:/"
    assert who("daemon:mail") == b"1:8:8:/usr/sbin"


def test_working_directory(client: AgentClient, name: str):
    assert client.run(["pwd"], id=name).out == b"/root\n"
    assert client.run(["pwd"], id=name + "2", fields=[("CWD", "/usr/lib")]).out == b"/usr/lib\n"


def test_limits_umask_and_a_clean_process(client: AgentClient, name: str):
    limit = struct.pack("<IQQ", 7, 100, 200)  # RLIMIT_NOFILE
    script = (
        "ulimit -n; ulimit -Hn; umask; ls /proc/self/fd | wc -l; grep -E '^Sig(Blk|Ign)' /proc/self/status"
    )
    fields: list[Field] = [("RLIMIT", limit), ("UMASK", 0o027)]
    lines = client.run(sh(script), id=name, fields=fields).out.split()
    assert lines[:4] == [b"100", b"200", b"0027", b"4"]  # 0, 1, 2 and the directory itself
    assert lines[4:7] == [b"SigBlk:", b"0" * 16, b"SigIgn:"]
    # 32 and 33 are the C library's own: make leaves them ignored.
    assert int(lines[7], 16) & ~(0b11 << 31) == 0


def test_each_exec_leads_a_session_in_its_own_cgroup(agent: AgentProcess, client: AgentClient, name: str):
    exec_ = client.start(["sleep", "60"], id=name)
    pid = int(exec_.started()["PID"])
    assert agent.processes_of(name) == [pid]
    assert os.getsid(pid) == pid
    assert os.getpgid(pid) == pid
    client.request("SIGNAL", [("ID", name), ("SIGNAL", signal.SIGTERM), ("SCOPE", 0)])
    exec_.wait()
    assert ended(exec_) == (SIGNALLED, signal.SIGTERM, BY_ITSELF)
    assert name not in agent.exec_cgroups()


# ---- timeouts


def test_timeout_kills_the_whole_tree_and_nothing_else_fl6(
    agent: AgentProcess, client: AgentClient, name: str
):
    other = client.start(["sleep", "60"], id=name + "-other")
    other.started()
    stubborn = "trap '' TERM HUP; while :; do sleep 1; done"
    script = f'setsid sh -c "{stubborn}" & (setsid sh -c "{stubborn}" &); echo up; {stubborn}'
    exec_ = client.start(sh(script), id=name, fields=[("TIMEOUT_MS", 3000)])
    exec_.read_until(b"up")
    until(lambda: len(agent.processes_of(name)) >= 4)
    pids = agent.processes_of(name)
    exec_.wait()
    assert ended(exec_) == (SIGNALLED, signal.SIGKILL, TIMEOUT)
    until(lambda: all(state_of(pid) is None for pid in pids))
    assert agent.processes_of(name + "-other")
    client.request("SIGNAL", [("ID", name + "-other"), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])
    other.wait()
    assert ended(other) == (SIGNALLED, signal.SIGKILL, KILLED)


def test_timeout_needs_no_client_fl7(agent: AgentProcess, client: AgentClient, name: str):
    exec_ = client.start(["sleep", "60"], id=name, fields=[("TIMEOUT_MS", 300)])
    pid = int(exec_.started()["PID"])
    client.close()
    until(lambda: state_of(pid) is None)
    with agent.connect() as again:
        exec_ = again.attach(name)
        exec_.wait()
        assert ended(exec_) == (SIGNALLED, signal.SIGKILL, TIMEOUT)


def test_timeout_keeps_what_was_printed_fl8(client: AgentClient, name: str):
    exec_ = client.run(sh("echo partial; echo e >&2; sleep 60"), id=name, fields=[("TIMEOUT_MS", 2000)])
    assert (exec_.out, exec_.err, ended(exec_)[2]) == (b"partial\n", b"e\n", TIMEOUT)


def test_idle_timeout_counts_silence_only(client: AgentClient, name: str):
    begun = time.monotonic()
    script = "for i in 1 2 3 4; do echo $i; sleep 0.4; done; sleep 60"
    exec_ = client.run(sh(script), id=name, fields=[("IDLE_TIMEOUT_MS", 2500)])
    assert ended(exec_) == (SIGNALLED, signal.SIGKILL, IDLE)
    assert exec_.out == b"1\n2\n3\n4\n"
    assert time.monotonic() - begun > 3.5


def test_a_reader_that_does_not_read_is_no_silence(client: AgentClient, name: str):
    exec_ = client.start(
        ["yes"], id=name, credit=4096, fields=[("IDLE_TIMEOUT_MS", 1000), ("BUFFER_BYTES", 65536)]
    )
    exec_.step(consume=False)
    time.sleep(2)
    assert client.list(name)[name]["RUNNING"] == 1
    client.request("SIGNAL", [("ID", name), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])
    exec_.close()


def test_a_pause_stops_the_clock(agent: AgentProcess, client: AgentClient, name: str):
    assert agent.cgroup
    freezer = agent.cgroup / "run/cgroup.freeze"
    exec_ = client.start(["sleep", "60"], id=name, fields=[("TIMEOUT_MS", 1500), ("IDLE_TIMEOUT_MS", 1900)])
    exec_.started()
    freezer.write_text("1")
    try:
        time.sleep(2.2)
        assert agent.processes_of(name)
    finally:
        freezer.write_text("0")
    exec_.wait(60)
    assert ended(exec_) == (SIGNALLED, signal.SIGKILL, TIMEOUT)


# ---- flow


def test_a_flood_is_held_back_by_credit_fl10(agent: AgentProcess, client: AgentClient, name: str):
    exec_ = client.start(["yes"], id=name, credit=100_000, fields=[("BUFFER_BYTES", 262_144)])
    while len(exec_.out) < 100_000:
        exec_.step(consume=False)
    with pytest.raises(TimeoutError):
        exec_.step(0.2, consume=False)

    def stands_still() -> bool:
        seen = int(client.list(name)[name]["TOTAL_OUT"])
        time.sleep(0.1)
        return 100_000 < seen == int(client.list(name)[name]["TOTAL_OUT"])

    until(stands_still)
    assert int(client.list(name)[name]["TOTAL_OUT"]) <= 100_000 + 262_144, "the producer was not held back"
    exec_.credit(1, 5000)
    exec_.step(consume=False)
    assert exec_.out == b"y\n" * (len(exec_.out) // 2)
    exec_.close()  # nobody reads: the ring keeps the newest and counts
    until(lambda: int(client.list(name)[name]["DROPPED_OUT"]) > 10 * MIB)
    assert agent.rss_kib() < 200_000 if agent.sanitized else agent.rss_kib() < 20_000
    client.request("SIGNAL", [("ID", name), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])
    until(lambda: not client.list(name)[name]["RUNNING"])
    last = client.list(name)[name]
    frames, told = client.request("PEEK", [("ID", name), ("STREAM", 1), ("OFFSET", 0), ("BYTES", MIB)])
    held = b"".join(f.payload[9:] for f in frames)
    assert told == {"START": int(last["TOTAL_OUT"]) - len(held), "END": last["TOTAL_OUT"]}
    assert len(held) == 262_144
    assert int(last["DROPPED_OUT"]) == int(told["START"]) - 105_000


def test_a_hundred_mib_of_input_arrive_fl11(agent: AgentProcess, client: AgentClient, name: str):
    size = 100 * MIB if not agent.sanitized else 10 * MIB
    block = os.urandom(MIB)
    exec_ = client.start(["sha256sum"], id=name, flags=ATTACH | STDIN)
    digest = hashlib.sha256()
    for _ in range(size // MIB):
        exec_.input(block)
        digest.update(block)
    exec_.input(b"", eof=True)
    exec_.wait()
    assert exec_.out.split()[0].decode() == digest.hexdigest()


def test_end_of_input_does_not_end_the_exec_fl11(client: AgentClient, name: str):
    exec_ = client.start(sh("cat; sleep 0.3; exit 3"), id=name, flags=ATTACH | STDIN)
    exec_.input(b"", eof=True)
    exec_.wait()
    assert ended(exec_) == (EXITED, 3, BY_ITSELF)


def test_input_nobody_reads_is_no_trouble(client: AgentClient, name: str):
    exec_ = client.start(sh("exec <&-; sleep 0.2; exit 4"), id=name, flags=ATTACH | STDIN)
    exec_.input(b"z" * (2 * MIB))
    exec_.wait()
    assert ended(exec_) == (EXITED, 4, BY_ITSELF)


def test_without_stdin_it_is_empty(client: AgentClient, name: str):
    exec_ = client.run(sh("cat; readlink /proc/self/fd/0"), id=name)
    assert exec_.out == b"/dev/null\n"


def test_a_greedy_exec_starves_nobody(client: AgentClient, name: str):
    greedy = [client.start(["yes"], id=f"{name}-{i}", credit=1 << 40) for i in range(4)]
    for exec_ in greedy:
        exec_.started()
    times = []
    for i in range(20):
        begun = time.monotonic()
        small = client.start(["echo", "small"], id=f"{name}-s{i}")
        small.wait()
        times.append(time.monotonic() - begun)
        assert small.out == b"small\n"
        times.append(client.ping())
    assert sorted(times)[len(times) // 2] < 2

    def least() -> int:
        client.ping()
        return min(sum(len(frame.payload) for frame in client.aside[exec_.channel]) for exec_ in greedy)

    # How much each has is the kernel's doing, too, which may not let one of them run for a while.
    until(lambda: least() > 4 * MIB)
    for exec_ in greedy:
        client.request("SIGNAL", [("ID", exec_.id), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])
        exec_.close()


# ---- readers come and go


def test_reattach_after_a_cut_repeats_and_skips_nothing_fl12(
    agent: AgentProcess, client: AgentClient, name: str
):
    exec_ = client.start(["seq", "1", "300000"], id=name, credit=65536, fields=[("BUFFER_BYTES", 262_144)])
    for _ in range(4):
        exec_.step()
    text, got = exec_.out, exec_.offsets[1]
    for _ in range(5):
        # Bytes that were sent, but that nobody took, and a producer that would go on if it could.
        time.sleep(0.05)
        client.close()
        client = agent.connect()
        time.sleep(0.02)
        exec_ = client.attach(name, out=got, credit=65536)
        assert exec_.first[1] == got, "bytes within the window were dropped"
        while exec_.offsets[1] - got < 150_000 and exec_.exit is None:
            exec_.step()
        text, got = text + exec_.out, exec_.offsets[1]
    exec_.data[1].clear()
    exec_.wait()
    text += exec_.out
    client.close()
    assert text == b"".join(b"%d\n" % i for i in range(1, 300001))
    assert exec_.exit is not None
    assert exec_.exit["DROPPED_OUT"] == 0


def test_a_broken_connection_is_waited_for_a_while_only(agent: AgentProcess, client: AgentClient, name: str):
    exec_ = client.start(["yes"], id=name, credit=4096, fields=[("BUFFER_BYTES", 65536)])
    exec_.step(consume=False)
    client.close()
    with agent.connect() as again:
        time.sleep(0.3)
        total = int(again.list(name)[name]["TOTAL_OUT"])
        assert total <= 65536 + 4096
        exec_ = again.attach(name, out=0, credit=0)
        assert exec_.first[1] == 0
        exec_.close()
        until(lambda: int(again.list(name)[name]["TOTAL_OUT"]) > MIB)
        again.request("SIGNAL", [("ID", name), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])


def test_the_hold_ends_after_ten_seconds(agent: AgentProcess, client: AgentClient, name: str):
    if agent.sanitized:
        pytest.skip("ten seconds once are enough")
    exec_ = client.start(["yes"], id=name, credit=4096, fields=[("BUFFER_BYTES", 65536)])
    exec_.step(consume=False)
    client.close()
    begun = time.monotonic()
    with agent.connect() as again:
        until(lambda: int(again.list(name)[name]["TOTAL_OUT"]) > MIB, 60)
        assert 9 < time.monotonic() - begun < 40
        again.request("SIGNAL", [("ID", name), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])


def test_an_ended_exec_can_be_read_again(agent: AgentProcess, client: AgentClient, name: str):
    client.run(sh("echo hello; echo err >&2; exit 5"), id=name)
    client.close()
    with agent.connect() as again:
        exec_ = again.attach(name, out=2)
        exec_.wait()
        assert (exec_.out, exec_.err, ended(exec_)) == (b"llo\n", b"err\n", (EXITED, 5, BY_ITSELF))
        again.request("FORGET", [("ID", name)])
        with pytest.raises(AgentError, match="^not-found"):
            again.attach(name)


def test_a_second_reader_takes_over(client: AgentClient, name: str):
    first = client.start(sh("echo 1; read x; echo $x"), id=name, flags=ATTACH | STDIN)
    first.read_until(b"1\n")
    second = client.attach(name, out=2)
    with pytest.raises(AgentError, match="^detached"):
        first.step()
    assert second.started_fields is not None
    second.input_credit = int(second.started_fields["CREDIT"])
    second.input(b"two\n")
    second.wait()
    assert second.out == b"two\n"


def test_kept_for_keep_ms_after_the_end(client: AgentClient, name: str):
    client.run(["true"], id=name, fields=[("KEEP_MS", 3000)])
    assert name in client.list()
    until(lambda: name not in client.list())


def test_forget_of_a_running_exec_is_busy(client: AgentClient, name: str):
    exec_ = client.start(["sleep", "60"], id=name)
    exec_.started()
    with pytest.raises(AgentError, match="^busy"):
        client.request("FORGET", [("ID", name)])
    client.request("SIGNAL", [("ID", name), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])
    exec_.wait()
    client.request("FORGET", [("ID", name)])
    assert name not in client.list()


def test_start_without_a_reader_tells_only_the_end(client: AgentClient, name: str):
    exec_ = client.start(sh("yes | head -c 3000000; exit 6"), id=name, flags=0)
    exec_.started()
    assert exec_.step().type == "EXIT"
    assert exec_.exit is not None
    assert (exec_.exit["STATUS"], exec_.exit["TOTAL_OUT"], exec_.exit["DROPPED_OUT"]) == (
        6,
        3_000_000,
        3_000_000 - MIB,
    )


# ---- terminals and signals


def test_terminal_size_interrupt_and_owner(client: AgentClient, name: str):
    script = (
        "trap 'echo resized $(stty size)' WINCH; stty size; tty; echo ready; while :; do sleep 0.05; done"
    )
    fields: list[Field] = [("ROWS", 30), ("COLS", 90), ("USER", "nobody")]
    exec_ = client.start(sh(script), id=name, flags=ATTACH | PTY, fields=fields)
    exec_.read_until(b"ready")
    size, tty = exec_.out.decode().split("\r\n")[:2]
    assert size == "30 90"
    assert os.stat(tty).st_uid == 65534
    client.request("RESIZE", [("ID", name), ("ROWS", 50), ("COLS", 132)])
    exec_.read_until(b"resized 50 132")
    exec_.input(b"\x03")
    exec_.wait()
    assert ended(exec_) == (SIGNALLED, signal.SIGINT, BY_ITSELF)
    with pytest.raises(AgentError, match="^invalid"):
        client.request("RESIZE", [("ID", name), ("ROWS", 1), ("COLS", 1)])


def test_a_terminal_loses_no_last_words(client: AgentClient, name: str):
    for i in range(20):
        exec_ = client.run(["seq", "1", "3000"], id=f"{name}-{i}", flags=ATTACH | PTY)
        assert exec_.out == b"".join(b"%d\r\n" % n for n in range(1, 3001))


def test_a_terminal_nobody_has_open_is_not_hung_up(client: AgentClient, name: str):
    script = "exec <&- >&- 2>&-; sleep 0.5; echo back > /dev/tty; exit 3"
    exec_ = client.run(sh(script), id=name, flags=ATTACH | PTY)
    assert (exec_.out, ended(exec_)) == (b"back\r\n", (EXITED, 3, BY_ITSELF))


def test_end_of_input_on_a_terminal(client: AgentClient, name: str):
    exec_ = client.start(sh("cat; echo done $TERM"), id=name, flags=ATTACH | PTY)
    exec_.started()
    exec_.input(b"line\n", eof=True)
    exec_.wait()
    assert exec_.out == b"line\r\nline\r\ndone xterm\r\n"


def test_signal_reaches_the_group_or_everybody(agent: AgentProcess, client: AgentClient, name: str):
    loop = "while :; do sleep 0.05; done"
    inner = f"setsid sh -c 'trap \"echo inner; exit\" USR1; echo ready; {loop}' &"
    exec_ = client.start(sh(f"{inner} trap 'echo outer' USR1; echo up; {loop}"), id=name)
    exec_.read_until(b"up")
    exec_.read_until(b"ready")
    assert len(agent.processes_of(name)) >= 2
    client.request("SIGNAL", [("ID", name), ("SIGNAL", signal.SIGUSR1), ("SCOPE", 0)])
    exec_.read_until(b"outer")
    assert b"inner" not in exec_.out
    client.request("SIGNAL", [("ID", name), ("SIGNAL", signal.SIGUSR1), ("SCOPE", 1)])
    exec_.read_until(b"inner")
    client.request("SIGNAL", [("ID", name), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])
    exec_.wait()
    assert ended(exec_) == (SIGNALLED, signal.SIGKILL, KILLED)
    for sig, scope in ((0, 0), (65, 0), (9, 2)):
        with pytest.raises(AgentError, match="^invalid"):
            client.request("SIGNAL", [("ID", name), ("SIGNAL", sig), ("SCOPE", scope)])


# ---- many


def test_hundreds_at_once_leave_nothing_behind(agent: AgentProcess, client: AgentClient, name: str):
    count = 1000 if not agent.sanitized else 200
    client.request("LIST")
    base, cgroups = agent.descriptors(), agent.exec_cgroups()
    script = sh("read x; echo $x")
    execs = [
        client.start(script, id=f"{name}-{i}", flags=ATTACH | STDIN, credit=4096, fields=[("KEEP_MS", 0)])
        for i in range(count)
    ]
    for exec_ in execs:
        exec_.started()
    assert client.ping() < 10
    for i, exec_ in enumerate(execs):
        exec_.input(b"%d\n" % i)
    for i, exec_ in enumerate(execs):
        exec_.wait(120)
        assert exec_.out == b"%d\n" % i
    until(lambda: agent.exec_cgroups() <= cgroups)
    until(lambda: agent.descriptors() <= base)
    assert not agent.zombies()


def test_usage_counts(client: AgentClient, name: str):
    before = client.request("USAGE")[0][0].fields
    client.run(sh("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"), id=name)
    after = client.request("USAGE")[0][0].fields
    assert int(after["EXECS_TOTAL"]) == int(before["EXECS_TOTAL"]) + 1
    assert int(after["CPU_USER_US"]) + int(after["CPU_SYSTEM_US"]) > int(before["CPU_USER_US"]) + int(
        before["CPU_SYSTEM_US"]
    )
    assert int(after["PID_COUNT"]) >= 2


def test_the_agent_cannot_be_looked_into():
    """Not dumpable: its files in /proc do not belong to its user, who so gets neither memory nor descriptors."""

    def owner(pid: int) -> int:
        return os.stat(f"/proc/{pid}/environ").st_uid

    with (
        running("plain", cgroup=False, user=65534) as process,
        subprocess.Popen(["sleep", "600"], user=65534) as other,
    ):
        assert owner(other.pid) == 65534
        # Its own first act, soon after it was executed.
        until(lambda: owner(process.pid) == 0)
        other.kill()


# ---- the end


@pytest.mark.parametrize("build_name", ["plain", "asan"])
def test_shutdown_asks_then_kills(build_name: str):
    build()
    with running(build_name) as process:
        client = process.connect()
        polite = client.start(
            sh("trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.05; done"), id="polite"
        )
        stubborn = client.start(sh("trap '' TERM; echo up; while :; do sleep 1; done"), id="stubborn")
        polite.read_until(b"up")
        stubborn.read_until(b"up")
        client.request("SHUTDOWN", [("GRACE_MS", 2500)])
        with pytest.raises(AgentError, match="^spawn-failed"):
            client.run(["true"], id="late")
        polite.wait()
        stubborn.wait()
        assert (polite.out, ended(polite)) == (b"up\nbye\n", (EXITED, 9, BY_ITSELF))
        assert ended(stubborn) == (SIGNALLED, signal.SIGKILL, SHUTDOWN)
        process.wait_for_end()
        assert process.exec_cgroups() == set()
        client.close()


def test_without_a_cgroup_sessions_are_killed():
    build()
    with running("plain", cgroup=False) as process, process.connect() as client:
        exec_ = client.start(
            sh("trap '' TERM; (trap '' TERM; sleep 60) & sleep 60"), id="a", fields=[("TIMEOUT_MS", 200)]
        )
        exec_.wait()
        assert ended(exec_) == (SIGNALLED, signal.SIGKILL, TIMEOUT)
        until(lambda: not process.children())
