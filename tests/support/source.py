# SPDX-License-Identifier: Apache-2.0
"""Reads this repository's own source for the tests that hold its shape.

Here: finding files and their imports, as data. Not here: any rule about them.
"""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Folders whose Python is ours, and those that hold none.
CODE = ("libdsec", "dsecctl", "dsecd")
TOOLS = ("tests", "demo", "tools")
ASSETS = ("agent", "kernel", "ebpf", "apparmor", "systemd", "packaging")


@dataclass(frozen=True)
class Module:
    """One Python file: its dotted name, its path below the root, its text and tree."""

    name: str
    path: str
    text: str
    tree: ast.Module

    def imports(self) -> Iterator[tuple[str, int]]:
        """Dotted names of everything imported anywhere in it, with the line; relative ones made absolute."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    package = self.name.split(".")
                    if not self.path.endswith("__init__.py"):
                        package = package[:-1]
                    package = package[: len(package) - node.level + 1]
                    base = ".".join([*package, base]).rstrip(".")
                for alias in node.names:
                    yield f"{base}.{alias.name}", node.lineno


def module_from(text: str, path: str) -> Module:
    """A module of `text` as if it lay at `path`, for planting violations."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return Module(name, path, text, ast.parse(text, path))


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """All Python files below the folders, in order of path."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(module_from(path.read_text(), str(path.relative_to(ROOT))) for path in paths)


@cache
def tracked_files() -> tuple[str, ...]:
    """Paths that git tracks or would add, so that what is about to be committed is looked at too."""
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others",
               "--exclude-standard"]  # fmt: skip
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return tuple(sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file()))


@cache
def setup_cfg() -> configparser.ConfigParser:
    """setup.cfg, parsed."""
    parser = configparser.ConfigParser()
    parser.read_string((ROOT / "setup.cfg").read_text())
    return parser


def declared_packages() -> set[str]:
    """The packages that setup.cfg lists."""
    return set(setup_cfg()["options"]["packages"].split())


def control_packages(text: str) -> set[str]:
    """Every package that a debian/control depends on, recommends or builds with; alternatives included."""
    fields = re.findall(
        r"^(?:Build-Depends|Build-Depends-Indep|Depends|Recommends|Suggests):(.*(?:\n[ \t].*)*)", text, re.MULTILINE
    )
    relations = (relation for field in fields for relation in re.split(r"[,|]", field))
    names = (re.match(r"\s*([a-z0-9][a-z0-9.+-]+)", relation) for relation in relations)
    return {match[1] for match in names if match}
