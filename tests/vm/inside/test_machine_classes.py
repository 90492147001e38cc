# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host, on a kernel with core scheduling: class batch of microVMs, by the threads of the monitor.

Cookies are read by prctl(2) from here.
"""

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from libdsec import Client, Sandbox
from libdsec.types import Limits

_IMAGE = "debian:trixie"
_PR_SCHED_CORE, _GET = 62, 0
_CPUS = 2
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client() as connected:
        yield connected


def _sandbox(client: Client, backend: str, cpu_class: Literal["latency", "batch"]) -> Sandbox:
    limits = Limits(cpu_max_permil=1000 * _CPUS) if backend == "microvm" else Limits()
    return Sandbox(image=_IMAGE, backend=backend, cpu_class=cpu_class, limits=limits, client=client).create()


def _group(sandbox: Sandbox) -> Path:
    (top,) = (path for kind in ("vm", "sandbox") for path in Path("/sys/fs/cgroup").rglob(f"{kind}-{sandbox.id}"))
    return top


def _cookies(sandbox: Sandbox) -> list[int]:
    """Of each thread in it."""
    pids = [pid for path in _group(sandbox).rglob("cgroup.procs") for pid in path.read_text().split()]
    try:
        return [_cookie(int(tid)) for pid in pids for tid in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:  # a process has ended since
        return [-1]


def _cookie(tid: int) -> int:
    cookie = ctypes.c_ulong()
    if _libc.prctl(_PR_SCHED_CORE, _GET, tid, 0, ctypes.byref(cookie)) != 0:
        # A thread of the monitor's pool may have ended since.
        assert ctypes.get_errno() == 3
        return -1
    return cookie.value


def _threads_settled(sandbox: Sandbox, least: int = _CPUS + 1) -> set[int]:
    """The cookies of all its threads; a monitor has at least as many as its machine has processors, and one."""
    deadline = time.monotonic() + 60
    while True:
        found = _cookies(sandbox)
        if len(found) >= least and -1 not in found:
            return set(found)
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def test_all_threads_of_a_monitor_of_batch_have_the_cookie_of_batch(client: Client) -> None:
    with _sandbox(client, "microvm", "batch") as machine, _sandbox(client, "container", "batch") as container:
        assert "core-scheduling" not in machine.info.off
        (cookie,) = _threads_settled(machine)
        assert cookie != 0
        assert _threads_settled(container, 1) == {cookie}
        assert _group(machine).parent == _group(container).parent
        assert (_group(machine).parent / "cpu.idle").read_text() == "1\n"
        # It lives on in the machine alone, and is found there by a daemon that never gave it.
        container.delete()
        subprocess.run(["systemctl", "kill", "-s", "KILL", "--kill-whom=main", "dsecd"], check=True)
        with _sandbox(client, "container", "batch") as later:
            assert _threads_settled(later, 1) == {cookie}


def test_a_monitor_of_latency_has_none(client: Client) -> None:
    with _sandbox(client, "microvm", "latency") as machine:
        assert _threads_settled(machine) == {0}
        assert _group(machine).parent.name != "batch"
