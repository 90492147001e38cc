# SPDX-License-Identifier: Apache-2.0
"""The API as an OpenAPI 3.1 document, derived from ``libdsec.routes`` and the wire types.

Here: the derivation. Not here: any fact about a route that the two do not hold.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dsecd import __version__
from dsecd.api.call import PATH_PARAMETERS
from dsecd.api.wire import REQUEST_ID
from libdsec.routes import PLAIN, ROUTES, Query, Route
from libdsec.types import ErrorBody

Json = dict[str, Any]
_Mode = Literal["validation", "serialization"]

_ABOUT = (
    "Spoken over a Unix socket. Who asks is who the kernel says is at the other end (SO_PEERCRED): there is no "
    "authentication scheme to take part in. Each operation names the scope it takes (x-dsec-scope): root and members "
    "of the group dsec-admin hold all, others read and sandbox. See docs/api.md for WebSocket frames and file bodies."
)
_KINDS: Mapping[str, Json] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
}
_BINARY = {"schema": {"type": "string", "contentMediaType": PLAIN}}


@functools.cache
def document() -> bytes:
    """The document as JSON."""
    return json.dumps(build(ROUTES)).encode()


def build(routes: tuple[Route, ...]) -> Json:
    """The document for ``routes``."""
    schemas = _Schemas(routes)
    paths: dict[str, Json] = {}
    for route in routes:
        method = "get" if route.method == "WS" else route.method.lower()
        paths.setdefault(route.path, {})[method] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dsecd", "version": __version__, "description": _ABOUT},
        "servers": [{"url": "http://dsec", "description": "the Unix socket; the host name means nothing"}],
        "paths": paths,
        "components": {
            "schemas": schemas.definitions,
            "responses": {
                "error": {
                    "description": "what went wrong; `code` is stable, `message` and `hint` are for people",
                    "headers": _headers(),
                    "content": _json(schemas.ref(ErrorBody, "serialization")),
                }
            },
        },
    }


class _Schemas:
    """The wire types: as a client writes them (defaults may be left out) and as the daemon does."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        wanted: list[tuple[type[BaseModel], _Mode]] = [(ErrorBody, "serialization")]
        wanted += [(route.request, "validation") for route in routes if route.request is not None]
        wanted += [(route.response, "serialization") for route in routes if route.response is not None]
        template = "#/components/schemas/{model}"
        self._refs, found = models_json_schema(list(dict.fromkeys(wanted)), ref_template=template)
        self.definitions: Json = found["$defs"]

    def ref(self, model: type[BaseModel], mode: _Mode) -> Json:
        return self._refs[model, mode]


def _operation(route: Route, schemas: _Schemas) -> Json:
    operation: Json = {
        "operationId": route.name,
        "summary": route.doc,
        "tags": [_tag(route)],
        "x-dsec-scope": route.scope.value,
        "parameters": [*_path_parameters(route), *(_query_parameter(query) for query in route.query)],
        "responses": {**_success(route, schemas), "default": {"$ref": "#/components/responses/error"}},
    }
    if route.method == "WS":
        first = {} if route.request is None else {"firstMessage": schemas.ref(route.request, "validation")}
        operation["x-websocket"] = {"frames": "docs/api.md", **first}
    elif route.body == "stream":
        operation["requestBody"] = {"content": _binary(route)}
    elif route.request is not None:
        needed = any(field.is_required() for field in route.request.model_fields.values())
        schema = schemas.ref(route.request, "validation")
        operation["requestBody"] = {"required": needed, "content": _json(schema)}
    return operation


def _tag(route: Route) -> str:
    """The part of the API: the last fixed noun that others follow."""
    parts = [part for part in route.path.split("/") if part in ("sandboxes", "execs", "files", "images")]
    return parts[-1] if parts else "daemon"


def _success(route: Route, schemas: _Schemas) -> Json:
    if route.method == "WS":
        return {"101": {"description": "the WebSocket is open"}}
    answer: Json = {"description": HTTPStatus(route.status).phrase, "headers": _headers()}
    if route.response is not None:
        answer["content"] = _json(schemas.ref(route.response, "serialization"))
    elif route.name == "openapi":
        answer["content"] = _json({"type": "object"})
    else:
        answer["content"] = _binary(route)
        if route.name == "get_file":
            for name in ("X-Dsec-Size", "X-Dsec-Info"):
                answer["headers"][name] = {"schema": {"type": "string"}}
    return {str(route.status): answer}


def _binary(route: Route) -> Json:
    return dict.fromkeys(route.forms, _BINARY)


def _headers() -> Json:
    return {
        REQUEST_ID: {"description": "names the request in the daemon's log", "schema": {"type": "string"}}
    }


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _path_parameters(route: Route) -> list[Json]:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": PATH_PARAMETERS[name].pattern},
        }
        for name in names
    ]


def _query_parameter(query: Query) -> Json:
    item = dict(_KINDS["str" if query.kind == "list" else query.kind])
    # Whole numbers stay whole: 0 and not 0.0.
    if query.minimum is not None:
        item["minimum"] = int(query.minimum) if query.minimum == int(query.minimum) else query.minimum
    if query.maximum is not None:
        item["maximum"] = int(query.maximum) if query.maximum == int(query.maximum) else query.maximum
    if query.pattern:
        item["pattern"] = query.pattern
    if query.choices:
        item["enum"] = list(query.choices)
    schema: Json = {"type": "array", "items": item} if query.kind == "list" else item
    found: Json = {"name": query.name, "in": "query", "required": query.required, "schema": schema}
    if query.doc:
        found["description"] = query.doc
    return found
