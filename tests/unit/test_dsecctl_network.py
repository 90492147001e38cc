# SPDX-License-Identifier: Apache-2.0
"""dsecctl and networks, against a daemon in memory."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from dsecctl.cli import cli
from libdsec import types as t
from tests.support.fake_daemon import FakeDaemon


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        fake.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie"), id="web"))
        yield fake


def call(daemon: FakeDaemon, *arguments: str) -> Result:
    return CliRunner(mix_stderr=False).invoke(cli, ["--socket", daemon.socket, *arguments])


def test_net_shows_the_policy_and_what_was_refused(daemon: FakeDaemon) -> None:
    assert call(daemon, "net", "web").stdout.split() == ["NETWORK", "may", "reach", "none"]
    policy = "tcp:203.0.113.0/24:443,udp:*:53"
    assert call(daemon, "create", "--name", "n1", "--network", policy, "debian:trixie").exit_code == 0
    lines = call(daemon, "net", "n1").stdout.splitlines()
    assert [line.split() for line in lines[1:3]] == [["may", "reach", "tcp:203.0.113.0/24:443"], ["udp:*:53"]]
    assert ["203.0.113.9", "25", "tcp", "policy"] in [line.split()[-4:] for line in lines]
    assert ["DNS", "198.18.255.254"] in [line.split() for line in lines]
    assert lines[-1].split()[-1] == "exfil.example"


def test_a_policy_is_refused_with_all_its_faults_before_the_daemon_is_asked(daemon: FakeDaemon) -> None:
    done = call(daemon, "update", "--network", "tcp:*:0,upd:*", "web")
    assert done.exit_code == 2
    assert "rule 1 'tcp:*:0', column 7" in done.stderr
    assert "rule 2 'upd:*', column 9" in done.stderr


# --- forward -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def forwarding(daemon: FakeDaemon, *ports: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """dsecctl forward as a program, and the ports that it listens on."""
    command = [sys.executable, "-m", "dsecctl", "--socket", daemon.socket, "--json", "forward", "web", *ports]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield process, [json.loads(process.stdout.readline())["port"] for _ in ports]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stdout.close()
        process.stderr.close()


def test_forward_leads_bytes_both_ways_and_ends_with_them(daemon: FakeDaemon) -> None:
    content = bytes(range(256)) * 4096
    with forwarding(daemon, "0:80", "0:80") as (process, ports):
        assert len(set(ports)) == 2
        for port in ports:
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                sender = threading.Thread(target=connection.sendall, args=(content,))
                sender.start()
                got = b""
                while len(got) < len(content):
                    got += connection.recv(1 << 16)
                sender.join()
                assert got == content
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(1) == b""
    assert process.returncode == 130


def test_forward_says_when_nobody_listens_and_goes_on(daemon: FakeDaemon) -> None:
    with forwarding(daemon, "0:81") as (process, ports):
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", ports[0]), 10) as connection:
                assert connection.recv(1) == b""
        assert process.stderr is not None
        assert "nobody listens there" in process.stderr.readline()
        assert process.poll() is None


def test_an_interrupt_ends_forward_with_its_connections_whatever_they_are_at(daemon: FakeDaemon) -> None:
    for turn in range(4):
        with forwarding(daemon, "0:80", "0:81") as (process, (answering, dead)), contextlib.ExitStack() as stack:
            open_ = [stack.enter_context(socket.create_connection(("127.0.0.1", answering), 60)) for _ in range(3)]
            for connection in open_:
                connection.sendall(b"hello")
                assert connection.recv(1) == b"h"
            # Some are being ended just when it comes.
            for _ in range(turn):
                stack.enter_context(socket.create_connection(("127.0.0.1", dead), 60))
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            for connection in open_:
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(100):
                        continue
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("text", ["x", "80:", ":80", "70000", "1:0", "1:2:3", ""])
def test_ports_that_are_none_are_refused(daemon: FakeDaemon, text: str) -> None:
    done = call(daemon, "forward", "web", text)
    assert done.exit_code == 2
    assert "[LOCAL:]PORT" in done.stderr
