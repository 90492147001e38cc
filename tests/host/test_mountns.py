# SPDX-License-Identifier: Apache-2.0
"""Mount namespaces, seen from other processes: nsenter, /proc/PID/mountinfo, and a daemon that is killed."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.linux import mount, mountns, proc
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
OURS = Path("/proc/self/ns/mnt")


def python(program: str, *args: str | Path) -> proc.Completed:
    """Another process of ours, that imports what we import."""
    argv = ["python3", "-c", program, *args]
    return proc.run_blocking(argv, timeout_s=300, check=False, env={**proc.MINIMAL_ENV, "PYTHONPATH": str(ROOT)})


def inside(namespace: int | Path, *command: str | Path) -> str:
    """Output of a command run in the namespace by nsenter."""
    if isinstance(namespace, Path):
        return proc.run_blocking(["nsenter", f"--mount={namespace}", *command], timeout_s=60).stdout.decode()
    argv = ["nsenter", "--mount=/proc/self/fd/3", *command]
    return proc.run_blocking(argv, timeout_s=60, fd_map={3: namespace}).stdout.decode()


def mount_tmpfs(target: Path, name: str = "marker") -> None:
    fd = mount.new_mount("tmpfs", source=name)
    mount.attach(fd, target)
    os.close(fd)


def sources(pid: int | str = "self") -> list[str]:
    return [line.split(" - ")[1].split()[1] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]


@pytest.fixture
def target(disk: Path) -> Path:
    path = disk / "target"
    path.mkdir()
    return path


@pytest.fixture
def pin(disk: Path) -> Iterator[Path]:
    """Where to pin a namespace. Where mounts are shared, as on a host with systemd, its folder becomes a mount."""
    holder = disk / "pins"
    holder.mkdir()
    yield holder / "mnt"
    mountns.unpin(holder / "mnt")
    if f" {holder} " in Path("/proc/self/mountinfo").read_text():
        proc.run_blocking(["umount", holder], timeout_s=60)


def test_new_namespace_is_private_and_not_ours() -> None:
    fd = mountns.create_private()
    try:
        assert os.fstat(fd).st_ino != OURS.stat().st_ino
        assert not os.get_inheritable(fd)
        assert set(inside(fd, "findmnt", "-n", "-o", "PROPAGATION").split()) == {"private"}
    finally:
        os.close(fd)


@pytest.mark.usefixtures("own_mounts")
def test_nothing_propagates_out_of_a_shared_mount(target: Path) -> None:
    """As on a host with systemd, whose mounts are shared."""
    mount_tmpfs(target, "parent")
    proc.run_blocking(["mount", "--make-shared", target], timeout_s=60)
    (target / "inner").mkdir()
    fd = mountns.create_private()
    mountns.run_in(fd, lambda: mount_tmpfs(target / "inner"))
    copy = mountns.open_namespace("/proc/thread-self/ns/mnt")
    mountns.run_in_copy(copy, lambda: mount_tmpfs(target / "inner"))
    assert set(inside(fd, "findmnt", "-n", "-o", "PROPAGATION").split()) == {"private"}
    assert "marker" in inside(fd, "cat", "/proc/self/mountinfo")
    assert "marker" not in sources("thread-self")
    for namespace in (fd, copy):
        os.close(namespace)


def test_mounts_made_by_run_in_stay_in_the_namespace(target: Path) -> None:
    before = OURS.stat().st_ino
    fd = mountns.create_private()
    mountns.run_in(fd, lambda: mount_tmpfs(target))
    assert "marker" in inside(fd, "cat", "/proc/self/mountinfo")
    assert "marker" not in sources()
    assert OURS.stat().st_ino == before
    os.close(fd)


def test_run_in_copy_leaves_the_namespace_as_it_was(target: Path) -> None:
    fd = mountns.create_private()
    mountns.run_in(fd, lambda: mount_tmpfs(target, "shared-by-copy"))

    def work() -> tuple[list[str], bytes]:
        mount_tmpfs(target)
        # The child is started by this thread, so it sees what this thread sees.
        return sources("thread-self"), proc.run_blocking(["cat", "/proc/self/mountinfo"], timeout_s=60).stdout

    seen, by_child = mountns.run_in_copy(fd, work)
    assert {"marker", "shared-by-copy"} <= set(seen)
    assert b"marker" in by_child
    assert "marker" not in inside(fd, "cat", "/proc/self/mountinfo")
    os.close(fd)


def test_child_keeps_the_copy_alive_after_the_thread(target: Path) -> None:
    fd = mountns.create_private()

    def work() -> int:
        mount_tmpfs(target)
        (target / "file").write_text("kept")
        script = "sleep 60 </dev/null >/dev/null 2>&1 & echo $!"
        return int(proc.run_blocking(["sh", "-c", script], timeout_s=60).stdout)

    pid = mountns.run_in_copy(fd, work)
    os.close(fd)
    try:
        assert "marker" in sources(pid)
        assert Path(f"/proc/{pid}/root/{target}/file").read_text() == "kept"
    finally:
        os.kill(pid, signal.SIGKILL)


def test_async_children_are_started_by_the_loop_not_by_the_thread(target: Path) -> None:
    """Why launches use run_blocking: run belongs to the loop's thread, whose namespace is the process's."""
    fd = mountns.create_private()

    async def scenario() -> bytes:
        def work() -> None:
            mount_tmpfs(target)

        await asyncio.to_thread(mountns.run_in_copy, fd, work)
        return (await proc.run(["cat", "/proc/self/mountinfo"], timeout_s=60)).stdout

    assert b"marker" not in asyncio.run(scenario())
    os.close(fd)


def test_exceptions_come_out_with_their_type() -> None:
    fd = mountns.create_private()

    def fail() -> None:
        raise KeyError("from inside")

    with pytest.raises(KeyError, match="from inside"):
        mountns.run_in_copy(fd, fail)
    with pytest.raises(KeyError, match="from inside"):
        mountns.run_in(fd, fail)
    os.close(fd)


def test_fd_of_something_else_is_refused(disk: Path) -> None:
    with open(disk / "file", "w") as file, pytest.raises(OSError):
        mountns.run_in(file.fileno(), lambda: None)


PIN_AND_DIE = """
import os, signal, sys
from pathlib import Path
from dsecd.linux import mount, mountns
pin, target = Path(sys.argv[1]), Path(sys.argv[2])
namespace = mountns.ensure_pinned(pin)
def work():
    fd = mount.new_mount("tmpfs", source="survivor")
    mount.attach(fd, target)
    (target / "file").write_text("written before the kill")
