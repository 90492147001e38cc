# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document agrees with the routes and with itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsecd.api import openapi
from libdsec.routes import ROUTES, Route
from tests.support.fake_core import serving
from tests.unit.api.test_requests import http

DOCUMENT: dict[str, Any] = json.loads(openapi.document())


def nodes(value: Any, path: str = "#") -> Iterator[tuple[str, Any]]:
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from nodes(item, f"{path}/{key}")


def resolve(reference: str) -> Any:
    found = DOCUMENT
    for part in reference.removeprefix("#/").split("/"):
        found = found[part.replace("~1", "/").replace("~0", "~")]
    return found


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    used = {
        value["$ref"]
        for _, value in nodes(DOCUMENT)
        if isinstance(value, dict) and isinstance(value.get("$ref"), str)
    }
    assert used
    for reference in used:
        assert resolve(reference)
    assert {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]} <= used


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_is_described(route: Route) -> None:
    method = "get" if route.method == "WS" else route.method.lower()
    operation = DOCUMENT["paths"][route.path][method]
    assert operation["operationId"] == route.name
    assert operation["x-dsec-scope"] == route.scope
    names = {parameter["name"]: parameter for parameter in operation["parameters"]}
    in_path = {part[1:-1] for part in route.path.split("/") if part.startswith("{")}
    assert set(names) == in_path | {query.name for query in route.query}
    assert all(names[name]["required"] and names[name]["in"] == "path" for name in in_path)
    assert all(names[query.name]["required"] == query.required for query in route.query)
    assert set(operation["responses"]) == {"101" if route.method == "WS" else str(route.status), "default"}
    assert ("requestBody" in operation) == (
        route.method != "WS" and (route.request is not None or route.body == "stream")
    )


def test_the_document_holds_nothing_but_the_routes() -> None:
    described = [op["operationId"] for item in DOCUMENT["paths"].values() for op in item.values()]
    assert sorted(described) == sorted(route.name for route in ROUTES)
    assert DOCUMENT["openapi"] == "3.1.0"


def test_requests_are_described_strictly_and_answers_openly() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert schemas["CreateRequest"]["additionalProperties"] is False
    assert "additionalProperties" not in schemas["Sandbox"]
    assert schemas["ExecResult"]["properties"]["stdout"]["contentEncoding"] == "base64"


def test_the_daemon_serves_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as api, http(api) as client:
            answer = await client.get("/v1/openapi.json")
            assert answer.headers["Content-Type"].startswith("application/json")
            assert answer.json() == DOCUMENT

    asyncio.run(main())
