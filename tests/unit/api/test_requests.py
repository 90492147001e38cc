# SPDX-License-Identifier: Apache-2.0
"""Requests to the API on a real socket: routes, limits, errors, connections."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dsecd.api import dispatch
from dsecd.api import server as server_module
from dsecd.api.handlers import HANDLERS
from dsecd.api.router import Router
from dsecd.core.principal import Principal, from_peer
from libdsec import types as t
from libdsec.errors import Refused, WrongState
from libdsec.routes import BY_NAME, ROUTES
from tests.support.fake_core import Api, sandbox, serving

LIMIT_S = 90


@pytest.fixture(autouse=True)
def _short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LINGER_S", 0.1)


def run(directory: Path, body: Callable[[Api], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), serving(directory, **options) as api:
            await body(api)

    asyncio.run(main())


@asynccontextmanager
async def http(api: Api) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(uds=str(api.socket), verify=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://dsec", timeout=LIMIT_S) as client:
        yield client


async def raw(api: Api, data: bytes) -> bytes:
    """Send bytes, and read until the server closes."""
    reader, writer = await asyncio.open_unix_connection(str(api.socket))
    writer.write(data)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""  # closed with our bytes unread
    finally:
        writer.close()


def body_of(answer: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found


# --- routes
# ------------------------------------------------------------------------------------------------------


def test_a_route_without_handler_or_a_handler_without_route_stops_the_start() -> None:
    with pytest.raises(ValueError, match="routes without a handler: pause"):
        Router(ROUTES, {name: handler for name, handler in HANDLERS.items() if name != "pause"})
    with pytest.raises(ValueError, match="handlers without a route: bogus"):
        Router(ROUTES, {**HANDLERS, "bogus": HANDLERS["pause"]})
    with pytest.raises(ValueError, match="routes pause and again are the same"):
        Router(
            (*ROUTES, dataclasses.replace(BY_NAME["pause"], name="again")),
            {**HANDLERS, "again": HANDLERS["pause"]},
        )


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_is_found_by_its_own_path(route: Any) -> None:
    path = route.path.replace("{id}", "sb").replace("{exec_id}", "x").replace("{operation_id}", "op-1")
    bound, parameters = Router(ROUTES, HANDLERS).find(route.method, path)
    assert bound.route is route
    assert bound.handler is HANDLERS[route.name]
    assert set(parameters) == {part[1:-1] for part in route.path.split("/") if part.startswith("{")}


def test_a_fixed_segment_goes_first_but_hides_no_name() -> None:
    router = Router(ROUTES, HANDLERS)
    assert router.find("POST", "/v1/sandboxes/batch")[0].route.name == "create_batch"
    assert router.find("GET", "/v1/sandboxes/batch")[0].route.name == "inspect"
    assert router.find("GET", "/v1/sandboxes/s/execs/stream")[0].route.name == "exec_inspect"
    assert router.find("WS", "/v1/sandboxes/s/execs/stream")[0].route.name == "exec_stream"


def test_unknown_paths_and_methods_are_told_apart(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        async with http(api) as client:
            answer = await client.get("/v1/nothing")
            assert (answer.status_code, answer.json()["code"]) == (404, "invalid-spec")
            answer = await client.put("/v1/sandboxes/a/pause")
            assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")
            assert (await client.get("/v1/sandboxes//pause")).status_code == 404
            answer = await client.get("/v1/events/stream")
            assert (answer.status_code, answer.json()["hint"]) == (405, "open it as a WebSocket")
            assert (await client.head("/v1/version")).status_code == 405

    run(tmp_path, body)


# --- arguments
# ---------------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_comes_at_once(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        async with http(api) as client:
            answer = await client.post("/v1/sandboxes/UPPER/stop?x=1&x=2", json={"grace_s": -1, "grase_s": 2})
            assert answer.status_code == 422
            errors = {error["path"]: error["message"] for error in answer.json()["details"]["errors"]}
            assert set(errors) == {"id", "query.x", "grace_s", "grase_s"}
            assert errors["query.x"] == "unknown parameter"
            assert errors["grase_s"] == "unknown field"
            assert errors["grace_s"] == "input should be greater than or equal to 0"
        assert api.sandboxes.calls == []

    run(tmp_path, body)


def test_paths_of_nested_errors_lead_to_the_field(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        spec = {"image": "base", "toolkits": ["ok", "-bad"], "limits": {"pids_max": 1}, "env": {"A=B": "x"}}
        async with http(api) as client:
            answer = await client.post("/v1/sandboxes", json={"spec": spec})
        errors = {error["path"] for error in answer.json()["details"]["errors"]}
        assert errors == {"spec.toolkits[1]", "spec.limits.pids_max", "spec.env.A=B.[key]"}

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("query", "path", "message"),
    [
        ("limit=x", "query.limit", "must be a whole number, got 'x'"),
        ("limit=0", "query.limit", "must be at least 1, got 0"),
        ("limit=10001", "query.limit", "must be at most 10000, got 10001"),
        ("limit=1&limit=2", "query.limit", "given more than once"),
        ("limit=%D9%A1", "query.limit", "must be a whole number, got '١'"),
        (
            "state=sleepy",
            "query.state",
            "must be one of creating, running, paused, stopped, failed, deleting, got 'sleepy'",
        ),
    ],
)
def test_a_wrong_query_is_refused_by_name(tmp_path: Path, query: str, path: str, message: str) -> None:
    async def body(api: Api) -> None:
        async with http(api) as client:
            answer = await client.get(f"/v1/sandboxes?{query}")
        assert answer.json()["details"]["errors"] == [{"path": path, "message": message}]

    run(tmp_path, body)


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e9", "", "x"])
def test_a_wait_has_to_be_a_sensible_number(tmp_path: Path, value: str) -> None:
    async def body(api: Api) -> None:
        async with http(api) as client:
            answer = await client.get(f"/v1/events?wait_s={value}")
        assert answer.status_code == 422
        assert answer.json()["details"]["errors"][0]["path"] == "query.wait_s"

    run(tmp_path, body)


def test_queries_reach_the_core_as_what_they_are(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        async with http(api) as client:
            await client.get("/v1/sandboxes?label=a%3Db&label=c&state=running&limit=5&after=sb-0")
            await client.get("/v1/sandboxes/s/files/stat?path=/a%FFb%20c&follow=true")
            answer = await client.get("/v1/sandboxes/s/files/stat?follow=yes")
        assert api.sandboxes.calls[0][1][1] == {
            "labels": ["a=b", "c"], "states": [t.State.RUNNING], "after": "sb-0", "limit": 5,
        }  # fmt: skip
        assert api.files.asked == [{"path": "/a\udcffb c", "user": None, "follow": True}]
        assert {e["path"]: e["message"] for e in answer.json()["details"]["errors"]} == {
            "query.path": "missing",
            "query.follow": "must be true or false, got 'yes'",
        }

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("data", "kind", "status", "message"),
    [
        (b"{", "application/json", 422, "body: invalid JSON: EOF while parsing an object"),
        (b'{"grace_s": 1}{', "application/json", 422, "body: invalid JSON: trailing characters"),
        (b"\xff", "application/json", 422, "body: invalid JSON"),
        (b"[]", "application/json; charset=utf-8", 422, "body: "),
        (b'{"grace_s": 1}', "text/plain", 415, "the body must be application/json, got 'text/plain'"),
        (b'{"grace_s": 1}', None, 415, "the body must be application/json, got 'no Content-Type'"),
        (b'{"grace_s": 1}', "application/json", 200, ""),
        (b"", None, 200, ""),
    ],
)
def test_bodies_must_be_json(
    tmp_path: Path, data: bytes, kind: str | None, status: int, message: str
) -> None:
    async def body(api: Api) -> None:
        async with http(api) as client:
            headers = {} if kind is None else {"Content-Type": kind}
            answer = await client.post("/v1/sandboxes/s/stop", content=data, headers=headers)
        assert answer.status_code == status
        if status != 200:
            assert answer.json()["message"].startswith(message)
            assert api.sandboxes.calls == []

    run(tmp_path, body)


def test_memory_is_asked_for_by_names_and_pages(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        async with http(api) as client:
            answer = await client.get("/v1/memory?sandbox=a&sandbox=b&after=z&limit=7")
            wrong = await client.get("/v1/memory?limit=0&sandboxes=a")
        assert answer.status_code == 200
        assert [one["id"] for one in answer.json()["sandboxes"]] == ["a", "b", "z"]
        assert answer.json()["host"]["total_bytes"] == 7
        assert wrong.status_code == 422
        assert all(name in wrong.text for name in ("limit", "sandboxes"))

    run(tmp_path, body)


def test_usage_is_told_with_none_for_what_the_host_does_not_count(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        async with http(api) as client:
            answer = await client.get("/v1/sandboxes/s/usage")
        assert answer.status_code == 200
        assert answer.json() == {
            "id": "s", "cgroup": "", "processes": 3, "execs_running": 1, "execs_total": 2, "cpu_user_us": 30,
            "cpu_system_us": 4, "max_rss_kib": 5, "cpu_usage_us": 34, "memory_current_bytes": None,
            "pids_current": None, "cpu_forced_idle_us": None,
        }  # fmt: skip
        assert [name for name, _ in api.sandboxes.calls] == ["usage"]

    run(tmp_path, body)


def test_a_request_that_takes_no_body_refuses_one(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        async with http(api) as client:
            answer = await client.post("/v1/sandboxes/s/pause", json={"now": True})
            assert answer.json()["details"]["errors"] == [
                {"path": "body", "message": "this request takes none"}
            ]
            assert (await client.post("/v1/sandboxes/s/pause", json={})).status_code == 200

    run(tmp_path, body)


def test_bytes_travel_as_base64(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        async with http(api) as client:
            answer = await client.post("/v1/sandboxes/s/execs", json={"argv": ["cat"], "stdin": "/wD+"})
        assert t.ExecResult.model_validate_json(answer.content).stdout == b"\xff\x00\xfe"

    run(tmp_path, body)


# --- limits
# ------------------------------------------------------------------------------------------------------


def test_a_body_beyond_the_limit_is_too_large_announced_or_not(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 40_000

    async def body(api: Api) -> None:
        headers = {"Content-Type": "application/json"}
        async with http(api) as client:
            for content in (b" " * 100_001, pieces()):
                answer = await client.post("/v1/sandboxes", content=content, headers=headers)
                assert (answer.status_code, answer.json()["code"]) == (413, "too-large")
                assert answer.json()["details"] == {"limit": 100_000}
            assert (await client.get("/v1/version")).status_code == 200

    run(tmp_path, body, max_request_bytes=100_000)


def test_a_compressed_body_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        bomb = gzip.compress(bytes(10 << 20))
        async with http(api) as client:
            for method, path in (("POST", "/v1/sandboxes"), ("PUT", "/v1/sandboxes/s/files?path=/f")):
                answer = await client.request(method, path, content=bomb, headers=headers)
                assert answer.status_code == 415
                assert "must not be compressed" in answer.json()["message"]
        assert api.files.put is None

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, "read a request: "),
        (b"GET / HTTP/1.1\r\nHost: d\r\nno colon\r\n\r\n", 400, "read a request: "),
        (b"GET /v1/version HTTP/1.1\r\nHost: d\r\nX: " + b"y" * 10_000 + b"\r\n\r\n", 400, "read a request: "),
        (b"GET /" + b"y" * 10_000 + b" HTTP/1.1\r\nHost: d\r\n\r\n", 400, "read a request: "),
        (b"POST /v1/sandboxes HTTP/1.1\r\nHost: d\r\nContent-Length: -1\r\n\r\n", 400, "read a request: "),
        (b"GET /v1/version HTTP/1.0\r\n\r\n", 400, "the request must be HTTP/1.1"),
        (
            b"POST /v1/sandboxes HTTP/1.1\r\nHost: d\r\nExpect: miracles\r\nConnection: close\r\n"
            b"Content-Length: 5\r\n\r\n12345",
            400, "expectation 'miracles' cannot be met",
        ),
        (
            b"POST /v1/sandboxes/s/stop HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\nnonsense\r\n\r\n",
            400, "read a request: ",
        ),
    ],
)  # fmt: skip
def test_what_is_no_proper_http_gets_an_error_in_the_same_form(
    tmp_path: Path, data: bytes, status: int, message: str
) -> None:
    async def body(api: Api) -> None:
        answer = await raw(api, data)
        assert answer.startswith((f"HTTP/1.1 {status} ".encode(), f"HTTP/1.0 {status} ".encode()))
        assert body_of(answer)["code"] == "invalid-spec"
        assert body_of(answer)["message"].startswith(message)
        assert body_of(answer)["request_id"]

    run(tmp_path, body)


def test_headers_that_do_not_arrive_close_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HEADER_TIMEOUT_S", 0.05)

    async def body(api: Api) -> None:
        assert await raw(api, b"GET /v1/version HTTP/1.1\r\nHost:") == b""
        # Whole requests are not late, and a quiet connection that sent none is left alone.
        reader, writer = await asyncio.open_unix_connection(str(api.socket))
        for _ in range(2):
            await asyncio.sleep(0.1)
            writer.write(b"GET /v1/version HTTP/1.1\r\nHost: d\r\n\r\n")
            assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
            await reader.readuntil(b'"generation":1}')
        writer.close()

    run(tmp_path, body)


@pytest.mark.parametrize(("name", "path", "status"), [
    ("exec", "/v1/sandboxes/s/execs", 422), ("stop", "/v1/sandboxes/s/stop", 504),
])  # fmt: skip
def test_a_body_that_does_not_arrive_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, path: str, status: int
) -> None:
    monkeypatch.setattr(dispatch, "BODY_TIMEOUT_S", 0.05)
    routes = [dataclasses.replace(r, timeout_s=0.05) if r.name == name == "stop" else r for r in ROUTES]

    async def body(api: Api) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        answer = await raw(api, head.encode() + b'{"')
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())

    run(tmp_path, body, routes=routes)


def test_a_route_that_takes_too_long_times_out_and_its_work_is_cancelled(tmp_path: Path) -> None:
    routes = [dataclasses.replace(r, timeout_s=0.05) if r.name == "pause" else r for r in ROUTES]

    async def body(api: Api) -> None:
        cancelled = asyncio.Event()

        async def hang(*_: Any) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        api.sandboxes.hook = hang
        async with http(api) as client:
            answer = await client.post("/v1/sandboxes/s/pause")
        assert (answer.status_code, answer.json()["code"]) == (504, "timed-out")
        assert answer.json()["message"] == "pause: not done after 0.05 s"
        assert answer.headers["Retry-After"] == "1"
        assert cancelled.is_set()

    run(tmp_path, body, routes=routes)


def test_requests_sent_ahead_are_answered_in_order(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        data = b"".join(f"GET /v1/sandboxes/sb-{n} HTTP/1.1\r\nHost: d\r\n\r\n".encode() for n in range(20))
        data += b"GET /v1/sandboxes/last HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n"
        answer = (await raw(api, data)).decode()
        ids = [part.partition('"')[0] for part in answer.split('{"id":"')[1:]]
        assert ids == [*(f"sb-{n}" for n in range(20)), "last"]

    run(tmp_path, body)


def test_sending_ahead_without_end_closes_the_connection(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        go = asyncio.Event()

        async def wait(*_: Any) -> None:
            await go.wait()

        api.sandboxes.hook = wait
        flood = b"POST /v1/sandboxes/s/pause HTTP/1.1\r\nHost: d\r\n\r\n" * 200
        assert await raw(api, flood) == b""
        assert len(api.sandboxes.calls) == 1
        go.set()

    run(tmp_path, body)


def test_expect_continue_is_answered_after_the_checks(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        head = (
            "POST /v1/sandboxes/s/stop HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nConnection: close\r\n"
            "Content-Length: {}\r\nExpect: 100-continue\r\n\r\n"
        )
        reader, writer = await asyncio.open_unix_connection(str(api.socket))
        writer.write(head.format(2).encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
        assert (await raw(api, head.format(1 << 40).encode())).startswith(b"HTTP/1.1 413 ")

    run(tmp_path, body)


# --- errors and principals
# ---------------------------------------------------------------------------------------


def test_an_error_of_the_tree_is_the_whole_answer(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        async def refuse(*_: Any) -> None:
            raise WrongState(
                "pause 's': it is stopped, not running", hint="dsecctl start s", state=t.State.STOPPED
            )

        api.sandboxes.hook = refuse
        async with http(api) as client:
            answer = await client.post("/v1/sandboxes/s/pause")
        wire = answer.json()
        assert answer.status_code == 409
        assert wire.pop("request_id") == answer.headers["X-Request-Id"]
        assert wire == {
            "code": "wrong-state", "message": "pause 's': it is stopped, not running", "hint": "dsecctl start s",
            "retryable": False, "details": {"state": "stopped"},
        }  # fmt: skip

    run(tmp_path, body)


def test_a_name_that_is_no_utf8_may_stand_in_a_message(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        async def refuse(*_: Any) -> None:
            raise Refused("open 'a\udcff': no", path=Path("/x"))

        api.sandboxes.hook = refuse
        async with http(api) as client:
            answer = await client.post("/v1/sandboxes/s/pause")
        assert answer.status_code == 500
        assert answer.json()["message"] == "open 'a\udcff': no"
        assert answer.json()["details"] == {"path": "/x"}

    run(tmp_path, body)


def test_a_bug_tells_the_client_only_where_to_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(api: Api) -> None:
        async def bug(*_: Any) -> None:
            raise KeyError("secret")

        api.sandboxes.hook = bug
        async with http(api) as client:
            answer = await client.post("/v1/sandboxes/s/pause")
            assert answer.status_code == 500
            assert answer.json() == {
                "code": "internal", "message": "internal error", "retryable": False,
                "hint": f"look for request={answer.headers['X-Request-Id']} in the daemon's log",
                "request_id": answer.headers["X-Request-Id"],
            }  # fmt: skip
            assert (await client.get("/v1/version")).status_code == 200

    with caplog.at_level(logging.ERROR):
        run(tmp_path, body)
    assert "KeyError: 'secret'" in caplog.text


def test_scopes_and_identity_come_from_the_connection(tmp_path: Path) -> None:
    def as_user(_sock: socket.socket) -> Principal:
        return from_peer(1000, 1000, 7, frozenset(), admin_gid=None)

    async def body(api: Api) -> None:
        async with http(api) as client:
            denied = await client.post("/v1/images/tag", json={"ref": "a", "name": "b"})
            assert (denied.status_code, denied.json()["code"]) == (403, "denied")
            assert denied.json()["details"] == {"scope": "image"}
            await client.post("/v1/sandboxes/s/pause")
        assert [arguments[0].uid for _, arguments in api.sandboxes.calls] == [1000]

    run(tmp_path, body, authenticate=as_user)


def test_a_peer_that_the_kernel_cannot_name_is_refused(tmp_path: Path) -> None:
    def unknown(_sock: socket.socket) -> Principal:
        raise OSError("no peer")

    async def body(api: Api) -> None:
        assert await raw(api, b"GET /v1/version HTTP/1.1\r\nHost: d\r\n\r\n") == b""

    run(tmp_path, body, authenticate=unknown)


@pytest.mark.parametrize("uid", [0, 1000])
def test_a_user_has_only_so_many_connections_but_root(tmp_path: Path, uid: int) -> None:
    def as_user(_sock: socket.socket) -> Principal:
        return from_peer(uid, uid, 7, frozenset(), admin_gid=None)

    async def answers(api: Api) -> bool:
        reader, writer = await asyncio.open_unix_connection(str(api.socket))
        kept.append(writer)
        writer.write(b"GET /v1/version HTTP/1.1\r\nHost: d\r\n\r\n")
        try:
            return await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        except ConnectionResetError:
            return False

    async def body(api: Api) -> None:
        assert [await answers(api) for _ in range(6)] == [True] * 4 + [uid == 0] * 2
        for writer in kept:
            writer.close()
        while api.server._by_uid:
            await asyncio.sleep(0.01)
        assert await answers(api)
        kept[-1].close()

    kept: list[asyncio.StreamWriter] = []
    run(tmp_path, body, authenticate=as_user, max_connections_per_user=4)


def test_many_requests_at_once_do_not_mix(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        async def slow(_name: str, _principal: Principal, request: t.CreateRequest) -> t.Sandbox:
            await asyncio.sleep(0.01)
            return sandbox(request.id or "?")

        api.sandboxes.hook = slow
        limits = httpx.Limits(max_connections=100)
        transport = httpx.AsyncHTTPTransport(uds=str(api.socket), verify=False, limits=limits)
        async with httpx.AsyncClient(transport=transport, base_url="http://dsec", timeout=LIMIT_S) as client:
            answers = await asyncio.gather(
                *(
                    client.post("/v1/sandboxes", json={"id": f"sb-{n}", "spec": {"image": "b"}})
                    for n in range(300)
                )
            )
        assert [answer.json()["id"] for answer in answers] == [f"sb-{n}" for n in range(300)]
        assert {answer.status_code for answer in answers} == {201}
        assert len({answer.headers["X-Request-Id"] for answer in answers}) == 300

    run(tmp_path, body)


def test_a_client_that_goes_away_does_not_undo_its_request(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        started, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slow(*_: Any) -> None:
            started.set()
            await go.wait()
            done.set()

        api.sandboxes.hook = slow
        _, writer = await asyncio.open_unix_connection(str(api.socket))
        writer.write(b"POST /v1/sandboxes/s/pause HTTP/1.1\r\nHost: d\r\n\r\n")
        await started.wait()
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.01)
        go.set()
        await done.wait()

    run(tmp_path, body)


# --- operations and events
# -----------------------------------------------------------------------------------------


def test_a_batch_is_an_operation(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        items = [{"spec": {"image": "b"}}, {"spec": {"image": "b"}}]
        async with http(api) as client:
            answer = await client.post("/v1/sandboxes/batch", json={"items": items})
            assert answer.status_code == 202
            done = (await client.get(f"/v1/operations/{answer.json()['id']}?wait_s=10")).json()
        assert done["state"] == "done"
        assert [item["sandbox"]["id"] for item in done["result"]] == ["sb-1", "sb-1"]

    run(tmp_path, body)


def test_waiting_for_events_ends_when_one_comes(tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        async with http(api) as client, asyncio.TaskGroup() as group:
            waiting = group.create_task(client.get("/v1/events?since=0&wait_s=10"))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            api.events.emit("sandbox.created", "sb-1")
        assert [event["subject"] for event in waiting.result().json()["events"]] == ["sb-1"]

    run(tmp_path, body)


def test_stopping_ends_waits_and_refuses_new_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(api: Api) -> None:
        async with http(api) as client, asyncio.TaskGroup() as group:
            # Two connections that are kept: a new one would be refused.
            await asyncio.gather(*(client.get("/v1/events?since=0&wait_s=0.1") for _ in range(2)))
            arrived, wait = asyncio.Event(), api.events.wait

            async def noticed(*arguments: Any) -> Any:
                arrived.set()
                return await wait(*arguments)

            monkeypatch.setattr(api.events, "wait", noticed)
            waiting = group.create_task(client.get("/v1/events?since=0&wait_s=60"))
            await arrived.wait()
            api.server.stop_accepting()
            answer = await client.get("/v1/version")
            assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (
                503,
                "no-capacity",
                True,
            )
            api.events.close()
        assert waiting.result().json()["events"] == []

    run(tmp_path, body)
