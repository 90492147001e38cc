# SPDX-License-Identifier: Apache-2.0
"""Removing trees delays nobody: neither who deletes, nor the end of the daemon."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from dsecd.backends.trash import Trash
from tests.support.waiting import until

_PROGRAM = """
import asyncio, sys, time
from pathlib import Path
from dsecd.backends.trash import Trash
trash = Trash(Path(sys.argv[1]), remove=lambda tree: time.sleep(100))
asyncio.run(trash.take(Path(sys.argv[2]), 0.1))
"""


def test_a_small_tree_is_gone_when_its_deletion_returns(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    asyncio.run(Trash(tmp_path / "trash").take(tree, 10))
    assert [path.name for path in tmp_path.rglob("*")] == ["trash"]


def test_a_tree_that_takes_long_keeps_no_process_from_ending(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    arguments = [sys.executable, "-c", _PROGRAM, str(tmp_path / "trash"), str(tree)]
    subprocess.run(arguments, check=True, timeout=90)
    assert not tree.exists()


def test_a_large_tree_does_not_delay_a_small_one(tmp_path: Path) -> None:
    def remove(tree: Path) -> None:
        time.sleep(100 if tree.name.startswith("large") else 0)

    trash = Trash(tmp_path / "trash", remove)

    async def main() -> None:
        for name in ("large", "small"):
            (tmp_path / name).mkdir()
        await trash.take(tmp_path / "large", 0.01)
        async with asyncio.timeout(90):
            await trash.take(tmp_path / "small", 100)

    asyncio.run(main())


def test_what_an_earlier_daemon_left_is_removed_and_a_failure_ends_nothing(tmp_path: Path) -> None:
    seen: list[str] = []

    def remove(tree: Path) -> None:
        seen.append(tree.name)
        raise RuntimeError("a tree that cannot be removed")

    for name in ("a", "b", "c", "d", "e"):
        (tmp_path / "trash" / name).mkdir(parents=True)
    Trash(tmp_path / "trash", remove)
    until(lambda: len(seen) >= 5)
    assert sorted(seen) == ["a", "b", "c", "d", "e"]
