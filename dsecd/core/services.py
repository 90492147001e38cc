# SPDX-License-Identifier: Apache-2.0
"""The services of the core, as one value for those who use them: the API.

Here: only the list. Not here: making them (``dsecd/wiring.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from dsecd.core.events import Events
from dsecd.core.execs import Execs
from dsecd.core.files import Files
from dsecd.core.forks import Forks
from dsecd.core.host import Host
from dsecd.core.image_jobs import ImageJobs
from dsecd.core.memory import MemoryUse
from dsecd.core.operations import Operations
from dsecd.core.sandboxes import Sandboxes
from dsecd.core.snapshots import Snapshots


@dataclass(frozen=True)
class Core:
    """What the API calls."""

    sandboxes: Sandboxes
    forks: Forks
    snapshots: Snapshots
    execs: Execs
    files: Files
    images: ImageJobs
    events: Events
    operations: Operations
    host: Host
    memory: MemoryUse
