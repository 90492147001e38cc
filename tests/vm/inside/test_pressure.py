# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host: admission by pressure that real memory hogs make; how the host is, read from /proc."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libdsec import Client, Sandbox
from libdsec.errors import NoCapacity
from libdsec.types import Sandbox as Info
from libdsec.types import SandboxSpec

_SPEC = SandboxSpec(image="debian:trixie")
_CONFIG = Path("/etc/dsec/dsecd.toml.d/test.toml")
#: Takes so many MiB, and goes on touching them.
_HOG = """
import sys, time
taken = bytearray(int(sys.argv[1]) << 20)
print("taken", flush=True)
while True:
    for at in range(0, len(taken), 4096):
        taken[at] = taken[at] ^ 1
"""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client() as connected:
        yield connected


def _meminfo(name: str) -> int:
    """In MiB."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return int({words[0]: words[1] for words in lines}[f"{name}:"]) >> 10


def _configure(client: Client, text: str) -> None:
    """Another configuration, as long as no other one takes its place: each start of the daemon takes seconds here."""
    _CONFIG.parent.mkdir(parents=True, exist_ok=True)
    _CONFIG.write_text(f"[admission]\n{text}")
    subprocess.run(["systemctl", "restart", "dsecd"], check=True)
    client.version()


@pytest.fixture(scope="module", autouse=True)
def _no_settings_stay() -> Iterator[None]:
    yield
    _CONFIG.unlink(missing_ok=True)
    subprocess.run(["systemctl", "stop", "dsecd"], check=True)  # a request starts it again


def _until(what: Callable[[], bool], timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, Path("/proc/pressure/memory").read_text()
        time.sleep(0.2)


@contextmanager
def _hog(mib: int, *wrapper: str, wait: bool = True) -> Iterator[None]:
    with subprocess.Popen([*wrapper, sys.executable, "-c", _HOG, str(mib)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if wait:
                assert process.stdout.readline() == b"taken\n"
            yield
        finally:
            process.kill()


def test_doctor_and_host_tell_by_what_is_admitted(client: Client) -> None:
    shown = subprocess.run(["dsecctl", "host"], check=True, capture_output=True, text=True).stdout
    assert "room for new sandboxes (admission on)" in shown
    (finding,) = [finding for finding in client.doctor().findings if finding.check == "pressure"]
    assert (finding.ok, finding.detail.startswith("admission is on; the host has room")) == (True, True)


def test_too_little_memory_refuses_or_queues_and_ends_nothing_that_runs(client: Client) -> None:
    """The floor is set where a hog reaches it without harming the test host."""
    total, available = _meminfo("MemTotal"), _meminfo("MemAvailable")
    floor = int(100 * available / total) - 15
    _configure(client, f"memory_available_min_percent = {floor}\n")
    with Sandbox(image=_SPEC.image, client=client) as box:
        box.stop()
        with Sandbox(image=_SPEC.image, client=client) as running, _hog(total * 25 // 100):
            _until(lambda: 100 * _meminfo("MemAvailable") < (floor - 1) * total)
            # At once: nothing is said of a wait.
            says = rf"the host is short of memory: .* available, {floor} % is kept"
            with pytest.raises(NoCapacity, match=says) as refused:
                client.create(_SPEC, wait_s=0)
            assert refused.value.details["retry_after_s"] == 5
            with pytest.raises(NoCapacity, match=f"start '{box.id}': the host is short of memory, also after 1 s"):
                box.start(wait_s=1)
            assert running.exec("echo", "alive").text == "alive\n"
            pressure = client.host().pressure
            assert pressure is not None
            assert pressure.refused == 2
            assert "is kept free" in pressure.short_of

            made: list[Info] = []
            waiter = threading.Thread(target=lambda: made.append(client.create(_SPEC, wait_s=100)))
            waiter.start()
            _until(lambda: client.host().pressure.waiting == 1)  # type: ignore[union-attr]
            assert made == []
        waiter.join(300)  # the hog has ended
        assert [info.state for info in made] == ["running"]
        client.delete(made[0].id)
        box.start()
    told = [event.details for event in client.events(limit=10000).events if event.kind == "host.pressure"]
    assert [details["short"] for details in told][-2:] == [True, False]


def test_time_lost_to_reclaim_refuses_although_memory_is_available(client: Client) -> None:
    hog = ("systemd-run", "--quiet", "--scope", "--property=MemoryHigh=24M", "--property=MemorySwapMax=0")
    _configure(client, "memory_some_percent = 20\n")
    with _hog(200, *hog, wait=False):
        # A mean of ten seconds: what it is now it stays for a moment, more than half of it for five seconds.
        _until(lambda: _some_avg10() > 40)
        assert _meminfo("MemAvailable") > _meminfo("MemTotal") // 20  # not by the floor
        with pytest.raises(NoCapacity, match="short of memory: a task waited for memory") as refused:
            client.create(_SPEC, wait_s=0)
        print(refused.value.message)
    began = time.monotonic()
    box = client.create(_SPEC, wait_s=110)
    print(f"room again {time.monotonic() - began:.1f} s after the hog had ended")
    client.delete(box.id)


def _some_avg10() -> float:
    """Percent of the last ten seconds in which a task waited for memory."""
    return float(Path("/proc/pressure/memory").read_text().split("avg10=")[1].split()[0])
