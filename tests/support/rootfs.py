# SPDX-License-Identifier: Apache-2.0
"""Root file systems that tests run sandboxes from.

Here: a real minimal Debian, built once from the archive and kept in the build cache, and what mmdebstrap may see of our
environment. Not here: importing it.
"""

import os
import subprocess
from pathlib import Path

from tests.support.once import make_once

SUITE = "trixie"


def debian_tar(*, include: tuple[str, ...] = ()) -> Path:
    """A tar of a minimal Debian with the packages named; built by mmdebstrap when the cache has none."""

    def make(partial: Path) -> None:
        command = ["mmdebstrap", "--quiet", "--variant=minbase", "--format=tar", SUITE, str(partial)]
        if include:
            command.insert(1, f"--include={','.join(include)}")
        subprocess.run(command, check=True, capture_output=True, env=clean_environment())

    cache = Path(os.environ.get("DSEC_BUILD_CACHE", "/var/tmp")) / "debian"
    return make_once(cache / f"{'-'.join([SUITE, *include])}.tar", make)


def clean_environment() -> dict[str, str]:
    """What mmdebstrap gets of our environment, which holds in what it builds as well.

    PYTHONPYCACHEPREFIX, for one, would leave the bytecode of its packages where we keep ours.
    """
    return {name: value for name, value in os.environ.items() if name in ("PATH", "LANG") or "proxy" in name.lower()}
