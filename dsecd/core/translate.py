# SPDX-License-Identifier: Apache-2.0
"""The agent's errors as the user's.

What belongs here: the one table from the agent's codes to error classes. What does not: kernel errors of
the daemon itself (``dsecd.backends.base.translated``). The agent's words are the sandbox's: they are
quoted, bounded, and decide nothing but which of its own user's errors this is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from dsecd.backends.agentlink.records import AgentError, LinkLost
from libdsec import errors

_NOT_STARTED = frozenset({"not-found", "not-executable", "no-such-user", "bad-cwd", "spawn-failed"})

_FILES: Mapping[str, type[errors.DsecError]] = {
    "not-found": errors.NotFound,
    "exists": errors.AlreadyExists,
    "denied": errors.Denied,
    "no-space": errors.NoCapacity,
    "busy": errors.Conflict,
    "io-error": errors.BackendFailed,
}

_NO_SUCH_USER = "the sandbox has no such user or group"
_USER_HINT = "a name in its /etc/passwd or /etc/group, or a number"

_EXECS: Mapping[str, type[errors.DsecError]] = {
    "not-found": errors.NotFound,
    "exists": errors.AlreadyExists,
    "busy": errors.WrongState,
    "detached": errors.Conflict,
}


@contextlib.contextmanager
def _translated(doing: str, convert: Callable[[AgentError], errors.DsecError]) -> Iterator[None]:
    try:
        yield
    except AgentError as error:
        raise convert(error) from error
    except LinkLost as error:
        text = f"{doing}: the connection to its agent broke: {error.reason}"
        raise errors.SandboxLost(text, retryable=True) from error


def starting(doing: str, argv: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Around starting a command."""
    line = len(argv) == 1 and any(letter.isspace() for letter in argv[0])
    hint = "a command is a list of words; for a line in a shell's language run 'sh', '-c', LINE" if line else None
    unnamed = not argv[0]
    if unnamed:
        hint = "the first word of a command names its program; a variable that is not set may have been put there"

    def convert(error: AgentError) -> errors.DsecError:
        if error.code == "no-such-user":
            return errors.ExecNotStarted(f"{doing}: {_NO_SUCH_USER}", hint=_USER_HINT, reason=error.code)
        if error.code in _NOT_STARTED:
            why = "start: the name of the program is empty" if unnamed else error.message or error.code
            return errors.ExecNotStarted(f"{doing}: {why}", hint=hint, reason=error.code)
        if error.code == "exists":
            return errors.AlreadyExists(f"{doing}: an exec with this id exists")
        return errors.InvalidSpec(f"{doing}: {error.message or error.code}", errno=error.errno)

    return _translated(doing, convert)


def execs(doing: str) -> contextlib.AbstractContextManager[None]:
    """Around calls on a command that was started, and on what the agent counts."""
    return _translated(doing, lambda error: _EXECS.get(error.code, errors.InvalidSpec)(_text(doing, error)))


def files(doing: str) -> contextlib.AbstractContextManager[None]:
    """Around file calls."""

    def convert(error: AgentError) -> errors.DsecError:
        if error.code == "no-such-user":
            return errors.InvalidSpec(f"{doing}: {_NO_SUCH_USER}", hint=_USER_HINT, reason=error.code)
        cls = _FILES.get(error.code, errors.InvalidSpec)
        return cls(_text(doing, error), reason=error.code, errno=error.errno)

    return _translated(doing, convert)


def _text(doing: str, error: AgentError) -> str:
    return f"{doing}: {error.message or error.code}"
