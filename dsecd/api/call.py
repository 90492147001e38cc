# SPDX-License-Identifier: Apache-2.0
"""One request, understood: who asks, which route, with which checked arguments.

Here: reading and checking path, query and body, with all that is wrong told at once. Not here: finding the
route (``router.py``), limits of time (``server.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from aiohttp import web
from aiohttp.http import HttpVersion11
from pydantic import BaseModel, ValidationError

from dsecd.api.room import crowded
from dsecd.api.sockets import Sockets
from dsecd.api.wire import JSON, BadRequest, WrongMediaType
from dsecd.core.principal import Principal
from dsecd.core.services import Core
from libdsec import types as t
from libdsec.errors import InvalidSpec, TooLarge
from libdsec.routes import Query, Route
from libdsec.types import EXEC_ID_PATTERN, ID_PATTERN, INT64_MAX

M = TypeVar("M", bound=BaseModel)

#: What the parameters of paths look like; one that is not here fails at start.
PATH_PARAMETERS = {
    "id": re.compile(ID_PATTERN),
    "exec_id": re.compile(EXEC_ID_PATTERN),
    "operation_id": re.compile(r"^[a-z0-9-]{1,64}$"),
}
#: More errors than this in one request help nobody.
ERRORS_MAX = 100
#: Putting so many into words takes milliseconds, in which nobody else is served.
_FINDINGS_MAX = 10_000
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(slots=True)
class Call:
    """What a handler is given."""

    core: Core
    principal: Principal
    route: Route
    request: web.BaseRequest
    request_id: str
    parameters: dict[str, str]
    query: dict[str, Any]
    body: BaseModel | None
    sockets: Sockets

    @property
    def id(self) -> str:
        """The sandbox of the path."""
        return self.parameters["id"]

    @property
    def exec_id(self) -> str:
        return self.parameters["exec_id"]

    def json(self, model: type[M]) -> M:
        """The body, which has been checked against the route's request type."""
        assert isinstance(self.body, model), f"{self.route.name} takes {self.route.request}, not {model}"
        return self.body

    def text(self, name: str) -> str | None:
        value = self.query.get(name)
        assert value is None or isinstance(value, str)
        return value

    def required(self, name: str) -> str:
        value = self.query[name]
        assert isinstance(value, str)
        return value

    def integer(self, name: str) -> int | None:
        value = self.query.get(name)
        assert value is None or isinstance(value, int)
        return value

    def seconds(self, name: str) -> float:
        """A time, 0 when not given."""
        return float(self.query.get(name, 0.0))

    def flag(self, name: str) -> bool:
        return bool(self.query.get(name, False))

    def texts(self, name: str) -> list[str]:
        return list(self.query.get(name, ()))


# --- path and query
# ----------------------------------------------------------------------------------------------


def check_parameters(parameters: dict[str, str]) -> list[dict[str, str]]:
    """What is wrong with the ids of a path."""
    return [
        {"path": name, "message": f"must match {PATH_PARAMETERS[name].pattern}, got {value[:80]!r}"}
        for name, value in parameters.items()
        if not PATH_PARAMETERS[name].fullmatch(value)
    ]


