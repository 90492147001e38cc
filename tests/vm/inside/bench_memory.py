# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host: memory of idle sandboxes without reclaim and with each way of it, and a neighbour at work.

    python3 bench_memory.py SANDBOXES SECONDS METHOD...

Each sandbox holds a process that wrote to 100 MiB, half of it noise, and sleeps. One more does a piece of work over and
over, on the last processor alone. A round for each METHOD begins with a restart of the daemon and with all memory
touched once more. A round "alternating" is one of "auto" in which another load, of the same kind but taking nothing
from anybody, has the other processors in turns. Prints JSON: for each round its samples of memory, and from when to
when reclaim was at work; of the alternating ones the turns; all pieces of work, with the time of each.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libdsec import Client, Sandbox
from libdsec.types import ExecRequest
from tests.support.equal_load import WORK, equal_load

IMAGE = "debian:trixie"
DROP_IN = Path("/etc/dsec/dsecd.toml.d/bench.toml")
MIB = 1 << 20
KDAMONDS_SET_UP = Path("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds")
#: Always, soon, and with a thread for every second sandbox; age and quota as a host with little memory might have them.
SETTINGS = f"""[memory]
age_s = 5
sweep_s = 1
kdamonds = 10
start_below_permil = 1001
pressure_max_percent = 100
zram_bytes = {3 << 30}
"""
SAMPLE_S = 2.0
#: After so long reclaim is at work: before that nothing is old enough, and the neighbour as good as alone.
SETTLE_S = 10.0
#: Turns of reclaim in a round, how long each of them and of the other load lasts, and what it takes to change over.
TURNS = 9
TURN_S, TURN_SKIPS_S = 4.0, 1.0
#: What a sandbox has at least when all that it wrote is in memory.
FULL_BYTES = 98 * MIB
IDLE = (
    'open R, "/dev/urandom"; read R, $n, 2048; $x = ($n . "\\0" x 2048) x 25600; '
    '$SIG{USR1} = sub { for ($i = 0; $i < length $x; $i += 4096) { substr($x, $i, 1) = "z"; } }; '
    "sleep 100000 while 1"
)


def configure(reclaim: str) -> None:
    """The daemon with this setting; its sandboxes go on."""
    DROP_IN.parent.mkdir(exist_ok=True)
    DROP_IN.write_text(f'{SETTINGS}reclaim = "{reclaim}"\n')
    subprocess.run(["systemctl", "restart", "dsecd.service"], check=True)


