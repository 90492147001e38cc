# SPDX-License-Identifier: Apache-2.0
"""The door for subprocesses, seen from the children's side: their files, groups, signals and namespaces."""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsecd.linux import proc
from tests.support import processes
from tests.support.waiting import until


def run_async(*args: Any, **kwargs: Any) -> proc.Completed:
    return asyncio.run(proc.run(*args, **kwargs))


Runner = Callable[..., proc.Completed]


@pytest.fixture(params=[proc.run_blocking, run_async], ids=["blocking", "async"])
def run(request: pytest.FixtureRequest) -> Runner:
    runner: Runner = request.param
    return runner


_others: set[int] = set()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves an open fd or a child behind."""
    _others.clear()
    _others.update(children())
    before = len(os.listdir("/proc/self/fd"))
    yield
    until(lambda: not children())
    # Fewer, when something of an earlier test's was only now collected.
    assert len(os.listdir("/proc/self/fd")) <= before


def children() -> list[int]:
    """Pids of this process's children, zombies included, that were not there before the test."""
    return [pid for pid in processes.children() if pid not in _others]


def gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_output_and_status_come_back_apart(run: Runner) -> None:
    done = run(["sh", "-c", "echo out; echo err >&2; exit 7"], timeout_s=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    assert done.argv[0] == "sh"


def test_failure_names_command_status_and_last_words(run: Runner) -> None:
    with pytest.raises(proc.ProcessFailed) as caught:
        run(["sh", "-c", "echo first >&2; echo 'disk on fire' >&2; exit 3"], timeout_s=60)
    assert caught.value.returncode == 3
    assert "exit status 3: first | disk on fire" in str(caught.value)
    assert str(caught.value).startswith("run sh -c ")


def test_death_by_signal_is_named(run: Runner) -> None:
    with pytest.raises(proc.ProcessFailed, match="killed by SIGTERM") as caught:
        run(["sh", "-c", "kill -TERM $$"], timeout_s=60)
    assert caught.value.returncode == -signal.SIGTERM


def test_missing_program_is_file_not_found(run: Runner) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        run(["no-such-program"], timeout_s=60)


def test_child_sees_exactly_the_mapped_fds(run: Runner) -> None:
    """Even when our numbers and the child's collide in a circle."""
    with contextlib.ExitStack() as stack:
        files = {}
        for name in "abcd":
            files[name] = os.memfd_create(name, os.MFD_CLOEXEC)
            stack.callback(os.close, files[name])
            os.write(files[name], name.encode())
            os.lseek(files[name], 0, os.SEEK_SET)
        # Every target number is another source's number.
        a, b, c, d = files.values()
        wanted = {b: a, c: b, a: c}
        leak = os.dup(d)
        os.set_inheritable(leak, True)
        stack.callback(os.close, leak)
        done = run(["sh", "-c", "for f in /proc/$$/fd/*; do echo ${f##*/}=$(readlink $f); done"],
                   timeout_s=60, fd_map=wanted)
    shown = dict(line.split("=", 1) for line in done.stdout.decode().splitlines())
    names = {str(target): "/memfd:" + next(n for n in files if files[n] == source) + " (deleted)"
             for target, source in wanted.items()}
    assert {number: link for number, link in shown.items() if "memfd" in link} == names
    assert shown["0"] == "/dev/null"


def test_fds_at_three_four_five_from_a_thread_while_others_open_files(run: Runner) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            os.close(os.open("/dev/null", os.O_RDONLY))

    threads = [threading.Thread(target=churn) for _ in range(2)]
    fds = [os.memfd_create(f"n{number}", os.MFD_CLOEXEC) for number in (3, 4, 5)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            done = run(["ls", "-l", "/proc/self/fd"], timeout_s=30, fd_map=dict(zip((3, 4, 5), fds, strict=True)))
            links = [line.split(" -> ") for line in done.stdout.decode().splitlines()[1:]]
            shown = {int(head.split()[-1]): target for head, target in links}
            # 6 is the directory that ls reads.
            assert sorted(shown) == [0, 1, 2, 3, 4, 5, 6]
            assert [shown[n] for n in (3, 4, 5)] == [f"/memfd:n{n} (deleted)" for n in (3, 4, 5)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for fd in fds:
            os.close(fd)


def test_pass_fds_keep_their_number(run: Runner) -> None:
    fd = os.memfd_create("kept", os.MFD_CLOEXEC)
    try:
        done = run(["readlink", f"/proc/self/fd/{fd}"], timeout_s=60, pass_fds=[fd])
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    assert done.stdout == b"/memfd:kept (deleted)\n"


def test_standard_streams_cannot_be_mapped(run: Runner) -> None:
    with pytest.raises(ValueError, match="stdin, stdout or stderr"):
        run(["true"], timeout_s=60, fd_map={2: 0})


def test_input_larger_than_a_pipe_reaches_the_child(run: Runner) -> None:
    data = os.urandom(1 << 20)
    done = run(["cat"], input=data, timeout_s=30, output_limit_bytes=1 << 21)
    assert done.stdout == data
    assert not done.truncated


def test_output_beyond_the_limit_is_dropped_and_reported(run: Runner) -> None:
    script = "seq 1 100000; seq 1 100000 >&2"
    done = run(["sh", "-c", script], timeout_s=30, output_limit_bytes=1000)
    whole = "".join(f"{n}\n" for n in range(1, 100001)).encode()
    assert done.truncated
    assert done.stdout == whole[:1000]
    assert done.stderr == whole[-1000:]


def test_grandchild_that_keeps_the_pipes_does_not_hold_the_result_back(run: Runner) -> None:
    started = time.monotonic()
    done = run(["sh", "-c", "sleep 60 & echo $!"], timeout_s=30)
    assert time.monotonic() - started < 20
    os.kill(int(done.stdout), signal.SIGKILL)


def test_all_a_child_wrote_before_its_exit_is_there(run: Runner) -> None:
    """The pipe is emptied after the exit, though a grandchild keeps it open."""
    done = run(["sh", "-c", "sleep 60 & head -c 65000 /dev/zero; echo $! >&2"], timeout_s=30)
    os.kill(int(done.stderr), signal.SIGKILL)
    assert len(done.stdout) == 65000


def test_timeout_kills_the_whole_group(run: Runner) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as pids:
        with pytest.raises(proc.ProcessTimedOut, match=r"still running after 3 s") as caught:
            run(["sh", "-c", "trap '' TERM; sleep 60 3>&- & echo $! $$ >&3; echo words >&2; wait"],
                timeout_s=3.0, fd_map={3: write})
        os.close(write)
        seen = [int(pid) for pid in pids.read().split()]
    assert len(seen) == 2
    until(lambda: all(gone(pid) for pid in seen))
    assert caught.value.stderr == "words"
    assert caught.value.timeout_s == 3.0


def test_cancelled_run_kills_and_reaps() -> None:
    async def scenario() -> int:
        read, write = os.pipe()
        with os.fdopen(read, "rb", buffering=0) as pid:
            task = asyncio.create_task(
                proc.run(["sh", "-c", "echo $$ >&3; exec sleep 60"], timeout_s=60, fd_map={3: write})
            )
            await asyncio.sleep(0)
            os.close(write)
            child = int(await asyncio.to_thread(pid.read, 100))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()
            for _ in range(3000):
                if not children():
                    break
                await asyncio.sleep(0.01)
            assert children() == []
        return child

    assert gone(asyncio.run(scenario()))


def test_environment_is_minimal_and_replaceable(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    assert b"SECRET" not in run(["env"], timeout_s=60).stdout
    assert run(["env"], timeout_s=60).stdout.splitlines()[-1:] == [b"LANG=C.UTF-8"]
    assert run(["/usr/bin/env"], timeout_s=60, env={"ONLY": "1"}).stdout == b"ONLY=1\n"


def test_signals_are_as_a_new_program_expects(run: Runner) -> None:
    """Python ignores SIGPIPE; its children must not."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        status = run(["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"], timeout_s=60).stdout.decode()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    masks = {name: int(value, 16) for name, value in (line.split(":") for line in status.splitlines())}
    # 32 and 33 are the C library's own: make leaves them ignored, and nothing but the kernel could change that.
    masks["SigIgn"] &= ~(0b11 << 31)
    assert masks == {"SigBlk": 0, "SigIgn": 0}


def test_working_directory(run: Runner, tmp_path: Path) -> None:
    assert run(["pwd", "-P"], timeout_s=60, cwd=tmp_path).stdout.decode().strip() == str(tmp_path.resolve())
    with pytest.raises(proc.ProcessFailed, match="nowhere"):
        run(["pwd"], timeout_s=60, cwd=tmp_path / "nowhere")


def test_stdio_to_takes_both_streams(run: Runner, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        done = run(["sh", "-c", "echo out; echo err >&2"], timeout_s=60, stdio_to=file.fileno())
    assert log.read_bytes() == b"out\nerr\n"
    assert (done.stdout, done.stderr) == (b"", b"")


def test_arguments_reach_the_program_untouched(run: Runner) -> None:
    nasty = ["a b", "$(id)", "'; rm x", "", "-n", "ü\udcff"]
    done = run(["printf", "%s\\0", *nasty], timeout_s=60)
    assert done.stdout == b"".join(os.fsencode(word) + b"\0" for word in nasty)


@pytest.mark.parametrize("free", range(7))
def test_running_out_of_fds_leaves_nothing(free: int) -> None:
    """With `free` descriptors to go it works or fails with EMFILE; the fixture looks for what is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    # Whatever is open already, there are numbers enough to be taken.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(free):
            os.close(taken.pop())
        if free < 6:
            with pytest.raises(OSError) as caught:
                proc.run_blocking(["true"], input=b"x", timeout_s=60)
            assert caught.value.errno == errno.EMFILE
        else:
            proc.run_blocking(["true"], input=b"x", timeout_s=60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_many_at_once_on_one_loop() -> None:
    async def scenario() -> list[proc.Completed]:
        jobs = [proc.run(["sh", "-c", f"exit {n}"], timeout_s=60, check=False) for n in range(40)]
        return await asyncio.gather(*jobs)

    assert [done.returncode for done in asyncio.run(scenario())] == list(range(40))


def test_stream_lines_arrive_before_the_end(tmp_path: Path) -> None:
    go = tmp_path / "go"

    async def scenario() -> list[str]:
        seen = []
        script = f"echo one; while [ ! -e {go} ]; do sleep 0.02; done; echo two >&2; printf three; exit 0"
        async for line in proc.stream_lines(["sh", "-c", script], timeout_s=30):
            seen.append(line)
            go.touch()  # Only a line that came while the program ran can end it.
        return seen

    assert asyncio.run(scenario()) == ["one", "two", "three"]


def test_stream_lines_raises_what_run_raises() -> None:
    async def scenario(script: str, timeout_s: float) -> None:
        async for _ in proc.stream_lines(["sh", "-c", script], timeout_s=timeout_s):
            pass

    with pytest.raises(proc.ProcessFailed, match="exit status 4: broken"):
        asyncio.run(scenario("echo broken; exit 4", 30))
    with pytest.raises(proc.ProcessTimedOut):
        asyncio.run(scenario("sleep 60", 0.2))


def test_sleeper_lives_for_the_block_only_and_holds_no_signal_handler() -> None:
    hits: list[int] = []
    old = signal.signal(signal.SIGUSR2, lambda number, _frame: hits.append(number))
    try:
        with proc.sleeper(0) as pid:
            assert Path(f"/proc/{pid}/status").read_text().count(f"\nPPid:\t{os.getpid()}\n") == 1
            os.kill(pid, signal.SIGUSR2)
            time.sleep(0.02)
        assert gone(pid)
    finally:
        signal.signal(signal.SIGUSR2, old)
    assert hits == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_sleeper_ends_by_itself_when_we_are_killed() -> None:
    program = (
        "import os, signal, sys\n"
        "from dsecd.linux import proc\n"
        "with proc.sleeper(0, lifetime_s=1) as pid:\n"
        "    print(pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = proc.run_blocking(["python3", "-c", program], timeout_s=300, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    until(lambda: gone(int(done.stdout)))


def test_socket_reaches_the_child_and_stays_listening() -> None:
    """The way an agent gets its listening socket."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0dsec-test-proc-{os.getpid()}")
        listener.listen(1)
        done = proc.run_blocking(["readlink", "/proc/self/fd/3"], timeout_s=60, fd_map={3: listener.fileno()})
        assert done.stdout.decode().strip() == os.readlink(f"/proc/self/fd/{listener.fileno()}")
