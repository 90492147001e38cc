# SPDX-License-Identifier: Apache-2.0
"""Values and errors as HTTP responses; the one place where an error becomes its wire form.

Here: responses. Not here: requests (``call.py``), which error it is (whoever raised it).
"""

from __future__ import annotations

import json
from http import HTTPStatus

from aiohttp import web
from pydantic import BaseModel

from libdsec.errors import DsecError, Internal, InvalidSpec

JSON = "application/json"
REQUEST_ID = "X-Request-Id"


class BadRequest(InvalidSpec):
    """Not HTTP, or HTTP that we do not speak."""

    http_status = HTTPStatus.BAD_REQUEST


class NoSuchRoute(InvalidSpec):
    http_status = HTTPStatus.NOT_FOUND


class WrongMethod(InvalidSpec):
    http_status = HTTPStatus.METHOD_NOT_ALLOWED


class WrongMediaType(InvalidSpec):
    http_status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE


def json_response(value: BaseModel, status: int, request_id: str) -> web.Response:
    """A model as JSON; pydantic writes the bytes, nothing copies them."""
    body = value.__pydantic_serializer__.to_json(value)
    return _response(body, status, request_id)


def error_response(error: DsecError, request_id: str) -> web.Response:
    """An error of the tree as the wire has it."""
    error.request_id = request_id
    # ASCII, since a message may quote a name that is no UTF-8; `default`, since details may hold a path or an
    # enum.
    body = json.dumps(error.to_wire(), default=str).encode()
    response = _response(body, error.http_status or HTTPStatus.INTERNAL_SERVER_ERROR, request_id)
    if error.http_status == HTTPStatus.METHOD_NOT_ALLOWED:
        response.headers["Allow"] = ", ".join(error.details.get("allowed", ()))
    if error.retryable:
        response.headers["Retry-After"] = str(error.details.get("retry_after_s", 1))
    return response


def internal(request_id: str) -> Internal:
    """What a client is told of a bug: only where to look."""
    return Internal("internal error", hint=f"look for request={request_id} in the daemon's log")


class _Answer(web.Response):
    """Without Date and Server: nobody caches what a local daemon says, and both sides would only handle them."""

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.popall("Date", None)
        self.headers.popall("Server", None)


def _response(body: bytes, status: int, request_id: str) -> web.Response:
    return _Answer(body=body, status=status, headers={"Content-Type": JSON, REQUEST_ID: request_id})
