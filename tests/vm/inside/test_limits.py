# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host: limits of sandboxes of the installed daemon, read back from the kernel."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from libdsec import Client, Sandbox
from libdsec.errors import DsecError, FeatureMissing, InvalidSpec
from libdsec.types import Limits

_MIB = 1 << 20
_IMAGE = "debian:trixie"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client() as connected:
        yield connected


def _sandbox(client: Client, **limits: int) -> Sandbox:
    # The end of one by memory is pressure, for which the next one has to wait.
    return Sandbox(image=_IMAGE, limits=Limits(**limits), client=client, wait_s=110)


def _top(sandbox: Sandbox) -> Path:
    (top,) = Path("/sys/fs/cgroup").rglob(f"sandbox-{sandbox.id}")
    return top


def _until(what: Callable[[], bool], timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def _cgroup(sandbox: Sandbox, file: str) -> Path:
    """The file of the sandbox's cgroup that limits what runs in it, whichever level the daemon chose."""
    (top,) = Path("/sys/fs/cgroup").rglob(f"*-{sandbox.id}")
    levels = [path for path in (top, top / "run") if (path / file).exists()]
    assert levels, f"no {file} in or below {top}"
    limited = [path for path in levels if not (path / file).read_text().startswith("max")]
    return (limited or levels)[-1]


def _keyed(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}


def test_memory_above_the_limit_ends_what_asked_for_it_and_nothing_else(client: Client) -> None:
    with _sandbox(client, memory_max_bytes=64 * _MIB, swap_max_bytes=0) as sandbox:
        group = _cgroup(sandbox, "memory.max")
        assert int((group / "memory.max").read_text()) == 64 * _MIB
        result = sandbox.exec("tail", "/dev/zero")  # keeps all of the line that never ends
        assert _keyed(group / "memory.events")["oom_kill"] >= 1
        assert result.signal == 9
        # Only what was too big is gone.
        assert sandbox.exec("echo", "alive").text == "alive\n"


@contextlib.contextmanager
def _held_in_exit(pid: str) -> Iterator[None]:
    program = Path(__file__).with_name("slowdeath.py")
    with subprocess.Popen(["python3", program, pid], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield


def _oom_events(client: Client, sandbox: Sandbox) -> list[dict[str, object]]:
    found = client.events(limit=10000).events
    return [event.details for event in found if (event.kind, event.subject) == ("sandbox.oom", sandbox.id)]


def test_an_end_by_memory_says_so_and_is_an_event(client: Client) -> None:
    with _sandbox(client, memory_max_bytes=64 * _MIB, swap_max_bytes=0) as sandbox:
        result = sandbox.exec("tail", "/dev/zero")
        assert (result.signal, result.reason, result.oom_kills) == (9, "oom", 1)
        _until(lambda: bool(_oom_events(client, sandbox)))
        assert _oom_events(client, sandbox)[-1]["oom_kills"] == 1
        assert sandbox.exec("true").reason == "exited"


def test_a_child_that_memory_ended_is_counted_though_the_command_goes_on(client: Client) -> None:
    with _sandbox(client, memory_max_bytes=64 * _MIB, swap_max_bytes=0) as sandbox:
        result = sandbox.exec("sh", "-c", "tail /dev/zero; exit 3")
        assert (result.exit_code, result.reason, result.oom_kills) == (3, "exited", 1)
        # Another's end right after it is its own.
        result = sandbox.exec("sh", "-c", "kill -9 $$")
        assert (result.signal, result.reason, result.oom_kills) == (9, "exited", 0)


def test_want_of_memory_ends_the_whole_command_when_asked_so(client: Client) -> None:
    with _sandbox(client) as sandbox:
        limits = Limits(memory_max_bytes=48 * _MIB, swap_max_bytes=0, memory_oom_group=True)
        result = sandbox.exec("sh", "-c", "sleep 600 & tail /dev/zero; echo survived", limits=limits)
        assert (result.signal, result.reason, result.stdout) == (9, "oom", b"")
        assert result.oom_kills >= 3
        assert sandbox.exec("echo", "alive").text == "alive\n"


def test_without_a_limit_the_end_is_known_by_the_count_of_all_commands(client: Client) -> None:
    with _sandbox(client) as sandbox:
        run = _top(sandbox) / "run"
        assert "memory" not in (run / "cgroup.subtree_control").read_text()
        (run / "memory.swap.max").write_text("0")
        (run / "memory.max").write_text(str(32 * _MIB))  # stands for a host that runs out
        result = sandbox.exec("tail", "/dev/zero")
        assert (result.signal, result.reason, result.oom_kills) == (9, "oom", 0)
        assert sandbox.exec("sh", "-c", "kill -9 $$").reason == "exited"


def test_a_sandbox_whose_first_process_memory_ended_says_so(client: Client) -> None:
    with _sandbox(client) as sandbox:
        agent = _top(sandbox) / "agent"
        process = sandbox.popen("sleep", "600", exec_id="slow")
        (slow,) = (_top(sandbox) / "run/slow/cgroup.procs").read_text().split()
        # Its end takes longer than the daemon tries to reach it again: it waits for all that runs in it.
        with _held_in_exit(slow):
            (agent / "memory.swap.max").write_text("0")
            (agent / "memory.max").write_text("0")  # nobody asks for this; a host that runs out does the like
            # Anything makes it ask for memory.
            with pytest.raises(DsecError):
                for _ in range(200):
                    sandbox.exec("true")
            time.sleep(5)
        process.close()
        _until(lambda: client.inspect(sandbox.id).state == "failed")
        assert client.inspect(sandbox.id).reason == "oom"


def test_a_sandbox_that_dies_otherwise_is_no_oom_whatever_its_commands_did(client: Client) -> None:
    with _sandbox(client, memory_max_bytes=64 * _MIB, swap_max_bytes=0) as sandbox:
        assert sandbox.exec("tail", "/dev/zero").reason == "oom"
        (pid,) = (_top(sandbox) / "agent/cgroup.procs").read_text().split()
        os.kill(int(pid), signal.SIGKILL)
        _until(lambda: client.inspect(sandbox.id).state == "failed")
        assert client.inspect(sandbox.id).reason == "crash"


def test_a_death_of_other_causes_is_no_oom(client: Client) -> None:
    with _sandbox(client, memory_max_bytes=64 * _MIB) as sandbox:
        result = sandbox.exec("sh", "-c", "kill -9 $$")
        assert (result.signal, result.reason != "oom") == (9, True)


def test_a_fork_bomb_ends_at_the_limit_and_harms_nobody(client: Client) -> None:
    with _sandbox(client, pids_max=40) as bombed, _sandbox(client) as other:
        group = _cgroup(bombed, "pids.max")
        assert (group / "pids.max").read_text() == "40\n"
        # Each level forks two; what cannot fork any more waits.
        bomb = "f() { f & f & sleep 600; }; f"
        process = bombed.popen("sh", "-c", bomb)
        deadline = time.monotonic() + 600
        while _keyed(group / "pids.events")["max"] == 0:
            assert time.monotonic() < deadline, (group / "pids.current").read_text()
            time.sleep(0.2)
        assert int((group / "pids.peak").read_text()) <= 40
        assert other.exec("echo", "alive").text == "alive\n"
        process.signal(9, tree=True)
        process.close()


def test_processor_time_is_held_to_its_share(client: Client) -> None:
    with _sandbox(client, cpu_max_permil=300) as sandbox:
        group = _cgroup(sandbox, "cpu.max")
        quota, period = (int(word) for word in (group / "cpu.max").read_text().split())
        assert quota / period == pytest.approx(0.3)
        process = sandbox.popen("sh", "-c", "while :; do :; done")
        start = _keyed(group / "cpu.stat")["usage_usec"]
        _until(lambda: _keyed(group / "cpu.stat")["usage_usec"] > start + 100_000)
        before, began = _keyed(group / "cpu.stat"), time.monotonic()
        while True:
            time.sleep(5)
            after, took = _keyed(group / "cpu.stat"), time.monotonic() - began
            share = (after["usage_usec"] - before["usage_usec"]) / 1e6 / took
            # Below, too: something must have run for the limit to have held it. Time in which this machine stands still
            # is charged to what runs, which has to wait for it afterwards: then it is looked at for longer.
            if 0.1 < share < 0.36 or took > 180:
                break
        process.signal(9, tree=True)
        process.close()
        assert 0.1 < share < 0.36
        assert after["nr_throttled"] > before["nr_throttled"]


def test_limits_change_while_a_sandbox_runs(client: Client) -> None:
    with _sandbox(client, memory_max_bytes=64 * _MIB, pids_max=40) as sandbox:
        group = _cgroup(sandbox, "memory.max")
        sandbox.update(limits=Limits(memory_max_bytes=128 * _MIB, pids_max=50))
        assert int((group / "memory.max").read_text()) == 128 * _MIB
        assert (_cgroup(sandbox, "pids.max") / "pids.max").read_text() == "50\n"


def test_a_limit_below_what_is_allowed_is_refused(client: Client) -> None:
    with pytest.raises((DsecError, ValueError), match="memory_max_bytes"), _sandbox(client, memory_max_bytes=1):
        pass


def test_limits_of_one_command_hold_for_it_alone(client: Client) -> None:
    with _sandbox(client) as sandbox:
        limits = Limits(
            memory_max_bytes=64 * _MIB, memory_high_bytes=48 * _MIB, pids_max=7, cpu_weight=33, cpu_max_permil=500
        )  # fmt: skip
        process = sandbox.popen("sleep", "600", exec_id="limited", limits=limits)
        group = _top(sandbox) / "run/limited"
        expected = {
            "memory.max": str(64 * _MIB), "memory.high": str(48 * _MIB), "pids.max": "7", "cpu.weight": "33",
            "cpu.max": "50000 100000",
        }  # fmt: skip
        assert {name: (group / name).read_text().strip() for name in expected} == expected
        assert (_top(sandbox) / "run/memory.max").read_text() == "max\n"
        process.signal(9, tree=True)
        process.close()
        small = Limits(memory_max_bytes=32 * _MIB, swap_max_bytes=0)
        assert sandbox.exec("tail", "/dev/zero", limits=small).reason == "oom"


def test_an_update_changes_what_it_names_and_lifts_what_it_is_told_to(client: Client) -> None:
    with _sandbox(client, memory_max_bytes=64 * _MIB, cpu_weight=50, pids_max=40) as sandbox:
        top = _top(sandbox)
        assert (top / "cpu.weight").read_text() == "50\n"  # among the other sandboxes
        sandbox.update(limits=Limits(cpu_weight=70))
        assert ((top / "cpu.weight").read_text(), (top / "run/memory.max").read_text()) == ("70\n", f"{64 * _MIB}\n")
        box = sandbox.update(lift=("memory_max_bytes", "cpu_weight", "pids_max"), limits=Limits(cpu_idle=True))
        assert box.spec.limits == Limits(cpu_idle=True)
        assert ((top / "cpu.idle").read_text(), (top / "run/memory.max").read_text()) == ("1\n", "max\n")
        assert (top / "run/pids.max").read_text() == "8192\n"
        with pytest.raises(InvalidSpec, match="cpu_idle"):
            sandbox.update(limits=Limits(cpu_weight=5))
        sandbox.update(lift=("cpu_idle",), limits=Limits(cpu_weight=5))
        assert ((top / "cpu.idle").read_text(), (top / "cpu.weight").read_text()) == ("0\n", "5\n")


def test_an_idle_sandbox_and_its_limits_survive_a_restart_of_the_unit(client: Client) -> None:
    with _sandbox(client, memory_max_bytes=64 * _MIB, swap_max_bytes=0, pids_max=40, cpu_weight=50) as sandbox:
        top = _top(sandbox)
        run = (top / "run").stat().st_ino
        subprocess.run(["systemctl", "restart", "dsecd"], check=True)
        assert client.inspect(sandbox.id).state == "running"
        # The new daemon takes it over in the background; a command waits for that.
        assert sandbox.exec("echo", "alive").text == "alive\n"
        assert (top / "run").stat().st_ino != run  # systemd did take it
        assert (top / "run/memory.max").read_text() == f"{64 * _MIB}\n"
        assert ((top / "run/pids.max").read_text(), (top / "cpu.weight").read_text()) == ("40\n", "50\n")
        assert sandbox.exec("tail", "/dev/zero").reason == "oom"
        # Its agent looks at the new one.
        assert any(_survives_a_pause(sandbox, timeout_s) for timeout_s in (2, 4, 8, 16, 32, 64))


def _survives_a_pause(sandbox: Sandbox, timeout_s: int) -> bool:
    """Whether a command outlives its timeout in a pause, which stops its clock; false when we were too slow to tell."""
    began = time.monotonic()
    with sandbox.popen("sleep", "600", timeout_s=timeout_s) as process:
        sandbox.pause()
        paused = time.monotonic()
        time.sleep(timeout_s + 1)
        resumed = time.monotonic()
        sandbox.resume()
        running = sandbox.client.exec_inspect(sandbox.id, process.exec_id).running
        slow = paused - began + time.monotonic() - resumed > timeout_s
        assert running or slow
        if running:
            process.signal(9, tree=True)
        return running


def test_reading_and_writing_are_held_to_their_rates_or_refused_by_name(client: Client) -> None:
    limits = Limits(io_write_bytes_per_s=_MIB, io_reads_per_s=1000)
    if not (Path("/sys/fs/cgroup/system.slice") / "io.max").exists():
        with pytest.raises(FeatureMissing, match=r"io\.max: this kernel has no such"):
            Sandbox(image=_IMAGE, limits=limits, client=client).create()
        pytest.skip("this kernel has no io.max: CONFIG_BLK_DEV_THROTTLING is off")
    with Sandbox(image=_IMAGE, limits=limits, client=client) as sandbox:
        disk = f"{os.major(os.stat('/var/lib/dsec').st_dev)}:{os.minor(os.stat('/var/lib/dsec').st_dev)}"
        assert (_top(sandbox) / "run/io.max").read_text() == f"{disk} rbps=max wbps={_MIB} riops=1000 wiops=max\n"
        began = time.monotonic()
        result = sandbox.exec("dd", "if=/dev/zero", "of=/file", "bs=256k", "count=24", "oflag=direct")
        took = time.monotonic() - began
        assert result.exit_code == 0, result.stderr
        assert took > 4.5  # 6 MiB
        sandbox.update(lift=("io_write_bytes_per_s", "io_reads_per_s"))
        assert (_top(sandbox) / "run/io.max").read_text() == ""

        def is_fast() -> bool:
            began = time.monotonic()
            again = sandbox.exec("dd", "if=/dev/zero", "of=/file", "bs=256k", "count=24", "oflag=direct")
            assert again.exit_code == 0, again.stderr
            return time.monotonic() - began < took / 2

        _until(is_fast)


def test_a_share_of_the_disk_that_nobody_gives_is_refused_by_name(client: Client) -> None:
    with pytest.raises(FeatureMissing, match="io_weight: nothing divides the time of disk"):
        _sandbox(client, io_weight=50).create()


def test_what_the_kernel_lacks_of_a_class_is_told(client: Client) -> None:
    lacks = ctypes.CDLL(None).prctl(62, 0, 0, 0, ctypes.byref(ctypes.c_ulong())) != 0  # PR_SCHED_CORE_GET
    with Sandbox(image=_IMAGE, cpu_class="batch", client=client) as sandbox:
        assert client.inspect(sandbox.id).off == (("core-scheduling",) if lacks else ())
        assert (_top(sandbox).parent / "cpu.idle").read_text() == "1\n"
    with Sandbox(image=_IMAGE, client=client) as sandbox:
        assert client.inspect(sandbox.id).off == ()
