# SPDX-License-Identifier: Apache-2.0
"""Peer credentials of real connections from processes with other ids."""

import os
import socket
from collections.abc import Iterator

import pytest

from dsecd.linux import peercred, proc


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        # Abstract, so that no path keeps other users away.
        sock.bind(f"\0dsec-test-peer-{os.getpid()}")
        sock.listen(8)
        yield sock


def connect_as(*ids: str) -> int:
    """A process with ids set by setpriv connects and leaves; its pid."""
    name = f"dsec-test-peer-{os.getpid()}"
    program = f"import os, socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}'); print(os.getpid())"
    done = proc.run_blocking(["setpriv", *ids, "--", "python3", "-c", program], timeout_s=300)
    return int(done.stdout)


def test_ids_and_groups_of_the_peer(listener: socket.socket) -> None:
    pid = connect_as("--reuid=1234", "--regid=2345", "--groups=10,70000,5")
    connection, _ = listener.accept()
    with connection:
        found = peercred.peer(connection)
    # The process is gone by now: the kernel kept what it was when it connected.
    assert (found.pid, found.uid, found.gid) == (pid, 1234, 2345)
    assert sorted(found.groups) == [5, 10, 70000]


def test_peer_without_groups(listener: socket.socket) -> None:
    connect_as("--reuid=1", "--regid=2", "--clear-groups")
    connection, _ = listener.accept()
    with connection:
        assert peercred.peer(connection).groups == ()


def test_more_groups_than_the_first_guess(listener: socket.socket) -> None:
    groups = list(range(1000, 1500))
    connect_as("--reuid=1", "--regid=2", "--groups=" + ",".join(map(str, groups)))
    connection, _ = listener.accept()
    with connection:
        assert sorted(peercred.peer(connection).groups) == groups


def test_ids_at_the_time_of_connecting_count(listener: socket.socket) -> None:
    """A descriptor handed on, or a process that drops its privileges afterwards, does not change the answer."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            assert peercred.peer(connection).pid == os.getpid()
            assert peercred.peer(connection).uid == os.getuid()


def test_other_sockets_are_refused() -> None:
    with socket.socket(socket.AF_INET) as inet, pytest.raises(OSError, match="not a Unix socket"):
        peercred.peer(inet)
    with socket.socket(socket.AF_UNIX) as alone, pytest.raises(OSError, match="not connected"):
        peercred.peer(alone)
