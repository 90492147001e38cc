# SPDX-License-Identifier: Apache-2.0
"""A skip that nobody expects fails the run; one of the list does not."""

from pathlib import Path

import pytest

from tests.support import skips
from tests.support.source import ROOT

pytest_plugins = ["pytester"]
_CONFTEST = (ROOT / "tests/conftest.py").read_text()


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of tests with our conftest.py, and a list that knows one skip."""
    monkeypatch.syspath_prepend(ROOT)
    known = skips.Skip("test_it.py::test_known*", "no such *", "it is known")
    monkeypatch.setattr(skips, "EXPECTED", (known,))
    pytester.makeconftest(_CONFTEST)
    return pytester


def run(project: pytest.Pytester, source: str) -> pytest.RunResult:
    project.makepyfile(test_it="import pytest\n" + source)
    return project.runpytest_inprocess("-p", "no:cacheprovider")


def test_an_expected_skip_is_skipped(project: pytest.Pytester) -> None:
    result = run(project, "@pytest.mark.parametrize('n', [1])\ndef test_known(n): pytest.skip('no such kernel')\n")
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize("source", [
    "def test_known(): pytest.skip('another reason')\n",
    "def test_other(): pytest.skip('no such kernel')\n",
    "@pytest.mark.skipif(True, reason='no such kernel')\ndef test_other(): pass\n",
    "@pytest.mark.skip\ndef test_other(): pass\n",
    "@pytest.fixture\ndef f(): pytest.skip('no such kernel')\ndef test_other(f): pass\n",
])  # fmt: skip
def test_an_unexpected_skip_is_a_failure_that_tells_the_reason(project: pytest.Pytester, source: str) -> None:
    result = run(project, source)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.re_match_lines([r"skipped: (another reason|no such kernel|unconditional skip)", "No skip that .*"])


def test_a_module_may_not_vanish_either(project: pytest.Pytester) -> None:
    result = run(project, "pytest.importorskip('no_such_module')\ndef test_it(): pass\n")
    assert result.ret != pytest.ExitCode.OK
    result.stdout.re_match_lines(["skipped: could not import 'no_such_module'.*"])


def test_expected_failures_stay_what_they_are(project: pytest.Pytester) -> None:
    result = run(project, "@pytest.mark.xfail\ndef test_other(): assert False\n")
    result.assert_outcomes(xfailed=1)
    assert result.ret == pytest.ExitCode.OK


def test_the_list_names_files_that_exist() -> None:
    for skip in skips.EXPECTED:
        assert list(Path(ROOT).glob(skip.test.partition("::")[0])), skip
