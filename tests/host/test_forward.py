# SPDX-License-Identifier: Apache-2.0
"""Connections into sandboxes that have no network."""

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest

from libdsec import AsyncClient, Client
from libdsec.errors import InvalidSpec, Refused, WrongState
from libdsec.types import ExecRequest, SandboxSpec
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar

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
    with Daemon() as running:
        with running.client() as client:
            tar = str(debian_tar(include=("python3",)))
            client.finish(client.image_import(name=IMAGE, source=tar, kind="rootfs-tar"))
        yield running


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def box(client: Client) -> str:
    """A sandbox without a network, with a server on each loopback."""
    box = client.create(SandboxSpec(image=IMAGE)).id
    for address, port in (("127.0.0.1", "8000"), ("::1", "8006")):
        server = client.exec_start(box, ExecRequest(argv=("python3", "-c", _SERVER, address, port)))
        deadline = time.monotonic() + 20
        while client.exec_output(box, server.exec_id).data != b"up\n":
            assert time.monotonic() < deadline
            time.sleep(0.05)
    return box


@pytest.mark.parametrize("port", [8000, 8006])
def test_a_port_is_reached_without_a_network(client: Client, box: str, port: int) -> None:
    assert client.exec(box, ExecRequest(argv=("ls", "/sys/class/net"))).text == "lo\n"
    tunnel = client.forward(box, port)
    tunnel.send(b"hello")
    assert tunnel.receive() == b"hello"
    tunnel.end()
    assert tunnel.receive() == b""
    tunnel.close()


def test_many_large_streams_at_once_arrive_whole(daemon: Daemon, box: str) -> None:
    content = bytes(range(256)) * (8 << 12)

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


def test_what_cannot_be_reached_is_told(client: Client, box: str) -> None:
    with pytest.raises(Refused, match="port 9 of .*nobody listens"):
        client.forward(box, 9)
    with pytest.raises(InvalidSpec):
        client.forward(box, 0)
    stopped = client.create(SandboxSpec(image=IMAGE)).id
    client.stop(stopped, grace_s=0)
    with pytest.raises(WrongState):
        client.forward(stopped, 8000)
    client.delete(stopped)


def test_connections_end_with_the_sandbox_and_with_the_client(daemon: Daemon, client: Client) -> None:
    box = client.create(SandboxSpec(image=IMAGE)).id
    server = client.exec_start(box, ExecRequest(argv=("python3", "-c", _SERVER, "127.0.0.1", "8000")))
    while client.exec_output(box, server.exec_id).data == b"":
        time.sleep(0.05)
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
