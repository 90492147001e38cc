# SPDX-License-Identifier: Apache-2.0
"""Memory reclaim where DAMON, zram and the memory controller are: mechanism and installed daemon, in the guest."""

from tests.vm.host import VmHost
from tests.vm.inside import run_host_tests, run_pytest


def test_damon_pages_out_what_is_cold(dsec_vm: VmHost) -> None:
    # The daemon itself takes DAMON as soon as there is swap.
    dsec_vm.run(["systemctl", "stop", "dsecd.socket", "dsecd.service"])
    report = run_host_tests(dsec_vm, ["test_damon.py"])
    dsec_vm.run(["systemctl", "start", "dsecd.socket"])
    assert len(report.passed) > 4


def test_memory_of_idle_sandboxes_is_reclaimed(dsec_vm: VmHost) -> None:
    run_pytest(dsec_vm, "test_memory.py")
