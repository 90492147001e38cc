# SPDX-License-Identifier: Apache-2.0
"""The driver for Firecracker against a strict fake of it: real processes in a real jail, without a guest.

tests/host/test_firecracker_real.py holds the fake to the real one, and runs the driver with that.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import subprocess
import time
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsecd.linux import mechanisms, pidfd
from dsecd.vmm.base import Place, Snapshot, VmmError
from dsecd.vmm.firecracker import driver as driver_module
from dsecd.vmm.firecracker import install
from dsecd.vmm.firecracker.errors import (
    BadAnswer,
    BadSnapshot,
    CallRefused,
    CallTimedOut,
    NotAnswering,
    StartFailed,
    TooOld,
)
from tests.support.firecracker import (
    LAYER,
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

GREETING = b"the guest speaks first\n"


@pytest.fixture(name="h")
def the_house(disk: Path) -> Iterator[House]:
    with house(disk) as found:
        yield found


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "_START_TIMEOUT_S", 2.0)


def started(h: House, name: str = "vm1", number: int = 0) -> Place:
    place = h.place(name, number)
    h.start(place, h.machine(name))
    return place


def state(h: House, place: Place) -> str:
    status, found = ask(h.jail(place) / "run/api.sock", "GET", "/")
    assert status == 200
    return str(found["state"])


def run(awaitable: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await awaitable

    return asyncio.run(main())


async def echo(h: House, place: Place, text: bytes) -> bytes:
    """What the guest's agent answers on a new connection."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60):
        with await h.driver.dial(place, 10) as sock:
            await loop.sock_sendall(sock, text)
            answer = b""
            while len(answer) < len(GREETING) + len(text):
                answer += await loop.sock_recv(sock, 1000)
    return answer.removeprefix(GREETING)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------------------------------------------- a machine runs


def test_a_machine_starts_as_it_was_asked_for(h: House) -> None:
    place, before = h.place(), descriptors()
    h.start(place, h.machine())
    assert state(h, place) == "Running"
    _, found = ask(h.jail(place) / "run/api.sock", "GET", "/vm/config")
    assert [device["path_on_host"] for device in found["pmem"]] == ["/layer0", "/layer1"]
    assert found["machine-config"]["mem_size_mib"] == 128
    assert found["boot-source"]["boot_args"].startswith("dsec.layers=2 console=ttyS0 ")
    assert found["balloon"]["free_page_reporting"] is True
    assert descriptors() <= before  # fewer, when something of an earlier test's was only now collected


