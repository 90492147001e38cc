# SPDX-License-Identifier: Apache-2.0
"""What is dear to make, and is made once for all runs of tests on a machine: `make test` has two at work at a time.

Here: that only one of them makes it, and that it is there whole or not at all. Not here: what is made.
"""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def make_once(target: Path, make: Callable[[Path], object]) -> Path:
    """The file or folder ``target``; if there is none, ``make`` is called with the path at which to make it.

    Others who want it wait meanwhile. They may be in another pid namespace, so numbers of processes tell nobody apart;
    a lock of flock(2) does, and goes with whoever holds it.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_name(f"partial-{target.name}")
            if partial.is_dir():
                shutil.rmtree(partial)
            partial.unlink(missing_ok=True)
            make(partial)
            partial.rename(target)
    return target
