# SPDX-License-Identifier: Apache-2.0
"""Sockets in directories of somebody else's lead to themselves or nowhere."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.linux import unixsocket


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    (tmp_path / "dir" / "run").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "dir" / "run" / "sock"))
        sock.listen(0)
        yield sock


async def connect(directory: Path, path: str, timeout_s: float = 60.0) -> socket.socket:
    fd = os.open(directory, os.O_RDONLY)
    try:
        return await unixsocket.connect_beneath(fd, path, timeout_s=timeout_s)
    finally:
        os.close(fd)


def test_a_socket_below_the_directory_is_reached(listener: socket.socket, tmp_path: Path) -> None:
    sock = asyncio.run(connect(tmp_path / "dir", "run/sock"))
    with sock, listener.accept()[0] as other:
        other.sendall(b"x")
        assert sock.recv(1) == b"x"


@pytest.mark.parametrize("way", ["link", "run2/sock", "../dir/run/sock", "absolute", "/run/sock"])
def test_no_way_leads_out_or_around(listener: socket.socket, tmp_path: Path, way: str) -> None:
    directory, real = tmp_path / "dir", tmp_path / "dir" / "run" / "sock"
    (directory / "link").symlink_to("run/sock")
    (directory / "run2").symlink_to("run")
    (directory / "absolute").symlink_to(real)
    if not way.startswith("/"):
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(directory / way))
            listener.accept()[0].close()
    with pytest.raises(OSError) as caught:
        asyncio.run(connect(directory, way))
    assert caught.value.errno in (errno.ELOOP, errno.EXDEV, errno.ENOTSOCK)
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_what_is_no_socket_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    for name in ("file", "fifo", "."):
        with pytest.raises(OSError) as caught:
            asyncio.run(connect(tmp_path, name))
        assert (caught.value.errno, caught.value.filename) == (errno.ENOTSOCK, name)
    with pytest.raises(FileNotFoundError):
        asyncio.run(connect(tmp_path, "missing"))


def test_a_full_backlog_is_waited_for_and_not_for_ever(listener: socket.socket, tmp_path: Path) -> None:
    async def go() -> None:
        first = await connect(tmp_path / "dir", "run/sock")
        with pytest.raises(TimeoutError):
            await connect(tmp_path / "dir", "run/sock", 0.2)
        waiting = asyncio.create_task(connect(tmp_path / "dir", "run/sock"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        listener.accept()[0].close()
        with first, await waiting:
            pass

    before = set(os.listdir("/proc/self/fd"))
    asyncio.run(go())
    assert set(os.listdir("/proc/self/fd")) <= before


def test_nobody_listening_is_refused(listener: socket.socket, tmp_path: Path) -> None:
    listener.close()
    with pytest.raises(ConnectionRefusedError) as caught:
        asyncio.run(connect(tmp_path / "dir", "run/sock"))
    assert caught.value.filename == "run/sock"
