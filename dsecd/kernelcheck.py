# SPDX-License-Identifier: Apache-2.0
"""Judges a kernel by its build configuration: what dsecd wants of a host's, and of a microVM guest's.

Here: the command `kernel/check`, and what guests need. Not here: what hosts need, which stands with the probes of
`dsecctl doctor` (``dsecd.linux.mechanisms``); whether a feature works, which only a probe on the running kernel tells.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dsecd.linux import kconfig
from dsecd.linux.feature import parse_version
from dsecd.linux.kconfig import Config
from dsecd.linux.mechanisms import MECHANISMS


@dataclass(frozen=True)
class Need:
    """A feature, the options that bring it, the release that had them first, and what it is for."""

    name: str
    since: str
    why: str
    options: tuple[str, ...]


HOST = tuple(Need(item.name, item.since, item.why, item.options) for item in MECHANISMS if item.options)

GUEST = (
    Need("pvh", "5.0", "starting at the ELF entry, without firmware", ("PVH",)),
    Need("virtio", "5.1", "disks, ports and networks of a virtual machine",
         ("VIRTIO_PCI", "VIRTIO_BLK", "VIRTIO_NET", "VIRTIO_CONSOLE", "VIRTIO_MMIO", "VIRTIO_MMIO_CMDLINE_DEVICES")),
    Need("vsock", "4.8", "the agent's connection with Firecracker", ("VSOCKETS", "VIRTIO_VSOCKETS")),
    Need("entropy", "5.18", "other random numbers in each clone", ("HW_RANDOM_VIRTIO", "VMGENID")),
    Need("pmem", "5.4", "layers read where they lie in the host's page cache",
         ("VIRTIO_PMEM", "BLK_DEV_PMEM", "FS_DAX", "ZONE_DEVICE")),
    Need("erofs", "5.4", "layers", ("EROFS_FS", "EROFS_FS_XATTR")),
    Need("overlay", "3.18", "a writable tree over layers", ("OVERLAY_FS",)),
    Need("ext4", "2.6.28", "the writable layer's disk", ("EXT4_FS",)),
    Need("devtmpfs", "2.6.32", "devices without udev", ("DEVTMPFS", "DEVTMPFS_MOUNT")),
    Need("cgroups", "4.5", "limits, and ending a command's whole tree", ("CGROUPS", "MEMCG", "CGROUP_PIDS")),
    Need("page-reporting", "5.7", "giving free memory back to the host", ("VIRTIO_BALLOON", "PAGE_REPORTING")),
    Need("damon", "5.18", "finding cold memory", ("DAMON_SYSFS", "DAMON_PADDR")),
    Need("zram", "3.14", "somewhere to put cold anonymous memory", ("SWAP", "ZRAM")),
)  # fmt: skip

ROLES = {"host": HOST, "guest": GUEST}


@dataclass(frozen=True)
class Row:
    """What was found about one option."""

    role: str
    option: str
    found: bool
    feature: str
    since: str
    why: str


def rows(config: Config, roles: Sequence[str]) -> Iterator[Row]:
    """Every option of the roles' tables."""
    for role in roles:
        for need in ROLES[role]:
            for option in need.options:
                yield Row(role, f"CONFIG_{option}", option in config.options, need.name, need.since, need.why)


def too_old(config: Config, roles: Sequence[str]) -> list[str]:
    """Features that came later than this kernel, as sentences; nothing when its version is unknown."""
    if not config.version:
        return []
    version = parse_version(config.version)
    return [
        f"{need.name}: needs Linux {need.since}, this is {config.version}"
        for role in roles for need in ROLES[role] if need.since and parse_version(need.since) > version
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit status 0 when nothing lacks, 1 when something does, 2 when there is nothing to read."""
    parser = argparse.ArgumentParser(prog="kernel/check", description="Judge a kernel by its build configuration.")
    parser.add_argument("file", nargs="?", type=Path, help="a .config, also gzipped; default: the running kernel's")
    parser.add_argument("--role", action="append", choices=sorted(ROLES), help="what it is for (default: host)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    roles = arguments.role or ["host"]
    path = arguments.file or kconfig.running_path()
    if path is None:
        print("kernel/check: neither /proc/config.gz nor a file in /boot tells how this kernel was built "
              "(hint: name a file)", file=sys.stderr)  # fmt: skip
        return 2
    try:
        config = kconfig.read(path)
    except (OSError, ValueError) as error:
        print(f"kernel/check: read {path}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return 2
    found, old = list(rows(config, roles)), too_old(config, roles)
    if arguments.json:
        document = {"file": str(path), "version": config.version, "options": [asdict(row) for row in found], "old": old}
        print(json.dumps(document, indent=2))
    else:
        _print(found, old)
    return 0 if all(row.found for row in found) and not old else 1


def _print(found: Sequence[Row], old: Sequence[str]) -> None:
    width = max(len(row.option) for row in found)
    for row in found:
        word, since = "ok" if row.found else "MISSING", f"Linux {row.since}" if row.since else ""
        print(f"{word:8} {row.option:{width}}  {since:13}  {row.role}, {row.feature}: {row.why}")
    print(*(f"OLD      {sentence}" for sentence in old), sep="\n", end="\n" if old else "")


if __name__ == "__main__":
    sys.exit(main())
