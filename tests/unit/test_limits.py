# SPDX-License-Identifier: Apache-2.0
"""Limits as values: what they become in a cgroup, what is refused, and how an update changes them."""

from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from dsecd.backends.limits import LimitWriter
from libdsec.errors import FeatureMissing
from libdsec.types import LimitName, Limits

_MIB = 1 << 20


def host(folder: Path, controllers: str, *files: str) -> LimitWriter:
    """A writer for a folder that looks like a cgroup with these controllers and attributes."""
    (folder / "cgroup.controllers").write_text(controllers)
    for name in files:
        (folder / name).touch()
    return LimitWriter(folder, folder)


def test_every_limit_has_its_attribute_and_unit(tmp_path: Path) -> None:
    limits = Limits(
        memory_max_bytes=64 * _MIB, memory_high_bytes=32 * _MIB, swap_max_bytes=0, memory_oom_group=True,
        cpu_max_permil=1500, cpu_weight=50, pids_max=7,
    )  # fmt: skip
    assert host(tmp_path, "").attributes(limits) == {
        "memory.max": "67108864", "memory.high": "33554432", "memory.swap.max": "0", "memory.oom.group": "1",
        "cpu.max": "150000 100000", "cpu.weight": "50", "pids.max": "7",
    }  # fmt: skip
    assert host(tmp_path, "").attributes(Limits(cpu_idle=False)) == {"cpu.idle": "0"}
    assert host(tmp_path, "").attributes(Limits()) == {}


def test_what_is_asked_for_and_missing_is_refused_by_name(tmp_path: Path) -> None:
    writer = host(tmp_path, "memory pids", "memory.max", "pids.max")
    assert writer.check(Limits(memory_max_bytes=64 * _MIB)) == []
    with pytest.raises(FeatureMissing, match=r"limit cpu\.max, cpu\.weight: this host has no .* controller cpu"):
        writer.check(Limits(cpu_weight=5, cpu_max_permil=500, pids_max=7))
    with pytest.raises(FeatureMissing, match=r"limit memory\.high: this kernel has no such cgroup attribute"):
        writer.check(Limits(memory_high_bytes=64 * _MIB))


def test_the_default_that_is_off_is_named(tmp_path: Path) -> None:
    assert host(tmp_path, "memory").check(Limits()) == ["pids.max"]


def test_io_without_a_disk_is_refused_by_name(tmp_path: Path) -> None:
    writer = LimitWriter(tmp_path, Path("/proc"))
    with pytest.raises(FeatureMissing, match="limit io_reads_per_s, io_weight: /proc is not on a file system with a"):
        writer.attributes(Limits(io_weight=5, io_reads_per_s=5))


def test_a_weight_of_what_is_idle_is_refused() -> None:
    with pytest.raises(ValidationError, match="cpu_weight: has no meaning with cpu_idle"):
        Limits(cpu_idle=True, cpu_weight=5)


def test_an_update_keeps_what_it_does_not_name() -> None:
    old = Limits(memory_max_bytes=64 * _MIB, cpu_weight=50)
    assert old.merged(Limits(cpu_weight=70)) == Limits(memory_max_bytes=64 * _MIB, cpu_weight=70)
    assert old.merged(Limits(), ("memory_max_bytes",)) == Limits(cpu_weight=50)
    assert old.merged(Limits(cpu_idle=True), ("cpu_weight",)) == Limits(memory_max_bytes=64 * _MIB, cpu_idle=True)
    with pytest.raises(ValidationError):
        old.merged(Limits(cpu_idle=True))


def test_every_limit_can_be_lifted() -> None:
    assert set(get_args(LimitName)) == set(Limits.model_fields)
