# SPDX-License-Identifier: Apache-2.0
"""`make bench-memory`: memory of idle sandboxes without reclaim and with each way of it, and what a neighbour pays.

    python3 -m tests.vm.bench_memory [--sandboxes N] [--seconds S] [--cycles N] [--json FILE]

Here: running ``inside/bench_memory.py`` on a fresh test host, and telling what it found. Ends with PASS, with FAIL and
what misses, which is status 1, or with PENDING and what N is too small, or the rounds too restless, to tell.

A round without reclaim is the peer of those with it, in the same sandboxes and the same minutes: there and back, so
that memory.reclaim, of which nothing is promised, has one round where the others have two.

The neighbour is alone on one of the emulated processors, and a piece of its work costs the instructions that this
processor executed meanwhile, whoever's. That includes page faults, interrupts, flushes of the TLB that other processors
ask for, spinning for a lock, and whatever ran there instead of the neighbour. It does not include what makes an
instruction slower, which is caches, the TLB, the memory's bandwidth or a busy sibling; and a repeated instruction, by
which the kernel clears and copies pages, counts as few.

Times include all that. But on an emulated machine they also include what any other load on the next processor costs,
whatever it does: so there is a second peer, for which there are rounds called alternating. In these, reclaim and
processes outside of any sandbox that compress memory of their own have the other processors in turns of some seconds,
and each turn of reclaim is compared with those before and after it. What reclaim costs beyond that load is its own.
What is compared is the time in which the neighbour's processor executes as many instructions, for its pieces of work,
which take the same instructions, would be longer than a turn on a busy machine. The thread of that processor has one
of this machine's processors to itself, as far as other programs let it, and its time is what it used.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.equal_load import WORK
from tests.vm import host, image, inside, kernels, packages
from tests.vm.host import VmHost
from tests.vm.qemu import Qemu

MIB = 1 << 20
METHODS = ("off", "auto", "memory.reclaim")
#: Of the rounds, there and back.
ORDER = ("off", "auto", "alternating", "memory.reclaim")
#: The promises: less memory at the end of a round with DAMON, and the neighbour's cost by median, in instructions over
#: that without reclaim and in time over that beside an equal load.
HELD_AT_MOST = 0.75
SLOWER_AT_MOST = 1.05
#: That load is equal when the other processors' threads used the same time but for this part. Turns beside which they
#: did not are left out, and so many have to be left.
UNEQUAL = 0.10
TURNS = 12
#: The first rounds and the last without reclaim may differ by this much, or none of them tells such a difference.
RESTLESS = 0.03
#: What the other processor does meanwhile where nothing is emulated: memory that no cache holds, page by page.
_COMPRESS = (
    "import os, zlib; data = (os.urandom(2048) + bytes(2048)) * (128 << 8)\n"
    "while True: [zlib.compress(data[at : at + 4096], 1) for at in range(0, len(data), 4096)]"
)
FULL = (20, 30)  # sandboxes, and pieces of work without reclaim and with DAMON


@dataclass
class Series:
    """A number that only grows, at some times, and on a straight line between them."""

    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.at.append(at)
        self.values.append(value)

    def between(self, begin: float, end: float) -> float:
        return self.at_time(end) - self.at_time(begin)

    def at_time(self, when: float) -> float:
        index = min(max(bisect.bisect(self.at, when), 1), len(self.at) - 1)
        (a, b), (x, y) = self.at[index - 1 : index + 1], self.values[index - 1 : index + 1]
        return x + (y - x) * (when - a) / (b - a)


@dataclass(frozen=True)
class Load:
    """How busy the machine was, by processors of this one's: the whole of it, and the guest's but the last."""

    whole: float
    others: float
    others_instructions: float  # in a second


class Meter:
    """What the last processor cost: instructions that it executed, and time that its thread used here; and the same of
    the others, and what time the whole machine used."""

    def __init__(self, vm: VmHost) -> None:
        self._vm = vm
        self._ours, self._whole = Series(), Series()
        self._instructions, self._used = Series(), Series()
        self._others_instructions, self._others_used = Series(), Series()
        self.ask_time()

    def ask_time(self) -> None:
        """What the time is there and here, by the quickest of some answers: its clock goes by an emulated counter."""
        answers = []
        for _ in range(5):
            before = time.time()
            there = float(self._vm.run(["date", "+%s.%N"]).text)
            after = time.time()
            answers.append((after - before, there, (before + after) / 2))
        _took, there, here = min(answers)
        self._ours.add(there, here)

    @property
    def drift_s(self) -> float:
        """How much the guest's clock has fallen behind ours between the first time that it was asked and the last."""
        return (self._ours.values[-1] - self._ours.values[0]) - (self._ours.at[-1] - self._ours.at[0])

    def watch(self, until: threading.Event) -> None:
        """Read the times used every 50 ms."""
        machine = self._vm.machine
        *others, last = machine.processors()
        while not until.wait(0.05):
            self._used.add(time.time(), machine.thread_s(last))
            self._others_used.add(time.time(), sum(map(machine.thread_s, others)))
            self._whole.add(time.time(), machine.cpu_s)

    def read(self, counted: Path) -> None:
        """What the plugin wrote; its last line may be half a one, and at first there were not all processors."""
        lines = [line.split() for line in counted.read_text().splitlines()[:-1]]
        for words in lines:
            if len(words) == len(lines[-1]):
                self._instructions.add(float(words[0]), float(words[-1]))
                self._others_instructions.add(float(words[0]), sum(map(float, words[1:-1])))

    def cost(self, begin: float, end: float) -> tuple[float, float]:
        """Instructions and seconds, between two times of the guest's.  Needs its time from before and after."""
        begin, end = self._ours.at_time(begin), self._ours.at_time(end)
        return self._instructions.between(begin, end), self._used.between(begin, end)

    def load(self, begin: float, end: float) -> Load:
        """Between two times of the guest's."""
        begin, end = self._ours.at_time(begin), self._ours.at_time(end)
        each = (self._whole, self._others_used, self._others_instructions)
        return Load(*(series.between(begin, end) / (end - begin) for series in each))


