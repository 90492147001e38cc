# SPDX-License-Identifier: Apache-2.0
"""Images end to end: imported by the real worker, mounted by the kernel, compared with their source."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsecd.core.images.store import ImageStore
from dsecd.linux import mount, overlay
from libdsec.types import ImageInfo, ImportRequest
from tests.support import images

pytestmark = pytest.mark.usefixtures("own_mounts")


def import_one(root: Path, **fields: object) -> ImageInfo:
    """One import by a daemon that starts, imports and stops."""
    async def run() -> ImageInfo:
        with images.opened(root) as (store, _):
            await store.reconcile()
            return await store.import_image(ImportRequest.model_validate({"name": "test", **fields}))

    return asyncio.run(run())


@contextmanager
def mounted(root: Path, *digests: str) -> Iterator[Path]:
    """The images stacked, first on top, read-only, as a sandbox would see them."""
    async def layers(store: ImageStore) -> list[Path]:
        return [await store.mount_layer(digest) for digest in digests]

    with images.opened(root) as (store, _):
        lower = asyncio.run(layers(store))
        objects = store.objects_dir
    target = root / "view"
    target.mkdir(exist_ok=True)
    fd = overlay.mount(lower=lower, data=[objects], upper=None, work=None, fsuid=None)
    mount.attach(fd, target)
    os.close(fd)
    yield target
    mount.detach(target)
    for path in lower:
        mount.detach(path)


def test_a_directory_comes_back_as_it_was(disk: Path) -> None:
    source = disk / "source"
    images.make_tree(source)
    before = images.fingerprint(source)
    info = import_one(disk, source=str(source))
    with mounted(disk, info.digest) as view:
        assert images.fingerprint(view) == before
    assert info.entries == len(before)
    assert images.residue(disk) == []


def test_a_tar_of_it_comes_back_as_tar_sees_it(disk: Path) -> None:
    source = disk / "source"
    images.make_tree(source)
    archive = disk / "root.tar"
    subprocess.run(
        ["tar", "--format=posix", "--xattrs", "--xattrs-include=*", "--sparse", "-C", source, "-cf", archive, "."], check=True
    )
    from_directory = import_one(disk, source=str(source))
    info = import_one(disk, source=str(archive))
    assert info.digest == from_directory.digest
    with mounted(disk, info.digest) as view:
        subprocess.run(["tar", "-C", view, "-df", archive], check=True)
    assert images.residue(disk) == []


@pytest.mark.parametrize("compress", [["gzip", "-c"], ["bzip2", "-c"], ["xz", "-c"], ["zstd", "-qc"]], ids=lambda argv: argv[0])
def test_compression_makes_no_difference(disk: Path, compress: list[str]) -> None:
    source = disk / "source"
    images.make_tree(source)
    archive, packed = disk / "root.tar", disk / "root.packed"
    subprocess.run(["tar", "--format=gnu", "--sparse", "-C", source, "-cf", archive, "."], check=True)
    with open(packed, "wb") as file:
        subprocess.run([*compress, archive], stdout=file, check=True)
    assert import_one(disk, source=str(archive)).digest == import_one(disk, source=str(packed)).digest


# --- killed at every step ----------------------------------------------------------------------------------------


def daemon(root: Path, action: str, argument: str, point: str) -> subprocess.CompletedProcess[str]:
    """A process that does one thing to the store and is killed at `point`."""
    return subprocess.run(
        [sys.executable, "-m", "tests.support.image_daemon", root, action, argument, point],
        capture_output=True, text=True, check=False,
    )


def workers(root: Path) -> list[str]:
    """Processes that still have something to do with a store, by their command lines and working files."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue
        if process.name != str(os.getpid()) and any(link.startswith(str(root)) for link in links):
            found.append(process.name)
    return found


def names_in(root: Path) -> set[str]:
    with images.opened(root) as (store, _):
        return {name for info in store.list() for name in info.names}


def test_an_import_killed_anywhere_leaves_nothing(disk: Path) -> None:
    first, second = disk / "first", disk / "second"
    images.make_tree(first)
    shutil.copytree(first / "usr", second / "usr")
    (second / "own").write_bytes(os.urandom(200_000))
    root = disk / "store"
    kept = import_one(root, name="first", source=str(first))
    every: list[str] = []
    for how in ("record", "record-undo"):
        recorded = daemon(root, "import", str(second), how)
        assert recorded.returncode == 0, recorded.stderr
        every += [point for point in recorded.stdout.split() if point not in every and not point.startswith("remove/")]
        daemon(root, "remove", "second", "nowhere")
    assert {"phase/read", "import/stage/do/after", "import/publish/do/after", "import/record/undo/before"} <= set(every)
    problems: dict[str, object] = {}
    for point in every:
        killed = daemon(root, "import", str(second), point)
        if killed.returncode != -9:
            problems[point] = killed.stderr or "was not killed"
        with images.opened(root) as (store, _):
            asyncio.run(store.reconcile())
        expected = {"first:latest"} | ({"second:latest"} if point == "import/publish/do/after" else set())
        state = (images.residue(root), workers(root), names_in(root) - expected, expected - names_in(root))
        if any(state):
            problems[f"{point} after reconcile"] = state
        daemon(root, "remove", "second", "nowhere")
    assert problems == {}
    with mounted(root, kept.digest) as view:
        assert images.fingerprint(view) == images.fingerprint(first)


def test_a_removal_killed_anywhere_is_finished_by_the_next_daemon(disk: Path) -> None:
    first, second = disk / "first", disk / "second"
    images.make_tree(first)
    shutil.copytree(first / "usr", second / "usr")
    (second / "own").write_bytes(os.urandom(200_000))
    root = disk / "store"
    kept = import_one(root, name="first", source=str(first))
    import_one(root, name="second", source=str(second))
    recorded = daemon(root, "remove", "second", "record")
    points = recorded.stdout.split()
    assert "remove/collect/do/before" in points
    problems: dict[str, object] = {}
    for point in points:
        import_one(root, name="second", source=str(second))
        killed = daemon(root, "remove", "second", point)
        if killed.returncode != -9:
            problems[point] = killed.stderr or "was not killed"
        with images.opened(root) as (store, _):
            asyncio.run(store.reconcile())
        if (state := (images.residue(root), names_in(root))) != ([], {"first:latest"}):
            problems[f"{point} after reconcile"] = state
    assert problems == {}
    with mounted(root, kept.digest) as view:
        assert images.fingerprint(view) == images.fingerprint(first)
