# SPDX-License-Identifier: Apache-2.0
"""What machine a sandbox becomes, and whose its limits are."""

from ipaddress import IPv4Address
from pathlib import Path

import pytest

from dsecd.backends import machines
from dsecd.backends.base import MachineSettings
from dsecd.vmm.base import Machine
from dsecd.vmm.guest import Boot
from libdsec.errors import FeatureMissing, InvalidSpec
from libdsec.types import AppArmor, Limits, SandboxSpec

SETTINGS = MachineSettings(memory_bytes=512 << 20, vcpus=2)


def spec(**limits: int) -> SandboxSpec:
    return SandboxSpec(image="a:1", backend="microvm", limits=Limits.model_validate(limits))


def made(**limits: int) -> Machine:
    boot = Boot(kernel=Path("/k"), initramfs=Path("/i"))
    return machines.machine(
        "web.1", spec(**limits), SETTINGS, boot, environment=Path("/e"), disk=Path("/d"),
        dns_server=IPv4Address("198.18.255.254"),
    )  # fmt: skip


def test_limits_size_the_machine() -> None:
    assert (made().memory_bytes, made().vcpus) == (512 << 20, 2)
    assert made(memory_max_bytes=(300 << 20) + 5).memory_bytes == 300 << 20
    assert made(cpu_max_permil=500).vcpus == 1
    assert made(cpu_max_permil=2500).vcpus == 3


def test_the_agent_is_told_by_words_without_blanks() -> None:
    words = made(pids_max=100).cmdline.split()
    assert {"dsec.hostname=web-1", "dsec.pids=100", "dsec.readonly=0", "dsec.dns=198.18.255.254"} <= set(words)
    assert all(word.startswith(("dsec.", "page_reporting.")) for word in words)


def test_the_monitor_has_room_beside_the_guest() -> None:
    limits = machines.host_limits(Limits(pids_max=5, cpu_weight=50), SETTINGS)
    assert limits.memory_max_bytes is not None
    assert limits.memory_max_bytes > SETTINGS.memory_bytes
    assert (limits.pids_max, limits.cpu_weight) == (None, 50)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="at least 128 MiB"):
        machines.check(spec(memory_max_bytes=64 << 20))
    with pytest.raises(FeatureMissing, match="memory_max_bytes of a microVM"):
        machines.check_change("web", Limits(), Limits(memory_max_bytes=1 << 30))
    with pytest.raises(FeatureMissing, match="io_weight"):
        machines.exec_limits(Limits(io_weight=5))


def test_limits_of_a_command_are_attributes_in_the_guest() -> None:
    assert machines.exec_limits(Limits(pids_max=7, cpu_max_permil=500)) == {"pids.max": "7", "cpu.max": "50000 100000"}


def test_what_only_containers_have_is_refused_by_name() -> None:
    with pytest.raises(FeatureMissing, match=r"spec.apparmor"):
        machines.check(spec().model_copy(update={"apparmor": AppArmor(deny_write=("/etc",))}))
