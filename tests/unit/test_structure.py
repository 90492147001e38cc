# SPDX-License-Identifier: Apache-2.0
"""The shape of the code: who imports whom, who may start processes, how long things get.

Every rule is a function from modules to complaints, run over the repository and over one planted violation.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.source import (
    ASSETS,
    CODE,
    ROOT,
    TOOLS,
    Module,
    control_packages,
    declared_packages,
    module_from,
    modules,
    tracked_files,
)

# ------------------------------------------------------------------------------------------- import direction

#: What a layer may import of ours besides itself. `libdsec.*` means the types and errors only.
MAY_IMPORT = {
    "libdsec": (),
    "dsecctl": ("libdsec",),
    "dsecd.linux": (),
    "dsecd.vmm": ("dsecd.linux",),
    "dsecd.dns": ("dsecd.linux", "libdsec.*"),
    "dsecd.backends": ("dsecd.dns", "dsecd.vmm", "dsecd.linux", "libdsec.*"),
    "dsecd.core": ("dsecd.backends", "dsecd.linux", "libdsec.*"),
    "dsecd.api": ("dsecd.core", "libdsec.*"),
    # The start-up modules beside the layers put them together.
    "dsecd": ("dsecd.api", "dsecd.core", "dsecd.backends", "dsecd.dns", "dsecd.vmm", "dsecd.linux", "libdsec.*"),
}
#: The part of libdsec that the daemon may use: never its clients.
CONTRACT = (
    "libdsec.types", "libdsec.errors", "libdsec.routes", "libdsec.network", "libdsec.ports", "libdsec.memory",
    "libdsec.snapshots", "libdsec.filetypes",
)  # fmt: skip


def layer_of(name: str) -> str | None:
    """The layer that a dotted name lies in, the longest that fits."""
    fits = [layer for layer in MAY_IMPORT if name == layer or name.startswith(layer + ".")]
    return max(fits, key=len) if fits else None


def below(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")


def wrong_imports(found: Iterable[Module]) -> Iterator[str]:
    for module in found:
        home = layer_of(module.name)
        assert home is not None, f"{module.path} lies in no known layer"
        for name, line in module.imports():
            target = layer_of(name)
            # The version is a fact about the whole daemon, kept at its top.
            if target is None or target == home or (name == "dsecd.__version__" and home.startswith("dsecd")):
                continue
            # `from libdsec import errors` and `from libdsec.errors import NotFound` alike.
            contract = any(below(name, part) for part in CONTRACT)
            if target in MAY_IMPORT[home] or ("libdsec.*" in MAY_IMPORT[home] and contract):
                continue
            yield f"{module.path}:{line}: {home} imports {name}"


def test_imports_point_in_one_direction() -> None:
    assert list(wrong_imports(modules(*CODE))) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("dsecd/linux/planted.py", "from dsecd.core import store\n"),
        ("dsecd/linux/planted.py", "from ..core import store\n"),
        ("dsecd/linux/planted.py", "def late() -> None:\n    import libdsec.errors\n"),
        ("dsecd/core/planted.py", "from dsecd import api\n"),
        ("dsecd/core/planted.py", "from libdsec.client import Client\n"),
        ("dsecd/core/planted.py", "from libdsec import Client\n"),
        ("dsecd/backends/planted.py", "import dsecd.core.store\n"),
        ("dsecd/api/planted.py", "from dsecd.linux import mount\n"),
        ("dsecctl/planted.py", "from dsecd.core import store\n"),
        ("libdsec/planted.py", "import dsecctl\n"),
    ],
)
def test_an_import_against_the_direction_is_found(path: str, text: str) -> None:
    assert len(list(wrong_imports([module_from(text, path)]))) == 1


def test_an_import_along_the_direction_is_not_found() -> None:
    text = "from dsecd.linux import mount\nfrom libdsec import errors\nfrom libdsec.types import State\n"
    assert list(wrong_imports([module_from(text, "dsecd/core/planted.py")])) == []


# -------------------------------------------------------------------------------------------- asset folders


def python_in_assets(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.split("/")[0] in ASSETS and name.endswith((".py", ".pyi", ".pyc"))]


def test_asset_folders_hold_no_python() -> None:
    assert python_in_assets(tracked_files()) == []
    assert python_in_assets(["systemd/__init__.py", "dsecd/__init__.py"]) == ["systemd/__init__.py"]


def test_asset_folders_exist_and_say_what_they_are_for() -> None:
    assert [name for name in ASSETS if not (ROOT / name / "README.md").is_file()] == []


# ------------------------------------------------------------------------------------ one door for processes

DOOR = "dsecd/linux/proc.py"
#: Calls that start a program or copy this process, wherever their module was imported from.
STARTERS = re.compile(
    r"^(?:os\.(?:system|popen|posix_spawnp?|fork|forkpty|exec[lv]p?e?|spawn[lv]p?e?)"
    r"|(?:asyncio\.)?create_subprocess_(?:exec|shell)|(?:\w+\.)?subprocess_(?:exec|shell)|pty\.(?:fork|spawn))$"
)
MODULES = ("subprocess", "asyncio.subprocess", "multiprocessing", "pty", "concurrent.futures.ProcessPoolExecutor")


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression that is such a chain, else an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join([node.id, *parts]) if isinstance(node, ast.Name) else ""


def other_doors(found: Iterable[Module]) -> Iterator[str]:
    for module in found:
        if module.path == DOOR:
            continue
        for name, line in module.imports():
            # `from os import fork` gives os.fork here.
            if any(below(name, banned) for banned in MODULES) or STARTERS.match(name):
                yield f"{module.path}:{line}: imports {name}"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and STARTERS.match(dotted(node.func)):
                yield f"{module.path}:{node.lineno}: calls {dotted(node.func)}"


def test_only_one_module_starts_processes() -> None:
    assert (ROOT / DOOR).is_file()
    # dsecctl may replace itself by a program of the user's, such as a pager: it runs as the user.
    assert list(other_doors(modules("libdsec", "dsecd"))) == []


@pytest.mark.parametrize(
    "text",
    [
        "import subprocess\n",
        "from subprocess import run\n",
        "def f():\n    import subprocess as s\n",
        "import os\nos.posix_spawn('a', [], {})\n",
        "import os\nos.fork()\n",
        "import os\nos.execve('a', [], {})\n",
        "import os\nos.system('a')\n",
        "from os import execvp\n",
        "import asyncio\nasyncio.create_subprocess_exec('a')\n",
        "from multiprocessing import Process\n",
    ],
)
def test_another_way_to_start_a_process_is_found(text: str) -> None:
    assert len(list(other_doors([module_from(text, "dsecd/core/planted.py")]))) == 1
    assert list(other_doors([module_from(text, DOOR)])) == []


# ------------------------------------------------------------------------------------------- plain prohibitions


def prohibited(found: Iterable[Module]) -> Iterator[str]:
    for module in found:
        for node in ast.walk(module.tree):
            where = f"{module.path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                yield f"{where}: bare except"
            elif isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) != "False":
                yield f"{where}: shell="


def test_no_bare_except_and_no_shell() -> None:
    assert list(prohibited(modules(*CODE, *TOOLS))) == []


@pytest.mark.parametrize("text", ["try:\n    x\nexcept:\n    raise\n", "run('a', shell=True)\n", "run('a', shell=s)\n"])
def test_a_bare_except_or_a_shell_is_found(text: str) -> None:
    assert len(list(prohibited([module_from(text, "tests/planted.py")]))) == 1


#: The one place where tasks may be made that nobody awaits at once; it keeps them and sees their failures.
TASK_MAKERS = ("dsecd/daemon.py", "dsecd/core/tasks.py")


def loose_tasks(found: Iterable[Module]) -> Iterator[str]:
    for module in found:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and re.search(r"(^|\.)(create_task|ensure_future)$", dotted(node.func)):
                owner = dotted(node.func).rpartition(".")[0]
                # A TaskGroup awaits what it makes.
                if module.path not in TASK_MAKERS and not re.search(r"(^|[._])(group|tg)$", owner):
                    yield f"{module.path}:{node.lineno}: {dotted(node.func)}"


def test_no_task_is_left_to_itself() -> None:
    assert list(loose_tasks(modules("dsecd"))) == []


def test_a_loose_task_is_found() -> None:
    text = "import asyncio\nasyncio.create_task(x())\ngroup.create_task(x())\n"
    assert len(list(loose_tasks([module_from(text, "dsecd/core/planted.py")]))) == 1


# -------------------------------------------------------------------------------------------------- proportions


def functions(module: Module) -> Iterator[tuple[str, int]]:
    """Each function with its length in lines, its docstring not counted."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.end_lineno:
                length -= first.end_lineno - first.lineno + 1
            yield f"{module.path}:{node.lineno}: {node.name}", length


