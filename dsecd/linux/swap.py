# SPDX-License-Identifier: Apache-2.0
"""Swap: what there is, and compressed memory (zram) as swap.

What belongs here: the list of swap areas, making a zram device and taking it away, and what one holds.  What does not:
whether a host should have one.  Linux documentation, admin-guide/blockdev/zram; proc(5), swapon(2).
"""

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from dsecd.linux import proc, syscalls

_CONTROL = Path("/sys/class/zram-control")
_TIMEOUT_S = 30.0
#: Above that of swap on disk, which is negative unless somebody set it.
_PRIORITY = 100


@dataclass(frozen=True)
class Area:
    """One swap area."""

    path: str
    size_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class Held:
    """What a zram device holds: pages as they were, and the memory that they take now, with all overhead."""

    original_bytes: int
    memory_bytes: int


def parse_areas(text: str) -> list[Area]:
    """The content of /proc/swaps.  Raises ValueError for a line that is none."""
    areas = []
    for line in text.splitlines()[1:]:
        # A blank in a path is \\040 there, so fields are words.
        fields = line.split()
        if len(fields) != 5:
            raise ValueError(f"parse swap area {line!r}: expected 5 fields")
        areas.append(Area(fields[0], int(fields[2]) << 10, int(fields[3]) << 10))
    return areas


def areas() -> list[Area]:
    """All swap areas in use; none where the kernel has no swap."""
    try:
        return parse_areas(Path("/proc/swaps").read_text())
    except FileNotFoundError:
        return []


def zram_held() -> Held | None:
    """What all zram devices that serve as swap hold together; None when there are none."""
    found = [_mm_stat(name) for name in _zram_names()]
    if not found:
        return None
    return Held(sum(held.original_bytes for held in found), sum(held.memory_bytes for held in found))


def _zram_names() -> list[str]:
    # Whoever has another mount of /dev than he who swapped on sees a path below that mount alone: /zram0.
    return [match[1] for area in areas() if (match := re.fullmatch(r"(?:/dev)?/(zram\d+)", area.path))]


def is_zram_used(number: int) -> bool:
    """Whether the zram device with that number is a swap area."""
    return f"zram{number}" in _zram_names()


def _mm_stat(name: str) -> Held:
    """orig_data_size, compr_data_size, mem_used_total and more."""
    fields = (Path("/sys/block") / name / "mm_stat").read_text().split()
    return Held(int(fields[0]), int(fields[2]))


def have_zram() -> bool:
    """Whether zram devices can be made; the module is loaded where it has to be.  Blocks."""
    if not _CONTROL.is_dir():
        try:
            proc.run_blocking(["modprobe", "zram"], timeout_s=_TIMEOUT_S, check=False)
        except FileNotFoundError:  # no modprobe: then no modules, either
            return False
    return _CONTROL.is_dir()


def add_zram() -> int:
    """Make a zram device, empty and unused; its number.  Blocks.  Raises FileNotFoundError without zram."""
    if not have_zram():
        raise FileNotFoundError(errno.ENOENT, "make a zram device: the kernel has no zram", str(_CONTROL))
    return int((_CONTROL / "hot_add").read_text())


def use_zram(number: int, size_bytes: int) -> None:
    """Give a new zram device its size, counted before compression, and swap to it.  Blocks."""
    settings, device = Path(f"/sys/block/zram{number}"), Path(f"/dev/zram{number}")
    # zstd halves memory again against the default, where the kernel has it.
    if "zstd" in (settings / "comp_algorithm").read_text().replace("[", "").replace("]", "").split():
        (settings / "comp_algorithm").write_text("zstd")
    (settings / "disksize").write_text(str(size_bytes))
    proc.run_blocking(["mkswap", device], timeout_s=_TIMEOUT_S)
    syscalls.swapon(device, syscalls.SWAP_FLAG_PREFER | _PRIORITY)


def remove_zram(number: int) -> None:
    """Take a zram device away; what it holds goes back to memory first.  One that is gone is fine.  Blocks."""
    device = f"/dev/zram{number}"
    if not Path(f"/sys/block/zram{number}").exists():
        return
    if is_zram_used(number):
        syscalls.swapoff(device)
    fd = os.open(_CONTROL / "hot_remove", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(number).encode())
    finally:
        os.close(fd)
