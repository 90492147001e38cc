# SPDX-License-Identifier: Apache-2.0
"""The test host with a kernel that has core scheduling."""

from tests.vm.host import VmHost
from tests.vm.inside import MECHANISMS, run_host_tests

#: Prints the core-scheduling cookie of its own process; fails with the error number where the kernel has none.
_GET_COOKIE = """
import ctypes
libc, cookie = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(1)
assert libc.prctl(62, 0, 0, 0, ctypes.byref(cookie)) == 0, ctypes.get_errno()
print(cookie.value)
"""


def test_it_boots_with_all_its_services_and_core_scheduling(sched_core_vm: VmHost) -> None:
    assert sched_core_vm.run(["systemctl", "is-system-running"]).text == "running\n"
    # PR_SCHED_CORE_GET of this process, see prctl(2): no cookie.
    assert sched_core_vm.run(["python3", "-c", _GET_COOKIE]).text == "0\n"


def test_mechanisms_work_on_it(sched_core_vm: VmHost) -> None:
    report = run_host_tests(sched_core_vm, MECHANISMS)
    assert len(report.passed) > 100
