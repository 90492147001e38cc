# SPDX-License-Identifier: Apache-2.0
"""inotify against this kernel: which files have changed, also those of a cgroup."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.linux import cgroup, inotify, proc
from tests.support.waiting import until


@pytest.fixture
def fd() -> Iterator[int]:
    made = inotify.create()
    yield made
    os.close(made)


def test_only_files_that_change_are_told(fd: int, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.write_text("before")
    watches = [inotify.watch(fd, path) for path in (one, other)]
    assert list(inotify.changes(fd)) == []
    proc.run_blocking(["sh", "-c", f"echo more >>{one}"], timeout_s=60)
    assert set(inotify.changes(fd)) == {watches[0]}
    inotify.unwatch(fd, watches[0])
    proc.run_blocking(["sh", "-c", f"echo more >>{one}; echo more >>{other}"], timeout_s=60)
    assert set(inotify.changes(fd)) == {watches[1]}


def test_lost_events_are_told(fd: int, tmp_path: Path) -> None:
    """The queue holds so many; equal ones in a row count once, so two files take turns."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    files = [(tmp_path / name).open("wb", buffering=0) for name in ("one", "other")]
    for file in files:
        inotify.watch(fd, Path(file.name))
    for number in range(limit + 100):
        files[number % 2].write(b"x")
    told = [watch for _ in range(limit // 1000 + 2) for watch in inotify.changes(fd)]
    assert told[-1] == inotify.OVERFLOW
    for file in files:
        file.close()


def test_the_kernel_tells_changes_of_a_cgroups_event_files(fd: int) -> None:
    group = cgroup.root() / cgroup.own().lstrip("/") / f"test-inotify-{os.getpid()}"
    cgroup.create(group)
    try:
        watch = inotify.watch(fd, group / "cgroup.events")
        proc.run_blocking(["sh", "-c", f"echo $$ >{group}/cgroup.procs"], timeout_s=60)
        # The kernel tells it later, from a queue of its own.
        told: set[int] = set()

        def heard() -> set[int]:
            told.update(inotify.changes(fd))
            return told

        until(heard)
        assert told == {watch}
    finally:
        cgroup.remove(group)
