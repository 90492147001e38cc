# SPDX-License-Identifier: Apache-2.0
"""Block devices as the cgroup io controller names them: the disk below a path, and who divides its time.

What belongs here: sysfs and the io controller's settings for whole devices.  What does not: any one cgroup's limits.
Linux documentation, admin-guide/cgroup-v2, "IO Interface Files"; block/bfq-iosched.
"""

import os
from pathlib import Path

_SYS = Path("/sys/dev/block")
_COST = "io.cost.qos"


class NoDisk(Exception):
    """There is no block device whose requests could be counted for this path; the text says what is there instead."""


def disk_of(path: Path) -> str:
    """The whole disk, as MAJOR:MINOR, that holds the file system of a path.  Raises NoDisk, OSError.

    The io controller knows no partitions.  A device-mapper device is a disk of its own.
    """
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    entry = _SYS / name
    if os.major(device) == 0 or not entry.exists():
        raise NoDisk(f"{path} is not on a file system with a block device of its own (device {name})")
    if (entry / "partition").exists():
        return (entry.resolve().parent / "dev").read_text().strip()
    return name


def weight_file(disk: str, cgroup_root: Path) -> str:
    """The attribute by which cgroups share a disk's time.  Raises NoDisk where nothing reads one."""
    costs = cgroup_root / _COST
    if costs.exists() and any(
        line.split()[0] == disk and "enable=1" in line.split() for line in costs.read_text().splitlines() if line
    ):
        return "io.weight"
    scheduler = _SYS / disk / "queue" / "scheduler"
    if scheduler.exists() and "[bfq]" in scheduler.read_text():
        return "io.bfq.weight"
    raise NoDisk(f"nothing divides the time of disk {disk}: neither io.cost.qos nor the scheduler bfq is on for it")
