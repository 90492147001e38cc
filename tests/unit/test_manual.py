# SPDX-License-Identifier: Apache-2.0
"""The manual pages: current, complete, and free of roff mistakes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsecctl.commands import GROUPS
from dsecd.config import Config

ROOT = Path(__file__).resolve().parents[2]
MAN = ROOT / "docs" / "man"
#: Commands of commands.
_GROUPS = ("image", "snapshot")


def rendered(name: str) -> str:
    """A page as a reader sees it. Raises when groff complains."""
    command = ["groff", "-man", "-Tascii", "-P-cbou", "-ww", "-rLL=100n", str(MAN / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_pages_made_from_code_are_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/manpages.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", sorted(path.name for path in MAN.iterdir()))
def test_pages_render_without_a_warning(name: str) -> None:
    text = rendered(name)
    for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "SEE ALSO"):
        assert re.search(rf"^{section}$", text, re.MULTILINE), section


def test_every_command_has_its_section_and_example() -> None:
    text = rendered("dsecctl.1")
    for name in (name for group in GROUPS.values() for name in group if name not in _GROUPS):
        assert re.search(rf"^ +{name}$", text, re.MULTILINE), name
        assert f"dsecctl {name}" in text
    assert text.count("Example:") == len([name for group in GROUPS.values() for name in group]) - 2 + 7 + 4


def test_every_setting_is_explained() -> None:
    text = rendered("dsecd.toml.5")
    for name in Config.model_fields:
        sections = {
            "limits": "max_request_bytes", "admission": "mode", "network": "ipv4_pool", "microvm": "monitor",
            "memory": "reclaim",
        }  # fmt: skip
        name = f"{name}.{sections[name]}" if name in sections else name  # noqa: PLW2901
        found = re.search(rf"^ +{re.escape(name)}(?: +|\n +)(\S.*)$", text, re.MULTILINE)
        assert found, name
        assert len(found.group(1)) > 5


def test_every_option_of_the_daemon_is_in_its_page() -> None:
    usage = subprocess.run(
        [sys.executable, "-m", "dsecd", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    text = rendered("dsecd.8")
    for option in set(re.findall(r"--[a-z][a-z-]+", usage)) - {"--help"}:
        assert option in text, option