def too_big(found: Iterable[Module]) -> Iterator[str]:
    for module in found:
        lines = module.text.count("\n")
        if lines > 700:
            yield f"{module.path}: {lines} lines, at most 700"
        for name, length in functions(module):
            if length > 80:
                yield f"{name} has {length} lines, at most 80"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
                if length > 300 or methods > 20:
                    yield f"{module.path}:{node.lineno}: {node.name} has {length} lines and {methods} methods"


#: A client's methods are the routes, one each: their number is the contract's, not a design's.
WIDE = ("libdsec/",)


def test_nothing_is_too_big() -> None:
    complaints = [text for text in too_big(modules(*CODE, *TOOLS)) if not (text.startswith(WIDE) and "methods" in text)]
    assert complaints == []


def test_nine_functions_in_ten_are_short() -> None:
    lengths = sorted(length for module in modules(*CODE) for _, length in functions(module))
    assert lengths[math.ceil(len(lengths) * 0.9) - 1] <= 30


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 701,
        "def f():\n" + "    x = 1\n" * 80,
        "class A:\n" + "    x = 1\n" * 300,
        "class A:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(21)),
    ],
)
def test_something_too_big_is_found(text: str) -> None:
    assert len(list(too_big([module_from(text, "dsecd/planted.py")]))) == 1


