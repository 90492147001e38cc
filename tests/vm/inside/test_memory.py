# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host: the installed daemon reclaims memory of idle sandboxes, and tells the truth about it."""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from libdsec import Client, Sandbox
from libdsec.memory import MemoryReport, SandboxMemory

_MIB = 1 << 20
_IMAGE = "debian:trixie"
_DROP_IN = Path("/etc/dsec/dsecd.toml.d/memory.toml")
_KDAMONDS = Path("/sys/kernel/mm/damon/admin/kdamonds")
#: What takes so long has not merely been slow.
_FAULT_S = 300.0
#: With _SETTINGS, reclaim that is at work has begun by then.
_BEGUN_S = 8.0
#: Half of it does not compress. Perl is in every Debian.
_IDLE = (
    'open R, "/dev/urandom"; read R, $n, 2048; $x = ($n . "\\0" x 2048) x 25600; $| = 1; print "ready\\n"; '
    "sleep 100000"
)


def _restart(settings: str) -> None:
    """Start the daemon anew with these settings for memory; its sandboxes go on."""
    _DROP_IN.parent.mkdir(exist_ok=True)
    _DROP_IN.write_text(f"[memory]\n{settings}\n")
    subprocess.run(["systemctl", "restart", "dsec-zram.service", "dsecd.service"], check=True)


_SETTINGS = "sweep_s = 1\nage_s = 5\nstart_below_permil = 1001\npressure_max_percent = 100\n"


@pytest.fixture(scope="module", autouse=True)
def no_settings_stay() -> Iterator[None]:
    yield
    _DROP_IN.unlink()
    # A request starts it again.
    subprocess.run(["systemctl", "stop", "dsec-zram.service", "dsecd.service"], check=True)


@contextlib.contextmanager
def _idle_sandbox(client: Client) -> Iterator[Sandbox]:
    """A sandbox in which a process has written to 100 MiB and does no more."""
    # What was reclaimed and is read back is pressure, for which the next one has to wait.
    with Sandbox(image=_IMAGE, client=client, wait_s=110) as sandbox:
        process = sandbox.popen("perl", "-e", _IDLE)
        _until(lambda: _current(sandbox) > 100 * _MIB)
        yield sandbox
        process.signal(signal.SIGKILL, tree=True)
        process.close()


def _group(sandbox: Sandbox) -> Path:
    (found,) = Path("/sys/fs/cgroup").rglob(f"*-{sandbox.id}")
    return found


def _current(sandbox: Sandbox) -> int:
    return int((_group(sandbox) / "memory.current").read_text())


def _swapped(sandbox: Sandbox) -> int:
    return int((_group(sandbox) / "memory.swap.current").read_text())


