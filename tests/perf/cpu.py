# SPDX-License-Identifier: Apache-2.0
"""`make bench-cpu`: how much slower a latency-sensitive sandbox gets beside load on half of the CPUs, by class.

    python3 -m tests.perf.cpu [--socket PATH --image IMAGE] [--rounds N] [--requests N] [--json FILE]

Here: the workload, three situations in turn, the verdict. Without --socket it is a daemon of its own; with it an
installed one. In each round the same requests run alone, beside load without classes, and beside load of class batch.
A request is a fixed piece of work that is due at a fixed time; its latency runs from then to its end, so waking up late
counts as well. What a virtual machine says about latency, or a host without core scheduling, is PENDING: siblings that
are emulated share no pipeline. The figures of the mechanism are shown all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from libdsec import Client, ExecStream, Sandbox
from libdsec.errors import FeatureMissing

Class = Literal["latency", "batch"]

#: Rise of the median latency that is promised, and rounds that it takes to prove it.
LIMIT, WANTED_ROUNDS = 0.10, 5
_SITUATIONS: tuple[tuple[str, Class | None], ...] = (("alone", None), ("no classes", "latency"), ("classes", "batch"))
_SETTLE_S = 1.0
#: Prints the latency of each request in microseconds: ITERATIONS of work every PERIOD seconds, REQUESTS times.
#: clock_gettime(2) by number, since a minimal Debian has no Time::HiRes.
_REQUESTS = """
my ($iterations, $period, $requests) = @ARGV;
my $time = "\\0" x 16;
sub now { syscall(228, 1, $time); my ($s, $ns) = unpack("qq", $time); return $s + $ns / 1e9 }
my ($due, $x, @took) = (now() + $period, 1);
for (1 .. $requests) {
    my $left = $due - now();
    select(undef, undef, undef, $left) if $left > 0;
    $x = ($x * 1103515245 + 12345) & 0x7fffffff for 1 .. $iterations;
    my $done = now();
    push @took, int(($done - $due) * 1e6);
    $due += $period;
    $due = $done if $done > $due;
}
print join(" ", @took);
"""
_SPIN = "my $x = 1; $x = ($x * 1103515245 + 12345) & 0x7fffffff while 1;"


@dataclass
class Measured:
    """What one situation gave, over all rounds."""

    latency_us: list[int] = field(default_factory=list)
    load_cpu_s: float = 0.0  # that the load got
    forced_idle_s: float = 0.0  # that siblings stood idle, for either
    seconds: float = 0.0

    def p(self, percent: int) -> float:
        ordered = sorted(self.latency_us)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] / 1000

    @property
    def mean(self) -> float:
        return statistics.fmean(self.latency_us) / 1000


@dataclass(frozen=True)
class Work:
    """Of one request."""

    iterations: int
    period_s: float
    requests: int


def _run(sandbox: Sandbox, work: Work) -> list[int]:
    words = (str(work.iterations), f"{work.period_s:g}", str(work.requests))
    return [int(word) for word in sandbox.exec("perl", "-e", _REQUESTS, *words, check=True).text.split()]


def calibrated(sandbox: Sandbox, requests: int, wanted_ms: float = 2.0) -> Work:
    """Requests that take ``wanted_ms`` when nobody is in the way, and one CPU to two fifths."""
    probe = Work(20_000, 0.2, 15)
    took_ms = statistics.median(_run(sandbox, probe)) / 1000
    return Work(max(100, int(probe.iterations * wanted_ms / took_ms)), wanted_ms / 400, requests)


@contextlib.contextmanager
def _load(client: Client, image: str, cpu_class: Class | None, count: int) -> Iterator[list[Sandbox]]:
    """Busy sandboxes, one for each of so many CPUs."""
    with contextlib.ExitStack() as stack:
        boxes: list[Sandbox] = []
        busy: list[ExecStream] = []
        for _ in range(count if cpu_class is not None else 0):
            boxes.append(stack.enter_context(Sandbox(image=image, cpu_class=cpu_class or "latency", client=client)))
            busy.append(stack.enter_context(boxes[-1].popen("perl", "-e", _SPIN)))
        time.sleep(_SETTLE_S)
        yield boxes
        for stream in busy:
            stream.signal(9, tree=True)


def measure(client: Client, image: str, rounds: int, requests: int) -> tuple[dict[str, Measured], Work, int]:
    """All situations in turn, so that what changes on the host meanwhile reaches each of them."""
    results = {name: Measured() for name, _cpu_class in _SITUATIONS}
    count = max(1, len(os.sched_getaffinity(0)) // 2)
    with Sandbox(image=image, cpu_class="latency", client=client) as sandbox:
        work = calibrated(sandbox, requests)
        for _ in range(rounds):
            for name, cpu_class in _SITUATIONS:
                with _load(client, image, cpu_class, count) as load:
                    before, began = _counted(client, sandbox, load), time.monotonic()
                    results[name].latency_us += _run(sandbox, work)
                    results[name].seconds += time.monotonic() - began
                    after = _counted(client, sandbox, load)
                results[name].load_cpu_s += after[0] - before[0]
                results[name].forced_idle_s += after[1] - before[1]
    return results, work, count


def _counted(client: Client, sandbox: Sandbox, load: list[Sandbox]) -> tuple[float, float]:
    """CPU seconds of the load; seconds in which siblings stood idle for it or for the other."""
    usages = [client.usage(box.id) for box in (sandbox, *load)]
    cpu_us = sum(usage.cpu_usage_us or 0 for usage in usages[1:])
    return cpu_us / 1e6, sum(usage.cpu_forced_idle_us or 0 for usage in usages) / 1e6


def doubts(rounds: int, features: Mapping[str, bool | None]) -> list[str]:
    """Why figures of this run prove nothing."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    found = []
    if " hypervisor" in cpuinfo:
        found.append("the CPUs are a virtual machine's")
    if features.get("core-scheduling") is not True:
        found.append("the kernel has no core scheduling")
    if rounds < WANTED_ROUNDS:
        found.append(f"{rounds} of {WANTED_ROUNDS} rounds")
    return found


