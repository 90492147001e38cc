# SPDX-License-Identifier: Apache-2.0
"""Pressure files: what is read out of them, and what is taken for absent."""

from pathlib import Path

import pytest

from dsecd.linux import psi

TEXT = (
    "some avg10=1.50 avg60=0.25 avg300=0.05 total=123456\n"
    "full avg10=0.75 avg60=0.10 avg300=0.01 total=7890\n"
)  # fmt: skip


def test_both_lines_are_read() -> None:
    found = psi.parse(TEXT)
    assert found.some == psi.Stall(1.5, 0.25, 0.05, 123456)
    assert found.full == psi.Stall(0.75, 0.1, 0.01, 7890)


def test_a_kernel_without_the_second_line_has_none_of_it() -> None:
    assert psi.parse(TEXT.splitlines()[0]).full == psi.Stall()


@pytest.mark.parametrize("text", ["", "full avg10=0.75 avg60=0.10 avg300=0.01 total=7\n", "some avg10=x\n", "enabled"])
def test_what_is_no_pressure_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="no pressure"):
        psi.parse(text)


def test_a_cgroup_without_figures_has_none(tmp_path: Path) -> None:
    assert psi.read("memory", tmp_path) is None
    assert psi.read("memory", tmp_path / "gone") is None
    (tmp_path / "memory.pressure").write_text(TEXT)
    assert psi.read("memory", tmp_path) == psi.parse(TEXT)
