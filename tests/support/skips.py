# SPDX-License-Identifier: Apache-2.0
"""The skips that are no loss: each with the reason it gives, and where else the thing is tested.

Here: the list, and judging a skip by it. Any other skip fails (``tests/conftest.py``), so that no test goes missing
unseen. Not here: what is skipped inside the test host (``may_skip`` in ``tests/vm/inside.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Skip:
    """A skip that is expected. ``test`` and ``reason`` are patterns as of a shell; ``because`` is for the reader."""

    test: str
    reason: str
    because: str


EXPECTED = (
    Skip("tests/host/test_agent.py::*", "ten seconds once are enough", "runs with the agent's other build"),
    Skip("tests/host/test_agent_protocol.py::*", "CAP_SYS_RESOURCE is missing",
         "the machines of CI have a root without it, and the test hosts in tests/vm do not run this file yet"),
    Skip("tests/host/test_damon.py::*", "damon-sysfs: *", "tests/vm runs it on Debian's kernel"),
    Skip("tests/host/test_damon.py::*", "* set up here by somebody else", "tests/vm runs it where DAMON is nobody's"),
    Skip("tests/host/test_firecracker_real.py::*", "there is no Firecracker here: *",
         "Debian has none; tests/host/test_firecracker.py runs the driver against a strict fake of it"),
    Skip("tests/host/test_firecracker_real.py::*", "KVM does not run guests here: *",
         "what needs no guest is still held to the real one"),
    Skip("tests/host/test_kvm.py::*", "no KVM to compare with: *",
         "the other tests of that file hold everywhere"),
    Skip("tests/host/test_lifecycle.py::*", "this host has the memory controller: *",
         "tests/vm/inside/test_limits.py proves limits where there are controllers"),
    Skip("tests/host/test_mechanisms.py::*", "* needs Linux *", "tests/vm runs it on the kernel we are made for"),
    Skip("tests/host/*", "no kernel for guests: *", "the archive cannot be reached; with it, Debian's kernel is taken"),
    Skip("tests/vm/*", "no kernel with core scheduling: * is not there, none is built *",
         "building one takes half an hour, and the tests of limits, classes and memory run on Debian's as well"),
)  # fmt: skip


def is_expected(test: str, reason: str) -> bool:
    """Whether the skip of a test (pytest's node id) for a reason is one of EXPECTED."""
    return any(fnmatchcase(test, skip.test) and fnmatchcase(reason, skip.reason) for skip in EXPECTED)