def _until(true: Callable[[], bool], limit_s: float = _FAULT_S, *tell: Any) -> None:
    """Wait; when it does not come about, ``tell`` is a function and its arguments that say how things are instead."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, tell[0](*tell[1:]) if tell else "it does not come about"
        time.sleep(0.5)


def _told(client: Client, sandbox: Sandbox) -> tuple[MemoryReport, SandboxMemory]:
    report = client.memory(sandbox=[sandbox.id])
    (one,) = report.sandboxes
    return report, one


def test_without_swap_anonymous_memory_stays_and_the_report_says_why() -> None:
    _restart(_SETTINGS)
    with Client() as client, _idle_sandbox(client) as sandbox:
        _until(lambda: client.memory().host.reclaim == "memory.reclaim")
        assert "no swap" in client.memory().host.reclaim_detail
        time.sleep(_BEGUN_S)
        assert _current(sandbox) > 95 * _MIB
        assert (_KDAMONDS / "nr_kdamonds").read_text() == "0\n"


def test_by_damon_the_memory_of_an_idle_sandbox_goes_and_comes_back_whole() -> None:
    _restart(_SETTINGS + f"zram_bytes = {1 << 30}\nkdamonds = 2")
    with Client() as client, _idle_sandbox(client) as sandbox:
        assert "/zram" in Path("/proc/swaps").read_text()
        _until(lambda: _swapped(sandbox) > 60 * _MIB, _FAULT_S, _swapped, sandbox)
        report, one = _told(client, sandbox)
        assert report.host.reclaim == "damon", report.host
        assert (_KDAMONDS / "nr_kdamonds").read_text() == "2\n"
        _until(lambda: _is_as_counted(client, sandbox), _FAULT_S, _told, client, sandbox)
        _until(lambda: _told(client, sandbox)[1].reclaimed_bytes > 50 * _MIB, _FAULT_S, _told, client, sandbox)
        report, one = _told(client, sandbox)
        assert report.host.zram_memory_bytes is not None
        assert report.host.zram_stored_bytes is not None
        assert report.host.zram_memory_bytes < report.host.zram_stored_bytes * 3 // 4
        assert report.host.sandboxes_bytes is not None
        assert report.host.sandboxes_bytes >= (one.used_bytes or 0)
        assert one.idle_s is not None
        shown = subprocess.run(["dsecctl", "--json", "mem", sandbox.id], capture_output=True, text=True, check=True)
        assert json.loads(shown.stdout)["sandboxes"][0]["id"] == sandbox.id
        refaults = one.refaults or 0
        # A process that looks at all of it finds it as it was, and the kernel counts what came back.
        assert sandbox.exec("echo", "alive").text == "alive\n"
        _read_all(_pid_of(sandbox, "perl"))
        _until(lambda: (_told(client, sandbox)[1].refaults or 0) > refaults, _FAULT_S, _told, client, sandbox)


def _is_as_counted(client: Client, sandbox: Sandbox) -> bool:
    """Whether what is told is what the kernel counts: it may go on counting in between, so not each time."""
    one = _told(client, sandbox)[1]
    assert one.used_bytes is not None and one.swapped_bytes is not None
    off = max(abs(one.used_bytes - _current(sandbox)), abs(one.swapped_bytes - _swapped(sandbox)))
    return off < 4 * _MIB


def _pid_of(sandbox: Sandbox, name: str) -> int:
    for procs in (_group(sandbox) / "run").rglob("cgroup.procs"):
        for pid in procs.read_text().split():
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return int(pid)
    raise AssertionError(f"no {name}")


def _read_all(pid: int) -> None:
    """Read a process's memory as a debugger does."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if line.endswith("[heap]") or len(line.split()) == 5:
                begin, end = (int(text, 16) for text in line.split()[0].split("-"))
                with contextlib.suppress(OSError):
                    memory.seek(begin)
                    memory.read(end - begin)


def test_kdamonds_of_a_killed_daemon_are_taken_over_and_a_stopped_one_leaves_none() -> None:
    with Client() as client:
        _until(lambda: client.memory().host.reclaim == "damon")
    old = _main_pid()
    subprocess.run(["systemctl", "kill", "--kill-whom=main", "--signal=KILL", "dsecd.service"], check=True)
    _until(lambda: _main_pid() not in ("0", old))
    with Client() as client:
        _until(lambda: client.memory().host.reclaim == "damon")
    assert (_KDAMONDS / "nr_kdamonds").read_text() == "2\n"
    subprocess.run(["systemctl", "stop", "dsecd.service"], check=True)
    assert (_KDAMONDS / "nr_kdamonds").read_text() == "0\n"


def _main_pid() -> str:
    show = ["systemctl", "show", "--value", "--property=MainPID", "dsecd.service"]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()


def test_damon_that_somebody_else_has_set_up_is_left_alone_and_the_kernel_chooses() -> None:
    subprocess.run(["systemctl", "stop", "dsecd.service"], check=True)
    (_KDAMONDS / "nr_kdamonds").write_text("1")
    (_KDAMONDS / "0/contexts/nr_contexts").write_text("1")
    try:
        _restart(_SETTINGS + f"zram_bytes = {1 << 30}")
        with Client() as client, _idle_sandbox(client) as sandbox:
            _until(lambda: _swapped(sandbox) > 60 * _MIB)
            report, _ = _told(client, sandbox)
            assert report.host.reclaim == "memory.reclaim"
            assert "somebody else" in report.host.reclaim_detail
            assert (_KDAMONDS / "nr_kdamonds").read_text() == "1\n"
            assert (_KDAMONDS / "0/state").read_text() == "off\n"
    finally:
        (_KDAMONDS / "nr_kdamonds").write_text("0")


def test_switched_off_nothing_is_reclaimed() -> None:
    _restart(_SETTINGS + f'reclaim = "off"\nzram_bytes = {1 << 30}')
    with Client() as client, _idle_sandbox(client) as sandbox:
        time.sleep(_BEGUN_S)
        assert client.memory().host.reclaim == "off"
        assert _current(sandbox) > 95 * _MIB


def test_the_zram_device_goes_with_its_unit() -> None:
    assert "/zram" in Path("/proc/swaps").read_text()
    subprocess.run(["systemctl", "stop", "dsec-zram.service"], check=True)
    assert "/zram" not in Path("/proc/swaps").read_text()
