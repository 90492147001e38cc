# SPDX-License-Identifier: Apache-2.0
"""The backends that the same tests run on.

Here: what differs between them for a test. Not here: the tests, and machines' kernels (``machines.py``).
"""

from dataclasses import dataclass

from tests.support import machines


@dataclass(frozen=True)
class Kind:
    """One backend; ``count`` tells how much a test can afford of what is dear where all is emulated."""

    name: str

    @property
    def emulated(self) -> bool:
        return self.name == "microvm"

    def require(self) -> None:
        """Skip the test where there is none of this kind."""
        if self.emulated:
            machines.guest_kernel()

    def count(self, usual: int) -> int:
        return max(1, usual // 10) if self.emulated else usual


KINDS = (Kind("container"), Kind("microvm"))
