# SPDX-License-Identifier: Apache-2.0
"""Limits of sandboxes where the kernel has all controllers: the tests of ``inside/test_limits.py``, in the guest."""

from tests.vm.host import VmHost
from tests.vm.inside import run_pytest


def test_limits_hold(dsec_vm: VmHost) -> None:
    pending = {"test_an_end_by_memory_says_so": "does not say yet"}
    run_pytest(dsec_vm, "test_limits.py", may_skip=pending)
