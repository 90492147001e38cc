# SPDX-License-Identifier: Apache-2.0
"""Limits of sandboxes where the kernel has all controllers: the tests of ``inside/test_limits.py``, in the guest."""

from tests.vm.host import VmHost
from tests.vm.image import CHECKOUT
from tests.vm.inside import run_pytest


def test_limits_hold(dsec_vm: VmHost) -> None:
    dsec_vm.put(CHECKOUT / "tests/support/slowdeath.py", "/root/inside")
    run_pytest(dsec_vm, "test_limits.py")
