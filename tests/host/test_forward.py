# SPDX-License-Identifier: Apache-2.0
"""Connections into sandboxes that have no network."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from libdsec import AsyncClient, Client
from libdsec.errors import InvalidSpec, Refused, WrongState
from libdsec.types import ExecRequest, SandboxSpec
from tests.support import machines
from tests.support.backends import KINDS, Kind
from tests.support.daemon import Daemon
from tests.support.imports import import_python
from tests.support.waiting import until

IMAGE = "debian:python"
_SERVER = """
import socket, sys, threading
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
print("up", flush=True)
def answer(connection):
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
while True:
    threading.Thread(target=answer, args=(server.accept()[0],)).start()
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(config=machines.config_if_any()) as running:
        import_python(running, IMAGE)
        yield running


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    found.require()
    return found


@pytest.fixture(scope="module")
def box(client: Client, kind: Kind) -> str:
    """A sandbox without a network, with a server on each loopback."""
    box = client.create(SandboxSpec(image=IMAGE, backend=kind.name)).id
    for address, port in (("127.0.0.1", "8000"), ("::1", "8006")):
        server = client.exec_start(box, ExecRequest(argv=("python3", "-c", _SERVER, address, port)))
        until_printed(client, box, server.exec_id, b"up\n")
    return box


@pytest.mark.parametrize("port", [8000, 8006])
def test_a_port_is_reached_without_a_network(client: Client, box: str, port: int) -> None:
    assert client.exec(box, ExecRequest(argv=("tail", "-n", "+2", "/proc/net/route"))).text == ""
    tunnel = client.forward(box, port)
    tunnel.send(b"hello")
    assert tunnel.receive() == b"hello"
    tunnel.end()
    assert tunnel.receive() == b""
    tunnel.close()


def test_many_large_streams_at_once_arrive_whole(daemon: Daemon, box: str, kind: Kind) -> None:
    content = bytes(range(256)) * kind.count(8 << 12)

    async def one(client: AsyncClient) -> None:
        tunnel = await client.forward(box, 8000)

        async def send() -> None:
            for at in range(0, len(content), 1 << 18):
                await tunnel.send(content[at : at + (1 << 18)])
            await tunnel.end()

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            got = bytearray()
            while data := await tunnel.receive():
                got += data
        await tunnel.close()
        assert got == content

    async def all_() -> None:
        async with AsyncClient(daemon.socket) as client, asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(one(client))

    asyncio.run(all_())


def test_what_cannot_be_reached_is_told(client: Client, box: str, kind: Kind) -> None:
    with pytest.raises(Refused, match="port 9 of .*nobody listens"):
        client.forward(box, 9)
    with pytest.raises(InvalidSpec):
        client.forward(box, 0)
    stopped = client.create(SandboxSpec(image=IMAGE, backend=kind.name)).id
    client.stop(stopped, grace_s=0)
    with pytest.raises(WrongState):
        client.forward(stopped, 8000)
    client.delete(stopped)


_GREEDY = """
import socket, sys
server = socket.create_server(("127.0.0.1", 8001))
print("up", flush=True)
while True:
    connection, _peer = server.accept()
    try:
        while True:
            connection.sendall(bytes(65536))
    except OSError:
        print("gone", flush=True)
"""


def test_who_does_not_read_holds_up_nobody_and_a_client_that_goes_is_noticed(client: Client, box: str) -> None:
    server = client.exec_start(box, ExecRequest(argv=("python3", "-c", _GREEDY)))
    until_printed(client, box, server.exec_id, b"up\n")
    silent = client.forward(box, 8001)
    other = client.forward(box, 8000)
    other.send(b"hello")
    assert other.receive() == b"hello"
    assert client.exec(box, ExecRequest(argv=("echo", "alive"))).text == "alive\n"
    other.close()
    silent.close()
    until_printed(client, box, server.exec_id, b"up\ngone\n")


def until_printed(client: Client, box: str, exec_id: str, printed: bytes) -> None:
    until(lambda: client.exec_output(box, exec_id).data == printed, 60)


def test_connections_end_with_the_sandbox_and_with_the_client(client: Client, kind: Kind) -> None:
    box = client.create(SandboxSpec(image=IMAGE, backend=kind.name)).id
    server = client.exec_start(box, ExecRequest(argv=("python3", "-c", _SERVER, "127.0.0.1", "8000")))
    until_printed(client, box, server.exec_id, b"up\n")
    left = client.forward(box, 8000)
    left.send(b"x")
    assert left.receive() == b"x"
    kept = client.forward(box, 8000)
    left.close()
    client.stop(box, grace_s=0)
    with contextlib.suppress(Exception):
        assert kept.receive() == b""
    kept.close()
    client.delete(box)
