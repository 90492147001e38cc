# SPDX-License-Identifier: Apache-2.0
"""How users name images: `name[:tag]`, `name@sha256:...`, `sha256:...` or the first digits of a digest.

What belongs here: the grammar and its errors.  What does not: which images exist.
"""

import re
from dataclasses import dataclass

from libdsec.errors import InvalidSpec

DEFAULT_TAG = "latest"
#: Fewer digits of a digest are refused: too easy to mistake for another image later.
DIGEST_PREFIX_MIN = 12

_NAME = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_HEX = re.compile(rf"[0-9a-f]{{{DIGEST_PREFIX_MIN},64}}")
_NAME_MAX = 128
_TAG_MAX = 128


@dataclass(frozen=True)
class Reference:
    """A parsed reference: a name and tag, or a digest's first digits, or both a name and a whole digest."""

    name: str | None
    tag: str | None
    #: Lower-case hexadecimal digits without 'sha256:', 12 to 64 of them.
    digest: str | None

    def __str__(self) -> str:
        if self.name is None:
            return f"sha256:{self.digest}"
        return f"{self.name}@sha256:{self.digest}" if self.digest else f"{self.name}:{self.tag}"


def parse(text: str) -> Reference:
    """Read a reference.  Raises InvalidSpec saying which part is wrong and what is allowed."""
    name, at, digest = text.partition("@")
    if at:
        return Reference(_checked_name(text, name), None, _checked_digest(text, digest))
    if text.startswith("sha256:"):
        return Reference(None, None, _checked_prefix(text, text.removeprefix("sha256:")))
    if _HEX.fullmatch(text):
        return Reference(None, None, text)
    name, colon, tag = text.partition(":")
    return Reference(_checked_name(text, name), _checked_tag(text, tag) if colon else DEFAULT_TAG, None)


def parse_name(text: str) -> tuple[str, str]:
    """Read a name to be given to an image: `name[:tag]`.  Raises InvalidSpec, also for what reads as a digest."""
    reference = parse(text)
    if reference.name is None or reference.tag is None or _HEX.fullmatch(reference.name):
        raise InvalidSpec(
            f"image name {text!r}: it would read as a digest", hint="use a name with a letter after 'f' or a dash"
        )
    return reference.name, reference.tag


def _checked_name(text: str, name: str) -> str:
    if len(name) > _NAME_MAX or not _NAME.fullmatch(name):
        raise InvalidSpec(
            f"image name {text[:200]!r}: expected words of a-z and 0-9 joined by '.', '_', '-' and '/', "
            f"at most {_NAME_MAX} characters"
        )
    return name


def _checked_tag(text: str, tag: str) -> str:
    if len(tag) > _TAG_MAX or not _TAG.fullmatch(tag):
        raise InvalidSpec(
            f"image name {text[:200]!r}: expected a tag of letters, digits, '.', '_' and '-', "
            f"1 to {_TAG_MAX} characters"
        )
    return tag


def _checked_digest(text: str, digest: str) -> str:
    found = digest.removeprefix("sha256:")
    if not digest.startswith("sha256:") or len(found) != 64 or not _HEX.fullmatch(found):
        raise InvalidSpec(f"image name {text[:200]!r}: expected 'sha256:' and 64 hexadecimal digits after '@'")
    return found


def _checked_prefix(text: str, digits: str) -> str:
    if not _HEX.fullmatch(digits):
        raise InvalidSpec(
            f"image digest {text[:200]!r}: expected {DIGEST_PREFIX_MIN} to 64 lower-case hexadecimal digits"
        )
    return digits