def test_the_process_is_walled_in(h: House) -> None:
    place = started(h)
    pid = only_process_of(place.uid)
    assert (place.cgroup / "cgroup.procs").read_text().split() == [str(pid)]
    for kind in ("mnt", "pid", "net", "ipc", "uts"):
        assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
    links = [line.split(":")[0].strip() for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]]
    assert "lo" in links
    assert set(links) < {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {str(place.uid)}
    assert status["Groups"].strip() == ""
    assert int(status["CapEff"], 16) == 0
    root = Path(f"/proc/{pid}/root")
    assert not (root / "etc").exists()
    assert (root / "layer1").read_bytes() == LAYER
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert f"{(128 + 64) << 20}" in next(line for line in limits.splitlines() if line.startswith("Max file size"))


def test_nothing_of_a_jail_can_be_changed_from_within(h: House) -> None:
    """A program as the process's user in its root tries; in a directory that was lent to it the same succeeds."""
    place = started(h)
    pid = only_process_of(place.uid)
    root = Path(f"/proc/{pid}/root")

    def attempt(*argv: str) -> bool:
        enter = ["nsenter", f"--target={pid}", "--mount", "--root", "--wd=/"]
        as_it = [f"--setuid={place.uid}", f"--setgid={place.uid}"]
        return subprocess.run([*enter, *as_it, *argv], capture_output=True, check=False).returncode == 0

    targets = [
        ("touch", "/new"), ("touch", "/run/new"), ("mv", "/run/api.sock", "/run/other"), ("rm", "/run/agent.sock"),
        ("ln", "-sf", "/etc/passwd", "/log"), ("mv", "/log", "/log2"), ("rm", "/dev/kvm"), ("mkdir", "/dev/shm"),
    ]  # fmt: skip
    assert [argv for argv in targets if attempt(*argv)] == []
    write = ("dd", "if=/log", "count=1", "conv=notrunc")
    assert [name for name in ("layer0", "kernel") if attempt(*write, f"of=/{name}")] == []
    assert attempt(*write, "of=/disk"), "its disk is its own"
    os.mkdir(root / "lent")
    os.chown(root / "lent", place.uid, place.uid)
    assert attempt("touch", "/lent/new"), "the attempts are able to succeed"


def test_the_agent_is_reached_and_speaks_first(h: House) -> None:
    place = started(h)
    assert run(echo(h, place, b"x" * 300_000)) == b"x" * 300_000


def test_dialling_waits_for_the_guest_to_boot(h: House) -> None:
    h.use(fakes(h.base / "slow", boot_s=2.5))
    place = started(h)
    began = time.monotonic()
    assert run(echo(h, place, b"hello")) == b"hello"
    # Its time has run since it was started.
    assert time.monotonic() - began > 0.3


@pytest.mark.parametrize("guest", ["nobody", "hang"])
def test_a_guest_that_never_boots_is_a_timeout(h: House, guest: str) -> None:
    h.use(fakes(h.base / guest, guest=guest))
    place = started(h)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        run(h.driver.dial(place, 0.8))
    assert 0.5 < time.monotonic() - began < 20


def test_what_is_no_answer_of_a_vsock_device_is_told(h: House) -> None:
    h.use(fakes(h.base / "odd", guest="garbage"))
    place = started(h)
    with pytest.raises(BadAnswer, match="is not the answer of a vsock device"):
        run(h.driver.dial(place, 30))


def test_dialling_a_machine_that_dies_ends_at_once(h: House) -> None:
    h.use(fakes(h.base / "nobody", guest="nobody"))
    place = started(h)
    pid = only_process_of(place.uid)
    began = time.monotonic()

    async def dial_and_end() -> None:
        dialling = asyncio.ensure_future(h.driver.dial(place, 120))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(end, pid)
        await dialling

    with pytest.raises(ConnectionError, match="firecracker of 'vm1' ended"):
        run(dial_and_end())
    assert time.monotonic() - began < 60


def test_pause_and_resume_are_felt_and_may_be_repeated(h: House) -> None:
    place = started(h)
    run(h.driver.pause(place))
    run(h.driver.pause(place))
    assert state(h, place) == "Paused"
    run(h.driver.resume(place))
    run(h.driver.resume(place))
    assert state(h, place) == "Running"


def test_commands_work_after_each_of_many_pauses_fl40(h: House) -> None:
    place = started(h)

    async def go() -> None:
        for number in range(50):
            await h.driver.pause(place)
            await h.driver.resume(place)
            assert await echo(h, place, b"%d" % number) == b"%d" % number

    run(go())


def test_memory_is_what_the_balloon_tells_fl47(h: House) -> None:
    place = started(h)
    half = 64 << 20
    assert run(h.driver.memory(place)) == {"free": half, "total": 2 * half, "available": half, "disk_caches": 0}
    h.use(fakes(h.base / "silent", guest="nobody"))
    other = started(h, "vm2", 1)
    assert run(h.driver.memory(other)) == {}


# ------------------------------------------------------------------------------------------- whoever comes later


def test_a_new_daemon_drives_what_another_started(h: House) -> None:
    place = started(h)
    pid = only_process_of(place.uid)
    h.use(h.driver._programs)
    assert h.driver.process(place) == pidfd.identify(pid)
    run(h.driver.pause(place))
    assert state(h, place) == "Paused"
    assert h.driver.residents() == {"vm1"}


def test_a_machine_that_was_killed_is_gone_and_forgotten(h: House) -> None:
    place = started(h)
    end(only_process_of(place.uid))
    assert h.driver.process(place) is None
    for call in (h.driver.pause, h.driver.resume, h.driver.memory):
        with pytest.raises(NotAnswering, match="it is not running"):
            run(call(place))
    assert "Running Firecracker" in h.driver.last_words(place)
    h.driver.forget(place)
    h.driver.forget(place)
    assert h.left_of(place) == []
    assert h.driver.residents() == set()
    assert h.driver.last_words(place) == ""


def test_a_second_start_is_refused_and_harms_nothing(h: House) -> None:
    place = started(h)
    pid = only_process_of(place.uid)
    with pytest.raises(StartFailed, match="runs already"):
        h.start(place, h.machine())
    assert only_process_of(place.uid) == pid
    assert run(echo(h, place, b"still here")) == b"still here"


def test_what_an_interrupted_start_left_is_no_obstacle(h: House) -> None:
    place = started(h)
    end(only_process_of(place.uid))
    assert h.left_of(place) != []
    h.start(place, h.machine())
    assert state(h, place) == "Running"


# ----------------------------------------------------------------------------------------------------- snapshots


def saved(h: House, place: Place, name: str = "s") -> Snapshot:
    folder = h.base / name
    folder.mkdir(mode=0o700)
    target = Snapshot(folder / "state", folder / "memory")
    run(h.driver.pause(place))
    run(h.driver.save(place, target))
    return target


def digest(snapshot: Snapshot) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in (snapshot.state, snapshot.memory)]


