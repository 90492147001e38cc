# SPDX-License-Identifier: Apache-2.0
"""The demo's last step: test suites that nobody here wrote, in sandboxes of base + workspace + toolkit.

Here: fetching three source distributions and what their tests need from the Python index, making images of
them, running them. Not here: anything about dsec itself.
"""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

from libdsec import Sandbox

#: Name and version.
PROJECTS = (
    ("click", "8.1.8"),
    ("jinja2", "3.1.6"),
    ("itsdangerous", "2.2.0"),
)
#: What the suites import; each project itself is imported from its workspace.
TOOLKIT = ("pytest==8.3.5", "markupsafe==3.0.2", "freezegun==1.5.1", "trio==0.29.0")
NOBODY = 65534
PLACE = Path("/var/tmp/demo")
CACHE = Path("/var/cache/dsec-build/demo")


def _pip(*words: str) -> None:
    pip = Path(os.environ["DSEC_DEV_TOOLS"]) / "bin" / "pip"
    subprocess.run([pip, "--disable-pip-version-check", "--quiet", *words], check=True)


def _fetch_source(name: str, version: str) -> Path:
    """The unpacked source distribution."""
    archives = CACHE / "sources"
    found = list(archives.glob(f"{name}-{version}.tar.gz"))
    if not found:
        _pip("download", "--no-deps", f"--no-binary={name}", f"--dest={archives}", f"{name}=={version}")
        found = list(archives.glob(f"{name}-{version}.tar.gz"))
    target = PLACE / name
    with tarfile.open(found[0]) as archive:
        archive.extractall(target, filter="data")
    # The workspace belongs to who works in it: the suites write beside their sources.
    for path in (target, *target.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return next(target.iterdir())


def _make_toolkit() -> Path:
    tree = CACHE / f"toolkit-{'-'.join(TOOLKIT)}"
    if not tree.exists():
        partial = tree.with_name("partial")
        shutil.rmtree(partial, ignore_errors=True)
        _pip("install", f"--target={partial}", "--only-binary=:all:", *TOOLKIT)
        partial.rename(tree)
    return tree


def run(
    say: Callable[[str], None], show: Callable[[str], None], check: Callable[[object, str], None],
    cli: Callable[..., str],
) -> None:
    """Fetch, build the images, run the suites; fails on the first that is not green."""
    PLACE.mkdir(parents=True, exist_ok=True)
    (CACHE / "sources").mkdir(parents=True, exist_ok=True)
    say("A real workload: the test suites of three projects from the Python index. The toolkit (pytest) is one image,")
    print("          each project's source is a workspace image, and both are stacked on the Debian base at creation:")
    cli("image", "import", str(_make_toolkit()), "pytest:8", "--prefix", "/opt/pytest")
    for name, version in PROJECTS:
        source = _fetch_source(name, version)
        cli("image", "import", str(source), f"{name}:{version}", "--prefix", "/workspace")
    cli("image", "ls")
    for name, version in PROJECTS:
        say(f"{name} {version}: its own tests, as nobody, without a network:")
        with Sandbox(
            image="debian:trixie", workspace=f"{name}:{version}", toolkits=["pytest:8"], user="nobody",
            env={"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"},
        ) as sandbox:  # fmt: skip
            result = sandbox.exec(
                "python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests",
                env={"PYTHONPATH": "/workspace/src:/opt/pytest"}, timeout_s=600,
            )  # fmt: skip
            show("\n".join(result.text.splitlines()[-4:]))
            check(result.exit_code == 0, f"{name}'s tests ended with status {result.exit_code}:\n{result.text[-3000:]}")