def apart(machine: Qemu) -> None:
    """Give the last processor's thread one of this machine's processors, and the rest of the threads the others."""
    processors = sorted(os.sched_getaffinity(0))
    last = machine.processors()[-1]
    for thread in machine.threads() if len(processors) > 1 else ():
        with contextlib.suppress(ProcessLookupError):  # those for files come and go
            os.sched_setaffinity(thread, processors[-1:] if thread == last else processors[:-1])


def _plugin(folder: Path) -> Path:
    """The counter of instructions, built."""
    built = folder / "instructions.so"
    source = Path(__file__).with_name("instructions.c")
    options = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["gcc", *options, "-o", str(built), str(source)], check=True)
    return built


def measured(sandboxes: int, seconds: float, cycles: int) -> tuple[dict[str, Any], Meter]:
    """What the benchmark in the guest printed, and what its neighbour's processor cost here."""
    order = list(ORDER)
    for cycle in range(1, cycles):
        # There and back; where it turns is one round.
        order += ORDER[-2::-1] if cycle % 2 else ORDER[1:]
    with host.only_machine(), tempfile.TemporaryDirectory(prefix="dsec-bench-", dir="/var/tmp") as name:
        base = image.get()
        kernel = kernels.debian(base)
        counted = Path(name) / "instructions"
        more = ["-plugin", f"{_plugin(Path(name))},out={counted}"]
        with VmHost(kernel, packages.installed(kernel, base), more=more) as vm:
            source = Path(__file__).with_name("inside") / "bench_memory.py"
            script = vm.put(source, "/root/inside")
            for module in inside.support_of(source):
                vm.put(module, "/root/inside/tests/support")
            apart(vm.machine)
            meter, ended = Meter(vm), threading.Event()
            watcher = threading.Thread(target=meter.watch, args=(ended,))
            watcher.start()
            try:
                argv = ["python3", script, str(sandboxes), str(seconds), *order]
                done = vm.run(argv, timeout_s=1200 + len(order) * (seconds + 400))
            finally:
                ended.set()
                watcher.join()
            meter.ask_time()
            meter.read(counted)
            found: dict[str, Any] = json.loads(done.text.splitlines()[-1])
            return found, meter


def natively(seconds: float = 2.0, turns: int = 3) -> dict[str, list[float]]:
    """Processor time of the neighbour's pieces of work where nothing is emulated, in s: alone on this machine's last
    processor, and beside a process that compresses on another, in turn.  Nothing when there is one processor."""
    found: dict[str, list[float]] = {"alone": [], "beside": []}
    *others, last = sorted(os.sched_getaffinity(0))
    for way in [*found] * turns if others else ():
        with contextlib.ExitStack() as running:
            if way == "beside":
                running.enter_context(_program([sys.executable, "-c", _COMPRESS], others[0]))
            worker = running.enter_context(_program(["perl", "-e", WORK], last))
            deadline = time.monotonic() + seconds
            assert worker.stdout is not None
            for line in worker.stdout:
                found[way].append(float(line.split()[2]))
                if time.monotonic() > deadline:
                    break
    return found


