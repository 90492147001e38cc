# SPDX-License-Identifier: Apache-2.0
"""The initramfs of a guest: which modules get in, in which order, and that it is made anew only when it must be."""

import lzma
from pathlib import Path

import pytest

from dsecd.vmm import guest


def module(folder: Path, name: str, needs: str = "") -> None:
    path = folder / "kernel" / "drivers" / f"{name}.ko.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(b"\x7fELF\0license=GPL\0depends=" + needs.encode() + b"\0name=x\0"))


def test_modules_come_after_what_they_need(tmp_path: Path) -> None:
    module(tmp_path, "nd_pmem", "libnvdimm,nd_btt")
    module(tmp_path, "nd_btt", "libnvdimm")
    module(tmp_path, "libnvdimm")
    module(tmp_path, "unused")
    assert list(guest.with_dependencies(tmp_path, ("built_in", "nd_pmem", "nd_btt"))) == [
        "libnvdimm", "nd_btt", "nd_pmem",
    ]  # fmt: skip


def test_an_initramfs_is_made_again_only_for_another_agent_or_kernel(tmp_path: Path) -> None:
    kernel, agent, folder = tmp_path / "vmlinux", tmp_path / "agent", tmp_path / "guest"
    kernel.write_bytes(b"kernel")
    agent.write_bytes(b"agent 1")
    first = guest.prepare(kernel, agent, folder)
    made = first.initramfs.stat().st_ino
    assert guest.prepare(kernel, agent, folder) == first
    assert first.initramfs.stat().st_ino == made
    assert b"agent 1" in first.initramfs.read_bytes()
    agent.write_bytes(b"agent 2")
    second = guest.prepare(kernel, agent, folder)
    assert second.kernel == first.kernel
    assert second.initramfs != first.initramfs


def test_a_named_kernel_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(guest.KernelMissing, match="no such kernel"):
        guest.find_kernel(str(tmp_path / "none"))