mountns.run_in(namespace, work)
os.kill(os.getpid(), signal.SIGKILL)
"""

ENTER = """
import os, sys
from pathlib import Path
from dsecd.linux import mountns
mountns.enter_process(mountns.ensure_pinned(Path(sys.argv[1])))
print(os.getcwd(), Path(sys.argv[2], "file").read_text(), os.stat("/proc/self/ns/mnt").st_ino)
"""


def test_mounts_survive_the_kill_of_their_maker(pin: Path, target: Path) -> None:
    assert python(PIN_AND_DIE, pin, target).returncode == -signal.SIGKILL
    assert "survivor" not in sources()
    inode = pin.stat().st_ino
    for _ in range(2):
        done = python(ENTER, pin, target)
        assert done.stdout.decode().split() == ["/", "written", "before", "the", "kill", str(inode)], done.stderr
    assert inside(pin, "cat", target / "file") == "written before the kill"


def test_many_processes_agree_on_one_pin(pin: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from dsecd.linux import mountns; "
        "print(os.fstat(mountns.ensure_pinned(Path(sys.argv[1]))).st_ino)"
    )

    async def scenario() -> set[bytes]:
        env = {**proc.MINIMAL_ENV, "PYTHONPATH": str(ROOT)}
        jobs = [proc.run(["python3", "-c", program, pin], timeout_s=300, env=env) for _ in range(6)]
        return {done.stdout for done in await asyncio.gather(*jobs)}

    assert asyncio.run(scenario()) == {b"%d\n" % pin.stat().st_ino}
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    assert len([line for line in lines if f" {pin} " in line]) == 1


def test_unpin_undoes_pin_and_may_be_repeated(pin: Path) -> None:
    os.close(mountns.ensure_pinned(pin))
    assert mountns.is_pinned(pin)
    mountns.unpin(pin)
    mountns.unpin(pin)
    assert not pin.exists()
    assert not mountns.is_pinned(pin)
    assert str(pin) not in Path("/proc/self/mountinfo").read_text()


def test_plain_file_at_the_pin_is_not_taken_for_one(pin: Path) -> None:
    pin.write_text("left by a crash between making the file and binding to it")
    assert not mountns.is_pinned(pin)
    os.close(mountns.ensure_pinned(pin))
    assert mountns.is_pinned(pin)


@pytest.mark.usefixtures("own_mounts")
def test_pin_on_a_shared_mount_gets_a_private_holder(disk: Path, target: Path) -> None:
    """As on a host with systemd, where / and /run are shared with every service's namespace."""
    mount_tmpfs(target)
    proc.run_blocking(["mount", "--make-shared", target], timeout_s=60)
    holder = target / "pins"
    holder.mkdir()
    # A namespace that receives what happens on the shared mount, as a service's does.
    peer = proc.run_blocking(["sh", "-c", "unshare -m --propagation slave sleep 60 >/dev/null 2>&1 & echo $!"],
                             timeout_s=60)
    try:
        os.close(mountns.ensure_pinned(holder / "mnt"))
        done = proc.run_blocking(["findmnt", "-n", "-o", "PROPAGATION", "-M", holder], timeout_s=60)
        assert done.stdout == b"private\n"
        assert mountns.is_pinned(holder / "mnt")
        # For a moment it may still be in ours, and then have what ours has.
        until(lambda: "nsfs" not in Path(f"/proc/{int(peer.stdout)}/mountinfo").read_text())
        os.close(mountns.ensure_pinned(holder / "mnt"))
        mountns.unpin(holder / "mnt")
    finally:
        os.kill(int(peer.stdout), signal.SIGKILL)


def test_namespace_cannot_be_pinned_inside_itself(disk: Path) -> None:
    """The kernel forbids it: a namespace would keep itself alive."""
    fd = mountns.create_private()
    with pytest.raises(OSError, match="mnt"):
        mountns.run_in(fd, lambda: mountns.pin(fd, disk / "mnt"))
    os.close(fd)


def test_no_thread_or_fd_is_left() -> None:
    fd = mountns.create_private()
    fds, tasks = set(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(5):
        mountns.run_in_copy(fd, lambda: None)
    until(lambda: len(os.listdir("/proc/self/task")) <= tasks)
    assert set(os.listdir("/proc/self/fd")) <= fds
    os.close(fd)
