# SPDX-License-Identifier: Apache-2.0
"""`make bench-memory`: how much memory 20 idle sandboxes hold with reclaim and without, and what a neighbour feels.

    python3 -m tests.vm.bench_memory [--sandboxes N] [--seconds S] [--json FILE]

Here: running ``inside/bench_memory.py`` on a fresh test host, and telling what it found. Exits 1 when a promise is
broken.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from tests.vm import host, image, kernels, packages
from tests.vm.host import VmHost

MIB = 1 << 20
#: The promise about the neighbour; by processor time, since wall time on an emulated machine is the machine's.
SLOWER_AT_MOST = 1.05


def measured(sandboxes: int, seconds: float) -> list[dict[str, Any]]:
    """What the benchmark in the guest printed."""
    with host.only_machine():
        base = image.get()
        kernel = kernels.debian(base)
        with VmHost(kernel, packages.installed(kernel, base)) as vm:
            script = vm.put(Path(__file__).with_name("inside") / "bench_memory.py", "/root/inside")
            done = vm.run(["python3", script, str(sandboxes), str(seconds)], timeout_s=1800 + 4 * seconds)
            found: list[dict[str, Any]] = json.loads(done.text.splitlines()[-1])
            return found


def held(samples: list[dict[str, Any]]) -> float:
    """Mean over time of what sandboxes hold: their pages, and their part of zram."""
    return statistics.fmean(sample["sandboxes"] + (sample["zram_memory"] or 0) for sample in samples) / MIB


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.vm.bench_memory")
    parser.add_argument("--sandboxes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--json", type=Path, help="where to write every sample")
    options = parser.parse_args()
    rounds = measured(options.sandboxes, options.seconds)
    if options.json is not None:
        options.json.write_text(json.dumps(rounds))
    off, on = rounds
    for one in rounds:
        print(f"\nreclaim = {one['reclaim']}: {one['samples'][-1]['method']}; {options.sandboxes} sandboxes")
        print(f"{'s':>6} {'sandboxes':>10} {'zram':>6} {'host used':>10}  MiB")
        for sample in one["samples"]:
            own, zram, used = ((sample[name] or 0) / MIB for name in ("sandboxes", "zram_memory", "host_used"))
            print(f"{sample['at_s']:6.0f} {own:10.0f} {zram:6.0f} {used:10.0f}")
        wall = [piece[0] for piece in one["work"]]
        cpu = [piece[1] for piece in one["work"]]
        print(f"neighbour: {len(wall)} pieces of work, median {statistics.median(wall):.3f} s wall, "
              f"{statistics.median(cpu):.3f} s processor")  # fmt: skip
    saved = 1 - held(on["samples"]) / held(off["samples"])
    last = [one["samples"][-1] for one in rounds]
    end = 1 - held(last[1:]) / held(last[:1])
    slower = [statistics.median(p[kind] for p in on["work"]) / statistics.median(p[kind] for p in off["work"])
              for kind in (0, 1)]  # fmt: skip
    print(f"\nheld by sandboxes, zram included: {saved:.1%} less over time, {end:.1%} less at the end")
    print(f"neighbour: {slower[0]:.3f} times as long by wall, {slower[1]:.3f} by processor time")
    return 0 if saved > 0 and slower[1] <= SLOWER_AT_MOST else 1


if __name__ == "__main__":
    raise SystemExit(main())