def read_query(raw: str, specs: Sequence[Query]) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The values of a query string and what is wrong with it.

    Paths are bytes to Linux: what is no UTF-8 comes through as surrogates, as ``os.fsencode`` wants it.
    """
    if not raw and not any(spec.required for spec in specs):
        return {}, []
    by_name = {spec.name: spec for spec in specs}
    values: dict[str, Any] = {}
    errors: list[dict[str, str]] = []

    def wrong(name: str, message: str) -> None:
        errors.append({"path": f"query.{name}", "message": message})

    for name, text in parse_qsl(raw, keep_blank_values=True, errors="surrogateescape"):
        spec = by_name.get(name)
        if spec is None:
            wrong(name, "unknown parameter")
        elif name in values and spec.kind != "list":
            wrong(name, "given more than once")
        else:
            try:
                value = _read(text, spec)
            except ValueError as error:
                wrong(name, str(error))
            else:
                values[name] = [*values.get(name, ()), value] if spec.kind == "list" else value
    given = values.keys() | {error["path"].removeprefix("query.") for error in errors}
    for spec in specs:
        if spec.required and spec.name not in given:
            wrong(spec.name, "missing")
    return values, errors


def _read(text: str, spec: Query) -> str | int | float | bool:
    if "\0" in text:
        raise ValueError("must not contain a NUL byte")
    if spec.choices and text not in spec.choices:
        raise ValueError(f"must be one of {', '.join(spec.choices)}, got {text[:40]!r}")
    if spec.pattern and not re.fullmatch(spec.pattern, text):
        raise ValueError(f"{t.in_words(spec.pattern)}, got {text[:80]!r}")
    if spec.kind in ("str", "list"):
        return text
    if spec.kind == "bool":
        if text not in _TRUTH:
            raise ValueError(f"must be true or false, got {text[:80]!r}")
        return _TRUTH[text]
    value: int | float
    if spec.kind == "int":
        if not re.fullmatch(r"-?[0-9]{1,20}", text, re.ASCII):
            raise ValueError(f"must be a whole number, got {text[:80]!r}")
        value = int(text)
    else:
        value = _real(text)
    if spec.minimum is not None and value < spec.minimum:
        raise ValueError(f"must be at least {spec.minimum}, got {value}")
    maximum = INT64_MAX if spec.maximum is None else spec.maximum
    if value > maximum:
        raise ValueError(f"must be at most {maximum}, got {value}")
    return value


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text[:80]!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"must be finite, got {text!r}")
    return value


# --- body
# --------------------------------------------------------------------------------------------------------


def media_type(request: web.BaseRequest) -> str:
    """The type of the body without its parameters, in lower case."""
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


async def expect_continue(request: web.BaseRequest) -> None:
    """Tell a client that waits for it to go on with the body (RFC 9110, 10.1.1)."""
    expect = request.headers.get("Expect")
    if expect is None or request.version < HttpVersion11:
        return
    if expect.lower() != "100-continue":
        raise BadRequest(f"expectation {expect[:80]!r} cannot be met")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # The final response has not begun.
    request.writer.output_size = 0


def check_encoding(request: web.BaseRequest) -> None:
    """Refuse compressed bodies: a few bytes could become gigabytes."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise WrongMediaType("a body must not be compressed (Content-Encoding)")


async def read_body(request: web.BaseRequest, limit: int, take: Callable[[int], None]) -> bytes:
    """The whole body; ``take`` is told of each piece before it is kept.  Raises TooLarge beyond ``limit`` bytes."""
    check_encoding(request)
    announced = request.content_length
    if announced is not None and announced > limit:
        raise TooLarge(f"the body has {announced} bytes, at most {limit} are taken", limit=limit)
    await expect_continue(request)
    pieces: list[bytes] = []
    size = 0
    while piece := await request.content.readany():
        size += len(piece)
        if size > limit:
            raise TooLarge(f"the body has more than {limit} bytes", limit=limit)
        take(len(piece))
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_model(
    request: web.BaseRequest, data: bytes, model: type[M] | None, values_max: int
) -> tuple[M | None, list[dict[str, str]]]:
    """The body as the route's request type and what is wrong with it.  No body stands for no fields.

    Raises TooLarge for more than ``values_max`` values.
    """
    if model is None:
        if data.strip() not in (b"", b"{}"):
            return None, [{"path": "body", "message": "this request takes none"}]
        return None, []
    if data and media_type(request) != JSON:
        raise WrongMediaType(
            f"the body must be {JSON}, got {request.headers.get('Content-Type', 'no Content-Type')[:80]!r}",
            hint=f"send the header 'Content-Type: {JSON}' (curl: --json)",
        )
    if crowded(data, values_max):
        raise TooLarge(f"the body has more than {values_max} values", limit=values_max)
    try:
        return model.model_validate_json(data or b"{}"), []
    except ValidationError as error:
        return None, explain(error)


def explain(error: ValidationError) -> list[dict[str, str]]:
    """pydantic's findings in our form: ``spec.limits.pids_max``, ``spec.toolkits[2]``."""
    if error.error_count() > _FINDINGS_MAX:
        return [{"path": "body", "message": f"{error.error_count()} faults, too many to tell one by one"}]
    found = []
    for item in error.errors(include_url=False, include_input=False)[:ERRORS_MAX]:
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"])
        found.append({"path": path.lstrip(".")[:200] or "body", "message": t.explain(item)})
    return found


def invalid(errors: list[dict[str, str]]) -> InvalidSpec:
    """All that is wrong as one error; the message has the first few, the details all."""
    shown = "; ".join(f"{error['path']}: {error['message']}" for error in errors[:3])
    more = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
    return InvalidSpec(shown + more, errors=errors[:ERRORS_MAX])
