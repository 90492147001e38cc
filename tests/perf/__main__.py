# SPDX-License-Identifier: Apache-2.0
"""`make bench`: every figure of SPECIFICATION.md next to its peer, as a table and as JSON.

    python3 -m tests.perf [--rounds N] [--many COUNT] [--only network|many] [--json FILE]

Fewer rounds than a promise names make its verdict PENDING: they prove nothing. Exits 1 when a promise is broken.
"""

import argparse
import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from libdsec.types import SandboxSpec
from tests.perf import image_import, many, network, sandboxes
from tests.perf.report import Figure, Side
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar


def sandbox_figures(rounds: int) -> list[Figure]:
    """Life cycle and exec, in a daemon of their own."""
    with Daemon() as daemon:
        with daemon.client() as client:
            client.finish(
                client.image_import(name=sandboxes.IMAGE, source=str(debian_tar()), kind="rootfs-tar")
            )
            client.delete(client.create(SandboxSpec(image=sandboxes.IMAGE)).id)
        place = Path(tempfile.mkdtemp(prefix="bench-crun-", dir="/run"))
        try:
            with sandboxes.stacked_root(daemon, "bench-root") as root:
                crun = sandboxes.Crun(root, place)
                figures = [sandboxes.life_cycle(daemon, crun, rounds)]
                with sandboxes.podman_container(debian_tar()) as podman:
                    figures += sandboxes.exec_true(daemon, crun, podman, rounds)
            return figures
        finally:
            shutil.rmtree(place)


def import_figures(rounds: int) -> list[Figure]:
    """A 600 MB root file system, and a second image that shares 89 % of it."""
    base = Path(tempfile.mkdtemp(prefix="bench-images-", dir="/var/lib/dsec"))
    try:
        measured = image_import.measure(base, Path("/usr"), rounds)
    finally:
        shutil.rmtree(base)
    note = (
        f"{measured['entries']} entries, {measured['bytes']} bytes; the second image added "
        f"{measured['second_bytes_new']} bytes ({measured['second_share_new']:.1%}) in "
        f"{min(measured['second_import_s']):.2f} s"
    )  # fmt: skip
    return [
        Figure(
            "import of a 600 MB root file system",
            Side("image import", "dsecctl image import FILE.tar", _ms(measured["import_s"])),
            Side("tar", "tar -x FILE.tar, then syncfs", _ms(measured["tar_x_s"])),
            limit=2.0, wanted_n=3, note=note, extra={"second": measured},
        )
    ]  # fmt: skip


def _ms(seconds: list[float]) -> tuple[float, ...]:
    return tuple(second * 1000 for second in seconds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.perf")
    parser.add_argument("--rounds", type=int, default=200, help="of the sandbox figures")
    parser.add_argument(
        "--many", type=int, default=0, metavar="COUNT", help="also creation beside so many live sandboxes; minutes"
    )
    parser.add_argument("--only", choices=("network", "many"), help="no other figures than those of the network")
    parser.add_argument("--json", type=Path, help="where to write every sample")
    options = parser.parse_args()
    figures = []
    if options.only is None:
        figures += sandbox_figures(options.rounds) + import_figures(max(1, min(3, options.rounds // 50)))
    if options.only != "many":
        figures += network.figures(options.rounds)
    if options.many:
        figures += many.figures(options.many, min(50, options.rounds))
    kernel = platform.release()
    print(f"Linux {kernel}, {platform.machine()}, times in milliseconds\n")
    for figure in figures:
        print("\n".join(figure.lines()))
    document = {"kernel": kernel, "figures": [figure.to_json() for figure in figures]}
    if options.json is not None:
        options.json.write_text(json.dumps(document))
    print(f"\nJSON: {json.dumps({f.name: [round(f.ratio, 3), f.verdict] for f in figures})}")
    return 1 if any(figure.verdict == "FAIL" for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
