# SPDX-License-Identifier: Apache-2.0
"""The built packages in a minimal Debian with what they depend on and no more: installed, used, removed, purged.

What takes systemd is in tests/vm. The Debian comes from the archive once and is kept in the build cache; each test has
a copy-on-write view of it, in which apt knows no archive.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.once import make_once
from tests.support.rootfs import clean_environment

_CHECKOUT = Path(__file__).resolve().parents[2]
_BUILT = _CHECKOUT / "build" / "deb"
_NAMES = ("dsecd", "python3-libdsec")
#: What dpkg, apt and the programs they run write for any package.
_BOOKKEEPING = (
    "etc/.pwd.lock", "etc/ld.so.cache", "var/cache/apt/", "var/cache/debconf/", "var/cache/ldconfig/", "var/lib/apt/",
    "var/lib/dpkg/", "var/log/", "debs/",
)  # fmt: skip
#: Accounts stay, as Debian's policy wants: files elsewhere may belong to them.
_ACCOUNTS = tuple(f"etc/{name}{end}" for name in ("group", "gshadow", "passwd", "shadow") for end in ("", "-"))
#: How ./dev reaches the archive.
_APT_SETTINGS = [f"--aptopt={path}" for path in Path("/etc/apt/apt.conf.d").glob("90host")]


def debs() -> list[Path]:
    return [path for name in _NAMES for path in _BUILT.glob(f"{name}_*.deb")]


pytestmark = pytest.mark.skipif(len(debs()) != len(_NAMES), reason=f"no packages in {_BUILT} (run: make deb)")


def field(deb: Path, name: str) -> str:
    return subprocess.run(["dpkg-deb", "-f", deb, name], capture_output=True, text=True, check=True).stdout.strip()


def depends() -> str:
    """What both packages depend on, but for each other, as apt-get satisfy reads it."""
    found = sorted({entry.strip() for deb in debs() for entry in field(deb, "Depends").split(",")})
    return ", ".join(entry for entry in found if not entry.startswith(_NAMES))


@pytest.fixture(scope="module")
def minimal() -> Path:
    """A root with the dependencies installed; built when the cache has none for these."""
    wanted = depends()

    def make(partial: Path) -> None:
        hook = f'chroot "$1" apt-get --yes --no-install-recommends satisfy "{wanted}"'
        command = [
            "mmdebstrap", "--quiet", "--variant=minbase", "--format=directory", f"--customize-hook={hook}",
            "--dpkgopt=path-exclude=/usr/share/locale/*", *_APT_SETTINGS, "trixie", str(partial),
            "/etc/apt/sources.list",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())
        assert done.returncode == 0, done.stderr[-3000:]

    cache = Path(os.environ.get("DSEC_BUILD_CACHE", "/var/tmp")) / "deb"
    return make_once(cache / f"root-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}", make)


@pytest.fixture
def root(minimal: Path, disk: Path, own_mounts: None) -> Path:
    """A view of it that may be written to; what was written is in `upper` beside it."""
    for name in ("upper", "work", "root"):
        (disk / name).mkdir()
    options = f"lowerdir={minimal},upperdir={disk}/upper,workdir={disk}/work"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "test", disk / "root"], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", disk / "root/proc"], check=True)
    (disk / "root/debs").mkdir()
    for deb in debs():
        shutil.copy(deb, disk / "root/debs")
    return disk / "root"


def run(root: Path, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command in the root, with nothing of our environment, as apt gives its scripts little."""
    done = subprocess.run(
        ["chroot", root, *argv], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LANG": "C.UTF-8"},
    )  # fmt: skip
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


def apt(root: Path, *arguments: str) -> None:
    no_archive = ("-o", "Dir::Etc::SourceList=/dev/null", "-o", "Dir::Etc::SourceParts=/dev/null")
    run(root, "apt-get", "--yes", "--no-install-recommends", *no_archive, *arguments)


def install(root: Path) -> None:
    apt(root, "--reinstall", "install", *(f"/debs/{deb.name}" for deb in debs()))