@contextlib.contextmanager
def _program(argv: list[str], processor: int) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["taskset", "-c", str(processor), *argv], stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def held(sample: dict[str, Any]) -> float:
    """What sandboxes hold: their pages, and their part of zram. In MiB."""
    return float(sample["sandboxes"] + sample["zram_memory"]) / MIB


@dataclass(frozen=True)
class Piece:
    """Of the neighbour's work."""

    instructions: float  # of its processor
    used_s: float  # its processor's thread, here
    wall_s: float  # in the guest
    cpu_s: float


def costs(found: dict[str, Any], meter: Meter) -> dict[str, list[list[Piece]]]:
    """Of each method, for each of its rounds, what each piece of work cost while reclaim was at work."""
    per: dict[str, list[list[Piece]]] = {method: [] for method in METHODS}
    for one in found["rounds"]:
        per[one["reclaim"]].append([
            Piece(*meter.cost(at, at + wall), wall, cpu)
            for at, wall, cpu in found["work"]
            if one["settled"] <= at and at + wall <= one["ended"]
        ])  # fmt: skip
    return per


def show_memory(rounds: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Print the memory of all rounds side by side; of each method what is held in the mean, and at the end."""
    ways = {one["reclaim"]: one["method"] for one in rounds}
    print(f"held by sandboxes, zram included, and used on the host, in MiB; auto is {ways['auto']}")
    print(f"{'s':>6}" + "".join(f"{one['reclaim']:>20}" for one in rounds))
    for row in zip(*(one["samples"] for one in rounds), strict=False):
        texts = (f"{held(sample):.0f} {sample['host_used'] / MIB:.0f}" for sample in row)
        print(f"{row[0]['at_s']:6.0f}" + "".join(f"{text:>20}" for text in texts))
    told = {}
    for method in METHODS:
        own = [one["samples"] for one in rounds if one["reclaim"] == method]
        mean = statistics.fmean(held(sample) for samples in own for sample in samples)
        told[method] = mean, statistics.fmean(held(samples[-1]) for samples in own)
    return told


def show_kinds(rounds: list[dict[str, Any]]) -> None:
    """Print what there is at the end of a round, as memory.stat has it, with what compressed pages take in zram."""
    names = ("anon", "file", "slab", "pagetables", "kernel_stack")
    print(f"\nat the end, in MiB: {', '.join(names)}, other of the sandboxes; zram")
    for one in rounds:
        last = one["samples"][-1]
        parts = [last["kinds"][name] for name in names]
        parts += [last["sandboxes"] - sum(parts), last["zram_memory"]]
        print(f"{one['reclaim']:>16}" + "".join(f"{part / MIB:9.1f}" for part in parts))


def show_load(rounds: list[dict[str, Any]], loads: list[Load]) -> None:
    """Print what there was to compress with."""
    print("\nprocessors of this machine's that the guest's other processors used, with their million instructions per "
          "second, and\nthat the whole machine used")  # fmt: skip
    for one, load in zip(rounds, loads, strict=True):
        print(f"{one['reclaim']:>16}{load.others:8.2f}{load.others_instructions / 1e6:8.0f}{load.whole:8.2f}")


@dataclass(frozen=True)
class Turn:
    """Of reclaim or of the equal load, beside the neighbour."""

    load: str
    per_instruction_s: float  # of the neighbour's processor, here
    others: float  # processors of this machine's that the guest's others used
    others_instructions: float


def turned(rounds: list[list[dict[str, Any]]], meter: Meter) -> list[list[Turn]]:
    """What each turn cost, of each round."""
    found: list[list[Turn]] = []
    for one in rounds:
        found.append([])
        for turn in one:
            instructions, used_s = meter.cost(turn["began"], turn["ended"])
            load = meter.load(turn["began"], turn["ended"])
            found[-1].append(Turn(turn["load"], used_s / instructions, load.others, load.others_instructions))
    return found


def compared(rounds: Iterable[Sequence[Turn]]) -> list[float]:
    """For each turn of reclaim, the time per instruction to that of the mean of the equal load's before and after it,
    where they were equal indeed."""
    ratios = []
    for turns in rounds:
        for before, reclaim, after in zip(turns[::2], turns[1::2], turns[2::2], strict=False):
            others = statistics.fmean((before.others, after.others))
            if abs(reclaim.others / others - 1) <= UNEQUAL:
                peer = statistics.fmean((before.per_instruction_s, after.per_instruction_s))
                ratios.append(reclaim.per_instruction_s / peer)
    return ratios


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which of these the median of what they were taken from lies, with a probability of at least 95 %: of a
    number of tosses of a coin so few show heads in 2.5 % of all cases at most."""
    ordered, number = sorted(values), len(values)
    at, below = 0, 1 / 2**number
    while (below := below + math.comb(number, at + 1) / 2**number) <= 0.025:
        at += 1
    return ordered[at], ordered[-1 - at]


def show_turns(rounds: list[list[Turn]]) -> None:
    """Print what there was beside the neighbour in turns, and what its instructions took."""
    print("\nin turns: n; ns for an instruction of the neighbour's processor, by quartile; processors of this one's "
          "that the guest's\nothers used, by quartile, and their million instructions per second")  # fmt: skip
    for load in ("control", "auto"):
        turns = [turn for one in rounds for turn in one if turn.load == load]
        text = f"{load:>16} {len(turns):5}"
        for values in ([1e9 * turn.per_instruction_s for turn in turns], [turn.others for turn in turns]):
            text += "  " + "".join(f"{value:7.3f}" for value in statistics.quantiles(values, n=4))
        print(text + f"{statistics.median(turn.others_instructions for turn in turns) / 1e6:8.0f}")
    ratios = compared(rounds)
    print("each turn of auto to those of the load beside it: " + " ".join(f"{value:.2f}" for value in ratios))


def medians(rounds: Iterable[Sequence[Piece]], kind: str) -> list[float]:
    """Of each round."""
    return [statistics.median(getattr(piece, kind) for piece in one) for one in rounds if one]


def ratio(per: Mapping[str, Sequence[Sequence[Piece]]], kind: str, method: str) -> float:
    """Of the medians of all pieces of work to that without reclaim."""
    values: list[list[float]] = [
        [getattr(piece, kind) for one in per[name] for piece in one] for name in (method, "off")
    ]
    return statistics.median(values[0]) / statistics.median(values[1])


def spread(values: Sequence[float]) -> float:
    """By which part of the lowest they differ."""
    return max(values) / min(values) - 1


def show_neighbour(per: Mapping[str, Sequence[Sequence[Piece]]]) -> None:
    """Print what a piece of work cost, and of each method the medians against those without reclaim."""
    print("\nthe neighbour's pieces of work: n; its processor's million instructions by quartile, and their median to "
          "that without\nreclaim; the same of its thread's time here; medians of wall and processor time in the guest, "
          "in ms; and of the thread's\ntime in each round")  # fmt: skip
    for method, rounds in per.items():
        pieces = [piece for one in rounds for piece in one]
        text = f"{method:>16} {len(pieces):5}"
        for kind, unit in (("instructions", 1e6), ("used_s", 1e-3)):
            values = statistics.quantiles((getattr(piece, kind) for piece in pieces), n=4)
            text += "".join(f"{value / unit:8.1f}" for value in values) + f"{ratio(per, kind, method):7.3f}"
        times = (statistics.median(getattr(piece, kind) for piece in pieces) for kind in ("wall_s", "cpu_s"))
        text += "".join(f"{1e3 * value:8.0f}" for value in times)
        print(text + "  " + " ".join(f"{1e3 * value:.0f}" for value in medians(rounds, "used_s")))


@dataclass(frozen=True)
class Promise:
    """One of them: what was found, and why that may be nothing to go by."""

    what: str
    found: float
    at_most: float
    too_little: tuple[str, ...]

    @property
    def verdict(self) -> str:
        if self.too_little:
            return "PENDING"
        return "PASS" if self.found <= self.at_most else "FAIL"

    def __str__(self) -> str:
        reasons = f" ({'; '.join(self.too_little)})" if self.too_little else ""
        return f"{self.what}: {self.found:.3f}, promised at most {self.at_most}: {self.verdict}{reasons}"


def promises(
    sandboxes: int, held_ratio: float, per: Mapping[str, Sequence[Sequence[Piece]]], turns: Sequence[Sequence[Turn]]
) -> list[Promise]:
    """What is promised of DAMON."""
    few: tuple[str, ...] = () if sandboxes >= FULL[0] else (f"{sandboxes} sandboxes of {FULL[0]}",)
    if len(per["auto"]) < 2:
        few += (f"{len(per['auto'])} round of 2",)
    by_time, ratios = few, compared(turns)
    if len(ratios) < TURNS:
        by_time += (f"{len(ratios)} turns beside an equal load of {TURNS}",)
    else:
        low, high = interval(ratios)
        if low <= SLOWER_AT_MOST < high:
            by_time += (f"n={len(ratios)}, it may be anything from {low:.3f} to {high:.3f}",)
    return [
        Promise("memory at the end of a round to that without", held_ratio, HELD_AT_MOST, few),
        Promise("the neighbour's instructions to those without", ratio(per, "instructions", "auto"), SLOWER_AT_MOST,
                (*few, *_too_few(per), *_too_restless(per["off"]))),
        Promise("the neighbour's time to that beside an equal load", statistics.median(ratios) if ratios else math.nan,
                SLOWER_AT_MOST, by_time),
    ]  # fmt: skip


def _too_few(per: Mapping[str, Sequence[Sequence[Piece]]]) -> tuple[str, ...]:
    number = min(sum(map(len, per[method])) for method in ("off", "auto"))
    return () if number >= FULL[1] else (f"{number} pieces of work of {FULL[1]}",)


def _too_restless(alone: Iterable[Sequence[Piece]]) -> tuple[str, ...]:
    found = medians(alone, "instructions")
    differ = spread(found) if found else 0.0
    return () if differ <= RESTLESS else (f"without reclaim its rounds differ by {differ:.1%}, {RESTLESS:.0%} tell",)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.vm.bench_memory")
    parser.add_argument("--sandboxes", type=int, default=FULL[0])
    parser.add_argument("--seconds", type=float, default=50, help="of each round")
    parser.add_argument("--cycles", type=int, default=2, help="times through the methods, there and back")
    parser.add_argument("--json", type=Path, help="where to write all that was measured")
    options = parser.parse_args()
    if options.seconds < 20:
        parser.error("--seconds: at least 20, since reclaim begins after some of them")
    began = time.monotonic()
    native = natively()
    found, meter = measured(options.sandboxes, options.seconds, options.cycles)
    rounds, per = found["rounds"], costs(found, meter)
    turns = turned(found["alternating"], meter)
    loads = [meter.load(one["settled"], one["ended"]) for one in rounds]
    if options.json is not None:
        more = {"neighbour": per, "loads": loads, "turns": turns, "native": native}
        options.json.write_text(json.dumps({**found, **more}, default=asdict))
    print(f"{options.sandboxes} idle sandboxes that wrote to 100 MiB each, one at work; {options.cycles} rounds of "
          f"{options.seconds:g} s each; load of this machine {os.getloadavg()[1]:.1f}\n")  # fmt: skip
    memory = show_memory(rounds)
    show_kinds(rounds)
    show_load(rounds, loads)
    show_neighbour(per)
    show_turns(turns)
    print()
    ends = {}
    for method in METHODS[1:]:
        mean, ends[method] = (mine / alone for mine, alone in zip(memory[method], memory["off"], strict=True))
        print(f"{method}: memory {mean:.3f} of that without over a round, {ends[method]:.3f} at its end; neighbour "
              f"{ratio(per, 'instructions', method):.3f} by instructions, {ratio(per, 'used_s', method):.3f} by time")
    if all(native.values()):
        alone, beside = (statistics.median(native[way]) for way in ("alone", "beside"))
        print(f"not emulated, a piece of that work takes {1e3 * alone:.1f} ms of processor time on this machine, and "
              f"{1e3 * beside:.1f} beside a process that compresses on another processor: {beside / alone:.3f} "
              f"(n={len(native['alone'])} and {len(native['beside'])})")  # fmt: skip
    print(f"the guest's clock drifted by {meter.drift_s:+.2f} s; {time.monotonic() - began:.0f} s\n\nof auto:")
    told = promises(options.sandboxes, ends["auto"], per, turns)
    print(*told, sep="\n")
    verdicts = {promise.verdict for promise in told}
    print(next(verdict for verdict in ("FAIL", "PENDING", "PASS") if verdict in verdicts))
    return 1 if "FAIL" in verdicts else 0


if __name__ == "__main__":
    raise SystemExit(main())