def test_clones_come_of_a_snapshot_that_stays_as_it_is_fl39(h: House) -> None:
    source = started(h)
    snapshot = saved(h, source)
    before = digest(snapshot)
    for path in (snapshot.state, snapshot.memory):
        status = path.stat()
        assert (status.st_uid, status.st_nlink, status.st_mode & 0o7777) == (0, 1, 0o444)
    assert not (h.jail(source) / "snapshot").exists()
    clones = [h.place(f"clone{number}", number) for number in (1, 2)]
    for place in clones:
        h.start(place, h.machine(place.id), snapshot)
        assert state(h, place) == "Paused", "nothing runs before it has an identity of its own"
        run(h.driver.resume(place))
        assert run(echo(h, place, place.id.encode())) == place.id.encode()
    run(h.driver.resume(source))
    assert run(echo(h, source, b"source")) == b"source"
    again = saved(h, clones[0], "again")
    assert again.memory.stat().st_size == 128 << 20
    assert digest(snapshot) == before


def test_a_machine_that_runs_is_not_saved(h: House) -> None:
    place = started(h)
    with pytest.raises(BadSnapshot, match="save 'vm1': it is running") as caught:
        run(h.driver.save(place, Snapshot(h.base / "state", h.base / "memory")))
    assert caught.value.hint == "pause it first"
    assert not (h.base / "state").exists()
    assert not (h.jail(place) / "snapshot").exists()


@pytest.mark.parametrize("kind", ["link", "fifo", "second-name", "nothing"])
def test_a_snapshot_that_is_no_plain_file_is_not_taken(h: House, kind: str) -> None:
    h.use(fakes(h.base / kind, snapshot=kind))
    place = started(h)
    with pytest.raises(BadSnapshot, match="save 'vm1'"):
        saved(h, place)
    assert list((h.base / "s").iterdir()) == []
    assert not (h.jail(place) / "snapshot").exists()
    assert oct(Path("/etc/passwd").stat().st_mode & 0o7777) == "0o644"


def test_a_name_that_is_taken_is_not_written_over(h: House) -> None:
    place = started(h)
    (h.base / "s").mkdir()
    (h.base / "s" / "memory").write_text("somebody's")
    run(h.driver.pause(place))
    with pytest.raises(BadSnapshot):
        run(h.driver.save(place, Snapshot(h.base / "s" / "state", h.base / "s" / "memory")))
    assert [path.name for path in (h.base / "s").iterdir()] == ["memory"]
    assert (h.base / "s" / "memory").read_text() == "somebody's"


