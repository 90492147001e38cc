# SPDX-License-Identifier: Apache-2.0
"""The disk below a path, against what lsblk(8) and findmnt(8) say."""

from pathlib import Path

import pytest

from dsecd.linux import blockdev, proc


def said(*argv: str) -> list[str]:
    return proc.run_blocking(argv, timeout_s=60).stdout.decode().split()


def test_the_whole_disk_of_the_state_directory_is_found() -> None:
    (device,) = said("findmnt", "-n", "-o", "MAJ:MIN", "--target", "/var/lib/dsec")
    path = Path("/sys/dev/block") / device
    if not path.exists():
        with pytest.raises(blockdev.NoDisk, match="/var/lib/dsec is not on a file system with a block device"):
            blockdev.disk_of(Path("/var/lib/dsec"))
        return
    disk = blockdev.disk_of(Path("/var/lib/dsec"))
    name = Path("/sys/dev/block", disk).resolve().name
    assert (Path("/sys/block") / name).exists()  # partitions are not there
    assert path.resolve().is_relative_to(Path("/sys/dev/block", disk).resolve())


def test_a_file_system_without_a_disk_has_none() -> None:
    with pytest.raises(blockdev.NoDisk, match="/proc is not on"):
        blockdev.disk_of(Path("/proc"))


def test_a_share_needs_somebody_who_divides(tmp_path: Path) -> None:
    with pytest.raises(blockdev.NoDisk, match="disk 999:7: neither"):
        blockdev.weight_file("999:7", tmp_path)
    (tmp_path / "io.cost.qos").write_text("999:7 enable=0 ctrl=auto\n999:8 enable=1 ctrl=auto\n")
    with pytest.raises(blockdev.NoDisk):
        blockdev.weight_file("999:7", tmp_path)
    assert blockdev.weight_file("999:8", tmp_path) == "io.weight"
