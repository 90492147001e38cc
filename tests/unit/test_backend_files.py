# SPDX-License-Identifier: Apache-2.0
"""Removing trees that hostile code made, on a plain directory."""

import os
import resource
from pathlib import Path

import pytest

from dsecd.backends import files


def _deep(top: Path, levels: int) -> None:
    top.mkdir()
    at = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _level in range(levels):
        os.mkdir("d" * 200, dir_fd=at)
        below = os.open("d" * 200, os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def test_a_deep_tree_takes_few_descriptors_and_little_memory(tmp_path: Path) -> None:
    """4,000 levels of long names: with a descriptor for each it would fail, with a path for each take 1.6 GB."""
    _deep(tmp_path / "tree", 4000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))
    try:
        files.remove_tree(tmp_path / "tree")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.listdir(tmp_path) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


def test_a_wide_tree_links_and_strange_names_go_and_nothing_else(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    for number in range(5000):
        (tree / f"{number}").touch()
    for name in (b"\xff\xfe", b"-rf", b"a\nb", b"x" * 255):
        os.close(os.open(os.path.join(os.fsencode(tree), name), os.O_CREAT))
    (tree / "sub" / "link").symlink_to(kept)
    os.mkfifo(tree / "sub" / "fifo")
    files.remove_tree(tree)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").exists()


@pytest.mark.parametrize("levels", [0, 3, 23, 24, 25, 26])
def test_trees_around_the_limit(tmp_path: Path, levels: int) -> None:
    _deep(tmp_path / "tree", levels)
    files.remove_tree(tmp_path / "tree")
    assert os.listdir(tmp_path) == []


def test_a_tree_that_is_not_there_and_a_link_in_its_place(tmp_path: Path) -> None:
    files.remove_tree(tmp_path / "none")
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files.remove_tree(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["real"]
    assert (tmp_path / "real" / "file").exists()
