# SPDX-License-Identifier: Apache-2.0
"""MicroVMs from the installed package, on a host whose AppArmor confines their monitors: in the guest.

The machines in the machine run by KVM, which the emulated processor offers, or are emulated a second time.
"""

from tests.vm import guests
from tests.vm.host import VmHost
from tests.vm.inside import run_pytest


def test_microvms_of_the_installed_package(dsec_vm: VmHost) -> None:
    guests.prepare(dsec_vm)
    run_pytest(dsec_vm, "test_microvm.py")


def test_firecrackers_profiles_let_it_do_what_it_does(dsec_vm: VmHost) -> None:
    # After the other, which has made it a host for microVMs.
    run_pytest(dsec_vm, "test_firecracker.py", support=("fake_firecracker", "fake_jailer"))
