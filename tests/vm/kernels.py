# SPDX-License-Identifier: Apache-2.0
"""The kernels that the test host boots.

Here: where they come from and whether they are what they should be. Not here: building one (``kernel/``).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.vm.image import CHECKOUT, Image

#: Names the file with a kernel that has core scheduling; without it, the one beside the checkout, or what was built.
VARIABLE = "DSEC_TEST_KERNEL_SCHED_CORE"
_BESIDE = CHECKOUT.parent / "shared/kernels/testhost-6.12-schedcore.bzImage"
#: What that file is: Linux 6.12.117 of Debian's linux-source with everything built in.
_BESIDE_SHA256 = "f5c10239c5855c3b3d2558b27c22557dc7ba47eca7f4cb37967681d8565be728"


class KernelMissing(Exception):
    """There is no such kernel here; the text says where it was looked for."""


@dataclass(frozen=True)
class Kernel:
    """A kernel and the initramfs that it needs, if any."""

    name: str
    image: Path
    initrd: Path | None = None


def debian(image: Image) -> Kernel:
    """The kernel that Debian 13 comes with."""
    return Kernel("debian", image.kernel, image.initrd)


def sched_core() -> Kernel:
    """One with CONFIG_SCHED_CORE, which Debian's lack.  Raises KernelMissing."""
    if named := os.environ.get(VARIABLE):
        # A file that somebody names is what they say.
        if not Path(named).is_file():
            raise KernelMissing(f"no kernel with core scheduling: {named}, which {VARIABLE} names, is not there")
        return Kernel("sched-core", Path(named))
    # The one found without asking has to be the one we know.
    why = f"{_BESIDE} is not there"
    if _BESIDE.is_file():
        found = sha256(_BESIDE)
        if found == _BESIDE_SHA256:
            return Kernel("sched-core", _BESIDE)
        why = f"{_BESIDE} has SHA-256 {found}, not {_BESIDE_SHA256}"
    if folder := built():
        return Kernel("sched-core", folder / "bzImage")
    raise KernelMissing(f"no kernel with core scheduling: {why}, none is built (run: make kernel; or set {VARIABLE})")


def built() -> Path | None:
    """The folder with what `kernel/build` made of the fragments as they are, None when it has not."""
    command = [str(CHECKOUT / "kernel/build"), "--find"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