def listing(root: Path) -> set[str]:
    """Paths of all files and directories but the bookkeeping's."""
    found = set()
    for folder, folders, files in os.walk(root):
        if folder == str(root):
            folders[:] = [name for name in folders if name not in ("proc", "sys", "dev")]
        relative = os.path.relpath(folder, root)
        found |= {os.path.normpath(os.path.join(relative, name)) for name in (*folders, *files)}
    return {path for path in found if not f"{path}/".startswith(_BOOKKEEPING) and path not in _BOOKKEEPING}


def changed(root: Path) -> Iterator[str]:
    """Files of the root below that were written again."""
    upper = root.with_name("upper")
    for path in upper.rglob("*"):
        name = str(path.relative_to(upper))
        known = name in _BOOKKEEPING or name.startswith(_BOOKKEEPING) or name in _ACCOUNTS
        if not known and (path.is_symlink() or not path.is_dir()):
            yield name


def test_from_install_to_purge_nothing_is_left(root: Path) -> None:
    before = listing(root)
    install(root)
    assert run(root, "dpkg", "--verify", *_NAMES).stdout == ""
    version = field(debs()[0], "Version")
    assert run(root, "dsecctl", "--version").stdout == f"dsecctl, version {version}\n"
    assert run(root, "dsecd", "--version").stdout == f"dsecd {version}\n"
    assert run(root, "dsecd", "--check-config").stdout == "the configuration is valid\n"
    assert run(root, "python3", "-c", "from libdsec import AsyncSandbox, Sandbox").stderr == ""
    assert run(root, "/usr/lib/dsec/dsec-teardown").stderr == ""
    groups = {line.split(":")[0] for line in (root / "etc/group").read_text().splitlines()}
    assert {"dsec", "dsec-admin"} <= groups

    # What a daemon and an operator would have made.
    for directory in ("var/lib/dsec/sandboxes/a", "var/cache/dsec/b", "run/dsec/c", "etc/dsec/dsecd.toml.d"):
        (root / directory).mkdir(parents=True)
    (root / "etc/dsec/dsecd.toml.d/10-site.toml").write_text('log_level = "debug"\n')
    apt(root, "purge", *_NAMES)
    assert listing(root) ^ before == set()
    assert list(changed(root)) == []


def test_removal_keeps_settings_and_what_sandboxes_wrote(root: Path) -> None:
    install(root)
    conffile, kept = root / "etc/dsec/dsecd.toml", root / "var/lib/dsec/sandboxes/a"
    conffile.write_text(conffile.read_text() + '\nlog_level = "debug"\n')
    kept.parent.mkdir(parents=True)
    kept.write_text("written inside\n")
    install(root)  # again: an upgrade, for the maintainer scripts
    assert run(root, "dsecd", "--check-config").returncode == 0
    assert 'log_level = "debug"' in conffile.read_text().splitlines()
    apt(root, "remove", *_NAMES)
    assert kept.read_text() == "written inside\n"
    assert conffile.exists()
    assert not (root / "usr/share/dsec").exists() and not (root / "usr/lib/dsec").exists()


def test_programs_run_no_code_from_the_environment_or_the_working_directory(root: Path) -> None:
    install(root)
    planted = root / "planted"
    for name in ("dsecd", "dsecctl", "libdsec", "json"):
        (planted / name).mkdir(parents=True)
        (planted / name / "__init__.py").write_text("raise SystemExit('planted code ran')\n")
    script = "cd /planted && PYTHONPATH=/planted dsecd --version && PYTHONPATH=/planted dsecctl --version"
    assert run(root, "sh", "-euc", script).stderr == ""
    assert "planted code ran" in run(root, "sh", "-c", "PYTHONPATH=/planted python3 -m dsecd", check=False).stderr


def test_a_configuration_with_a_fault_is_told_with_its_file(root: Path) -> None:
    install(root)
    (root / "etc/dsec/dsecd.toml").write_text("no_such_setting = 1\n")
    done = run(root, "dsecd", "--check-config", check=False)
    assert done.returncode == 78
    assert "/etc/dsec/dsecd.toml: no_such_setting: unknown key" in done.stderr