@pytest.mark.parametrize("wrong", ["state", "memory", "release"])
def test_a_snapshot_that_cannot_be_loaded_leaves_nothing(h: House, wrong: str) -> None:
    snapshot = saved(h, started(h))
    place, machine = h.place("clone", 1), h.machine("clone")
    if wrong == "release":
        h.use(fakes(h.base / "next", version="2.0.0"))
    else:
        broken = h.base / "broken"
        broken.write_bytes(b"\0" * 100)
        snapshot = replace(snapshot, state=broken) if wrong == "state" else replace(snapshot, memory=h.base / "missing")
    with pytest.raises((StartFailed, FileNotFoundError)):
        h.start(place, machine, snapshot)
    assert h.left_of(place) == []


# -------------------------------------------------------------------------------------- starts that do not succeed

CALLS = [
    "GET /version", "PUT /machine-config", "PUT /boot-source", "PUT /pmem/layer1", "PUT /drives/disk", "PUT /vsock",
    "PUT /entropy", "PUT /balloon", "PUT /serial", "PUT /actions",
]  # fmt: skip


@pytest.mark.parametrize("fault", ["die", "refuse"])
@pytest.mark.parametrize("call", CALLS)
def test_a_start_that_fails_at_any_call_leaves_nothing(h: House, call: str, fault: str) -> None:
    h.use(fakes(h.base / "bad", faults={call: fault}))
    place, before = h.place(), descriptors()
    with pytest.raises(StartFailed if call != "GET /version" or fault == "die" else VmmError) as caught:
        h.start(place, h.machine())
    assert h.left_of(place) == []
    assert descriptors() <= before  # fewer, when something of an earlier test's was only now collected
    if fault == "refuse":
        assert f"{call} is refused [31m by this test" in str(caught.value), "its words, without control characters"
        assert len(str(caught.value)) < 1500


