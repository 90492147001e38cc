# SPDX-License-Identifier: Apache-2.0
"""File descriptors that close themselves.

What belongs here: their lifetime.  What does not: what they are of.
"""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close the descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)
