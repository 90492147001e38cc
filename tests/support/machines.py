# SPDX-License-Identifier: Apache-2.0
"""What tests of virtual machines boot, and how a daemon for them is configured.

Here: finding a kernel for guests, getting Debian's when there is no own one. Not here: starting machines.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.once import make_once

#: Names a kernel for guests, other than the one found here.
VARIABLE = "DSEC_TEST_GUEST_KERNEL"
#: A guest that is emulated on a busy machine takes its time.
BOOT_TIMEOUT_S = 180
MEMORY_BYTES = 256 << 20
_PACKAGE = "linux-image-cloud-amd64"


def config(*, kernel: Path | None = None, boot_timeout_s: float = BOOT_TIMEOUT_S, disk_bytes: int = 1 << 30) -> str:
    """Lines of a daemon's configuration for small guests, emulated so that results do not depend on the machine."""
    return (
        f'[microvm]\nkernel = "{kernel or guest_kernel()}"\naccelerator = "tcg"\nmemory_bytes = {MEMORY_BYTES}\n'
        f"disk_bytes = {disk_bytes}\nboot_timeout_s = {boot_timeout_s}\n"
    )


def config_if_any() -> str:
    """``config``, or nothing where there is no kernel for guests: for daemons that also run other sandboxes."""
    try:
        return config()
    except pytest.skip.Exception:
        return ""


def guest_kernel() -> Path:
    """The kernel that guests of tests boot: a named one, else our own, else Debian's. Skips without any."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    own = sorted(path for path in (_cache() / "kernel").glob("*/vmlinux") if path.parent.suffix != ".partial")
    return own[-1] if own else debian_kernel()


def debian_kernel() -> Path:
    """Debian's cloud kernel with its modules, unpacked from the archive once. Skips when the archive is not there."""
    try:
        tree = make_once(_cache() / "cloud-kernel/tree", _fetch)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no kernel for guests: {error.cmd[0]} {error.cmd[-1]}: {error.stderr.decode()[-300:]}")
    return max(tree.glob("boot/vmlinuz-*"))


def _fetch(target: Path) -> None:
    folder = target.parent
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    # Lists of its own: those of the system are gone, or another run's.
    options = ["-o", "APT::Sandbox::User=root", "-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}"]
    _run("apt-get", "-q", *options, "update")
    depends = _run("apt-cache", *options, "depends", _PACKAGE)
    package = next(line.split()[-1] for line in depends.splitlines() if "Depends: linux-image" in line)
    _run("apt-get", "-q", *options, "download", package, cwd=folder)
    _run("dpkg-deb", "-x", str(next(folder.glob(f"{package}_*.deb"))), str(target))


def _run(*argv: str, cwd: Path | None = None) -> str:
    return subprocess.run(argv, check=True, capture_output=True, cwd=cwd).stdout.decode()


def _cache() -> Path:
    return Path(os.environ.get("DSEC_BUILD_CACHE", "/var/tmp"))
