# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a Firecracker process, as types: what was being done, why it failed, what to do.

What belongs here: the exceptions of this package.  What does not: turning them into a user's errors, which is
done where backends meet them.
"""

from dsecd.vmm.base import VmmError


class FirecrackerError(VmmError):
    """Something with a Firecracker process failed; `hint` says what to do about it, where that is known."""

    def __init__(self, what: str, why: str, hint: str = "") -> None:
        self.what = what
        self.why = why
        self.hint = hint
        super().__init__(f"{what}: {why}")


class InvalidRequest(FirecrackerError):
    """A request breaks the documented rules, so it was not sent; `faults` names all of them."""

    def __init__(self, what: str, faults: list[str]) -> None:
        self.faults = tuple(faults)
        super().__init__(what, "; ".join(faults))


class TooOld(FirecrackerError):
    """The installed Firecracker does not know what was asked for, so it was not sent."""

    def __init__(self, what: str, since: str, version: str) -> None:
        self.since = since
        self.version = version
        super().__init__(
            what, f"needs Firecracker {since}, this is {version}", f"install Firecracker {since} or newer"
        )


class CallRefused(FirecrackerError):
    """Firecracker understood a call and said no; `fault` is its own explanation, cut to a sane length."""

    def __init__(self, what: str, status: int, fault: str) -> None:
        self.status = status
        self.fault = fault
        super().__init__(what, f"refused with status {status}: {fault}")


class NotAnswering(FirecrackerError, ConnectionError):
    """The API socket is not there, not Firecracker's, or the process went away during a call."""


class CallTimedOut(FirecrackerError, TimeoutError):
    """A call got no whole answer in time; whether it took effect is not known."""


class BadAnswer(FirecrackerError):
    """What came back is not an answer of Firecracker's: broken, of the wrong type, or too large."""


class StartFailed(FirecrackerError):
    """No working process came of a start; nothing of it is left."""


class ConnectRefused(FirecrackerError, ConnectionError):
    """Nobody in the guest listens at that vsock port (yet)."""


class BadSnapshot(FirecrackerError):
    """What a snapshot left behind is not what it should be, and was not taken."""
