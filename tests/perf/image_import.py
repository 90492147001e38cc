# SPDX-License-Identifier: Apache-2.0
"""How long an import takes next to `tar -x` of the same archive on the same disk, and what a second image adds.

Run as root in the private root: python -m tests.perf.image_import [--rounds N] [--tree DIR] [--json FILE].  The
archive is made of DIR (default /usr) cut at 600 MB; the second one has 11 % of its bytes in changed files.  Both sides
end with the data on disk: `tar -x` is followed by syncfs, an import ends with one.  Caches are warm for both.
"""

import argparse
import asyncio
import io
import json
import os
import resource
import shutil
import statistics
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from dsecd.core.images.store import ImageStore
from libdsec.types import ImageInfo, ImportRequest
from tests.support import images

SIZE_BYTES = 600 << 20
CHANGED = 0.11


def make_archives(tree: Path, first: Path, second: Path) -> tuple[int, int]:
    """Two root file system tars that share all but CHANGED of their bytes; entries and bytes of one."""
    entries = total = changed = 0
    with (
        tarfile.open(first, "w", format=tarfile.GNU_FORMAT) as one,
        tarfile.open(second, "w", format=tarfile.GNU_FORMAT) as two,
    ):
        for directory, subs, files in os.walk(tree):
            subs.sort()
            for name in [*sorted(files), *subs]:
                path = os.path.join(directory, name)
                info = one.gettarinfo(path, os.path.relpath(path, tree))
                if total + (info.size if info.isreg() else 0) > SIZE_BYTES or info.islnk():
                    continue
                entries += 1
                if not info.isreg():
                    one.addfile(info)
                    two.addfile(info)
                    continue
                total += info.size
                with open(path, "rb") as file:
                    one.addfile(info, file)
                # Not the largest files: one of them alone could be more than the share.
                change = changed < CHANGED * total and 0 < info.size < 4 << 20
                changed += info.size if change else 0
                with open(path, "rb") as file:
                    two.addfile(info, io.BytesIO(_changed(file.read())) if change else file)
    return entries, total


def _changed(data: bytes) -> bytes:
    return bytes([data[0] ^ 0xFF]) + data[1:]


def time_tar(archive: Path, root: Path) -> float:
    """Seconds that GNU tar takes to unpack and sync."""
    target = root / "unpacked"
    target.mkdir()
    os.sync()
    start = time.perf_counter()
    subprocess.run(["tar", "-xf", archive, "-C", target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    took = time.perf_counter() - start
    shutil.rmtree(target)
    return took


def time_import(archive: Path, root: Path, name: str) -> tuple[float, ImageInfo, float]:
    """Seconds of an import, its result, and the worst delay of the event loop meanwhile in milliseconds."""
    async def run(store: ImageStore) -> tuple[float, ImageInfo, float]:
        await store.reconcile()
        worst = 0.0

        async def watch() -> None:
            nonlocal worst
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.005)
                worst = max(worst, time.perf_counter() - before - 0.005)

        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(watch())
            os.sync()
            start = time.perf_counter()
            info = await store.import_image(ImportRequest(name=name, source=str(archive), kind="rootfs-tar"))
            took = time.perf_counter() - start
            watcher.cancel()
        return took, info, worst * 1000

    with images.opened(root) as (store, _):
        return asyncio.run(run(store))


def children_cpu_s() -> float:
    """CPU time of all children so far: quieter than wall time on a busy machine."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tree", type=Path, default=Path("/usr"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="bench-images-", dir="/var/lib/dsec"))
    try:
        report = measure(base, options.tree, options.rounds)
    finally:
        shutil.rmtree(base)
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report))


def measure(base: Path, tree: Path, rounds: int) -> dict[str, Any]:
    first, second = base / "first.tar", base / "second.tar"
    entries, total = make_archives(tree, first, second)
    tars: list[float] = []
    imports: list[float] = []
    seconds: list[float] = []
    delays: list[float] = []
    added: ImageInfo | None = None
    cpu: dict[str, list[float]] = {"tar": [], "import": []}
    for number in range(rounds):
        before = children_cpu_s()
        tars.append(time_tar(first, base))
        cpu["tar"].append(children_cpu_s() - before)
        root = base / f"store-{number}"
        before = children_cpu_s()
        took, info, delay = time_import(first, root, "first")
        cpu["import"].append(children_cpu_s() - before)
        imports.append(took)
        delays.append(delay)
        took, added, _ = time_import(second, root, "second")
        seconds.append(took)
        assert info.objects_new == info.objects
        shutil.rmtree(root)
    assert added is not None
    return {
        "entries": entries, "bytes": total, "rounds": rounds,
        "tar_x_s": tars, "import_s": imports, "ratio": statistics.median(imports) / statistics.median(tars),
        "tar_x_cpu_s": cpu["tar"], "import_cpu_s": cpu["import"],
        "second_import_s": seconds, "second_objects_new": added.objects_new, "second_objects": added.objects,
        "second_bytes_new": added.bytes_new, "second_share_new": added.bytes_new / added.size_bytes,
        "metadata_bytes": added.metadata_bytes, "loop_worst_delay_ms": delays,
    }


if __name__ == "__main__":
    main()
