# SPDX-License-Identifier: Apache-2.0
"""The error tree: every failure a user of dsec can meet, with its stable code, HTTP status and CLI exit status.

Here: the exception classes, the table from code to class, and the conversion to and from the wire form
``{"code", "message", "hint", "details", "request_id"}``. Not here: text for a particular failure.

The tree::

    DsecError
    ├── RequestError            the request cannot be honoured; repeating it unchanged fails again
    │   ├── InvalidSpec  NotFound  AlreadyExists  Conflict  WrongState  Denied  FeatureMissing  TooLarge
    ├── InfraError              the infrastructure failed, not the command in the sandbox
    │   ├── NoCapacity  BackendFailed  SandboxLost  Refused  TimedOut  Internal
    │   └── ConnectionFailed    the daemon cannot be reached
    └── ExecError               the command itself
        ├── ExecFailed          it ended with a non-zero status (raised only by ``check=True``)
        ├── ExecTimeout         it was killed at its deadline
        └── ExecNotStarted      no such program, not executable, no such user, bad working directory
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class DsecError(Exception):
    """Base of all errors.

    ``details`` are typed extras for programs; ``hint`` is one imperative sentence for people; ``retryable`` says
    whether the same request may succeed later without a change.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    exit_status: ClassVar[int] = 1
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        request_id: str | None = None,
        retryable: bool | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.request_id = request_id
        self.details: dict[str, Any] = details
        if retryable is not None:
            self.retryable = retryable

    def to_wire(self) -> dict[str, Any]:
        """The JSON body of an error response."""
        body: dict[str, Any] = {"code": self.code, "message": self.message, "retryable": self.retryable}
        if self.hint:
            body["hint"] = self.hint
        if self.details:
            body["details"] = self.details
        if self.request_id:
            body["request_id"] = self.request_id
        return body


class RequestError(DsecError):
    """The request cannot be honoured as it stands."""


class InvalidSpec(RequestError):
    """One or more fields are wrong; ``details["errors"]`` lists all of them as ``{"path", "message"}``."""

    code = "invalid-spec"
    http_status = 422
    exit_status = 2


class NotFound(RequestError):
    code = "not-found"
    http_status = 404
    exit_status = 4


class AlreadyExists(RequestError):
    code = "already-exists"
    http_status = 409
    exit_status = 5


class Conflict(RequestError):
    """The idempotency key was used with another request, or the object is referenced by others."""

    code = "conflict"
    http_status = 409
    exit_status = 5


class WrongState(RequestError):
    """The sandbox is in another state than the call needs: ``details`` has ``state`` and ``required``."""

    code = "wrong-state"
    http_status = 409
    exit_status = 5


class Denied(RequestError):
    code = "denied"
    http_status = 403
    exit_status = 8


class FeatureMissing(RequestError):
    """The host lacks what was asked for by name; ``details["feature"]`` names it."""

    code = "feature-missing"
    http_status = 501
    exit_status = 6


class TooLarge(RequestError):
    code = "too-large"
    http_status = 413
    exit_status = 2


class InfraError(DsecError):
    """The infrastructure failed; never to be counted as the command's (or the model's) own failure."""


class NoCapacity(InfraError):
    code = "no-capacity"
    http_status = 503
    exit_status = 7
    retryable = True


class BackendFailed(InfraError):
    code = "backend-failed"


class SandboxLost(InfraError):
    """The sandbox died or its agent does not answer; its running commands are lost."""

    code = "sandbox-lost"
    http_status = 502


class Refused(InfraError):
    """The kernel refused something the daemon needed; ``message`` has the file or call and the errno text."""

    code = "refused"


class TimedOut(InfraError):
    code = "timed-out"
    http_status = 504
    exit_status = 124
    retryable = True


class Internal(InfraError):
    """A bug in the daemon; the journal has the details under the request id."""

    code = "internal"


class ConnectionFailed(InfraError):
    """The daemon cannot be reached, or the connection broke before an answer came."""

    code = "connection-failed"
    http_status = 0
    exit_status = 3
    retryable = True


class ExecError(DsecError):
    """The command in the sandbox, not the infrastructure."""


class ExecFailed(ExecError):
    """The command ended with a non-zero status; ``result`` is the whole ExecResult."""

    code = "exec-failed"
    result: Any = None


class ExecTimeout(ExecError):
    """The command was killed at its deadline; ``result`` holds what it printed before."""

    code = "exec-timeout"
    http_status = 504
    exit_status = 124
    result: Any = None

    @property
    def stdout(self) -> bytes:
        return b"" if self.result is None else bytes(self.result.stdout)

    @property
    def stderr(self) -> bytes:
        return b"" if self.result is None else bytes(self.result.stderr)


class ExecNotStarted(ExecError):
    """``details["reason"]``: not-found, not-executable, no-such-user, bad-cwd or spawn-failed."""

    code = "exec-not-started"
    http_status = 422
    exit_status = 126


def _tree(cls: type[DsecError]) -> list[type[DsecError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


#: Every concrete error class by its wire code.
BY_CODE: Mapping[str, type[DsecError]] = {cls.code: cls for cls in _tree(DsecError) if "code" in vars(cls)} | {
    "internal": Internal
}


def from_wire(body: Mapping[str, Any]) -> DsecError:
    """The exception that an error body stands for; an unknown code (a newer daemon) becomes a plain DsecError."""
    cls = BY_CODE.get(str(body.get("code")), DsecError)
    details = body.get("details")
    error = cls(
        str(body.get("message", "unknown error")),
        hint=body.get("hint"),
        request_id=body.get("request_id"),
        retryable=body.get("retryable"),
    )
    error.details = dict(details) if isinstance(details, Mapping) else {}
    return error
