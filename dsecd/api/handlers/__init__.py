# SPDX-License-Identifier: Apache-2.0
"""The handlers: for each route of ``libdsec.routes`` one function of its name.

Here: turning arguments into one call of the core. Not here: checking arguments (``dsecd.api.call``), deciding
anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from dsecd.api.handlers import execs, files, images, sandboxes, snapshots, system
from dsecd.api.router import Handler

_MODULES: tuple[ModuleType, ...] = (system, sandboxes, snapshots, execs, files, images)


def _collect() -> Mapping[str, Handler]:
    found: dict[str, Handler] = {}
    for module in _MODULES:
        handlers: Mapping[str, Handler] = module.HANDLERS
        if twice := found.keys() & handlers.keys():
            raise ValueError(f"two handlers for {', '.join(sorted(twice))}")
        found |= handlers
    return found


HANDLERS: Mapping[str, Handler] = _collect()