@pytest.mark.usefixtures("_short_waits")
@pytest.mark.parametrize(
    "fault",
    ["die-late", "half", "slow", "garbage", "oversized", "head", "chunked", "nested", "text", "empty"],
)
@pytest.mark.parametrize("call", ["GET /version", "PUT /actions"])
def test_no_answer_of_a_strange_process_does_harm(
    h: House, call: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsecd.vmm.firecracker.api.CALL_TIMEOUT_S", 1.0)
    monkeypatch.setattr("dsecd.vmm.firecracker.api.Api.send.__kwdefaults__", {"timeout_s": 1.0})
    monkeypatch.setattr("dsecd.vmm.firecracker.api.Api.get.__kwdefaults__", {"timeout_s": 1.0})
    h.use(fakes(h.base / "bad", faults={call: fault}))
    place, before = h.place(), descriptors()
    with pytest.raises(VmmError) as caught:
        h.start(place, h.machine())
    assert h.left_of(place) == []
    assert descriptors() <= before  # fewer, when something of an earlier test's was only now collected
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("start", ["exit", "no-socket", "mute"])
def test_a_process_that_never_answers_is_ended(h: House, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if start != "exit":
        monkeypatch.setattr(driver_module, "_START_TIMEOUT_S", 2.0)
    h.use(fakes(h.base / "bad", start=start))
    place = h.place()
    with pytest.raises(StartFailed) as caught:
        h.start(place, h.machine())
    assert h.left_of(place) == []
    if start == "exit":
        assert "ended before its API answered; last line: Error: the kernel has no KVM" in str(caught.value)


def test_a_socket_that_leads_elsewhere_is_not_followed(h: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process makes its API's name a way to another service of the host, which would take us for a client."""
    monkeypatch.setattr(driver_module, "_START_TIMEOUT_S", 1.0)
    service = h.base / "service.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(service))
        listener.listen(8)
        listener.setblocking(False)
        (h.base / "way").symlink_to(service)
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(h.base / "way"))
            listener.accept()[0].close()
        h.use(fakes(h.base / "bad", start=str(service)))
        place = h.place()
        with pytest.raises(StartFailed):
            h.start(place, h.machine())
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert h.left_of(place) == []


def test_a_socket_of_another_process_is_not_spoken_to(h: House) -> None:
    place = started(h)
    api = h.jail(place) / "run/api.sock"
    api.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(api.parent, os.O_PATH)
        listener.bind(f"/proc/self/fd/{here}/api.sock")
        os.close(here)
        listener.listen(8)
        with pytest.raises(NotAnswering, match=f"the API socket is that of process {os.getpid()} of uid 0"):
            run(h.driver.pause(place))
        sock, _ = listener.accept()
        with sock:
            assert sock.recv(100) == b""


def test_a_jailer_that_fails_is_quoted(h: House) -> None:
    programs = fakes(h.base / "bad")
    programs.jailer.write_text("#!/bin/sh\necho 'Error: no jail today' >&2\nexit 1\n")
    h.use(programs)
    place = h.place()
    with pytest.raises(StartFailed, match="exit status 1: Error: no jail today"):
        h.start(place, h.machine())
    assert h.left_of(place) == []


def test_programs_that_are_not_there_leave_nothing(h: House) -> None:
    programs = fakes(h.base / "bad")
    programs.jailer.unlink()
    h.use(programs)
    place = h.place()
    with pytest.raises(FileNotFoundError):
        h.start(place, h.machine())
    assert h.left_of(place) == []
    probe = h.driver.probe()
    assert (probe.works, probe.detail) == (False, f"{programs.jailer} is not installed")


@pytest.mark.parametrize("missing", ["kernel", "layer", "disk"])
def test_a_file_that_is_missing_is_named(h: House, missing: str) -> None:
    place, machine = h.place(), h.machine()
    gone = h.base / "files" / "gone"
    machine = {
        "kernel": replace(machine, kernel=gone),
        "layer": replace(machine, layers=(machine.layers[0], gone)),
        "disk": replace(machine, disk=gone),
    }[missing]
    with pytest.raises(FileNotFoundError, match="gone"):
        h.start(place, machine)
    assert h.left_of(place) == []


def test_a_release_without_pmem_is_too_old_for_layers(h: House) -> None:
    h.use(fakes(h.base / "old", version="1.13.1"))
    place = h.place()
    with pytest.raises(StartFailed, match=r"PUT /pmem/layer0: needs Firecracker 1\.14\.0, this is 1\.13\.1") as caught:
        h.start(place, h.machine())
    assert caught.value.hint == "install Firecracker 1.14.0 or newer"
    assert h.left_of(place) == []
    h.start(place, h.machine(layers=0))
    assert state(h, place) == "Running"


def test_a_release_older_than_all_we_know_is_refused(h: House) -> None:
    h.use(fakes(h.base / "old", version="1.9.0"))
    place = h.place()
    with pytest.raises(TooOld, match=r"use Firecracker: needs Firecracker 1\.12\.0, this is 1\.9\.0"):
        h.start(place, h.machine(layers=0))
    assert h.left_of(place) == []


@pytest.mark.parametrize("version", ["1.14.0", "1.15.3", "1.16.0", "1.17.0"])
def test_each_release_is_told_only_what_it_knows(h: House, version: str) -> None:
    """The fake refuses fields that its release does not have."""
    h.use(fakes(h.base / "some", version=version))
    place = started(h)
    assert state(h, place) == "Running"


# --------------------------------------------------------------------------------------------------- later faults


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("die", NotAnswering), ("half", NotAnswering), ("slow", CallTimedOut), ("garbage", BadAnswer),
        ("oversized", BadAnswer), ("head", BadAnswer), ("chunked", BadAnswer), ("refuse", CallRefused),
    ],
)  # fmt: skip
def test_faults_of_a_later_call_are_typed(
    h: House, fault: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    h.use(fakes(h.base / "bad", faults={"PATCH /vm": fault}))
    place = started(h)
    limit_s = 1.0 if fault == "slow" else 20.0
    monkeypatch.setattr("dsecd.vmm.firecracker.api.Api.send.__kwdefaults__", {"timeout_s": limit_s})
    before = descriptors()
    with pytest.raises(error, match=r"PATCH /vm: "):
        run(h.driver.pause(place))
    assert descriptors() <= before  # fewer, when something of an earlier test's was only now collected
    if fault not in ("die", "slow", "head"):
        # One call that went wrong is not the end of the process; half an answer comes after the effect.
        assert state(h, place) == ("Paused" if fault == "half" else "Running")


@pytest.mark.parametrize("fault", ["text", "nested", "empty", "garbage", "oversized"])
def test_figures_that_are_none_are_not_taken(h: House, fault: str) -> None:
    h.use(fakes(h.base / "bad", faults={"GET /balloon/statistics": fault}))
    place = started(h)
    with pytest.raises(BadAnswer, match="GET /balloon/statistics"):
        run(h.driver.memory(place))


def test_last_words_are_bounded_clean_and_only_its_own(h: House, tmp_path: Path) -> None:
    place = started(h)
    log = h.jail(place) / "log"
    log.write_text("old\n" * 100_000 + "\x1b[2Jlast\n")
    words = h.driver.last_words(place)
    assert words.endswith(" [2Jlast")
    assert len(words) <= 2000
    (tmp_path / "secret").write_text("secret")
    log.unlink()
    log.symlink_to(tmp_path / "secret")
    assert (h.driver.last_words(place), log.read_text()) == ("", "secret")
    log.unlink()
    os.mkfifo(log)
    assert h.driver.last_words(place) == ""


def test_a_machine_ends_with_its_cgroup(h: House) -> None:
    """How the backend ends it, whatever the process does with signals."""
    place = started(h)
    (place.cgroup / "cgroup.kill").write_text("1")
    until(lambda: not processes_of(place.uid))
    h.driver.forget(place)
    assert h.left_of(place) == []


# ----------------------------------------------------------------------------------------------- what is installed


def _program(path: Path, words: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{words}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("firecracker", "jailer", "fault"),
    [
        ("Firecracker v1.16.1", "Jailer v1.16.1", ""),
        ("Firecracker v1.16.1", "Jailer v1.15.0", "they must be of one release"),
        ("Firecracker v1.13.0", "Jailer v1.13.0", "Firecracker is 1.13.0, 1.14.0 is needed"),
        ("something", "Jailer v1.16.1", "no version in"),
        ("Firecracker yes", "Jailer v1.16.1", "not three numbers"),
    ],
)
def test_what_is_installed_must_fit(tmp_path: Path, firecracker: str, jailer: str, fault: str) -> None:
    program = _program(tmp_path / "firecracker", firecracker)
    _program(tmp_path / "jailer", jailer)
    programs = install.find(str(program))
    if not fault:
        assert install.check(programs) == "1.16.1"
        return
    with pytest.raises(ValueError, match=fault):
        install.check(programs)




def test_only_an_uncompressed_kernel_will_do(tmp_path: Path) -> None:
    (tmp_path / "vmlinuz").write_bytes(b"MZ" + b"\0" * 1000)
    with pytest.raises(ValueError, match=r"boots uncompressed kernels, and .*/vmlinuz is none: install "):
        install.check_kernel(tmp_path / "vmlinuz")
    install.check_kernel(tiny_kernel(tmp_path / "vmlinux", b""))
    with pytest.raises(FileNotFoundError):
        install.check_kernel(tmp_path / "missing")


def test_the_probe_wants_kvm_that_runs_guests(h: House) -> None:
    probe = h.driver.probe()
    kvm = mechanisms.by_name("kvm").probe()
    if kvm.works:
        assert (probe.works, probe.detail) == (True, "Firecracker 1.16.1 with kvm")
    else:
        assert probe.works is False
        assert probe.detail.startswith("Firecracker 1.16.1 needs KVM: ")
