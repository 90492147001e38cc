# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host: memory of idle sandboxes without reclaim and with each way of it, and a neighbour at work.

    python3 bench_memory.py SANDBOXES SECONDS METHOD...

Each sandbox holds a process that wrote to 100 MiB, half of it noise, and sleeps. One more does a piece of work over and
over, on the last processor alone. A round for each METHOD begins with a restart of the daemon and with all memory
touched once more. Prints JSON: for each round its samples of memory; all pieces of work, with the time of each.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from libdsec import Client, Sandbox
from libdsec.types import ExecRequest

IMAGE = "debian:trixie"
DROP_IN = Path("/etc/dsec/dsecd.toml.d/bench.toml")
MIB = 1 << 20
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
#: What a sandbox has at least when all that it wrote is in memory.
FULL_BYTES = 98 * MIB
IDLE = (
    'open R, "/dev/urandom"; read R, $n, 2048; $x = ($n . "\\0" x 2048) x 25600; '
    '$SIG{USR1} = sub { for ($i = 0; $i < length $x; $i += 4096) { substr($x, $i, 1) = "z"; } }; '
    "sleep 100000 while 1"
)
#: Work on 16 MiB of its own memory; a line with the beginning, wall time and processor time of each piece. A minimal
#: Debian's Perl has no Time::HiRes, so the clocks are read by clock_gettime(2).
WORK = (
    'sub at { $b = "\\0" x 16; syscall(228, $_[0], $b); ($s, $n) = unpack "qq", $b; $s + $n / 1e9 } '
    '$| = 1; $y = "x" x (16 << 20); while (1) { $t = at(0); $c = at(2); for $r (1 .. 10) { '
    'for ($i = 0; $i < 16 << 20; $i += 512) { substr($y, $i, 1) = "z"; } } '
    'printf("%.4f %.4f %.4f\\n", $t, at(0) - $t, at(2) - $c); }'
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
    """What all zram devices take of memory: mem_used_total, the third number of mm_stat."""
    return sum(int(path.read_text().split()[2]) for path in Path("/sys/block").glob("zram*/mm_stat"))


def kinds(top: Path) -> dict[str, int]:
    """What the sandboxes hold, by kind, in bytes: memory.stat of the cgroup above them."""
    return {name: int(value) for name, value in map(str.split, (top / "memory.stat").read_text().splitlines())}


def measure(client: Client, reclaim: str, idle: list[int], top: Path, seconds: float) -> dict[str, Any]:
    """One round: samples over time, read from the kernel: the daemon is under test, and busy."""
    subprocess.run(["systemctl", "stop", "dsecd.service"], check=True)
    for pid in idle:
        os.kill(pid, signal.SIGUSR1)
    # What else was paged out of them, some of Perl's own, stays where it is: it counts as held then, too.
    until("all memory is back", lambda: int((top / "memory.current").read_text()) >= len(idle) * FULL_BYTES, 400)
    configure(reclaim)
    # What the daemon itself takes to start is no part of it.
    time.sleep(3)
    began, clock, samples = time.monotonic(), time.time(), []
    while (at := time.monotonic() - began) < seconds:
        memory = meminfo()
        samples.append({
            "at_s": round(at, 1), "host_used": memory["MemTotal"] - memory["MemAvailable"],
            "sandboxes": int((top / "memory.current").read_text()), "zram_memory": zram_bytes(),
            "kinds": kinds(top),
        })  # fmt: skip
        time.sleep(SAMPLE_S)
    ended = time.time()
    method = client.memory(limit=1).host.reclaim
    return {"reclaim": reclaim, "method": method, "began": clock, "ended": ended, "samples": samples}


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
            os.sched_setaffinity(started(client, neighbour, WORK), {(os.cpu_count() or 1) - 1})
            until("the neighbour works", lambda: bool(pieces(client, neighbour.id)))
            rounds = [measure(client, method, idle, top.parent, seconds) for method in methods]
            done = pieces(client, neighbour.id)
        print(json.dumps({"rounds": rounds, "work": done}))
    finally:
        DROP_IN.unlink()
        subprocess.run(["systemctl", "restart", "dsec-zram.service", "dsecd.service"], check=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