def undocumented(found: Iterable[Module]) -> list[str]:
    return [module.path for module in found if not ast.get_docstring(module.tree)]


def test_every_module_says_what_it_is() -> None:
    assert undocumented(modules(*CODE, *TOOLS)) == []
    assert undocumented([module_from("x = 1\n", "dsecd/planted.py")]) == ["dsecd/planted.py"]


# ----------------------------------------------------------------------------------------- packages and depends


def test_setup_cfg_lists_exactly_the_packages_that_exist() -> None:
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".") for name in CODE for path in (ROOT / name).rglob("*.py")
    }
    assert declared_packages() == found
    assert [name for name in found if not (ROOT / name.replace(".", "/") / "__init__.py").is_file()] == []


#: What Debian calls a module where it is not python3- and the module's name.
DEBIAN_NAME = {"bcc": "python3-bpfcc", "dns": "python3-dnspython", "LibAppArmor": "python3-libapparmor"}


def undeclared(found: Iterable[Module], control: set[str], ours: Iterable[str]) -> Iterator[str]:
    for module in found:
        for name, line in module.imports():
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in ours:
                continue
            package = DEBIAN_NAME.get(top, f"python3-{top.replace('_', '-').lower()}")
            if package not in control:
                yield f"{module.path}:{line}: imports {top}, but packaging names no {package}"


def test_every_import_from_elsewhere_is_named_in_the_packaging() -> None:
    control = control_packages((ROOT / "packaging/debian/control").read_text())
    assert {"crun", "python3-aiohttp", "python3-bpfcc"} <= control
    assert list(undeclared(modules(*CODE), control, CODE)) == []
    development = {*control, *(ROOT / "packaging/dev-packages").read_text().split()}
    # What runs inside a tool from the Python index may import it.
    pins = re.findall(r"^([a-z0-9-]+)==", (ROOT / "packaging/dev-tools.txt").read_text(), re.MULTILINE)
    development |= {f"python3-{name}" for name in pins}
    assert list(undeclared(modules(*TOOLS), development, (*CODE, *TOOLS))) == []


def test_an_import_that_no_package_brings_is_found() -> None:
    planted = module_from("import requests\nimport os\nimport bcc\n", "dsecd/planted.py")
    assert len(list(undeclared([planted], {"python3-bpfcc"}, CODE))) == 1


# ------------------------------------------------------------------------------------------------ text of files

LICENSED = re.compile(
    r"\.(py|c|h|sh|sql)$|^(dev|Makefile|setup\.cfg|pyproject\.toml|\.ci/run|bin/\w+|demo/run"
    r"|kernel/(build|check|fragments/.*)|packaging/build-deb)$"
)


def unlicensed(name: str, text: str) -> bool:
    """True for a source file whose first line (second after #!) does not name the licence."""
    if not LICENSED.search(name):
        return False
    lines = [*text.splitlines(), "", ""]
    return "SPDX-License-Identifier: Apache-2.0" not in lines[1 if lines[0].startswith("#!") else 0]


def test_sources_name_their_licence_first() -> None:
    texts = ((name, (ROOT / name).read_text(errors="replace")) for name in tracked_files() if LICENSED.search(name))
    assert [name for name, text in texts if unlicensed(name, text)] == []
    assert unlicensed("a.py", '"""No."""\n')
    assert unlicensed("agent/a.c", "int main;\n/* SPDX-License-Identifier: Apache-2.0 */\n")
    assert not unlicensed("bin/a", "#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\n")


#: Folders that every machine has, so that a path below them may be meant.
STANDARD = {"/", "/root", "/home", "/srv", "/opt", "/tmp", "/var/tmp", "/mnt", "/usr/src", "/usr/local/src"}


def private_paths(text: str, checkout: Path) -> list[str]:
    """Lines with a path that means nothing elsewhere: the checkout's or its neighbours', or a person's home."""
    near = {str(checkout), str(checkout.parent)} - STANDARD
    patterns = [re.escape(path) + "/" for path in near] + ["/home/(?!user/|app/)[a-z]+/", "/Users/[a-z]+/"]
    pattern = re.compile(r"(?<![\w.$})\]*-])(?:" + "|".join(patterns) + ")")
    return [line for line in text.splitlines() if pattern.search(line)]


def test_no_file_names_a_path_of_one_machine() -> None:
    found = {}
    for name in tracked_files():
        data = (ROOT / name).read_bytes()
        if b"\0" not in data and (lines := private_paths(data.decode(errors="replace"), ROOT)):
            found[name] = lines
    assert found == {}


def test_a_path_of_one_machine_is_found() -> None:
    checkout = Path("/data/dsec")
    assert private_paths("see /data/notes/x", checkout)
    assert private_paths("cd /" + "home/somebody/dsec", checkout)
    assert not private_paths('base = f"{top}/data/x"; home = "/home/user/x"', checkout)
