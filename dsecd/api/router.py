# SPDX-License-Identifier: Apache-2.0
"""From method and path to a route and its handler.

Here: binding ``libdsec.routes.ROUTES`` to handlers by name, failing at start when the two differ, and finding
the one for a request. Not here: what a handler does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from aiohttp import web
from pydantic import BaseModel

from dsecd.api.call import Call
from dsecd.api.wire import NoSuchRoute, WrongMethod
from libdsec.routes import Route

Handler = Callable[[Call], Awaitable[BaseModel | web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Bound:
    """A route and what answers it."""

    route: Route
    handler: Handler


@dataclass(slots=True)
class _Node:
    """What one segment of a path leads to; ``any`` takes every segment, under its parameter's name."""

    named: dict[str, _Node] = field(default_factory=dict)
    any: _Node | None = None
    parameter: str = ""
    bound: dict[str, Bound] = field(default_factory=dict)  # by method


class Router:
    """All routes."""

    def __init__(self, routes: Sequence[Route], handlers: Mapping[str, Handler]) -> None:
        """Raises ValueError when a route lacks a handler, a handler a route, or two routes are the same."""
        names = {route.name for route in routes}
        if missing := sorted(names - handlers.keys()):
            raise ValueError(f"routes without a handler: {', '.join(missing)}")
        if superfluous := sorted(handlers.keys() - names):
            raise ValueError(f"handlers without a route: {', '.join(superfluous)}")
        self._root = _Node()
        for route in routes:
            self._add(route, handlers[route.name])

    def _add(self, route: Route, handler: Handler) -> None:
        node = self._root
        for segment in route.path.strip("/").split("/"):
            if segment.startswith("{"):
                node.any = node.any or _Node()
                node = node.any
                node.parameter = node.parameter or segment[1:-1]
                if node.parameter != segment[1:-1]:
                    raise ValueError(f"route {route.name}: {segment} is {node.parameter!r} in another route")
            else:
                node = node.named.setdefault(segment, _Node())
        if route.method in node.bound:
            raise ValueError(f"routes {node.bound[route.method].route.name} and {route.name} are the same")
        node.bound[route.method] = Bound(route, handler)

    def find(self, method: str, path: str) -> tuple[Bound, dict[str, str]]:
        """The handler and the path's parameters.  ``method`` is WS for a WebSocket.

        A fixed segment goes before a parameter, unless only the parameter knows the method. Raises
        NoSuchRoute, WrongMethod.
        """
        allowed: set[str] = set()
        if path.startswith("/"):
            for node, parameters in _walk(self._root, path[1:].split("/"), 0):
                if (bound := node.bound.get(method)) is not None:
                    return bound, parameters
                allowed |= node.bound.keys()
        if not allowed:
            raise NoSuchRoute(f"{method} {path!r}: no such path", hint="see /v1/openapi.json")
        raise WrongMethod(
            f"{method} {path!r}: the method must be {' or '.join(sorted(allowed))}",
            hint="open it as a WebSocket" if allowed == {"WS"} else None,
            allowed=sorted("GET" if known == "WS" else known for known in allowed),
        )


def _walk(node: _Node, segments: Sequence[str], at: int) -> Iterator[tuple[_Node, dict[str, str]]]:
    if at == len(segments):
        if node.bound:
            yield node, {}
        return
    segment = segments[at]
    if (next_node := node.named.get(segment)) is not None:
        yield from _walk(next_node, segments, at + 1)
    if node.any is not None and segment:
        for found, parameters in _walk(node.any, segments, at + 1):
            yield found, {node.any.parameter: unquote(segment), **parameters}
