# SPDX-License-Identifier: Apache-2.0
"""The kinds of sandbox; ``BACKENDS`` is the one list of those that work.

What belongs here: one module per kind and what they share. What does not: states, users, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dsecd.backends.base import Backend, Site
from dsecd.backends.container import ContainerBackend
from dsecd.backends.microvm import MicrovmBackend

#: A backend that is not built yet is not here, and asking for it is ``feature-missing``.
BACKENDS: Mapping[str, Callable[[Site], Backend]] = {
    "container": ContainerBackend,
    "microvm": MicrovmBackend,
}

#: What the design names; those not in BACKENDS are planned.
PLANNED = ("fullvm", "fncall")
