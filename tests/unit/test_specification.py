# SPDX-License-Identifier: Apache-2.0
"""SPECIFICATION.md names tests that exist, numbers each promise once, and says "pending" where nothing proves one."""

import ast
import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_ROWS = [
    line for line in (_ROOT / "SPECIFICATION.md").read_text().splitlines() if re.match(r"\| [A-Z]\d+ \|", line)
]


def _tests(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_named_exists() -> None:
    named = [found for row in _ROWS for found in re.findall(r"(tests/[\w/]+\.py)::(\w+)", row)]
    assert len(named) > 50
    missing = [f"{file}::{name}" for file, name in named if name not in _tests(_ROOT / file)]
    assert missing == []


def test_numbers_are_unique() -> None:
    numbers = [row.split("|")[1].strip() for row in _ROWS]
    assert len(set(numbers)) == len(numbers)


def test_a_promise_has_a_proof_or_is_pending() -> None:
    bare = [row for row in _ROWS if not re.search(r"::test_|`make|`\.ci/run|Makefile|pending|make bench", row)]
    assert bare == []
