# SPDX-License-Identifier: Apache-2.0
"""Fault injection for tests: the checkpoint that plans pass, made from the environment.

What belongs here: turning ``DSEC_FAULT`` and ``DSEC_FAULT_LOG`` into a checkpoint. What does not: plans.
Without these variables, which only whoever starts the daemon can set, the checkpoint does nothing.

``DSEC_FAULT=create/launch/do/after=kill`` ends the daemon with SIGKILL at that point, ``=fail`` makes the
step fail there; ``DSEC_FAULT_LOG=FILE`` appends the name of every point that is passed, so that tests learn
the points from the plans.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from dsecd.backends.plan import Checkpoint, no_checkpoint
from libdsec.errors import BackendFailed


def checkpoint(environ: Mapping[str, str] = os.environ) -> Checkpoint:
    """The daemon's checkpoint. Raises ValueError for a DSEC_FAULT of another form."""
    point, equals, action = environ.get("DSEC_FAULT", "").partition("=")
    log_path = environ.get("DSEC_FAULT_LOG")
    if not point and log_path is None:
        return no_checkpoint
    if point and (not equals or action not in ("kill", "fail")):
        form = "PLAN/STEP/do|undo/before|after=kill|fail"
        raise ValueError(f"DSEC_FAULT: expected {form}, got {environ['DSEC_FAULT']!r}")

    def passing(name: str) -> None:
        if log_path is not None:
            with open(log_path, "a") as log:
                log.write(f"{name}\n")
        if name == point and action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == point and action == "fail":
            raise BackendFailed(f"fault injected at {name}")

    return passing
