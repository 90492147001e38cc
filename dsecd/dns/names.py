# SPDX-License-Identifier: Apache-2.0
"""Which names a policy covers.

Here: text only. Not here: how a name is written in a policy (``libdsec.network``), DNS messages.

- ``example.org`` is that name alone.
- ``*.example.org`` is every name below it, at any depth, and not ``example.org`` itself.

Case means nothing. Labels hold letters, digits, ``-`` and ``_``: a query for a name with anything else in it is
covered by no rule, and so is the root.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# As in libdsec.network.
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)


def asked(labels: Iterable[bytes]) -> str | None:
    """The text of a name in a query, given by its labels without the root; None when no pattern can cover it."""
    parts = [label.decode("latin-1").lower() for label in labels]
    if not parts or not all(_LABEL.fullmatch(part) for part in parts):
        return None
    return ".".join(parts)


class Names:
    """The patterns of one policy, made for one look-up per label of a name."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """``patterns`` in the one spelling that ``libdsec.network`` gives them."""
        self._patterns = frozenset(patterns)

    def covers(self, name: str) -> bool:
        return next(self.covering(name), None) is not None

    def covering(self, name: str) -> Iterator[str]:
        """Every pattern that covers a name of ``asked``, the narrowest first."""
        if name in self._patterns:
            yield name
        rest = name
        while "." in rest:
            rest = rest.partition(".")[2]
            if (wildcard := f"*.{rest}") in self._patterns:
                yield wildcard
