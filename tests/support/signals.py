# SPDX-License-Identifier: Apache-2.0
"""Signals to programs that tests run."""

import contextlib
import signal
import subprocess


def interrupted(running: subprocess.Popen[bytes]) -> int:
    """Its status after ctrl-C; pressed again after a while, since Python loses one that comes during a finalizer."""
    for _ in range(20):
        running.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return running.wait(0.5)
    raise AssertionError("it does not end")
