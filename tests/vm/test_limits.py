# SPDX-License-Identifier: Apache-2.0
"""Limits of sandboxes where the kernel has all controllers: the tests of ``inside/test_limits.py``, in the guest."""

from tests.vm.host import VmHost
from tests.vm.inside import run_pytest


def test_limits_hold(dsec_vm: VmHost) -> None:
    io = {
        "test_reading_and_writing_are_held_to_their_rates_or_refused_by_name": "CONFIG_BLK_DEV_THROTTLING is off",
    }
    run_pytest(dsec_vm, "test_limits.py", may_skip=io)
