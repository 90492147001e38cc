# SPDX-License-Identifier: Apache-2.0
"""The way of a request: route, scope, limits, arguments, handler, response.

Here: that order, once for all routes. Not here: sockets (``server.py``), reading arguments (``call.py``).

A client that goes away does not end its request: what it asked for is completed (a command, a creation) and
only the answer has nowhere to go.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar

from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.web_protocol import RequestPayloadError
from pydantic import BaseModel

from dsecd.api import call as calls
from dsecd.api import wire
from dsecd.api.call import Call
from dsecd.api.room import Room
from dsecd.api.router import Bound, Handler, Router
from dsecd.api.sockets import Sockets
from dsecd.core.principal import Principal
from dsecd.core.services import Core
from libdsec.errors import DsecError, InvalidSpec, NoCapacity, TimedOut
from libdsec.routes import Route

log = logging.getLogger(__name__)

#: The request that a line of the log belongs to.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

#: How long the body of a request may take to arrive, where the route itself has no limit of time.
BODY_TIMEOUT_S = 60.0


class Dispatcher:
    """Answers requests. ``principal_of`` tells who is at the other end of a request's connection."""

    def __init__(
        self,
        core: Core,
        routes: Sequence[Route],
        handlers: Mapping[str, Handler],
        principal_of: Callable[[web.BaseRequest], Principal],
        *,
        max_request_bytes: int,
        max_body_bytes_per_user: int,
    ) -> None:
        self._core = core
        self._router = Router(routes, handlers)
        self._principal_of = principal_of
        self._max_request_bytes = max_request_bytes
        self._room = Room(max_body_bytes_per_user)
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self.sockets = Sockets()
        self.stopping = False

    def new_request_id(self) -> str:
        """Unique also across restarts, short enough to read out."""
        return f"{self._prefix}-{next(self._numbers):x}"

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request.  Raises ConnectionError when there is nobody to answer to."""
        request_id = self.new_request_id()
        REQUEST_ID.set(request_id)  # aiohttp runs each request in a context of its own
        began = time.monotonic()
        response: web.StreamResponse
        try:
            response = await self._answer(request, request_id)
        except DsecError as error:
            response = self._error(request, error, request_id)
        except RequestPayloadError as error:
            response = self._error(request, wire.BadRequest(f"read the body: {error}"), request_id)
        except web.HTTPException as error:  # aiohttp's own, from a failed WebSocket handshake
            response = self._error(request, wire.BadRequest(error.text or error.reason), request_id)
        except ConnectionError:
            log.debug("client gone")
            raise
        except Exception:  # the boundary: whatever else comes up is a bug, told to the log only
            log.exception("request failed method=%s path=%s", request.method, request.path)
            response = self._error(request, wire.internal(request_id), request_id)
        finally:
            _let_go(request)
        if log.isEnabledFor(logging.DEBUG):
            took_ms = (time.monotonic() - began) * 1000
            log.debug(
                "answered method=%s path=%s status=%d took_ms=%.1f",
                request.method, request.path_qs, response.status, took_ms,
            )  # fmt: skip
        return response

    def _error(self, request: web.BaseRequest, error: DsecError, request_id: str) -> web.StreamResponse:
        if request.writer.output_size > 0:
            # Half an answer is out. Only breaking the connection says that it is not a whole one.
            log.warning("answer broken off path=%s: %s", request.path, error)
            raise ConnectionAbortedError(str(error))
        response = wire.error_response(error, request_id)
        if not request.content.is_eof():
            response.force_close()  # the rest of the body would be taken for the next request
        return response

    async def _answer(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        if self.stopping:
            raise NoCapacity("the daemon is stopping", hint="try again when it is back")
        if request.version < HttpVersion11:
            raise wire.BadRequest("the request must be HTTP/1.1")
        path, _, query = request.raw_path.partition("?")
        upgrade = request.headers.get("Upgrade", "").lower() == "websocket"
        bound, parameters = self._router.find("WS" if upgrade else request.method, path)
        principal = self._principal_of(request)
        principal.require(bound.route.scope, bound.route.name)
        timeout_s = bound.route.timeout_s if bound.route.method != "WS" else 0.0
        call = Call(
            self._core, principal, bound.route, request, request_id, parameters, {}, None, self.sockets
        )
        limit = asyncio.timeout(timeout_s or None)
        try:
            with self._room.of(principal.uid) as take:
                async with limit:
                    return await self._run(bound, call, query, take)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimedOut(f"{bound.route.name}: not done after {timeout_s:g} s") from error

    async def _run(
        self, bound: Bound, call: Call, query: str, take: Callable[[int], None]
    ) -> web.StreamResponse:
        route = bound.route
        errors = calls.check_parameters(call.parameters)
        call.query, wrong = calls.read_query(query, route.query)
        errors += wrong
        if route.body == "json" and route.method != "WS":
            data = await self._body(call, take)
            call.body, wrong = calls.read_model(call.request, data, route.request, route.values_max)
            errors += wrong
        if errors:
            raise calls.invalid(errors)
        result = await bound.handler(call)
        if isinstance(result, BaseModel):
            return wire.json_response(result, route.status, call.request_id)
        return result

    async def _body(self, call: Call, take: Callable[[int], None]) -> bytes:
        request = call.request
        if not request.body_exists:
            return b""
        limit = min(call.route.body_limit_bytes, self._max_request_bytes)
        if request.content.is_eof() or call.route.timeout_s:
            return await calls.read_body(request, limit, take)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await calls.read_body(request, limit, take)
        except TimeoutError as error:
            raise InvalidSpec(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error


def _let_go(request: web.BaseRequest) -> None:
    """Forget the frames that an error of the body came through.

    The request keeps that error, and its frames, which have what had arrived of the body, keep the request: a circle
    that the collector, which counts objects and not bytes, may not look at for hours.
    """
    error = request.content.exception()
    if error is not None:
        error.__traceback__ = None
