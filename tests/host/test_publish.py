# SPDX-License-Identifier: Apache-2.0
"""Ports on the host's loopback that lead into a sandbox for as long as it exists."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import Client
from libdsec.errors import Conflict, Denied, InvalidSpec
from libdsec.ports import parse
from libdsec.types import SandboxSpec, State
from tests.support import machines
from tests.support.daemon import Daemon
from tests.support.imports import import_python
from tests.support.waiting import until

IMAGE = "debian:python"
#: An emulated guest, on a busy machine.
_BOOTED_S = 240.0
_CHECKOUT = Path(__file__).resolve().parents[2]
#: Says its process's number, then what it hears.
_SERVER = """
import os, socket, threading
server = socket.create_server(("127.0.0.1", 8000))
def answer(connection):
    with connection:
        connection.sendall(b"%d\\n" % os.getpid())
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


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected
        for box in connected.list_all():
            connected.delete(box.id)


def make(client: Client, *publish: str) -> tuple[str, int]:
    """A sandbox with a server, and the host's port of the first that it publishes."""
    box = client.create(SandboxSpec(image=IMAGE, publish=publish, command=("python3", "-c", _SERVER)))
    until(lambda: ask(parse(box.spec.publish[0]).host_port) != "reset")
    return box.id, parse(client.inspect(box.id).spec.publish[0]).host_port


def ask(port: int, *, address: str = "127.0.0.1", timeout_s: float = 60.0) -> str:
    """What comes of a connection: "echoed", or why not."""
    try:
        with socket.create_connection((address, port), timeout_s) as connection:
            connection.sendall(b"hello")
            connection.shutdown(socket.SHUT_WR)
            said = b""
            while data := connection.recv(100):
                said += data
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "silence"
    except OSError as error:
        # Which of them depends on what of it was done when the reset came: socket(7), shutdown(2).
        if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
            raise
        return "reset"
    return "echoed" if said.endswith(b"\nhello") else f"{said!r}"


def listening(daemon: Daemon | None = None) -> set[int]:
    """Ports that anybody listens on, or only the daemon, from the kernel's own list."""
    texts = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for text in texts for line in text.splitlines()[1:]]
    own = set() if daemon is None else _sockets(daemon.pid)
    return {
        int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and (daemon is None or line[9] in own)
    }


