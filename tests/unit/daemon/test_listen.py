# SPDX-License-Identifier: Apache-2.0
"""The listening socket: its mode, what it may replace, and systemd's."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd import listen
from libdsec.errors import Refused


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_mode_is_the_one_asked_for_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "made" / "sock"
    with listen.bound(path, mode, "no-such-group"):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        connect(path)
        assert [p.name for p in path.parent.iterdir()] == ["sock"]


@pytest.mark.usefixtures("open_umask")
def test_the_socket_is_closed_to_others_until_it_has_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, modes = tmp_path / "sock", []
    monkeypatch.setattr(listen, "_group", lambda _: modes.append(stat.S_IMODE(path.stat().st_mode)))
    listen.bound(path, 0o666, "group").close()
    assert modes == [0o600]


def test_a_socket_that_nobody_serves_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    listen.bound(path, 0o600, "none").close()
    assert path.exists()
    with pytest.raises(ConnectionRefusedError):
        connect(path)
    with listen.bound(path, 0o600, "none"):
        connect(path)


def test_a_socket_that_somebody_serves_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with listen.bound(path, 0o600, "none"):
        with pytest.raises(Refused, match="another process serves it"):
            listen.bound(path, 0o600, "none")
        connect(path)
        listen.remove(path)
        assert path.exists()
    listen.remove(path)
    assert not path.exists()


def test_something_else_than_a_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    path.write_text("precious")
    with pytest.raises(Refused, match="something else than a socket is there"):
        listen.bound(path, 0o600, "none")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="something else than a socket is there"):
        listen.bound(tmp_path / "link", 0o600, "none")
    assert path.read_text() == "precious"


_ADOPT = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=sys.argv[2])
from dsecd import listen
from libdsec.errors import Refused
try:
    sock = listen.adopted(os.environ)
    print("adopted", sock.getsockname(), os.get_inheritable(3), "LISTEN_FDS" in os.environ)
except Refused as error:
    print("refused", error)
"""


def adopt(sock: socket.socket, count: str = "1") -> str:
    done = subprocess.run(
        [sys.executable, "-c", _ADOPT, str(sock.fileno()), count],
        pass_fds=[sock.fileno()], capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def test_systemds_socket_is_taken_over(tmp_path: Path) -> None:
    with listen.bound(tmp_path / "sock", 0o600, "none") as sock:
        assert adopt(sock) == f"adopted {tmp_path}/sock False False\n"
        assert "expected 1, got 2" in adopt(sock, "2")


def test_what_does_not_listen_is_not_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        assert "refused take over the socket from systemd: it is no listening Unix stream socket" in adopt(
            deaf
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        assert "refused" in adopt(datagrams)


def test_sockets_for_another_process_are_not_ours() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1"}
    assert listen.adopted(environ) is None
    assert environ == {}
