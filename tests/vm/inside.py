# SPDX-License-Identifier: Apache-2.0
"""Running pytest inside the test host, and believing it only when it is sure to have succeeded.

Here: taking tests in, their report out, and judging it. Not here: the tests (``inside/``).

A run has succeeded when pytest ended by itself with status 0, and wrote a report that bears the name made up for
this very run, in which tests passed, none failed and none was skipped that was not expected to be.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.vm.channel import CommandFailed, Result
from tests.vm.host import VmHost

_HERE = Path(__file__).with_name("inside")
_OPTIONS = (
    "-p", "no:cacheprovider", "-o", "junit_family=xunit2", "-o", "filterwarnings=error", "--strict-markers", "-ra",
)  # fmt: skip


class InsideFailed(AssertionError):
    """Tests in the guest failed, or it is not certain that they passed; the text holds theirs."""


@dataclass(frozen=True)
class Report:
    """What pytest in the guest reported: names of tests, for the failed and skipped ones with their text."""

    name: str
    passed: tuple[str, ...]
    failed: Mapping[str, str]
    skipped: Mapping[str, str]


def run_pytest(
    vm: VmHost, file: str, *, may_skip: Mapping[str, str] | None = None, timeout_s: float = 900.0
) -> Report:
    """Run one file of ``inside/`` in the guest.

    ``may_skip``: tests that may be skipped, with a part of the reason that they then give.  Raises InsideFailed.
    """
    word = f"run-{os.urandom(8).hex()}"
    folder = f"/root/{word}"
    path = vm.put(_HERE / file, folder)
    command = ["python3", "-m", "pytest", *_OPTIONS, f"--rootdir={folder}", f"--junit-xml={folder}/junit.xml",
               "-o", f"junit_suite_name={word}", path]  # fmt: skip
    result = vm.run(command, check=False, timeout_s=timeout_s)
    try:
        xml = vm.read(f"{folder}/junit.xml")
    except CommandFailed:
        xml = b""
    return judge(result, xml, word, may_skip or {})


def judge(result: Result, xml: bytes, word: str, may_skip: Mapping[str, str]) -> Report:
    """The report, if it proves success.  Raises InsideFailed."""
    try:
        report = parse(xml)
    except (ElementTree.ParseError, ValueError) as error:
        raise InsideFailed(f"pytest in the guest left no report ({error})\n{result}") from error
    problems = [f"FAILED in the guest: {name}\n{text}" for name, text in report.failed.items()]
    if report.name != word:
        problems.append(f"the report is of {report.name!r}, not of this run")
    for name, reason in report.skipped.items():
        if name not in may_skip or may_skip[name] not in reason:
            problems.append(f"SKIPPED in the guest, unexpectedly: {name}: {reason}")
    if not report.passed:
        problems.append("no test passed")
    if not result.ok or problems:
        raise InsideFailed("\n".join([*problems, str(result)]))
    return report


def parse(xml: bytes) -> Report:
    """Read a JUnit report.  Raises ParseError and ValueError when it is none."""
    suite = ElementTree.fromstring(xml).find("testsuite")
    if suite is None:
        raise ValueError("no testsuite in it")
    passed: list[str] = []
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for case in suite.iter("testcase"):
        name = case.get("name", "")
        troubles = [child for child in case if child.tag in ("failure", "error")]
        skip = case.find("skipped")
        if troubles:
            failed[name] = "\n".join(child.text or child.get("message") or child.tag for child in troubles)
        elif skip is not None:
            skipped[name] = skip.get("message", "")
        else:
            passed.append(name)
    # A test that passes and then fails to clean up counts twice, so with failures the count says nothing.
    if not failed and int(suite.get("tests", "-1")) != len(passed) + len(skipped):
        raise ValueError("it counts more or fewer tests than it has")
    return Report(suite.get("name", ""), tuple(passed), failed, skipped)
