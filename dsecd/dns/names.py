# SPDX-License-Identifier: Apache-2.0
"""Names as policies mean them: patterns, their one spelling, and which names they cover.

Here: text only, shared by the policy language and the DNS process. Not here: DNS messages.

- ``example.org`` is that name alone.
- ``*.example.org`` is every name below it, at any depth, and not ``example.org`` itself.
- ``*`` is every name.

Case means nothing, one dot at the end neither. A pattern may be written in Unicode; it means its IDNA 2008
form (after the usual mapping of UTS 46), which is what travels in DNS. Labels hold letters, digits, ``-`` and
``_``; a query for a name with anything else in it is covered by no pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import idna

#: RFC 1035: 255 bytes on the wire are 253 characters of text.
NAME_MAX = 253
ANY = "*"

# The letters of host names (RFC 1123), and the underscore that service names begin with (RFC 8552).
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)


class BadPattern(ValueError):
    """A pattern that means no name; the text says why."""


def pattern(text: str) -> str:
    """The one spelling of a pattern.  Raises BadPattern."""
    if text == ANY:
        return ANY
    wildcard = text.startswith("*.")
    name = _ascii(text[2:] if wildcard else text).lower().removesuffix(".")
    if not name:
        raise BadPattern("the name is empty")
    if len(name) > NAME_MAX:
        raise BadPattern(f"the name has {len(name)} characters, at most {NAME_MAX} fit into DNS")
    for label in name.split("."):
        if not label:
            raise BadPattern("two dots follow each other, or one comes first")
        if "*" in label:
            raise BadPattern("'*' may only stand alone, or first as '*.'")
        if not _LABEL.fullmatch(label):
            raise BadPattern(f"{label!r} is no label of a host name")
    if name.split(".")[-1].isdecimal():
        raise BadPattern("an address is no name")
    return f"*.{name}" if wildcard else name


def _ascii(name: str) -> str:
    if name.isascii():
        return name
    try:
        mapped = idna.uts46_remap(name)
        labels = (label if label.isascii() else idna.alabel(label).decode("ascii") for label in mapped.split("."))
        return ".".join(labels)
    except (idna.IDNAError, UnicodeError) as error:
        raise BadPattern(f"no IDNA form: {error}") from error


def asked(labels: Iterable[bytes]) -> str | None:
    """The text of a name in a query, given by its labels without the root; None when no pattern can cover it."""
    parts = [label.decode("latin-1").lower() for label in labels]
    if not parts or not all(_LABEL.fullmatch(part) for part in parts):
        return None
    return ".".join(parts)


class Names:
    """The patterns of one policy, made for one look-up per label of a name."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """``patterns`` as ``pattern`` spells them."""
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
        if ANY in self._patterns:
            yield ANY