def _sockets(pid: int) -> set[str]:
    """Numbers of a process's sockets."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {link.removeprefix("socket:[").removesuffix("]") for link in found if link.startswith("socket:[")}


def dsecctl(daemon: Daemon, *words: str) -> str:
    command = [str(_CHECKOUT / "bin/dsecctl"), "--socket", str(daemon.socket), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def told(client: Client, kind: str) -> dict[str, str]:
    """Subjects of the events of a kind, with what each says of an error."""
    return {event.subject: event.details.get("error", "") for event in client.events().events if event.kind == kind}


def _whole_stream(port: int) -> None:
    data = os.urandom(3 << 20)
    with socket.create_connection(("127.0.0.1", port), 60) as connection, connection.makefile("rb") as reading:
        reading.readline()
        for begin in range(0, len(data), 1 << 16):
            connection.sendall(data[begin : begin + (1 << 16)])
            assert reading.read(min(1 << 16, len(data) - begin)) == data[begin : begin + (1 << 16)]


def test_a_published_port_leads_into_a_sandbox_without_a_network(daemon: Daemon, client: Client) -> None:
    box, port = make(client, "0:8000", "[::1]:0:8000")
    six = parse(client.inspect(box).spec.publish[1])
    assert (ask(port), ask(six.host_port, address="::1"), six.port) == ("echoed", "echoed", 8000)
    assert client.network(box).addresses == ()
    # On loopback alone: the machine's other addresses are nobody's business.
    assert ask(port, address="127.0.0.2") == "refused"
    _whole_stream(port)
    assert f"{port}:8000,[::1]:{six.host_port}:8000" in dsecctl(daemon, "ps")


def test_it_is_taken_at_creation_or_creation_fails_and_is_free_after_the_end(daemon: Daemon, client: Client) -> None:
    box, port = make(client, "127.0.0.1:0:8000/tcp")
    with pytest.raises(Conflict, match=f"publish '127.0.0.1:{port}:80' of .*listens on that port") as refused:
        client.create(SandboxSpec(image=IMAGE, publish=("0:81", f"{port}:80")))
    assert refused.value.hint is not None
    assert [found.id for found in client.list_all()] == [box]
    assert ask(port) == "echoed"
    assert listening(daemon) == {port}
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.recv(100)
        client.delete(box)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    assert listening(daemon) == set()
    assert ask(port) == "refused"
    again = make(client, f"{port}:8000")
    assert again[1] == port


def test_it_stays_while_the_sandbox_is_paused_stopped_and_started(daemon: Daemon, client: Client) -> None:
    box, port = make(client, "0:8000")
    client.pause(box)
    assert ask(port, timeout_s=1.0) == "silence"
    with socket.create_connection(("127.0.0.1", port), 60) as waiting:
        client.resume(box)
        assert waiting.recv(100).endswith(b"\n")
    client.stop(box, grace_s=0)
    assert ask(port) == "reset"
    assert listening(daemon) == {port}
    client.start(box)
    until(lambda: ask(port) == "echoed")


def test_the_next_daemon_has_the_same_ports_at_once_and_waits_for_one_that_was_taken(daemon: Daemon) -> None:
    with daemon.client() as client:
        (one, port), (two, other) = make(client, "0:8000"), make(client, "0:8000")
        daemon.kill()
        # A process that shared its descriptors for a moment may outlive it by another.
        until(lambda: ask(port, timeout_s=1.0) == "refused")
        with socket.create_server(("127.0.0.1", other)):
            daemon.start()
            assert ask(port) == "echoed"
            found = client.inspect(two)
            assert found.state is State.RUNNING
            assert found.unpublished is not None
            assert f"publish '127.0.0.1:{other}:8000' of '{two}': somebody listens" in found.unpublished
            assert f"ss -ltnp 'sport = :{other}'" in found.unpublished
            assert client.inspect(one).unpublished is None
            assert [line.split()[0] for line in dsecctl(daemon, "ps").splitlines() if "not published" in line] == [two]
            # An event is shown when it is on the disk.
            until(lambda: told(client, "sandbox.unpublished") == {two: found.unpublished})
            assert told(client, "sandbox.published") == {}
        until(lambda: ask(other) == "echoed")
        assert client.inspect(two).unpublished is None
        assert "not published" not in dsecctl(daemon, "ps")
        until(lambda: set(told(client, "sandbox.published")) == {two})
        daemon.stop()
        daemon.start()
        assert (ask(port), ask(other)) == ("echoed", "echoed")
        assert client.inspect(one).spec.publish == (f"127.0.0.1:{port}:8000",)
        for box in (one, two):
            client.delete(box)


def test_what_cannot_be_published_is_refused_by_name(client: Client) -> None:
    with pytest.raises(InvalidSpec, match=r"port 1 '0.0.0.0:1:2': '0.0.0.0' is not .* of the loopback.*only tcp"):
        client.create(SandboxSpec.model_construct(image=IMAGE, publish=("0.0.0.0:1:2", "1:1/udp")))
    assert client.list_all() == ()


@pytest.mark.timeout(600)
def test_a_published_port_leads_into_a_microvm_through_pause_stop_and_another_daemon(daemon: Daemon) -> None:
    machines.guest_kernel()  # or skip
    with daemon.client() as client:
        spec = SandboxSpec(image=IMAGE, backend="microvm", publish=("0:8000",), command=("python3", "-c", _SERVER))
        box = client.create(spec)
        port = parse(box.spec.publish[0]).host_port
        until(lambda: ask(port) == "echoed", _BOOTED_S)
        assert listening(daemon) == {port}
        _whole_stream(port)
        client.pause(box.id)
        assert ask(port, timeout_s=1.0) == "silence"
        with socket.create_connection(("127.0.0.1", port), 60) as waiting:
            client.resume(box.id)
            assert waiting.recv(100).endswith(b"\n")
        daemon.kill()
        # A process that shared its descriptors for a moment may outlive it by another.
        until(lambda: ask(port, timeout_s=1.0) == "refused")
        daemon.start()
        assert ask(port, timeout_s=60) == "echoed"
        client.stop(box.id, grace_s=0)
        assert ask(port) == "reset"
        client.start(box.id)
        until(lambda: ask(port) == "echoed", _BOOTED_S)
        client.delete(box.id)
        assert listening(daemon) == set()


def test_ports_below_1024_are_roots(daemon: Daemon, client: Client) -> None:
    """Whoever else may use the daemon may not take one by it; the same request of root's gets it."""
    port = next(number for number in range(1023, 0, -1) if number not in listening())
    daemon.socket.chmod(0o666)
    script = (
        "import sys\nfrom libdsec import Client\nfrom libdsec.errors import DsecError\n"
        "from libdsec.types import SandboxSpec\n"
        "with Client(socket=sys.argv[1]) as client:\n"
        " for publish in sys.argv[2:]:\n"
        "  try: print(client.create(SandboxSpec(image='" + IMAGE + "', publish=(publish,))).spec.publish[0])\n"
        "  except DsecError as error: print(error.code, error, error.hint, sep='|')\n"
    )
    free = 1024
    while free in listening():
        free += 1
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "--", sys.executable, "-c", script, daemon.socket,
         f"{port}:8000", f"{free}:8000"],
        capture_output=True, text=True, check=False, cwd=_CHECKOUT,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith(f"{Denied.code}|publish '127.0.0.1:{port}:8000' of ")
    assert lines[0].endswith("ports below 1024 are root's|choose a higher host port")
    assert lines[1] == f"127.0.0.1:{free}:8000"
    assert port not in listening()
    make(client, f"{port}:8000")
    assert port in listening() and ask(port) == "echoed"
