# SPDX-License-Identifier: Apache-2.0
"""Whether KVM runs guests is found out by running one."""

import errno
import os
from pathlib import Path

import pytest

from dsecd.linux import kvm, mechanisms, syscalls

_DEVICE = Path("/dev/kvm")


def test_the_probe_agrees_with_what_kvm_is_built_on() -> None:
    """The modules say by another road whether there is a processor's virtualization behind the device."""
    modules = [name for name in ("kvm_intel", "kvm_amd", "kvm_pvm") if Path("/sys/module", name).exists()]
    if not _DEVICE.exists() or not modules:
        pytest.skip(f"no KVM to compare with: {_DEVICE} exists is {_DEVICE.exists()}, modules {modules}")
    answer = mechanisms.by_name("kvm").probe()
    if modules == ["kvm_pvm"]:
        assert answer.works is False
        assert answer.reason.startswith("KVM emulates guests: ")
    else:
        assert answer.works is True
        assert kvm.run_guest() < 50


@pytest.mark.usefixtures("own_mounts")
def test_a_device_that_is_no_kvm_is_told(tmp_path: Path) -> None:
    if not _DEVICE.exists():
        _DEVICE.touch()
    syscalls.mount("/dev/null", _DEVICE, None, syscalls.MS_BIND)
    with pytest.raises(OSError) as caught:
        kvm.run_guest()
    assert caught.value.errno == errno.ENOTTY
    answer = mechanisms.by_name("kvm").probe()
    assert (answer.works, answer.reason) == (False, f"/dev/kvm: {os.strerror(errno.ENOTTY)}")


def test_nothing_stays_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    mechanisms.by_name("kvm").probe()
    assert set(os.listdir("/proc/self/fd")) <= before
