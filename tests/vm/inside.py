# SPDX-License-Identifier: Apache-2.0
"""Running pytest inside the test host, and believing it only when it is sure to have succeeded.

Here: taking tests in, their report out, and judging it. Not here: the tests (``inside/``).

A run has succeeded when pytest ended by itself with status 0, and wrote a report that bears the name made up for
this very run, in which tests passed, none failed and none was skipped that was not expected to be.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from tests.vm.channel import Result
from tests.vm.host import VmHost
from tests.vm.image import CHECKOUT

_HERE = Path(__file__).with_name("inside")
_SUPPORT = Path(__file__).resolve().parents[1] / "support"
_OPTIONS = (
    "-p", "no:cacheprovider", "-o", "junit_family=xunit2", "-o", "filterwarnings=error", "--strict-markers", "-ra",
    "--tb=short",
)  # fmt: skip

#: Files of tests/host that need nothing but a kernel, root and the programs that the package depends on.
MECHANISMS = (
    "test_cgroup.py", "test_erofs.py", "test_mechanisms.py", "test_mount.py", "test_mountns.py", "test_overlay.py",
    "test_peercred.py", "test_pidfd.py", "test_proc.py", "test_userns.py",
)  # fmt: skip
#: Tests among them that say how long something may take, which an emulated processor on a busy machine exceeds.
_TIMED = (
    "test_cgroup.py::test_remove_of_a_busy_group_is_bounded_and_names_a_pid",
    "test_proc.py::test_timeout_kills_the_whole_group",
)


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
    vm: VmHost, file: str, *, only: str = "", support: Sequence[str] = (),
    may_skip: Mapping[str, str] | None = None, timeout_s: float = 2400.0,
) -> Report:  # fmt: skip
    """Run one file of ``inside/`` in the guest, or one test of it, against the installed SDK and daemon.

    What it imports of tests/support goes with it; ``support``: other modules of there, which it starts as programs.
    ``may_skip``: tests that may be skipped, with a part of the reason that they then give.  Raises InsideFailed.
    """
    path = vm.put(_HERE / file, "/root/inside")
    for module in support_of(_HERE / file, *(_SUPPORT / f"{name}.py" for name in support)):
        vm.put(module, "/root/inside/tests/support")
    return _run(vm, [*_OPTIONS, f"{path}::{only}" if only else path], {}, may_skip or {}, timeout_s)


def support_of(*programs: Path) -> list[Path]:
    """The modules of tests/support that these import, directly or not, those of them that lie there, and its marker."""
    found: set[Path] = {path for path in programs if path.parent == _SUPPORT}
    looking = list(programs)
    while looking:
        for node in ast.walk(ast.parse(looking.pop().read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tests.support"):
                continue
            _tests, _support, *module = (node.module or "").split(".")
            new = {_SUPPORT / f"{name}.py" for name in (module or [alias.name for alias in node.names])} - found
            found |= new
            looking += new
    return sorted({*found, _SUPPORT / "__init__.py"}) if found else []


def run_host_tests(
    vm: VmHost, names: Sequence[str], *, may_skip: Mapping[str, str] | None = None, timeout_s: float = 2400.0
) -> Report:
    """Run files of ``tests/host`` in the guest, on its kernel and against this checkout.  Raises InsideFailed."""
    folder = "/srv/checkout"  # for users other than root, too
    for part in ("dsecd", "libdsec", "setup.cfg"):
        vm.put(CHECKOUT / part, folder)
    for part in ("host", "support", "__init__.py"):
        vm.put(CHECKOUT / "tests" / part, f"{folder}/tests")
    # Where the tests put what has to be on a disk.
    vm.run(["mkdir", "-p", "/var/lib/dsec"])
    paths = [f"{folder}/tests/host/{name}" for name in names]
    options = ["-c", f"{folder}/setup.cfg", f"--rootdir={folder}", "-o", "timeout=600"]
    options += [f"--deselect=tests/host/{test}" for test in _TIMED]
    return _run(vm, [*options, *paths], {"PYTHONPATH": folder}, may_skip or {}, timeout_s)


def _run(
    vm: VmHost, arguments: Sequence[str], env: Mapping[str, str], may_skip: Mapping[str, str], timeout_s: float
) -> Report:
    word = f"run-{os.urandom(8).hex()}"
    xml = f"/root/{word}.xml"
    command = ["python3", "-m", "pytest", f"--junit-xml={xml}", "-o", f"junit_suite_name={word}", *arguments]
    result = vm.run(command, check=False, timeout_s=timeout_s, env=env)
    report = vm.run(["cat", xml], check=False).stdout
    return judge(result, report, word, may_skip)


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
        # With failures to tell, the rest of the output only repeats them.
        output = result if not report.failed else replace(result, stdout=result.stdout[-1500:])
        raise InsideFailed("\n".join([*problems, str(output)]))
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
