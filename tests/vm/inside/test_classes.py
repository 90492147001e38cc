# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host, on a kernel with core scheduling: classes latency and batch of the installed daemon.

Cookies are read by prctl(2) from here, processor time from cgroups; when each of two tasks ran, they say themselves.
"""

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from libdsec import Client, ExecStream, Sandbox
from libdsec.errors import DsecError
from libdsec.types import CreateRequest, Limits, SandboxSpec

_IMAGE = "debian:trixie"
_CONFIG = Path("/etc/dsec/dsecd.toml.d/test.toml")
_PR_SCHED_CORE, _GET = 62, 0
#: What takes so long has not merely been slow.
_FAULT_S = 180.0
Class = Literal["latency", "batch"]
_libc = ctypes.CDLL(None, use_errno=True)

#: Spins from one time until another, and prints as JSON when it ran: a gap of more than 2 ms ends a stretch. The clock,
#: time.monotonic()'s, is read by its number, since a minimal Debian has no Time::HiRes.
_STRETCHES = """
my $time = "\\0" x 16;
sub now { syscall(228, 1, $time); my ($s, $ns) = unpack("qq", $time); return $s + $ns / 1e9 }
my ($from, $until, @stretches) = @ARGV;
select(undef, undef, undef, $from - now()) if $from > now();
my $begin = my $last = now();
while ($last < $until) {
    my $now = now();
    if ($now - $last > 0.002) { push @stretches, sprintf("[%.6f,%.6f]", $begin, $last); $begin = $now }
    $last = $now;
}
push @stretches, sprintf("[%.6f,%.6f]", $begin, $last);
print "[", join(",", @stretches), "]";
"""
#: Asks for a cookie of its own, also by a number that is equal only in the bits that the kernel looks at.
_TAKE_A_COOKIE = """
for my $option (62, 62 + 2**32) { print syscall(157, $option, 1, 0, 0, 0), " " }
"""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client() as connected:
        yield connected


def _sandbox(client: Client, cpu_class: Class, **limits: int) -> Sandbox:
    return Sandbox(image=_IMAGE, cpu_class=cpu_class, limits=Limits(**limits), client=client)


def _top(sandbox: Sandbox) -> Path:
    (top,) = Path("/sys/fs/cgroup").rglob(f"sandbox-{sandbox.id}")
    return top


def _cookie(tid: int) -> int:
    cookie = ctypes.c_ulong()
    if _libc.prctl(_PR_SCHED_CORE, _GET, tid, 0, ctypes.byref(cookie)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl for {tid}")
    return cookie.value


def _cookies(sandbox: Sandbox) -> set[int]:
    """Of all threads in it, at least three of them."""
    deadline = time.monotonic() + _FAULT_S
    while True:
        with suppress(FileNotFoundError, ProcessLookupError):  # one of them has just ended
            pids = [pid for path in _top(sandbox).rglob("cgroup.procs") for pid in path.read_text().split()]
            found = [_cookie(int(tid)) for pid in pids for tid in os.listdir(f"/proc/{pid}/task")]
            if len(found) >= 3:
                return set(found)
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextmanager
def _busy(sandbox: Sandbox, cpu: int) -> Iterator[None]:
    """Something in it that wants one processor all of the time, and has begun to."""
    with _running(sandbox, "taskset", "-c", str(cpu), "sh", "-c", "while :; do :; done"):
        before, deadline = _used_s(sandbox), time.monotonic() + _FAULT_S
        while _used_s(sandbox) < before + 0.5:
            assert time.monotonic() < deadline, "it gets no processor time"
            time.sleep(0.1)
        yield


def _family(sandbox: Sandbox) -> AbstractContextManager[ExecStream]:
    """Processes that were started by processes in it."""
    return _running(sandbox, "sh", "-c", "sleep 600 & sleep 600")


@contextmanager
def _running(sandbox: Sandbox, *argv: str) -> Iterator[ExecStream]:
    with sandbox.popen(*argv) as process:
        yield process
        with suppress(DsecError):  # it may have been deleted with its sandbox
            process.signal(9, tree=True)


def _used_s(sandbox: Sandbox) -> float:
    lines = (line.split() for line in (_top(sandbox) / "cpu.stat").read_text().splitlines())
    return int(dict(lines)["usage_usec"]) / 1e6


def _shares(boxes: Sequence[Sandbox], seconds: float, fit: Callable[[list[float]], bool]) -> list[float]:
    """Of the time that all together got in so many seconds.

    When this machine stands still, whoever runs is charged for it, which evens out: shares that do not ``fit`` are
    looked at over a longer time.
    """
    before, deadline = [_used_s(box) for box in boxes], time.monotonic() + _FAULT_S
    while True:
        time.sleep(seconds)
        used = [_used_s(box) - start for box, start in zip(boxes, before, strict=True)]
        assert sum(used) > seconds / 4  # something ran at all
        shares = [amount / sum(used) for amount in used]
        if fit(shares) or time.monotonic() > deadline:
            return shares


def _configure(client: Client, text: str) -> None:
    """Another configuration, for new sandboxes. The tests with one are the last: each start takes seconds here."""
    _CONFIG.parent.mkdir(parents=True, exist_ok=True)
    _CONFIG.write_text(text)
    subprocess.run(["systemctl", "restart", "dsecd"], check=True)
    client.version()


@pytest.fixture(scope="module", autouse=True)
def _no_settings_stay() -> Iterator[None]:
    yield
    _CONFIG.unlink(missing_ok=True)
    subprocess.run(["systemctl", "stop", "dsecd"], check=True)  # a request starts it again


def _daemon_cookies() -> set[int]:
    """Of all its threads, of which some end while they are asked."""
    show = ["systemctl", "show", "-P", "MainPID", "dsecd"]
    deadline = time.monotonic() + _FAULT_S
    while True:
        pid = subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip()
        with suppress(FileNotFoundError, ProcessLookupError):
            return {_cookie(int(tid)) for tid in os.listdir(f"/proc/{pid}/task")}
        assert time.monotonic() < deadline, pid
        time.sleep(0.1)


@pytest.fixture(scope="module", autouse=True)
def _forced_idle_is_counted() -> None:
    # Only then does the kernel, sched/core_sched.c.
    Path("/proc/sys/kernel/sched_schedstats").write_text("1")


def test_the_processor_has_siblings_here() -> None:
    assert Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list").read_text().strip() in ("0-1", "0,1")


def test_all_of_batch_have_one_cookie_and_nobody_else_has_any(client: Client) -> None:
    with ExitStack() as stack:
        batch = [stack.enter_context(_sandbox(client, "batch")) for _ in range(2)]
        latency = stack.enter_context(_sandbox(client, "latency"))
        for sandbox in (*batch, latency):
            stack.enter_context(_family(sandbox))
        assert client.inspect(batch[0].id).off == ()
        (cookie,) = _cookies(batch[0])
        assert cookie != 0
        assert (_top(batch[0]).parent / "cpu.idle").read_text() == "1\n"
        assert (_cookies(batch[1]), _cookies(latency), _daemon_cookies()) == ({cookie}, {0}, {0})

        # A daemon that is killed takes none with it, and the next one goes on with the same.
        subprocess.run(["systemctl", "kill", "-s", "KILL", "--kill-whom=main", "dsecd"], check=True)
        batch[0].delete()
        later = stack.enter_context(_sandbox(client, "batch"))
        stack.enter_context(_family(later))
        assert (_cookies(later), _cookies(batch[1]), _daemon_cookies()) == ({cookie}, {cookie}, {0})


def test_many_started_at_once_have_the_same_cookie(client: Client) -> None:
    # Twice: with nobody there to take it from.
    for _ in range(2):
        spec = SandboxSpec(image=_IMAGE, cpu_class="batch", command=("sh", "-c", "sleep 600 & sleep 600"))
        job = client.finish(client.create_batch([CreateRequest(spec=spec) for _ in range(8)], parallel=8))
        boxes = [Sandbox.get(item["sandbox"]["id"], client=client) for item in job.result]
        assert len(boxes) == 8
        found = [_cookies(box) for box in boxes]
        for box in boxes:
            client.delete(box.id)
        assert len(set.union(*found)) == 1
        assert 0 not in found[0]


def test_code_inside_cannot_take_a_cookie_of_its_own(client: Client) -> None:
    with _sandbox(client, "latency") as sandbox, _sandbox(client, "batch") as batch:
        for box in (sandbox, batch):
            assert box.exec("perl", "-e", _TAKE_A_COOKIE).text == "-1 -1 "
        # The same program where nothing keeps it from it.
        control = subprocess.run(["perl", "-e", _TAKE_A_COOKIE], check=True, capture_output=True, text=True)
        assert control.stdout == "0 0 "


def _overlap(one: list[list[float]], other: list[list[float]]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


@dataclass
class _Meeting:
    """Two busy tasks on the siblings of one core, in seconds: how long each ran, and how long both at the same time."""

    ran: list[float]
    both: float = 0.0
    forced_idle: float = 0.0

    def part(self) -> float:
        """Of the time that both could have run, as one could that was forced to be idle: perhaps it never ran."""
        return self.both / (min(self.ran) + self.forced_idle)

    def __str__(self) -> str:
        ran = " and ".join(f"{one:.2f}" for one in self.ran)
        return f"ran {ran} s, both at once {self.both:.3f} s, forced idle {self.forced_idle:.3f} s"


def _meet(boxes: Sequence[Sandbox], enough: Callable[[_Meeting], bool]) -> _Meeting:
    """Rounds of 4 s until there is enough: a loaded machine may hardly ever run two processors of ours at once."""
    met, deadline, start_s = _Meeting([0.0, 0.0]), time.monotonic() + _FAULT_S, 1.0
    while True:
        idle = _forced_idle_s(boxes)
        begin = time.monotonic() + start_s
        tasks = [
            box.popen("taskset", "-c", str(cpu), "perl", "-e", _STRETCHES, str(begin), str(begin + 4))
            for cpu, box in enumerate(boxes)
        ]
        found = [json.loads(b"".join(data for name, data in task if name == "stdout")) for task in tasks]
        for task in tasks:
            task.close()
        ran = [sum(end - begin for begin, end in one) for one in found]
        met.ran = [before + more for before, more in zip(met.ran, ran, strict=True)]
        met.both += _overlap(*found)
        met.forced_idle += _forced_idle_s(boxes) - idle
        if enough(met) or time.monotonic() > deadline:
            return met
        start_s *= 2  # it may have been over before both had begun


def _forced_idle_s(boxes: Sequence[Sandbox]) -> float:
    return sum(box.client.usage(box.id).cpu_forced_idle_us or 0 for box in boxes) / 1e6


def test_batch_and_latency_never_run_on_the_siblings_of_one_core(client: Client) -> None:
    with ExitStack() as stack:
        latency = [stack.enter_context(_sandbox(client, "latency")) for _ in range(2)]
        batch = [stack.enter_context(_sandbox(client, "batch")) for _ in range(2)]
        # Without cookies, with different ones, with the same one.
        free = _meet(latency, lambda met: met.both > 0.1)
        apart = _meet((latency[0], batch[0]), lambda met: met.forced_idle > 0.2)
        same = _meet(batch, lambda met: met.both > 0.1)
    for name, met in (("none", free), ("different", apart), ("the same", same)):
        print(f"cookies {name}: {met}")
    assert min(free.both, same.both) > 0.1
    assert apart.forced_idle > 0.2
    assert min(free.part(), same.part()) > 10 * apart.part()
    assert apart.part() < 0.05


def test_under_contention_batch_gets_what_latency_leaves_however_many_there_are(client: Client) -> None:
    with ExitStack() as stack:
        latency = stack.enter_context(_sandbox(client, "latency"))
        batch = [stack.enter_context(_sandbox(client, "batch")) for _ in range(4)]
        for box in batch:
            stack.enter_context(_busy(box, 0))
        alone = _shares(batch, 4, lambda found: min(found) > 0.1)
        with _busy(latency, 0):
            shares = _shares((latency, *batch), 6, lambda found: found[0] > 0.85)
            # What is left is too little to end by: it is given more.
            began = time.monotonic()
            batch[-1].delete()
            print(f"deleted beside a busy one of latency in {time.monotonic() - began:.2f} s")
            assert (_top(batch[0]).parent / "cpu.idle").read_text() == "1\n"
        print(f"four of batch alone: {alone}; beside one of latency: {shares}")
        assert min(alone) > 0.1  # with nobody to wait for each gets its part
        assert shares[0] > 0.85


def test_a_sandbox_of_batch_can_be_made_and_ended_on_a_host_that_has_no_time_for_it(client: Client) -> None:
    with ExitStack() as stack:
        for cpu in sorted(os.sched_getaffinity(0)):
            latency = stack.enter_context(_sandbox(client, "latency"))
            stack.enter_context(_busy(latency, cpu))
        began = time.monotonic()
        box = _sandbox(client, "batch").create()
        made, idle = time.monotonic() - began, (_top(box).parent / "cpu.idle").read_text()
        box.delete()
        print(f"made in {made:.1f} s, deleted in {time.monotonic() - began - made:.1f} s with every CPU busy")
        assert idle == "1\n"


def test_weights_divide_a_processor(client: Client) -> None:
    with _sandbox(client, "latency", cpu_weight=300) as heavy, _sandbox(client, "latency") as light:
        with _busy(heavy, 0), _busy(light, 0):
            shares = _shares((heavy, light), 5, lambda found: 0.62 < found[0] < 0.88)
            print(f"weights 300 and 100: {shares}")
            assert 0.62 < shares[0] < 0.88
            heavy.update(limits=Limits(cpu_weight=100))
            shares = _shares((heavy, light), 5, lambda found: 0.35 < found[0] < 0.65)
            print(f"weights 100 and 100: {shares}")
            assert 0.35 < shares[0] < 0.65


def test_each_sandbox_has_a_cookie_of_its_own_where_that_is_configured(client: Client) -> None:
    _configure(client, 'core_scheduling = "sandbox"\n')
    with ExitStack() as stack:
        names: tuple[Class, ...] = ("latency", "latency", "batch", "batch")
        boxes = [stack.enter_context(_sandbox(client, name)) for name in names]
        for box in boxes:
            stack.enter_context(_family(box))
        found = [_cookies(box) for box in boxes]
        assert [len(cookies) for cookies in found] == [1, 1, 1, 1]
        assert len(set.union(*found) - {0}) == 4
        assert _daemon_cookies() == {0}


def test_nobody_has_a_cookie_where_it_is_off(client: Client) -> None:
    _configure(client, 'core_scheduling = "off"\n')
    with _sandbox(client, "batch") as box, _family(box):
        assert _cookies(box) == {0}
