# SPDX-License-Identifier: Apache-2.0
"""``python3 -m tests.vm.prepare``: make the machines that the tests restore, while other tests run.

Here: that, for `make test`, at the lowest priority. It is no more than a start: what is missing afterwards, for
whatever reason, the tests make for themselves, and tell what is wrong. Not here: how a machine is made (``image.py``,
``host.py``, ``packages.py``).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

from tests.vm import host, image, kernels, packages
from tests.vm.kernels import Kernel


def main() -> None:
    """Build the images, then boot, install and save with each kernel.  Raises what those raise."""
    # All that is begun is taken back on the way out, machines and half of an image.
    signal.signal(signal.SIGTERM, _end)
    os.nice(19)
    began = time.monotonic()
    with host.only_machine():
        # First what has mount namespaces of its own, while no test has mounts that it would hold.
        packages.slim_tar()
        base = image.get()
        for kernel in _kernels(base):
            host.booted(kernel, base)
            packages.installed(kernel, base)
    print(f"vm: machines are ready after {time.monotonic() - began:.0f} s")


def _kernels(base: image.Image) -> list[Kernel]:
    try:
        return [kernels.debian(base), kernels.sched_core()]
    except kernels.KernelMissing:
        return [kernels.debian(base)]


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