def meminfo() -> dict[str, int]:
    """Of /proc/meminfo, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}


def started(client: Client, sandbox: Sandbox, program: str) -> int:
    """Start a program that goes on when this daemon ends; its pid."""
    client.exec_start(sandbox.id, ExecRequest(argv=("perl", "-e", program), exec_id="program"))
    (top,) = Path("/sys/fs/cgroup").rglob(f"*-{sandbox.id}")
    return int((top / "run/program/cgroup.procs").read_text())


def until(what: str, true: Callable[[], bool], limit_s: float = 180) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit_s:.0f} s")
        time.sleep(0.5)


def zram_bytes() -> int:
    """What all zram devices that serve as swap take of memory: mem_used_total, the third number of mm_stat."""
    areas = (Path(line.split()[0]).name for line in Path("/proc/swaps").read_text().splitlines()[1:])
    return sum(int((Path("/sys/block") / area / "mm_stat").read_text().split()[2]) for area in areas)


def kinds(top: Path) -> dict[str, int]:
    """What the sandboxes hold, by kind, in bytes: memory.stat of the cgroup above them."""
    return {name: int(value) for name, value in map(str.split, (top / "memory.stat").read_text().splitlines())}


@dataclass(frozen=True)
class Processes:
    """By their pids."""

    idle: list[int]
    neighbour: int


def begin(reclaim: str, processes: Processes, top: Path) -> None:
    """A daemon with that setting, and all memory there."""
    # A daemon that had to be killed has left kdamonds, which this one ends.
    configure("off")
    until("DAMON is given back", lambda: int(KDAMONDS_SET_UP.read_text()) == 0)
    for pid in processes.idle:
        os.kill(pid, signal.SIGUSR1)
    # What else was paged out of them, some of Perl's own, stays where it is: it counts as held then, too.
    full = len(processes.idle) * FULL_BYTES
    until("all memory is back", lambda: int((top / "memory.current").read_text()) >= full, 400)
    configure(reclaim)
    # What the daemon itself takes to start is no part of it.
    time.sleep(3)


def measure(client: Client, reclaim: str, processes: Processes, top: Path, seconds: float) -> dict[str, Any]:
    """One round: samples over time, read from the kernel: the daemon is under test, and busy."""
    begin(reclaim, processes, top)
    began, samples = time.monotonic(), []
    settled = 0.0
    while (at := time.monotonic() - began) < seconds:
        if at >= SETTLE_S and not settled:
            settled = time.time()
        memory = meminfo()
        samples.append({
            "at_s": round(at, 1), "host_used": memory["MemTotal"] - memory["MemAvailable"],
            "sandboxes": int((top / "memory.current").read_text()), "zram_memory": zram_bytes(),
            "kinds": kinds(top),
        })  # fmt: skip
        time.sleep(SAMPLE_S)
    ended = time.time()
    method = client.memory(limit=1).host.reclaim
    return {"reclaim": reclaim, "method": method, "settled": settled, "ended": ended, "samples": samples}


def alternate(processes: Processes, top: Path) -> list[dict[str, Any]]:
    """One round in which reclaim and the other load have turns, which begin and end with the load: times of each."""
    begin("auto", processes, top)
    turns = []
    # What a page of an idle process holds.
    page = os.urandom(2048) + bytes(2048)
    with equal_load(page, range((os.cpu_count() or 1) - 1)) as load:
        time.sleep(SETTLE_S)
        for number in range(2 * TURNS + 1):
            what = "auto" if number % 2 else "control"
            (load.halt if number % 2 else load.go)()
            time.sleep(TURN_SKIPS_S)
            began = time.time()
            time.sleep(TURN_S)
            turns.append({"load": what, "began": began, "ended": time.time()})
    return turns


def pieces(client: Client, sandbox: str) -> list[list[float]]:
    """What the neighbour wrote."""
    told, at = b"", 0
    while data := client.exec_output(sandbox, "program", offset=at).data:
        told, at = told + data, at + len(data)
    # The last line may be half a one.
    return [[float(word) for word in line.split()] for line in told.decode().splitlines()[:-1]]


def main(sandboxes: int, seconds: float, methods: list[str]) -> None:
    """All rounds, beside one another in the same sandboxes."""
    configure("off")
    subprocess.run(["systemctl", "restart", "dsec-zram.service"], check=True)
    try:
        with Client() as client, contextlib.ExitStack() as stack:
            idle = []
            for _ in range(sandboxes):
                sandbox = stack.enter_context(Sandbox(image=IMAGE, client=client))
                idle.append(started(client, sandbox, IDLE))
            neighbour = stack.enter_context(Sandbox(image=IMAGE, client=client))
            (top,) = Path("/sys/fs/cgroup").rglob(f"*-{neighbour.id}")
            until("all memory is written",
                  lambda: int((top.parent / "memory.current").read_text()) >= sandboxes * FULL_BYTES, 600)  # fmt: skip
            processes = Processes(idle, started(client, neighbour, WORK))
            os.sched_setaffinity(processes.neighbour, {(os.cpu_count() or 1) - 1})
            until("the neighbour works", lambda: bool(pieces(client, neighbour.id)))
            rounds, turns = [], []
            for method in methods:
                if method == "alternating":
                    turns.append(alternate(processes, top.parent))
                else:
                    rounds.append(measure(client, method, processes, top.parent, seconds))
            done = pieces(client, neighbour.id)
        print(json.dumps({"rounds": rounds, "alternating": turns, "work": done}))
    finally:
        DROP_IN.unlink()
        subprocess.run(["systemctl", "restart", "dsec-zram.service", "dsecd.service"], check=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
