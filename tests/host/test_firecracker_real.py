# SPDX-License-Identifier: Apache-2.0
"""The real Firecracker, where there is one: the fake answers as it does, and the driver works with it.

Found as DSEC_FIRECRACKER says (`jailer` beside it), else in the usual places. The guests are a few machine
instructions, so that a KVM which emulates them will do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsecd.linux import kvm
from dsecd.vmm.base import Machine, Place, Snapshot
from dsecd.vmm.firecracker import install, models
from dsecd.vmm.firecracker.errors import StartFailed
from dsecd.vmm.firecracker.jail import Programs
from tests.support.firecracker import (
    SPIN,
    TRIPLE_FAULT,
    House,
    ask,
    end,
    fakes,
    house,
    only_process_of,
    processes_of,
    tiny_kernel,
)
from tests.support.waiting import until


def programs() -> Programs:
    found = install.find(os.environ.get("DSEC_FIRECRACKER", "auto"))
    if not (found.firecracker.exists() and found.jailer.exists()):
        pytest.skip("there is no Firecracker here: neither in PATH nor where DSEC_FIRECRACKER says")
    return found


def need_kvm() -> None:
    """A guest of a few instructions must run; how fast does not matter here."""
    try:
        kvm.run_guest()
    except (OSError, kvm.Unusable) as error:
        pytest.skip(f"KVM does not run guests here: {error}")


def release(program: Path) -> str:
    text = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return text.split()[1].removeprefix("v")


@pytest.fixture(name="h")
def the_house(disk: Path) -> Iterator[House]:
    real = programs()
    with house(disk) as found:
        found.use(real)
        yield found


# ------------------------------------------------------------------------------------- the fake answers as it does

BUCKET = {"size": 1, "refill_time": 1}
BEFORE: list[tuple[str, str, Any]] = [
    ("GET", "/", None), ("GET", "/version", None), ("GET", "/nonsense", None), ("PUT", "/nonsense", {}),
    ("GET", "/balloon", None), ("GET", "/balloon/statistics", None), ("GET", "/machine-config", None),
    ("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": 128, "foo": 1}),
    ("PUT", "/machine-config", {"vcpu_count": 3, "mem_size_mib": 128, "smt": True}),
    ("PUT", "/machine-config", {"vcpu_count": 33, "mem_size_mib": 128}),
    ("PUT", "/machine-config", {"vcpu_count": 300, "mem_size_mib": 128}),
    ("PUT", "/machine-config", {"vcpu_count": "1", "mem_size_mib": 128}),
    ("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": 0}),
    ("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": 127, "huge_pages": "2M"}),
    ("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": 128, "huge_pages": "1G"}),
    ("PUT", "/machine-config", {"vcpu_count": 1}), ("PUT", "/machine-config", None),
    ("PATCH", "/machine-config", {"vcpu_count": 2}), ("GET", "/machine-config", None),
    ("PUT", "/actions", {"action_type": "InstanceStart"}), ("PUT", "/actions", {"action_type": "Start"}),
    ("PUT", "/actions", {"action_type": "SendCtrlAltDel"}), ("PUT", "/actions", {"action_type": "FlushMetrics"}),
    ("PATCH", "/vm", {"state": "Paused"}), ("PATCH", "/vm", {"state": "Stopped"}),
    ("PUT", "/snapshot/create", {"snapshot_path": "s", "mem_file_path": "m"}),
    ("PUT", "/snapshot/create", {"snapshot_path": "s"}),
    ("PUT", "/snapshot/load", {"snapshot_path": "s", "mem_backend": {"backend_type": "File", "backend_path": "m"}}),
    ("PUT", "/snapshot/load", {"snapshot_path": "s", "mem_backend": {"backend_type": "Tape", "backend_path": "m"}}),
    ("PUT", "/snapshot/load", {"snapshot_path": "s", "drive_overrides": []}),
    ("PUT", "/boot-source", {"kernel_image_path": "missing"}), ("PUT", "/boot-source", {"boot_args": "x"}),
    ("PUT", "/boot-source", {"kernel_image_path": "kernel", "initrd_path": "missing"}),
    ("PUT", "/boot-source", {"kernel_image_path": "kernel", "boot_args": "x"}),
    ("PUT", "/drives/a-b", {"drive_id": "a-b", "path_on_host": "file", "is_root_device": False}),
    ("PUT", "/drives/a", {"drive_id": "b", "path_on_host": "file", "is_root_device": False}),
    ("PUT", "/drives/a", {"drive_id": "a", "path_on_host": "missing", "is_root_device": False}),
    ("PUT", "/drives/a", {"drive_id": "a", "path_on_host": "file"}),
    ("PUT", "/drives/a", {"drive_id": "a", "path_on_host": "file", "is_root_device": True}),
    ("PUT", "/drives/b", {"drive_id": "b", "path_on_host": "file", "is_root_device": True}),
    ("PUT", "/drives/b", {"drive_id": "b", "path_on_host": "file", "is_root_device": False, "cache_type": "Fast"}),
    ("PUT", "/drives/b", {
        "drive_id": "b", "path_on_host": "file", "is_root_device": False, "cache_type": "Writeback",
        "rate_limiter": {"ops": BUCKET},
    }),
    ("PUT", "/drives/b", {
        "drive_id": "b", "path_on_host": "file", "is_root_device": False, "rate_limiter": {"ops": {"size": 1}},
    }),
    ("PATCH", "/drives/a", {"drive_id": "a", "path_on_host": "file"}),
    ("PUT", "/vsock", {"guest_cid": 3}), ("PUT", "/vsock", {"guest_cid": 3, "uds_path": "v", "port": 1}),
    ("PUT", "/vsock", {"guest_cid": 3, "uds_path": "v"}), ("PUT", "/vsock", {"guest_cid": 3, "uds_path": "v"}),
    ("PUT", "/balloon", {"amount_mib": 256, "deflate_on_oom": False}), ("PUT", "/balloon", {"amount_mib": 1}),
    ("PUT", "/balloon", {"amount_mib": -1, "deflate_on_oom": False}),
    ("PUT", "/balloon", {"amount_mib": 0, "deflate_on_oom": True, "free_page_reporting": True}),
    ("PUT", "/balloon", {"amount_mib": 0, "deflate_on_oom": True, "stats_polling_interval_s": 1}),
    ("PATCH", "/balloon", {"amount_mib": 1}), ("GET", "/balloon/statistics", None),
    ("PUT", "/entropy", {}), ("PUT", "/entropy", {"x": 1}),
    ("PUT", "/entropy", {"rate_limiter": {"bandwidth": BUCKET}}),
    ("PUT", "/pmem/p", {"id": "p", "path_on_host": "file"}), ("PUT", "/pmem/p", {"id": "q", "path_on_host": "file"}),
    ("PUT", "/serial", {"serial_out_path": "file"}),
    ("PUT", "/network-interfaces/e", {"iface_id": "e", "host_dev_name": "none"}),
    ("PUT", "/network-interfaces/e", {"iface_id": "e"}),
    ("PUT", "/network-interfaces/e", {"iface_id": "e", "host_dev_name": "none", "mtu": 1500}),
    ("PUT", "/boot-source", {"kernel_image_path": "kernel", "boot_args": "x" * 60_000}),
]  # fmt: skip
AFTER: list[tuple[str, str, Any]] = [
    ("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": 128}),
    ("PUT", "/boot-source", {"kernel_image_path": "kernel"}), ("PUT", "/vsock", {"guest_cid": 3, "uds_path": "v"}),
    ("PUT", "/drives/a", {"drive_id": "a", "path_on_host": "file", "is_root_device": False}),
    ("PUT", "/actions", {"action_type": "InstanceStart"}), ("GET", "/", None),
    ("PUT", "/actions", {"action_type": "InstanceStart"}), ("PUT", "/snapshot/create", {
        "snapshot_path": "s", "mem_file_path": "m",
    }),
    ("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": 128}), ("PATCH", "/machine-config", {"vcpu_count": 1}),
    ("PUT", "/boot-source", {"kernel_image_path": "kernel"}), ("PUT", "/vsock", {"guest_cid": 3, "uds_path": "w"}),
    ("PUT", "/entropy", {}), ("PUT", "/balloon", {"amount_mib": 0, "deflate_on_oom": True}),
    ("GET", "/balloon", None), ("GET", "/balloon/statistics", None), ("PATCH", "/balloon", {"amount_mib": 1}),
    ("PUT", "/snapshot/load", {"snapshot_path": "s", "mem_backend": {"backend_type": "File", "backend_path": "m"}}),
    ("PATCH", "/drives/q", {"drive_id": "q", "path_on_host": "file"}),
    ("PATCH", "/drives/a", {"drive_id": "a", "path_on_host": "missing"}),
    ("PATCH", "/drives/a", {"drive_id": "a", "path_on_host": "file"}),
    ("PATCH", "/vm", {"state": "Resumed"}), ("PATCH", "/vm", {"state": "Paused"}),
    ("PATCH", "/vm", {"state": "Paused"}), ("GET", "/", None),
    ("PUT", "/snapshot/create", {"snapshot_path": "s", "mem_file_path": "m", "snapshot_type": "Diff"}),
    ("PUT", "/snapshot/create", {"snapshot_path": "s", "mem_file_path": "m"}),
    ("PATCH", "/vm", {"state": "Resumed"}), ("PATCH", "/vm", {"state": "Resumed"}), ("GET", "/", None),
]  # fmt: skip


def _listens(path: Path) -> bool:
    """It is bound a moment before it listens."""
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


@contextlib.contextmanager
def running(program: Path, directory: Path) -> Iterator[Path]:
    """A process without a jail, and the path of its API."""
    directory.mkdir()
    tiny_kernel(directory / "kernel", SPIN)
    (directory / "file").write_bytes(b"\0" * (2 << 20))
    argv = [str(program), "--api-sock", "api.sock", "--id", "it"]
    with open(directory / "output", "wb") as output:
        process = subprocess.Popen(argv, cwd=directory, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        until(lambda: _listens(directory / "api.sock"))
        yield directory / "api.sock"
    finally:
        process.kill()
        process.wait()


def essence(status: int, found: Any) -> tuple[int, str]:
    """What an answer says, without the words that only tell where in a body or from which call of the system."""
    if status < 400:
        return status, ", ".join(sorted(found)) if isinstance(found, dict) and "state" in found else ""
    text = str(found.get("fault_message") or found.get("error"))
    kind = re.search(r"(unknown field|missing field|unknown variant) `\w+`|invalid type|invalid value", text)
    if kind is not None:
        return status, kind[0]
    return status, re.split(r"[:.] | with size | /", text + " ")[0]


@pytest.mark.parametrize("calls", ["before", "after"])
def test_the_fake_answers_as_the_real_one(disk: Path, calls: str) -> None:
    real = programs().firecracker
    if calls == "after":
        need_kvm()
    version = release(real)
    fake = fakes(disk / "programs", version=version).firecracker
    steps = BEFORE if calls == "before" else AFTER
    with running(real, disk / "real") as api, running(fake, disk / "fake") as fake_api:
        differ = []
        for step in steps:
            answers = [essence(*ask(path, *step)) for path in (api, fake_api)]
            if answers[0] != answers[1]:
                differ.append((step, *answers))
    print(f"Firecracker {version}: {len(steps)} calls")
    assert differ == []


# ------------------------------------------------------------------------------------------- the driver with the real


def spinning(h: House, name: str = "vm1", number: int = 0, code: bytes = SPIN) -> tuple[Place, Machine]:
    kernel = tiny_kernel(h.base / f"kernel-{name}", code)
    layers = 2 if models.parse_version(release(programs().firecracker)) >= models.PMEM else 0
    machine = replace(h.machine(name, layers=layers), kernel=kernel, initramfs=None)
    return h.place(name, number), machine


def state(h: House, place: Place) -> str:
    return str(ask(h.jail(place) / "run/api.sock", "GET", "/")[1]["state"])


def test_a_machine_lives_and_is_walled_in(h: House) -> None:
    need_kvm()
    place, machine = spinning(h)
    h.start(place, machine)
    assert state(h, place) == "Running"
    pid = only_process_of(place.uid)
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert (int(status["CapEff"], 16), status["Seccomp"], status["NoNewPrivs"]) == (0, "2", "1")
    for kind in ("mnt", "pid", "net", "ipc", "uts"):
        assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
    assert (place.cgroup / "cgroup.procs").read_text().split() == [str(pid)]
    asyncio.run(h.driver.pause(place))
    assert state(h, place) == "Paused"
    asyncio.run(h.driver.resume(place))
    assert asyncio.run(h.driver.memory(place)) == {}
    with pytest.raises(TimeoutError):  # this guest has no agent
        asyncio.run(h.driver.dial(place, 1))
    end(pid)
    h.driver.forget(place)
    assert h.left_of(place) == []


def test_clones_of_a_snapshot(h: House) -> None:
    need_kvm()
    source, machine = spinning(h)
    h.start(source, machine)
    target = Snapshot(h.base / "state", h.base / "memory")
    asyncio.run(h.driver.pause(source))
    began = time.monotonic()
    asyncio.run(h.driver.save(source, target))
    saved_s = time.monotonic() - began
    assert target.memory.stat().st_size == 128 << 20
    assert target.state.stat().st_size < 1 << 20
    took = []
    for number in (1, 2, 3):
        place, copy = spinning(h, f"clone{number}", number)
        began = time.monotonic()
        h.start(place, replace(copy, kernel=machine.kernel), target)
        took.append(time.monotonic() - began)
        assert state(h, place) == "Paused"
        asyncio.run(h.driver.resume(place))
        assert state(h, place) == "Running"
    print(f"saved in {saved_s:.3f} s, {target.state.stat().st_size} bytes of state; clones in {took} s")


def test_a_guest_that_ends_its_machine_ends_the_process(h: House) -> None:
    need_kvm()
    place, machine = spinning(h, code=TRIPLE_FAULT)
    # It may end before the start has told it everything there is to tell.
    with contextlib.suppress(StartFailed):
        h.start(place, machine)
    until(lambda: not processes_of(place.uid))
    assert h.driver.process(place) is None


def test_a_kernel_that_is_none_is_told_and_nothing_is_left(h: House) -> None:
    """Without KVM the same call says that there is none."""
    place, machine = spinning(h)
    broken = h.base / "no-kernel"
    broken.write_bytes(b"not a kernel")
    with pytest.raises(StartFailed) as caught:
        h.start(place, replace(machine, kernel=broken))
    assert "PUT /actions: refused with status 400: Start microvm error" in str(caught.value)
    assert h.left_of(place) == []


def test_a_snapshot_that_is_none_is_told_and_nothing_is_left(h: House) -> None:
    place, machine = spinning(h)
    for name in ("state", "memory"):
        (h.base / name).write_bytes(os.urandom(4096))
    with pytest.raises(StartFailed, match="PUT /snapshot/load: refused with status 400: Load snapshot error"):
        h.start(place, machine, Snapshot(h.base / "state", h.base / "memory"))
    assert h.left_of(place) == []
