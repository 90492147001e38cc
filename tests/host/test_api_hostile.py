# SPDX-License-Identifier: Apache-2.0
"""Strange arguments against a real daemon and a real agent: never a bug, always an answer that says what is wrong."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from libdsec.types import SandboxSpec
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

PATHS = (
    "/a%ff", "", "%00", "/%00", "a", "/" + "x" * 300, "/" + "x/" * 3000, "/etc/passwd", "/proc/self/mem", "/etc",
    "/dev/null",    "/../../etc/shadow", "/%F0%9F%98%80", "//", "/.",
)  # fmt: skip
USERS = (None, "", "root", "nobody", "-1", "99999999999", "a:b:c", "%ff", "x" * 5000, "0:0", "%00")
NUMBERS = ("0", "-1", "18446744073709551615", "9" * 30, "1e3", "0x10", "", "%D9%A1", "nan")
EXECS: tuple[dict[str, object], ...] = (
    {"argv": [""]},
    {"argv": ["true"], "user": "\0"},
    {"argv": ["true"], "user": "nobody:no-such-group"},
    {"argv": ["true"], "cwd": "/nope"},
    {"argv": ["x" * 4000]},
    {"argv": ["true", "y" * 131072]},
    {"argv": ["true"] * 60000},
    {"argv": ["true"], "env": {"é": "\ud7ff"}},
    {"argv": ["true"], "timeout_s": 1e-9},
    {"argv": ["true"], "timeout_s": 3e8, "keep_s": 0},
    {"argv": ["head", "-c", "300000", "/dev/zero"], "max_output_bytes": 0},
    {"argv": ["true"], "rlimits": {"nofile": {"soft": 9, "hard": 3}}},
    {"argv": ["true"], "rlimits": {"nofile": {"soft": 10**30, "hard": -1}}},
    {"argv": ["cat"], "stdin": "!!"},
    {"argv": ["true"], "pty": True, "stdin": "AAAA"},
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        with running.client() as client:
            client.finish(
                client.image_import(name="debian:trixie", source=str(debian_tar()), kind="rootfs-tar")
            )
            client.create(SandboxSpec(image="debian:trixie"), id="sb")
        yield running
        assert "request failed" not in running.log.read_text()


def request(path: Path, method: str, target: str, body: str | bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("dsec", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
    try:
        connection.request(method, target, body, {"Content-Type": kind} if body is not None else {})
        answer = connection.getresponse()
        try:
            return answer.status, answer.read()
        except http.client.IncompleteRead as error:
            return answer.status, error.partial  # broken off: so a failure on the way is told
    finally:
        connection.close()


def check(daemon: Daemon, method: str, target: str, body: str | bytes | None = None) -> None:
    status, data = request(daemon.socket, method, target, body)
    if status >= 400:
        wire = json.loads(data)
        assert wire["code"] != "internal", f"{method} {target[:200]} {str(body)[:200]}: {daemon.tail()}"
        assert wire["message"]


@pytest.mark.parametrize(
    ("method", "route"),
    [("GET", "files"), ("GET", "files/stat"), ("GET", "files/list"), ("GET", "files/part"), ("PUT", "files"),
     ("DELETE", "files")],
)  # fmt: skip
def test_paths_and_users(daemon: Daemon, method: str, route: str) -> None:
    for path in PATHS:
        if method == "DELETE" and path not in PATHS[:7]:
            continue  # what the other requests look at stays
        for user in USERS:
            target = f"/v1/sandboxes/sb/{route}?path={path}" + (f"&user={user}" if user is not None else "")
            target += "&part=p" if route == "files/part" else ""
            check(daemon, method, target, b"data" if method == "PUT" else None)


def test_numbers(daemon: Daemon) -> None:
    check(daemon, "POST", "/v1/sandboxes/sb/execs", json.dumps({"argv": ["true"], "exec_id": "x"}))
    for number in NUMBERS:
        for name in ("offset", "length"):
            check(daemon, "GET", f"/v1/sandboxes/sb/files?path=/etc/passwd&{name}={number}")
        for name in ("offset", "limit"):
            check(daemon, "GET", f"/v1/sandboxes/sb/execs/x/output?{name}={number}")
        for name in ("mode", "umask", "mtime_ns", "offset", "size"):
            check(daemon, "PUT", f"/v1/sandboxes/sb/files?path=/tmp/n&{name}={number}", b"x")
        for name in ("cursor", "limit"):
            check(daemon, "GET", f"/v1/sandboxes/sb/files/list?path=/etc&{name}={number}")
        for name in ("since", "limit"):
            check(daemon, "GET", f"/v1/events?{name}={number}")


@pytest.mark.parametrize("body", EXECS, ids=lambda body: str(body)[:40])
def test_commands(daemon: Daemon, body: dict[str, object]) -> None:
    check(daemon, "POST", "/v1/sandboxes/sb/execs", json.dumps(body))
    check(daemon, "POST", "/v1/sandboxes/sb/execs/start", json.dumps(body))


@pytest.mark.parametrize(
    "ref", ["", "\0", "\udcff", "x" * 7000, "../../etc", "sha256:zz", "a@sha256:" + "0" * 64, "*"]
)
def test_image_references(daemon: Daemon, ref: str) -> None:
    target = quote(ref, errors="surrogateescape")
    check(daemon, "GET", f"/v1/images/inspect?ref={target}")
    check(daemon, "DELETE", f"/v1/images?ref={target}")
    for body in (
        {"image": ref},
        {"image": "debian:trixie", "workspace": ref},
        {"image": "debian:trixie", "toolkits": [ref]},
    ):
        check(daemon, "POST", "/v1/sandboxes", json.dumps({"spec": body}))


def test_an_update_takes_no_label_that_a_spec_would_not(daemon: Daemon) -> None:
    for labels in ({"\xf1": "x"}, {"": ""}, {"a b": "x"}, {"ok": "v" * 129}, {f"l{n}": "" for n in range(65)}):
        status, data = request(daemon.socket, "PATCH", "/v1/sandboxes/sb", json.dumps({"labels": labels}))
        assert status == 422, data
        assert json.loads(data)["details"]["errors"][0]["path"].startswith("labels")
    with daemon.client() as client:
        assert [sandbox.spec.labels for sandbox in client.list().sandboxes] == [{}]


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize("part", ["", "a%2Fb", "..%2F..%2Fetc", "%0B", "%C2%9B", "x" * 65, "%ff"])
def test_names_of_parts_are_checked(daemon: Daemon, method: str, part: str) -> None:
    target = f"/v1/sandboxes/sb/files{'/part' if method == 'GET' else ''}?path=/root/f&part={part}"
    status, data = request(daemon.socket, method, target, b"x" if method == "PUT" else None)
    wire = json.loads(data)
    assert (status, wire["code"]) == (422, "invalid-spec")
    assert wire["message"].startswith("query.part: must be 1 to 64 of A-Z, a-z, 0-9, '_' and '-'")


def test_a_part_of_an_upload_tells_how_much_arrived_before_the_daemon_died(daemon: Daemon) -> None:
    data = bytes(range(256)) * 400
    target = "/v1/sandboxes/sb/files?path=/root/resumed&part=p1"
    head = f"PUT {target} HTTP/1.1\r\nHost: d\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as cut:
        cut.connect(str(daemon.socket))
        cut.sendall(head.encode() + data[:50_000])
        assert wait_for_part(daemon, 50_000) == 50_000
        # One at a time: the part is somebody's.
        status, answer = request(daemon.socket, "PUT", f"{target}&offset=50000", data[50_000:])
        assert (status, json.loads(answer)["code"]) == (409, "conflict")
        daemon.restart()
    assert wait_for_part(daemon, 50_000) == 50_000
    status, answer = request(daemon.socket, "PUT", f"{target}&offset=50000", data[50_000:])
    assert (status, json.loads(answer).get("size_bytes")) == (200, len(data)), answer
    assert request(daemon.socket, "GET", "/v1/sandboxes/sb/files?path=/root/resumed") == (200, data)
    assert request(daemon.socket, "GET", "/v1/sandboxes/sb/files/part?path=/root/resumed&part=p1")[0] == 404


def test_a_client_that_leaves_its_upload_leaves_nothing(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as cut:
        cut.connect(str(daemon.socket))
        target = "/v1/sandboxes/sb/files?path=/root/resumed&part=p2"
        cut.sendall(f"PUT {target} HTTP/1.1\r\nHost: d\r\nContent-Length: 9\r\n\r\n1234".encode())
        assert wait_for_part(daemon, 4, "p2") == 4
    until(lambda: wait_for_part(daemon, 0, "p2") < 0)


def wait_for_part(daemon: Daemon, size: int, part: str = "p1") -> int:
    """How much of it is there, once there is as much; -1 when there is none."""
    deadline = time.monotonic() + (60 if size else 0)
    while True:
        status, answer = request(daemon.socket, "GET", f"/v1/sandboxes/sb/files/part?path=/root/resumed&part={part}")
        found = int(json.loads(answer)["size_bytes"]) if status == 200 else -1
        if found >= size or time.monotonic() > deadline:
            return found
        time.sleep(0.02)
