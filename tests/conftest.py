# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests: the signals that their programs meet, and that no test goes missing by a skip."""

import signal
from collections.abc import Generator

import pytest

from tests.support import skips

# Whoever runs the tests in the background, or under a tool that ignores it, hands an ignored SIGINT down to every
# program that a test starts and then interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # One that is expected to fail is reported as skipped, too.
    if not hasattr(report, "wasxfail"):
        _fail_unexpected_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_unexpected_skip(report)
    return report


def _fail_unexpected_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.outcome != "skipped":
        return
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not skips.is_expected(report.nodeid, reason):
        report.outcome = "failed"
        report.longrepr = f"skipped: {reason}\nNo skip that tests/support/skips.py expects, so it counts as a failure."
