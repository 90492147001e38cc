# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host: memory of idle sandboxes over time, without and with reclaim, and what a neighbour feels.

    python3 bench_memory.py SANDBOXES SECONDS

Each sandbox holds a process that wrote to 100 MiB, half of it noise, and sleeps. One more does a fixed piece of work
over and over. Prints JSON: for each setting a sample every few seconds, and the time of each piece of work.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libdsec import Client, Sandbox
from libdsec.types import ExecRequest

IMAGE = "debian:trixie"
DROP_IN = Path("/etc/dsec/dsecd.toml.d/bench.toml")
SETTINGS = "[memory]\nsweep_s = 2\nage_s = 15\nkdamonds = 4\nstart_below_permil = 1001\n"
SAMPLE_S = 5.0
IDLE = (
    'open R, "/dev/urandom"; read R, $n, 2048; $x = ($n . "\\0" x 2048) x 25600; $| = 1; print "ready\\n"; '
    "sleep 100000"
)
#: Work on 16 MiB of its own memory; a line with the processor and wall time of each piece.
WORK = (
    'use Time::HiRes "time"; $| = 1; $y = "x" x (16 << 20); '
    "while (1) { $t = time; $c = (times)[0]; for $r (1 .. 4) { "
    'for ($i = 0; $i < 16 << 20; $i += 512) { substr($y, $i, 1) = "z"; } } '
    'printf("%.4f %.4f\\n", time - $t, (times)[0] - $c); }'
)


@contextlib.contextmanager
def configured(reclaim: str) -> Iterator[None]:
    """The daemon with this setting, and a gigabyte and more of zram."""
    DROP_IN.parent.mkdir(exist_ok=True)
    DROP_IN.write_text(f'{SETTINGS}reclaim = "{reclaim}"\nzram_bytes = {3 << 30}\n')
    subprocess.run(["systemctl", "restart", "dsec-zram.service", "dsecd.service"], check=True)
    try:
        yield
    finally:
        DROP_IN.unlink()
        subprocess.run(["systemctl", "restart", "dsec-zram.service", "dsecd.service"], check=True)


def meminfo() -> dict[str, int]:
    """Of /proc/meminfo, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}


def measure(reclaim: str, sandboxes: int, seconds: float) -> dict[str, Any]:
    """One setting: samples over time, and the neighbour's pieces of work."""
    with configured(reclaim), Client() as client, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(Sandbox(image=IMAGE, client=client)) for _ in range(sandboxes)]
        for sandbox in idle:
            process = sandbox.popen("perl", "-e", IDLE)
            stack.callback(process.close)
        neighbour = stack.enter_context(Sandbox(image=IMAGE, client=client))
        while (used := client.memory().host.sandboxes_bytes or 0) < sandboxes * (98 << 20):
            time.sleep(1)
        # Its output is small, and kept by the agent.
        work = client.exec_start(neighbour.id, ExecRequest(argv=("perl", "-e", WORK)))
        began, samples = time.monotonic(), []
        while (at := time.monotonic() - began) < seconds:
            report, memory = client.memory(), meminfo()
            samples.append({
                "at_s": round(at, 1), "host_used": memory["MemTotal"] - memory["MemAvailable"],
                "sandboxes": report.host.sandboxes_bytes, "zram_memory": report.host.zram_memory_bytes,
                "swapped": report.host.swap_used_bytes, "method": report.host.reclaim,
            })  # fmt: skip
            time.sleep(SAMPLE_S)
        told = client.exec_output(neighbour.id, work.exec_id).data.decode()
        # The last line may be half a one.
        pieces = [[float(word) for word in line.split()] for line in told.splitlines()[:-1]]
        return {"reclaim": reclaim, "started_with": used, "samples": samples, "work": pieces}


if __name__ == "__main__":
    rounds = [measure(reclaim, int(sys.argv[1]), float(sys.argv[2])) for reclaim in ("off", "auto")]
    print(json.dumps(rounds))
