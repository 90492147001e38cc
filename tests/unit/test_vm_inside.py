# SPDX-License-Identifier: Apache-2.0
"""Only what proves success of a run in the guest is taken for it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vm.channel import Result
from tests.vm.image import run_time_packages
from tests.vm.inside import InsideFailed, judge, support_of

_PASSED = "def test_good(): pass\n"


def _result(status: int = 0, reason: str = "exit") -> Result:
    return Result(("pytest",), status, reason, 1.0, b"the output", b"")


def _report(folder: Path, text: str, word: str = "word") -> bytes:
    """A report as pytest itself writes it."""
    (folder / "test_it.py").write_text(text)
    xml = folder / "junit.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={folder}",
         f"--junit-xml={xml}", "-o", f"junit_suite_name={word}", str(folder / "test_it.py")],
        check=False, capture_output=True, cwd=folder,
    )  # fmt: skip
    return xml.read_bytes()


def test_a_good_run_is_good(tmp_path: Path) -> None:
    assert judge(_result(), _report(tmp_path, _PASSED), "word", {}).passed == ("test_good",)


@pytest.mark.parametrize("result", [_result(1), _result(-9), _result(0, "timeout"), _result(127, "not-started")])
def test_a_good_report_with_a_bad_end_is_no_success(tmp_path: Path, result: Result) -> None:
    with pytest.raises(InsideFailed, match="the output"):
        judge(result, _report(tmp_path, _PASSED), "word", {})


@pytest.mark.parametrize("xml", [b"", b"<testsuites/>", b"<testsuites><testsuite tests='2' name='word'/></testsuites>"])
def test_no_report_is_no_success(xml: bytes) -> None:
    with pytest.raises(InsideFailed, match="no report"):
        judge(_result(), xml, "word", {})


def test_the_report_of_another_run_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(InsideFailed, match="not of this run"):
        judge(_result(), _report(tmp_path, _PASSED, word="other"), "word", {})


def test_what_a_test_in_the_guest_imports_goes_with_it(tmp_path: Path) -> None:
    checkout = Path(__file__).resolve().parents[2]
    for package in ("dsecd", "libdsec"):  # which are installed there
        (tmp_path / package).symlink_to(checkout / package)
    for inside in (checkout / "tests/vm/inside").glob("*.py"):
        modules = support_of(inside)
        there = tmp_path / inside.stem / "tests/support"
        there.mkdir(parents=True)
        for module in modules:
            shutil.copy(module, there)
        program = "; ".join(["pass", *(f"import tests.support.{module.stem}" for module in modules)])
        subprocess.run(
            [sys.executable, "-c", program], check=True, cwd=there.parents[1], env={"PYTHONPATH": str(tmp_path)}
        )
    assert [module.stem for module in support_of(checkout / "tests/vm/inside/check_trace.py")] == [
        "__init__", "own_python", "traced", "waiting"
    ]  # fmt: skip


def test_no_test_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(InsideFailed, match="no test passed"):
        judge(_result(), _report(tmp_path, "x = 1\n"), "word", {})


def test_a_failure_is_told_with_its_text(tmp_path: Path) -> None:
    text = _PASSED + "def test_bad():\n    assert 2 == 3, 'sums'\n"
    with pytest.raises(InsideFailed, match=r"test_bad[\s\S]*sums"):
        judge(_result(), _report(tmp_path, text), "word", {})


def test_an_error_of_a_fixture_is_a_failure(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.fixture\ndef f():\n    yield\n    raise OSError('late')\ndef test_a(f): pass\n"
    with pytest.raises(InsideFailed, match=r"late"):
        judge(_result(), _report(tmp_path, text), "word", {})


def test_only_an_expected_skip_for_the_expected_reason_is_one(tmp_path: Path) -> None:
    xml = _report(tmp_path, _PASSED + "import pytest\ndef test_not():\n    pytest.skip('no such kernel')\n")
    assert judge(_result(), xml, "word", {"test_not": "no such kernel"}).passed == ("test_good",)
    for allowed in ({}, {"test_not": "something else"}, {"test_other": "no such kernel"}):
        with pytest.raises(InsideFailed, match="unexpectedly: test_not: no such kernel"):
            judge(_result(), xml, "word", allowed)


def test_what_packages_depend_on_is_read_from_control() -> None:
    control = (
        "Source: s\nBuild-Depends: builder\n\nPackage: one\nPre-Depends: early\nDepends: a (>= 1) [amd64],\n b | c,\n"
        " two (= 1), ${misc:Depends}\nRecommends: rest\n\nPackage: two\nDepends: python3:any\n"
    )
    assert run_time_packages(control) == {"early", "a", "b", "python3"}
