# SPDX-License-Identifier: Apache-2.0
"""DAMON that is somebody else's: that nothing of it is written. What the kernel does is tested in tests/host."""

import os
from pathlib import Path

import pytest

from dsecd.linux import damon, swap


def admin(path: Path, *update_us: int) -> Path:
    """The sysfs files of kdamonds that somebody has set up, each with its update interval."""
    (path / "nr_kdamonds").write_text(f"{len(update_us)}\n")
    for index, interval in enumerate(update_us):
        intervals = path / str(index) / "contexts/0/monitoring_attrs/intervals"
        intervals.mkdir(parents=True)
        (intervals / "update_us").write_text(f"{interval}\n")
        (path / str(index) / "contexts/nr_contexts").write_text("1\n")
        (path / str(index) / "state").write_text("off\n")
    return path


def content(path: Path) -> dict[str, str]:
    return {str(file): file.read_text() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("intervals", [(60_000_000,), (60_000_000, 60_000_123), (1, 2, 3)])
def test_what_is_somebody_elses_is_left_as_it_is(intervals: tuple[int, ...], tmp_path: Path) -> None:
    before = content(admin(tmp_path, *intervals))
    for number in (1, len(intervals), 8):
        with pytest.raises(damon.InUse, match=r"somebody else.*nr_kdamonds"):
            damon.take(number, 60_000_123, tmp_path)
    damon.give_back(60_000_123, tmp_path)
    assert content(tmp_path) == before


def test_what_bears_the_mark_is_ours(tmp_path: Path) -> None:
    admin(tmp_path, 60_000_123, 60_000_123)
    assert damon.owned(60_000_123, tmp_path)
    assert not damon.owned(60_000_124, tmp_path)
    damon.give_back(60_000_123, tmp_path)
    assert (tmp_path / "nr_kdamonds").read_text().startswith("0")


def test_a_kdamond_without_a_context_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "nr_kdamonds").write_text("1\n")
    (tmp_path / "0").mkdir()
    assert not damon.owned(60_000_123, tmp_path)


def test_marks_are_told_from_the_interval_that_everybody_uses() -> None:
    for _ in range(1000):
        mark = damon.new_mark()
        assert damon.mark_from(f"{mark}\n") == mark
    for text in ("60000000", "", "x", "-1", "61048576", "6e7", "٦٠٠٠٠٠٠١"):
        assert damon.mark_from(text) is None


def test_without_damon_there_is_nothing_to_take(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        damon.take(1, 60_000_123, tmp_path)
    assert os.listdir(tmp_path) == []


SWAPS = (
    "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
    "/dev/zram0                              partition\t1048572\t\t2048\t\t100\n"
    "/swap\\040file                           file\t\t524284\t\t0\t\t-2\n"
)


def test_swap_areas_are_read() -> None:
    assert swap.parse_areas(SWAPS) == [
        swap.Area("/dev/zram0", 1048572 << 10, 2 << 20), swap.Area("/swap\\040file", 524284 << 10, 0)
    ]  # fmt: skip
    assert swap.parse_areas(SWAPS.splitlines()[0] + "\n") == []
    with pytest.raises(ValueError, match="5 fields"):
        swap.parse_areas(SWAPS + "nonsense\n")
