# SPDX-License-Identifier: Apache-2.0
"""Root file systems that tests run sandboxes from.

Here: a real minimal Debian, built once from the archive and kept in the build cache. Not here: importing it.
"""

import os
import subprocess
from pathlib import Path

SUITE = "trixie"


def debian_tar(*, include: tuple[str, ...] = ()) -> Path:
    """A tar of a minimal Debian with the packages named; built by mmdebstrap when the cache has none."""
    cache = Path(os.environ.get("DSEC_BUILD_CACHE", "/var/tmp")) / "rootfs"
    cache.mkdir(parents=True, exist_ok=True)
    tar = cache / f"{'-'.join([SUITE, *include])}.tar"
    if not tar.exists():
        partial = tar.with_name(f"partial-{os.getpid()}-{tar.name}")
        command = ["mmdebstrap", "--quiet", "--variant=minbase", "--format=tar", SUITE, str(partial)]
        if include:
            command.insert(1, f"--include={','.join(include)}")
        subprocess.run(command, check=True, capture_output=True)
        partial.rename(tar)
    return tar
