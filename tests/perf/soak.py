# SPDX-License-Identifier: Apache-2.0
"""`make bench-soak`: the SDK used for an hour, sync and async, while its daemon is killed now and then.

    python3 -m tests.perf.soak [--minutes M] [--rounds N] [--pause S] [--kill-every CYCLES] [--json FILE]

In cycles: both clients (``soak_client.py``) run N rounds, every few cycles the daemon is killed under them, and when
they stand still their descriptors and memory and the daemon's are read from /proc, and what is left over by
``tests/support/residue.py``. What a cycle leaves adds up: of each process that lived longest, the readings of the last
quarter are held against those of the first, without its very first ones. Exits 1 when something grew or was left, or a
round failed while no daemon was killed; under 60 minutes the verdict is PENDING.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar

IMAGE = "soak:1"
WANTED_MINUTES = 60
#: A pool keeps idle connections for half a minute, so two readings differ by a few without anything being lost.
SLACK_DESCRIPTORS = 6
SLACK_RSS_KIB = 16 * 1024
#: Cycles in which caches and pools fill.
WARM_UP = 2
_SETTLE_S = 60.0
_CYCLE_S = 900.0


@dataclass(frozen=True)
class Reading:
    """Of one process while nothing runs."""

    pid: int
    descriptors: int
    rss_kib: int

    @classmethod
    def of(cls, pid: int) -> Reading:
        status = Path(f"/proc/{pid}/status").read_text()
        (rss,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
        return cls(pid, len(os.listdir(f"/proc/{pid}/fd")), int(rss))


@dataclass
class Story:
    """All readings, by role; ``daemon`` is whichever lives then. ``left`` has what should not be."""

    began: float = field(default_factory=time.monotonic)
    kills: int = 0
    rounds: int = 0
    early: int = 0
    readings: dict[str, list[Reading]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def growth(self, name: str) -> tuple[int, int] | None:
        """Largest reading of the last quarter less the largest of the first: descriptors, KiB. None for too few."""
        lives = Counter(row.pid for row in self.readings[name])
        ((pid, _),) = lives.most_common(1) or ((0, 0),)
        rows = [row for row in self.readings[name] if row.pid == pid][WARM_UP:]
        quarter = len(rows) // 4
        if quarter == 0:
            return None
        first, last = rows[:quarter], rows[-quarter:]
        return (
            max(row.descriptors for row in last) - max(row.descriptors for row in first),
            max(row.rss_kib for row in last) - max(row.rss_kib for row in first),
        )

    def verdict(self) -> str:
        grown = [self.growth(name) for name in self.readings]
        if self.left or any(
            row is not None and (row[0] > SLACK_DESCRIPTORS or row[1] > SLACK_RSS_KIB) for row in grown
        ):
            return "FAIL"
        return "PASS" if self.minutes >= WANTED_MINUTES and None not in grown else "PENDING"

    def lines(self) -> list[str]:
        rows = [
            f"{self.verdict():7} {self.minutes:.1f} minutes (wanted {WANTED_MINUTES}), {self.rounds} rounds, daemon "
            f"killed {self.kills} times, {self.early} rounds ended early by that, left over: {self.left or 'nothing'}"
        ]
        for name, readings in self.readings.items():
            grown = self.growth(name)
            told = "too few readings" if grown is None else f"grown by {grown[0]} descriptors, {grown[1]} KiB"
            spread = f"descriptors {min(r.descriptors for r in readings)} to {max(r.descriptors for r in readings)}"
            memory = f"RSS {min(r.rss_kib for r in readings)} to {max(r.rss_kib for r in readings)} KiB"
            rows.append(f"        {name:8} n={len(readings):<4} {spread}, {memory}; last quarter against first: {told}")
        return rows


@contextmanager
def client(kind: str, daemon: Daemon) -> Iterator[subprocess.Popen[str]]:
    """A program that waits for numbers of rounds."""
    command = [sys.executable, "-m", "tests.perf.soak_client", kind, str(daemon.socket), IMAGE]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end_all(clients: dict[str, subprocess.Popen[str]]) -> None:
    for process in clients.values():
        process.kill()


def cycle(story: Story, clients: dict[str, subprocess.Popen[str]], rounds: int, meanwhile: Callable[[], None]) -> int:
    """``rounds`` by each client, with ``meanwhile`` beside them; how many ended early. Raises when a client died."""
    for process in clients.values():
        assert process.stdin is not None
        process.stdin.write(f"{rounds}\n")
        process.stdin.flush()
    beside = threading.Thread(target=meanwhile, daemon=True)
    beside.start()
    guard = threading.Timer(_CYCLE_S, end_all, [clients])
    guard.start()
    early = 0
    try:
        for kind, process in clients.items():
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if len(words) != 3:
                raise RuntimeError(f"the {kind} client ended or stood still: {process.wait(10)}")
            story.rounds += int(words[1])
            early += int(words[2])
    finally:
        guard.cancel()
        beside.join()
    return early


def settle(daemon: Daemon) -> list[str]:
    """What is left over once nothing runs: sandboxes go on being removed for a moment after the call."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        daemon.delete_all()  # of rounds that ended early
        left = daemon.residue()
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def soak(minutes: float, rounds: int, pause_s: float, kill_every: int) -> Story:
    story = Story()
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon())
        with daemon.client() as setup:
            setup.finish(setup.image_import(name=IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        clients = {kind: stack.enter_context(client(kind, daemon)) for kind in ("sync", "async")}
        story.readings = {name: [] for name in ("daemon", *clients)}
        story.began, number = time.monotonic(), 0
        while story.minutes < minutes and not story.left:
            number += 1
            killing = number % kill_every == 0

            def meanwhile(*, killing: bool = killing) -> None:
                if killing:
                    time.sleep(1)
                    daemon.restart()

            early = cycle(story, clients, rounds, meanwhile)
            story.early, story.kills = story.early + early, story.kills + killing
            story.left = settle(daemon)
            if early and not killing:
                story.left.append(f"{early} rounds failed though no daemon was killed")
            for name, pid in {"daemon": daemon.pid, **{kind: c.pid for kind, c in clients.items()}}.items():
                story.readings[name].append(Reading.of(pid))
            now = {name: asdict(rows[-1]) for name, rows in story.readings.items()}
            print(f"{story.minutes:6.1f} min  {now}", flush=True)
            time.sleep(pause_s)
    return story


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.perf.soak")
    parser.add_argument("--minutes", type=float, default=WANTED_MINUTES)
    parser.add_argument("--rounds", type=int, default=10, help="of each client in a cycle")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="after each cycle")
    parser.add_argument("--kill-every", type=int, default=20, metavar="CYCLES", help="the daemon, by SIGKILL")
    parser.add_argument("--json", type=Path, help="where to write every reading")
    options = parser.parse_args()
    story = soak(options.minutes, options.rounds, options.pause, options.kill_every)
    print("\n".join(story.lines()))
    if options.json is not None:
        readings = {name: [asdict(row) for row in rows] for name, rows in story.readings.items()}
        options.json.write_text(json.dumps({"minutes": story.minutes, "verdict": story.verdict(), **readings}))
    return 1 if story.verdict() == "FAIL" else 0


if __name__ == "__main__":
    sys.exit(main())
