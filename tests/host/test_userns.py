# SPDX-License-Identifier: Apache-2.0
"""User namespaces, looked at by processes that nsenter puts inside."""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsecd.linux import proc, userns


@contextmanager
def namespace(base: int, size: int = userns.SIZE) -> Iterator[int]:
    fd = userns.create(base, size)
    try:
        yield fd
    finally:
        os.close(fd)


def inside(fd: int, *command: str) -> str:
    argv = ["nsenter", "--user=/proc/self/fd/3", "--setuid=0", "--setgid=0", *command]
    return proc.run_blocking(argv, timeout_s=60, fd_map={3: fd}).stdout.decode()


def test_ids_inside_and_outside(disk: Path) -> None:
    """A file made by root inside has the base id outside, and one of id N has base + N."""
    disk.chmod(0o777)
    with namespace(1_000_000) as fd:
        assert inside(fd, "id", "-u").strip() == "0"
        inside(fd, "sh", "-c", f"touch {disk}/root; touch {disk}/last; chown 65535:7 {disk}/last")
    done = proc.run_blocking(["stat", "-c", "%n %u %g", "root", "last"], timeout_s=60, cwd=disk)
    assert done.stdout == b"root 1000000 1000000\nlast 1065535 1000007\n"


def test_each_belongs_to_its_own_root_and_the_caller_stays_who_it_is() -> None:
    """What the kernel counts per user is not counted for us.  ioctl_ns(2), NS_GET_OWNER_UID."""
    owner = ctypes.c_uint32()
    with namespace(3_000_000) as fd:
        assert ctypes.CDLL(None).ioctl(fd, ctypes.c_ulong(0xB704), ctypes.byref(owner)) == 0
    assert owner.value == 3_000_000
    status = Path("/proc/thread-self/status").read_text().splitlines()
    assert [line.split()[1:] for line in status if line.startswith("Uid:")] == [["0"] * 4]
    assert proc.run_blocking(["id", "-u"], timeout_s=60).stdout == b"0\n"


def test_range_ends_where_it_should(disk: Path) -> None:
    disk.chmod(0o777)
    with namespace(1_000_000, 10) as fd:
        columns = [line.split() for line in inside(fd, "cat", "/proc/self/uid_map", "/proc/self/gid_map").splitlines()]
        # Read from inside, the second column is in terms of the parent only for who is not in the namespace.
        assert [(line[0], line[2]) for line in columns] == [("0", "10"), ("0", "10")]
        inside(fd, "sh", "-c", f"touch {disk}/file && chown 9 {disk}/file")
        with pytest.raises(proc.ProcessFailed, match="Invalid argument"):
            inside(fd, "chown", "10", f"{disk}/file")
    assert (disk / "file").stat().st_uid == 1_000_009


def test_each_is_another_namespace_and_not_ours() -> None:
    with namespace(1_000_000) as one, namespace(1_000_000) as two:
        inodes = {os.fstat(one).st_ino, os.fstat(two).st_ino, os.stat("/proc/self/ns/user").st_ino}
    assert len(inodes) == 3


def test_fd_is_close_on_exec_and_no_process_stays() -> None:
    before = Path("/proc/thread-self/children").read_text()
    with namespace(1_000_000) as fd:
        assert not os.get_inheritable(fd)
        assert Path("/proc/thread-self/children").read_text() == before


@pytest.mark.parametrize(("base", "size"), [(-1, 10), (0, 0), (1 << 32, 1), ((1 << 32) - 5, 6)])
def test_range_outside_32_bits_is_refused(base: int, size: int) -> None:
    with pytest.raises(ValueError, match="id range"):
        userns.create(base, size)


def test_made_by_many_threads_at_once() -> None:
    fds: list[int] = []
    threads = [threading.Thread(target=lambda: fds.append(userns.create(2_000_000))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({os.fstat(fd).st_ino for fd in fds}) == 16
    for fd in fds:
        os.close(fd)