def lines(results: Mapping[str, Measured], work: Work, count: int, why: list[str]) -> list[str]:
    """The table, and the verdict in the first line."""
    alone = results["alone"]
    rise = results["classes"].p(50) / alone.p(50) - 1
    verdict = "PENDING" if why else "PASS" if rise <= LIMIT else "FAIL"
    rows = [
        f"{verdict:7} rise of the median latency beside batch load on {count} CPUs: {rise:.1%}, at most {LIMIT:.0%}"
        + (f" ({'; '.join(why)})" if why else ""),
        f"        a request: {work.iterations} iterations of perl every {work.period_s * 1000:g} ms, "
        f"n={len(alone.latency_us)} each",
    ]
    for name, one in results.items():
        rises = ", ".join(
            f"{label} {value:.2f} ms ({value / base - 1:+.1%})"
            for label, value, base in (
                ("p50", one.p(50), alone.p(50)), ("p99", one.p(99), alone.p(99)), ("mean", one.mean, alone.mean),
            )
        )  # fmt: skip
        rows.append(
            f"        {name:11} {rises}; load got {one.load_cpu_s / one.seconds:.2f} CPUs, "
            f"siblings idle {one.forced_idle_s / one.seconds:.2f}"
        )
    return rows


@contextlib.contextmanager
def _daemon(options: argparse.Namespace) -> Iterator[tuple[Client, str]]:
    if options.socket is not None:
        with Client(socket=options.socket) as client:
            yield client, options.image
        return
    from tests.perf.sandboxes import IMAGE
    from tests.support.daemon import Daemon
    from tests.support.rootfs import debian_tar

    with Daemon() as daemon, daemon.client() as client:
        client.finish(client.image_import(name=IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        yield client, IMAGE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.perf.cpu")
    parser.add_argument("--socket", type=Path, help="of an installed daemon")
    parser.add_argument("--image", default="debian:trixie", help="with perl, for the installed daemon")
    parser.add_argument("--rounds", type=int, default=WANTED_ROUNDS)
    parser.add_argument("--requests", type=int, default=1000, help="in each situation of a round")
    parser.add_argument("--json", type=Path, help="where to write every sample")
    options = parser.parse_args()
    with _daemon(options) as (client, image):
        features = {feature.name: feature.works for feature in client.host().features}
        try:
            results, work, count = measure(client, image, options.rounds, options.requests)
        except FeatureMissing as error:
            print(f"PENDING classes cannot be measured here: {error}")
            return 0
    told = lines(results, work, count, doubts(options.rounds, features))
    print(f"Linux {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs\n", *told, sep="\n")
    if options.json is not None:
        samples: dict[str, Any] = {name: vars(one) for name, one in results.items()}
        options.json.write_text(json.dumps({"work": vars(work), "load_cpus": count, "situations": samples}))
    return 1 if told[0].startswith("FAIL") else 0


if __name__ == "__main__":
    sys.exit(main())
