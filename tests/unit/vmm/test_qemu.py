# SPDX-License-Identifier: Apache-2.0
"""QEMU's arguments as data, and what is read out of its answers."""

import dataclasses
from pathlib import Path

import pytest

from dsecd.backends.microvm_memory import bounded
from dsecd.vmm.base import ALIGN_BYTES, Machine, Nic
from dsecd.vmm.qemu import arguments, balloon_statistics


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    layer = tmp_path / "layer"
    layer.write_bytes(bytes(ALIGN_BYTES))
    return Machine(
        kernel=tmp_path / "kernel", initramfs=tmp_path / "initramfs", cmdline="dsec.layers=1", vcpus=2,
        memory_bytes=256 << 20, layers=(layer,), disk=tmp_path / "disk",
    )  # fmt: skip


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_layers_are_mapped_shared_and_read_only(machine: Machine) -> None:
    words = arguments("vm", machine, "tcg")
    (layer,) = [word for word in words if "mem-path=/m/layer0" in word]
    assert "share=on,readonly=on" in layer
    assert layer.endswith(f"size={ALIGN_BYTES}")
    assert "virtio-pmem-pci,id=layer0,memdev=pm0" in words


def test_nothing_of_the_host_is_named_but_files_of_the_cage(machine: Machine, tmp_path: Path) -> None:
    assert not any(str(tmp_path) in word for word in arguments("vm", machine, "kvm"))


def test_emulated_guests_are_told_so_and_others_are_not(machine: Machine) -> None:
    assert "no_timer_check" in value(arguments("vm", machine, "tcg"), "-append")
    assert "mitigations=off" not in value(arguments("vm", machine, "kvm"), "-append")
    assert value(arguments("vm", machine, "kvm"), "-accel") == "kvm"


def test_system_calls_of_the_monitor_are_restricted(machine: Machine) -> None:
    assert value(arguments("vm", machine, "tcg"), "-sandbox").startswith("on,")


def test_a_network_device_is_a_tap_that_is_open_already(machine: Machine) -> None:
    assert "-netdev" not in arguments("vm", machine, "tcg")
    nics = (Nic("dsec0", "06:64:73:00:00:01", 17), Nic("dsec1", "06:64:73:00:00:02", 18))
    words = arguments("vm", dataclasses.replace(machine, nics=nics), "tcg")
    # By the numbers that they have in there; nothing is opened or run for them.
    assert [word for word in words if word.startswith("tap,")] == ["tap,id=net0,fd=6", "tap,id=net1,fd=7"]
    assert "virtio-net-pci,netdev=net1,mac=06:64:73:00:00:02,romfile=" in words


def test_a_layer_that_cannot_be_mapped_is_refused(machine: Machine) -> None:
    machine.layers[0].write_bytes(b"x" * 4096)
    with pytest.raises(ValueError, match="4096 bytes, not a multiple of 2097152"):
        arguments("vm", machine, "tcg")


def test_a_restored_machine_waits_and_keeps_the_snapshots_memory_as_it_is(machine: Machine) -> None:
    words = arguments("vm", machine, "tcg", restoring=True)
    assert value(words, "-incoming") == "defer"
    (ram,) = [word for word in words if "id=ram," in word]
    assert "share=off,readonly=on" in ram


def test_balloon_figures_have_linux_names_and_only_those_reported() -> None:
    answer = {"last-update": 17, "stats": {"stat-free-memory": 5, "stat-swap-in": (1 << 64) - 1, "stat-x": "y"}}
    assert balloon_statistics(answer) == {"free_memory": 5}
    assert balloon_statistics({"last-update": 0, "stats": {"stat-free-memory": 5}}) == {}
    assert balloon_statistics(None) == {}


def test_what_a_guest_says_is_no_more_than_it_can_be() -> None:
    said = {"free_memory": 1 << 62, "total_memory": 5, "disk_caches": -3, "major_faults": (1 << 64) - 2, "available": 7}
    assert bounded(said, 256) == {
        "free": 256, "total": 5, "disk_caches": 0, "major_faults": 1 << 53, "available": 7,
    }  # fmt: skip
