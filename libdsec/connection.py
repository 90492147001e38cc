# SPDX-License-Identifier: Apache-2.0
"""What both forms of the client share about reaching the daemon: where its socket is, URLs, and errors put into words.

Here: pure functions and constants. Not here: input and output (``_async``, ``_sync``).
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import httpcore
import httpx
from pydantic import BaseModel, ValidationError

from libdsec import __version__
from libdsec import types as t
from libdsec.errors import ConnectionFailed, DsecError, Internal, InvalidSpec, from_wire
from libdsec.filetypes import in_bytes
from libdsec.routes import BY_NAME, Route
from libdsec.routes import EXTENTS as EXTENTS
from libdsec.routes import PLAIN as PLAIN
from libdsec.routes import RECORDS as RECORDS
from libdsec.types import EXEC_ID_PATTERN, ID_PATTERN

DEFAULT_SOCKET = "/run/dsec/dsecd.sock"
AGENT = f"libdsec/{__version__}"
OPEN_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
MAX_MESSAGE_BYTES = 8 << 20
#: How much longer than the daemon's own limit the client waits for an answer.
MARGIN_S = 15.0
#: No limit on connections: a running exec holds one, and a full pool would keep the call out that could end it.
POOL = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0)

#: Routes that may be sent again when the connection broke before an answer came, because the second request has no
#: further effect: reads, and changes that carry a key or name their final state.
REPEATABLE = frozenset(
    {route.name for route in BY_NAME.values() if route.method == "GET"}
    | {"create", "create_batch", "update", "delete", "exec_resize", "image_tag"}
)
_IDS = {"id": ID_PATTERN, "exec_id": EXEC_ID_PATTERN, "operation_id": r"^[A-Za-z0-9._-]{1,128}$"}

M = TypeVar("M", bound=BaseModel)
QueryValue = str | int | float | bool | Sequence[str] | None


def socket_path(given: str | os.PathLike[str] | None) -> str:
    """The daemon's socket: the argument, else $DSEC_SOCKET, else the default."""
    return os.fspath(given) if given is not None else os.environ.get("DSEC_SOCKET") or DEFAULT_SOCKET


def new_key() -> str:
    """A name nobody else has: for execs, uploads and idempotency keys."""
    return secrets.token_hex(10)


def target(route: Route, path: Mapping[str, str], query: Mapping[str, QueryValue]) -> str:
    """Path and query of a request. Raises InvalidSpec for an id that could not be one."""
    for name, value in path.items():
        if not re.fullmatch(_IDS[name], value):
            text = f"must match {_IDS[name]}"
            raise InvalidSpec(f"{name} {value!r}: {text}", errors=[{"path": name, "message": text}])
    text = route.path.format_map({name: quote(value, safe="") for name, value in path.items()})
    pairs = [pair for name, value in query.items() for pair in _pairs(name, value)]
    return f"{text}?{urlencode(pairs, errors='surrogateescape')}" if pairs else text


def _pairs(name: str, value: QueryValue) -> list[tuple[str, str]]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [(name, "true" if value else "false")]
    if isinstance(value, str | int | float):
        return [(name, str(value))]
    return [(name, item) for item in value]


def path_fields(name: str, path: str) -> dict[str, str | bytes]:
    """The field of a JSON body that takes a path: another one for what is not UTF-8."""
    raw = in_bytes(path)
    return {name: path} if raw is None else {f"{name}_bytes": raw}


def read_timeout_s(route: Route, override_s: float | None) -> float | None:
    """How long to wait for an answer: the caller's wish, else the route's own limit and a margin; None is for ever."""
    if override_s is not None:
        return override_s
    return route.timeout_s + MARGIN_S if route.timeout_s else None


# --- errors ------------------------------------------------------------------------------------------------------


def build(model: type[M], root: str, /, **fields: Any) -> M:
    """Make a request object; raises InvalidSpec with every wrong field, named under ``root``."""
    try:
        return model(**fields)
    except ValidationError as exc:
        raise invalid(exc, root) from exc


def invalid(exc: ValidationError, root: str) -> InvalidSpec:
    """All errors of a validation as one InvalidSpec."""
    errors = []
    for error in exc.errors(include_url=False, include_input=False):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
        errors.append({"path": f"{root}{path}".lstrip("."), "message": t.explain(error)})
    text = "; ".join(f"{error['path']}: {error['message']}" for error in errors)
    return InvalidSpec(text, errors=errors)


def parse(model: type[M], data: bytes, route: str) -> M:
    """Read an answer. Raises Internal when the daemon sent something else than its contract says."""
    try:
        return model.model_validate_json(data)
    except ValidationError as exc:
        raise Internal(
            f"read the answer of '{route}': {exc.error_count()} errors, first: {_first(exc)}"
        ) from exc


def _first(exc: ValidationError) -> str:
    error = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"


def error_of(status: int, body: bytes) -> DsecError:
    """The exception that an error response stands for."""
    try:
        wire = json.loads(body)
    except ValueError:
        wire = None
    if isinstance(wire, Mapping) and "code" in wire:
        return from_wire(wire)
    text = body[:200].decode("utf-8", "replace").strip()
    return Internal(f"the daemon answered with HTTP status {status}: {text!r}")


def error_of_handshake(status: int, body: bytes | None) -> DsecError:
    """The exception for a WebSocket that the daemon refused."""
    return error_of(status, body or b"")


def unreachable(socket: str, exc: BaseException) -> ConnectionFailed:
    """A failure before anything was sent, in words, with what to do about it."""
    cause = _os_error(exc)
    number = cause.errno if cause is not None else None
    text = os.strerror(number) if number else str(exc) or type(exc).__name__
    hint = None
    if number in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        hint = "'systemctl start dsecd.socket', or start 'dsecd' as root"
    elif number in (errno.EACCES, errno.EPERM):
        hint = "run as root or join the group 'dsec'"
    elif number in (errno.EMFILE, errno.ENFILE):
        hint = "raise the limit of open files with 'ulimit -n'"
    return ConnectionFailed(f"connect to {socket}: {text}", hint=hint, sent=False, errno=number)


def _os_error(exc: BaseException | None) -> OSError | None:
    seen = 0
    while exc is not None and seen < 8:
        if isinstance(exc, OSError) and exc.errno:
            return exc
        exc, seen = exc.__cause__ or exc.__context__, seen + 1
    return None


#: What httpcore raises when httpx does not stand between; the same kinds under the same names.
HTTPCORE_ERRORS = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)

_NO_CONNECTION = (
    httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout,
    httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.PoolTimeout,
)  # fmt: skip


def transport_error(socket: str, what: str, exc: Exception) -> ConnectionFailed:
    """Any failure of the HTTP transport; ``details["sent"]`` tells whether the daemon may have seen the request."""
    if isinstance(exc, _NO_CONNECTION):
        return unreachable(socket, exc)
    if isinstance(exc, httpx.TimeoutException | httpcore.TimeoutException):
        return ConnectionFailed(f"{what}: the daemon did not answer in time", sent=True, gave_up=True)
    cause = _os_error(exc)
    text = (
        os.strerror(cause.errno) if cause is not None and cause.errno else str(exc) or "the connection broke"
    )
    return ConnectionFailed(f"{what}: {text[:1].lower()}{text[1:]}", sent=True)
