# SPDX-License-Identifier: Apache-2.0
"""Features: what a host may lack, as values with a probe.

What belongs here: the types.  What does not: the list of features and their probes (mechanisms).
"""

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from dsecd.linux import kconfig

_NOT_ALLOWED = (errno.EPERM, errno.EACCES)


@dataclass(frozen=True)
class Answer:
    """What a probe found out: `works` is None when it could not tell."""

    works: bool | None
    reason: str = ""


YES = Answer(True)


def no(reason: str) -> Answer:
    """The answer of a probe that found the feature absent."""
    return Answer(False, reason)


def unknown(reason: str) -> Answer:
    """The answer of a probe that could not find out."""
    return Answer(None, reason)


class FeatureMissing(Exception):
    """Something needs a feature that this host does not have, or that could not be shown to work."""

    def __init__(self, name: str, reason: str, hint: str = "") -> None:
        self.name = name
        self.reason = reason
        self.hint = hint
        super().__init__(f"{name}: not supported here: {reason}")


@dataclass(frozen=True)
class FeatureStatus:
    """One row of the host's report."""

    name: str
    since: str
    why: str
    works: bool | None
    reason: str
    #: What to do about it; empty when there is nothing to do.
    hint: str


@dataclass
class Feature:
    """A feature and how to find out whether it works.

    The probe tries the thing itself where that is cheap and leaves no trace, answers with YES, no() or
    unknown(), and may raise OSError.  It blocks; check, require and status therefore run in a thread.
    """

    name: str
    #: The Linux release that brought it, "" where the kernel does not decide.
    since: str
    #: What it is needed for, as the end of "needed for".
    why: str
    probe: Callable[[], Answer]
    #: What to do when it is missing, one imperative sentence.
    hint: str
    #: Options that a kernel needs for it, without CONFIG_.
    options: tuple[str, ...] = ()
    _known: Answer | None = field(default=None, init=False, repr=False, compare=False)

    def check(self, *, again: bool = False) -> Answer:
        """Probe, or repeat the last conclusive answer unless told to ask `again`.  Blocks."""
        if self._known is not None and not again:
            return self._known
        try:
            answer = self.probe()
        except OSError as error:
            answer = self._answer_to(error)
        self._known = answer if answer.works is not None else None
        return answer

    def _answer_to(self, error: OSError) -> Answer:
        # Not being allowed to try says nothing about the kernel; any other failure of the thing itself does.
        if error.errno in _NOT_ALLOWED:
            return unknown(f"could not try: {error}")
        return no(str(error))

    def require(self) -> None:
        """Raise FeatureMissing unless it works.  Blocks."""
        answer = self.check()
        if answer.works is not True:
            raise FeatureMissing(self.name, answer.reason + self._kernel_note(), self.hint)

    def expected_here(self) -> bool:
        """Whether this kernel is new enough: then its absence is a fault of the host's configuration."""
        return not self.since or kernel_version() >= parse_version(self.since)

    def _kernel_note(self) -> str:
        """What about this kernel explains an absence, in brackets; its configuration is asked as well as its age."""
        if not self.expected_here():
            return f" (needs Linux {self.since}, this is {os.uname().release})"
        config = kconfig.running() if self.options else None
        lacks = config.lacks(self.options) if config else []
        return f" (this kernel is built without {', '.join(f'CONFIG_{name}' for name in lacks)})" if lacks else ""

    def status(self, *, again: bool = False) -> FeatureStatus:
        """The row for the host's report.  Blocks."""
        answer = self.check(again=again)
        if answer.works:
            return FeatureStatus(self.name, self.since, self.why, True, answer.reason, "")
        return FeatureStatus(
            self.name, self.since, self.why, answer.works, answer.reason + self._kernel_note(), self.hint
        )


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor number at the start of a version: "6.12.48+deb13-amd64" is (6, 12)."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"version {text!r}: does not begin with two numbers")
    return int(match[1]), int(match[2])


def kernel_version() -> tuple[int, int]:
    """Major and minor number of the running kernel."""
    return parse_version(os.uname().release)
