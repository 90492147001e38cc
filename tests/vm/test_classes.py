# SPDX-License-Identifier: Apache-2.0
"""Classes latency and batch where the kernel has core scheduling, and admission by pressure: in the guest."""

from tests.vm import guests
from tests.vm.host import VmHost
from tests.vm.inside import run_pytest


def test_classes_keep_apart(dsec_sched_core_vm: VmHost) -> None:
    run_pytest(dsec_sched_core_vm, "test_classes.py")


def test_pressure_is_felt(dsec_sched_core_vm: VmHost) -> None:
    run_pytest(dsec_sched_core_vm, "test_pressure.py")


def test_memory_is_reclaimed_on_this_kernel_too(dsec_sched_core_vm: VmHost) -> None:
    only = "test_by_damon_the_memory_of_an_idle_sandbox_goes_and_comes_back_whole"
    run_pytest(dsec_sched_core_vm, "test_memory.py", only=only)


def test_classes_of_microvms_keep_apart_too(dsec_sched_core_vm: VmHost) -> None:
    guests.prepare(dsec_sched_core_vm)
    # The kernel beside the checkout has no KVM, one of kernel/build has.
    may_skip = {"test_a_later_daemon_finds_the_cookie_in_the_machine": "no KVM"}
    run_pytest(dsec_sched_core_vm, "test_machine_classes.py", may_skip=may_skip)
