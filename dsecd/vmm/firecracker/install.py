# SPDX-License-Identifier: Apache-2.0
"""Firecracker as it is installed: where its two programs are, and whether they fit each other and us.

What belongs here: finding and asking them.  What does not: starting machines.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dsecd.linux import proc
from dsecd.vmm.firecracker import models
from dsecd.vmm.firecracker.jail import Programs

_TIMEOUT_S = 10.0
_NAMES = ("firecracker", "jailer")
_USUAL = Path("/usr/local/bin")


def find(firecracker: str = "auto") -> Programs:
    """The two programs: beside each other as configured, else in the usual places, where there may be none."""
    if firecracker != "auto":
        return Programs(Path(firecracker), Path(firecracker).with_name("jailer"))
    found = [Path(shutil.which(name, path=proc.MINIMAL_ENV["PATH"]) or _USUAL / name) for name in _NAMES]
    return Programs(found[0], found[1])


def check_kernel(kernel: Path) -> None:
    """Raise ValueError for a kernel that Firecracker does not boot, OSError when there is none.  Blocks."""
    with kernel.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            raise ValueError(f"Firecracker boots uncompressed kernels, and {kernel} is none: install dsec-guest-kernel")


def check(programs: Programs) -> str:
    """The release of both.  Blocks.  Raises OSError, proc.ProcessFailed, and ValueError when they are of no use."""
    missing = [str(path) for path in (programs.firecracker, programs.jailer) if not path.exists()]
    if missing:
        raise ValueError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed")
    releases = [_release(path) for path in (programs.firecracker, programs.jailer)]
    if releases[0] != releases[1]:
        first, second = map(models.version_text, releases)
        raise ValueError(f"{programs.firecracker} is {first}, {programs.jailer} {second}: they must be of one release")
    if releases[0] < models.PMEM:
        found, needed = models.version_text(releases[0]), models.version_text(models.PMEM)
        raise ValueError(f"Firecracker is {found}, {needed} is needed for layers on virtio-pmem")
    return models.version_text(releases[0])


def _release(program: Path) -> models.Version:
    """Out of "Firecracker v1.16.1" and more lines, or "Jailer v1.16.1"."""
    text = proc.run_blocking([program, "--version"], timeout_s=_TIMEOUT_S).stdout.decode("utf-8", "replace")
    words = text.split(None, 2)
    if len(words) < 2:
        raise ValueError(f"{program} --version: no version in {text[:80]!r}")
    return models.parse_version(words[1])
