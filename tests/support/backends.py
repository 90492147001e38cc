# SPDX-License-Identifier: Apache-2.0
"""The backends that the same tests run on.

Here: what differs between them for a test. Not here: the tests, and machines' kernels (``machines.py``).
"""

from dataclasses import dataclass

from tests.support import machines


@dataclass(frozen=True)
class Kind:
    """One backend; a test asks ``count`` how often it can afford something that is dear where all is emulated."""

    name: str

    @property
    def emulated(self) -> bool:
        return self.name == "microvm"

    def config(self) -> str:
        """Lines of the daemon's configuration. May skip the test: there is no kernel for guests."""
        return machines.config() if self.emulated else ""

    def count(self, usual: int) -> int:
        return max(1, usual // 10) if self.emulated else usual


KINDS = (Kind("container"), Kind("microvm"))
