# SPDX-License-Identifier: Apache-2.0
"""``dsecctl cp`` of a tree of many small files, beside ``tar`` through ``dsecctl exec`` and ``podman cp``.

    python3 -m tests.perf.trees [--files N] [--rounds R]

Here: samples and their figures. Not here: what a figure is (``report.py``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from libdsec.types import SandboxSpec
from tests.perf.report import Figure, Side
from tests.perf.sandboxes import podman_container, timed
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

IMAGE, BOX = "bench:trees", "bench"
FILES, ROUNDS = 10_000, 3
#: Against tar through exec, which is a program of C at both ends and holds nothing to a tree's safety.
LIMIT = 3.0
_ROOT = Path(__file__).resolve().parents[2]


def make(top: Path, files: int) -> None:
    """Files of 0 to 4,000 bytes, a hundred to a directory."""
    for number in range(files):
        path = top / f"d{number // 100}" / f"file-{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(number % 4000))


class Bench:
    """One daemon and its peer; everything goes to a new place each time."""

    def __init__(self, daemon: Daemon, base: Path, podman: list[str] | None) -> None:
        self._base = base
        self._podman = None if podman is None else podman[2]
        self._env = {**os.environ, "DSEC_SOCKET": str(daemon.socket)}
        self.samples: dict[str, list[float]] = defaultdict(list)

    def _run(self, *argv: str, stdin: int = subprocess.DEVNULL) -> None:
        subprocess.run(argv, stdin=stdin, stdout=subprocess.DEVNULL, check=True, cwd=_ROOT, env=self._env)

    def _piped(self, first: list[str], second: list[str]) -> None:
        with subprocess.Popen(first, stdout=subprocess.PIPE, cwd=_ROOT, env=self._env) as source:
            assert source.stdout is not None
            self._run(*second, stdin=source.stdout.fileno())
        assert source.returncode == 0

    def round(self, number: int) -> None:
        tree, ctl = str(self._base / "tree"), [sys.executable, "-m", "dsecctl"]
        self._time("cp in", lambda: self._run(*ctl, "cp", tree, f"{BOX}:/root/cp{number}"))
        inside = ["sh", "-c", f"mkdir /root/tar{number} && exec tar -xf - -C /root/tar{number}"]
        packed = ["tar", "-cf", "-", "-C", tree, "."]
        self._time("tar in", lambda: self._piped(packed, [*ctl, "exec", "-i", BOX, *inside]))
        out, unpacked = self._base / "out", self._base / "unpacked"
        self._time("cp out", lambda: self._run(*ctl, "cp", f"{BOX}:/root/cp{number}", str(out)))
        subprocess.run(["diff", "-r", tree, out], check=True)
        unpacked.mkdir()
        from_box = [*ctl, "exec", BOX, "tar", "-cf", "-", "-C", f"/root/tar{number}", "."]
        self._time("tar out", lambda: self._piped(from_box, ["tar", "-xf", "-", "-C", str(unpacked)]))
        if self._podman is not None:
            there = f"{self._podman}:/root/cp{number}"
            self._time("podman in", lambda: self._run("podman", "cp", tree, there))
            self._time("podman out", lambda: self._run("podman", "cp", there, str(self._base / "podman")))
        for path in (out, unpacked, self._base / "podman"):
            shutil.rmtree(path, ignore_errors=True)

    def _time(self, name: str, fn: object) -> None:
        assert callable(fn)
        self.samples[name].append(timed(fn))


def figures(files: int, rounds: int) -> list[Figure]:
    """Both ways, against both peers."""
    base = Path(tempfile.mkdtemp(prefix="bench-trees-", dir="/var/lib/dsec"))
    try:
        make(base / "tree", files)
        with Daemon() as daemon, daemon.client() as client, podman_container(debian_tar()) as podman:
            client.finish(client.image_import(name=IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
            client.create(SandboxSpec(image=IMAGE), id=BOX)
            bench = Bench(daemon, base, podman)
            for number in range(rounds):
                bench.round(number)
            client.delete(BOX)
            until(lambda: not daemon.residue(), limit_s=300)  # so many files are removed behind the call
    finally:
        shutil.rmtree(base)
    wanted = ROUNDS if files >= FILES else rounds + 1
    found = []
    for way, ours, tar in (
        ("in", "dsecctl cp TREE BOX:/PATH", "tar -c | dsecctl exec -i BOX tar -x"),
        ("out", "dsecctl cp BOX:/PATH TREE", "dsecctl exec BOX tar -c | tar -x"),
    ):
        mine = Side("dsecctl cp", ours, tuple(bench.samples[f"cp {way}"]))
        peers = [("tar", tar, f"tar {way}", LIMIT), ("podman", "podman cp", f"podman {way}", LIMIT)]
        found += [
            Figure(f"{files} small files {way}, against {name}", mine, Side(name, what, tuple(bench.samples[key])),
                   limit=limit, wanted_n=wanted)
            for name, what, key, limit in peers if bench.samples[key]
        ]  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.perf.trees")
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    found = figures(options.files, options.rounds)
    print("\n".join(line for figure in found for line in figure.lines()))
    return 1 if any(figure.verdict == "FAIL" for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
