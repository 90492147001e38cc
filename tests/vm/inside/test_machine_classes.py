# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host, on a kernel with core scheduling: class batch of microVMs, by the threads of the monitor.

Cookies are read by prctl(2) from here, while the guest still boots: without KVM, emulated on an emulated processor, it
takes minutes.
"""

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from libdsec import Client
from libdsec.errors import DsecError
from libdsec.types import Limits, SandboxSpec

_IMAGE = "debian:trixie"
_PR_SCHED_CORE, _GET = 62, 0
_CPUS = 2
_WAIT_S = 600
_libc = ctypes.CDLL(None, use_errno=True)
Class = Literal["latency", "batch"]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client() as connected:
        yield connected


def _group(sandbox_id: str) -> Path | None:
    found = (path for kind in ("vm", "sandbox") for path in Path("/sys/fs/cgroup").rglob(f"{kind}-{sandbox_id}"))
    return next(found, None)


def _cookies(sandbox_id: str) -> list[int]:
    """Of each thread in it; none while a process comes or goes."""
    try:
        group = _group(sandbox_id)
        pids = [pid for path in group.rglob("cgroup.procs") for pid in path.read_text().split()] if group else []
        return [_cookie(int(tid)) for pid in pids for tid in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _cookie(tid: int) -> int:
    cookie = ctypes.c_ulong()
    if _libc.prctl(_PR_SCHED_CORE, _GET, tid, 0, ctypes.byref(cookie)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl for {tid}")
    return cookie.value


def _settled(sandbox_id: str, least: int) -> set[int]:
    """The cookies of all its threads, at least so many: a monitor has one for each processor, and one."""
    deadline = time.monotonic() + _WAIT_S
    while len(found := _cookies(sandbox_id)) < least:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return set(found)


def _spec(cpu_class: Class, backend: str = "container") -> SandboxSpec:
    limits = Limits(cpu_max_permil=1000 * _CPUS) if backend == "microvm" else Limits()
    return SandboxSpec(image=_IMAGE, backend=backend, cpu_class=cpu_class, limits=limits)


@contextmanager
def _booting(sandbox_id: str, cpu_class: Class) -> Iterator[None]:
    """A microVM that is being created, and is deleted whether it has come up meanwhile or not."""

    def create() -> None:
        try:
            with Client() as other:
                other.create(_spec(cpu_class, "microvm"), id=sandbox_id)
        except DsecError as error:
            ended.append(str(error))

    ended: list[str] = []
    caller = threading.Thread(target=create, daemon=True)
    caller.start()
    try:
        yield
    finally:
        with Client() as other:
            other.delete(sandbox_id)
        caller.join(_WAIT_S)
    assert not caller.is_alive()
    assert all("deleted while it was being created" in why for why in ended), ended


def test_all_threads_of_a_monitor_of_batch_have_the_cookie_of_batch(client: Client) -> None:
    container = client.create(_spec("batch"), id="beside")
    (cookie,) = _settled(container.id, 1)
    assert cookie != 0
    with _booting("machine", "batch"):
        assert _settled("machine", _CPUS + 1) == {cookie}
        assert client.inspect("machine").off.count("core-scheduling") == 0
        group, other = _group("machine"), _group("beside")
        assert group is not None
        assert other is not None
        assert group.parent == other.parent
        # It lives on in the machine alone, and is taken from there.
        client.delete("beside")
        client.create(_spec("batch"), id="later")
        assert (_settled("later", 1), _settled("machine", _CPUS + 1)) == ({cookie}, {cookie})
    assert (group.parent / "cpu.idle").read_text() == "1\n"
    client.delete("later")


def test_a_monitor_of_latency_has_none(client: Client) -> None:
    with _booting("plain", "latency"):
        assert _settled("plain", _CPUS + 1) == {0}
        group = _group("plain")
        assert group is not None
        assert group.parent.name != "batch"


@pytest.mark.skipif(not Path("/dev/kvm").exists(), reason="no KVM: a guest takes minutes to boot here")
def test_a_later_daemon_finds_the_cookie_in_the_machine(client: Client) -> None:
    client.create(_spec("batch", "microvm"), id="up")
    (cookie,) = _settled("up", _CPUS + 1)
    assert cookie != 0
    subprocess.run(["systemctl", "kill", "-s", "KILL", "--kill-whom=main", "dsecd"], check=True)
    client.create(_spec("batch"), id="after")
    assert (_settled("after", 1), _settled("up", _CPUS + 1)) == ({cookie}, {cookie})
    client.delete("after")
    client.delete("up")
