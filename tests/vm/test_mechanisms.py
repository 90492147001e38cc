# SPDX-License-Identifier: Apache-2.0
"""The mechanisms on the kernel that operators have: tests of ``tests/host``, in the guest."""

from tests.vm.host import VmHost
from tests.vm.inside import MECHANISMS, run_host_tests


def test_mechanisms_work_on_debian_s_kernel(vm: VmHost) -> None:
    report = run_host_tests(vm, MECHANISMS)
    assert len(report.passed) > 100
