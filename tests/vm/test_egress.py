# SPDX-License-Identifier: Apache-2.0
"""A network that the installed package enforces: ``inside/test_egress.py``, in the guest, on Debian's kernel."""

from tests.vm.host import VmHost
from tests.vm.inside import run_pytest


def test_an_installed_package_lets_nothing_escape_through_kills_restarts_and_an_upgrade(dsec_vm: VmHost) -> None:
    report = run_pytest(dsec_vm, "test_egress.py", support=("escape", "peers", "reach"))
    assert len(report.passed) == 7
