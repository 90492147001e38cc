# SPDX-License-Identifier: Apache-2.0
"""cgroups without any controller: grouping, delegation, freezing, killing, removal.

Read back from /proc/PID/cgroup, /proc/PID/stat and the directory itself.
"""

import asyncio
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.linux import cgroup, proc
from tests.support.waiting import until


@pytest.fixture
def group() -> Iterator[Path]:
    path = cgroup.root() / cgroup.own().lstrip("/") / f"test-{os.getpid()}"
    cgroup.create(path)
    yield path
    if path.exists():
        (path / "cgroup.freeze").write_text("0")
        (path / "cgroup.kill").write_text("1")
        cgroup.remove(path)


def start(group: Path, script: str = "exec sleep 60") -> int:
    """A process in the group, not our child; its pid."""
    inner = f"echo $$ > {group}/cgroup.procs; {script}"
    done = proc.run_blocking(
        ["sh", "-c", 'setsid sh -c "$0" >/dev/null 2>&1 & echo $!', inner], timeout_s=60
    )
    pid = int(done.stdout)
    until(lambda: Path(f"/proc/{pid}/cgroup").read_text().strip().endswith(group.name))
    return pid


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_root_is_where_findmnt_sees_it() -> None:
    done = proc.run_blocking(["findmnt", "-n", "-o", "TARGET", "-t", "cgroup2"], timeout_s=60)
    assert str(cgroup.root()) in done.stdout.decode().split("\n")


def test_create_makes_parents_and_may_be_repeated(group: Path) -> None:
    for _ in range(2):
        cgroup.create(group / "a" / "b")
    assert (group / "a" / "b" / "cgroup.procs").exists()
    assert cgroup.children(group) == [group / "a"]


def test_delegate_gives_the_files_away_and_no_others(group: Path) -> None:
    cgroup.delegate(group, 100_000)
    done = proc.run_blocking(["find", group, "-maxdepth", "1", "-uid", "100000", "-gid", "100000"], timeout_s=60)
    names = {Path(line).name for line in done.stdout.decode().splitlines()}
    assert names == {group.name, "cgroup.procs", "cgroup.threads", "cgroup.subtree_control"}
    # What that user can do, and what not.
    as_user = ["setpriv", "--reuid=100000", "--regid=100000", "--clear-groups", "--"]
    proc.run_blocking([*as_user, "mkdir", group / "inner"], timeout_s=60)
    with pytest.raises(proc.ProcessFailed):
        proc.run_blocking([*as_user, "sh", "-c", f"echo 1 > {group}/cgroup.freeze"], timeout_s=60)


def test_processes_are_seen_where_they_are(group: Path) -> None:
    inner = group / "inner"
    cgroup.create(inner)
    assert not cgroup.populated(group)
    pid = start(inner)
    assert cgroup.populated(group)
    assert cgroup.procs(group) == []
    assert cgroup.procs(inner) == [pid]
    assert cgroup.procs(group, recursive=True) == [pid]


def test_attach_moves_a_process(group: Path) -> None:
    cgroup.create(group / "a")
    cgroup.create(group / "b")
    pid = start(group / "a")
    cgroup.attach(group / "b", pid)
    assert Path(f"/proc/{pid}/cgroup").read_text().strip().endswith(f"/{group.name}/b")
    with pytest.raises(cgroup.AttributeRefused) as caught:
        cgroup.attach(group / "b", 1 << 22)
    assert caught.value.errno == errno.ESRCH


def test_kill_ends_a_tree_that_ignores_signals_and_leaves_others_alone(group: Path) -> None:
    for name in ("victim", "other"):
        cgroup.create(group / name)
    loop = "while :; do sleep 1; done"
    stubborn = f"trap '' TERM INT HUP; setsid sh -c 'trap \"\" TERM; {loop}' & {loop}"
    start(group / "victim", stubborn)
    other = start(group / "other")
    cgroup.kill(group / "victim")
    assert asyncio.run(cgroup.wait_empty(group / "victim", 60))
    assert exists(other)
    assert cgroup.procs(group / "victim") == []


def test_kill_reaches_frozen_processes(group: Path) -> None:
    pid = start(group)
    assert asyncio.run(cgroup.freeze(group, 60))
    cgroup.kill(group)
    assert asyncio.run(cgroup.wait_empty(group, 60))
    # A process leaves its cgroup a moment before it has ended.
    until(lambda: not exists(pid))


def test_freeze_stops_and_thaw_resumes(group: Path) -> None:
    pid = start(group, "while :; do :; done")
    assert asyncio.run(cgroup.freeze(group, 60))
    assert (group / "cgroup.events").read_text().split("\n")[1] == "frozen 1"
    before = cpu_ticks(pid)
    time.sleep(0.15)
    assert cpu_ticks(pid) == before
    assert cgroup.frozen(group)
    assert asyncio.run(cgroup.thaw(group))
    until(lambda: cpu_ticks(pid) > before, 60)
    assert not cgroup.frozen(group)


def test_thaw_below_a_frozen_parent_says_it_is_still_frozen(group: Path) -> None:
    cgroup.create(group / "inner")
    start(group / "inner")
    assert asyncio.run(cgroup.freeze(group, 60))
    assert not asyncio.run(cgroup.thaw(group / "inner", 0.05))
    assert asyncio.run(cgroup.thaw(group))


def test_freezing_does_not_block_the_loop(group: Path) -> None:
    """The waiting is for the loop: another task runs meanwhile."""
    cgroup.create(group / "inner")
    start(group / "inner")

    async def scenario() -> int:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(turn())
        await cgroup.freeze(group, 60)
        assert not await cgroup.thaw(group / "inner", 0.1)
        task.cancel()
        await cgroup.thaw(group)
        return turns

    assert asyncio.run(scenario()) > 10


def test_remove_takes_the_whole_tree_and_may_be_repeated(group: Path) -> None:
    for path in ("a/b/c", "a/d", "e"):
        cgroup.create(group / path)
    for _ in range(2):
        cgroup.remove(group)
        assert not group.exists()


def test_remove_waits_for_processes_that_are_leaving(group: Path) -> None:
    cgroup.create(group / "a")
    pids = [start(group / "a") for _ in range(5)]
    timer = threading.Timer(0.1, lambda: cgroup.kill(group))
    timer.start()
    cgroup.remove(group, timeout_s=60)
    timer.join()
    assert not group.exists()
    until(lambda: not any(exists(pid) for pid in pids))


def test_remove_of_a_busy_group_is_bounded_and_names_a_pid(group: Path) -> None:
    pid = start(group)
    started = time.monotonic()
    with pytest.raises(OSError, match=rf"still busy after 0\.05 s, pids {pid}") as caught:
        cgroup.remove(group, timeout_s=0.05)
    assert caught.value.errno == errno.EBUSY
    assert time.monotonic() - started < 30
    assert not cgroup.try_remove(group)
    assert exists(pid)


def test_deep_tree_made_by_a_sandbox_is_removed(group: Path) -> None:
    """A sandbox may nest as deep as cgroup.max.depth allows; names add up beyond nothing, but recursion would."""
    path = group
    for _ in range(200):
        path = path / "d"
    cgroup.create(path)
    cgroup.remove(group)
    assert not group.exists()


def test_refused_value_names_file_value_and_reason(group: Path) -> None:
    with pytest.raises(cgroup.AttributeRefused, match="write '7'") as caught:
        cgroup.write(group, "cgroup.freeze", 7)
    assert caught.value.errno == errno.ERANGE
    assert caught.value.path == group / "cgroup.freeze"
    assert caught.value.filename == str(group / "cgroup.freeze")
    assert caught.value.value == "7"


def test_write_never_makes_a_plain_file(tmp_path: Path) -> None:
    with pytest.raises(cgroup.AttributeRefused) as caught:
        cgroup.write(tmp_path, "memory.max", "1")
    assert caught.value.errno == errno.ENOENT
    assert os.listdir(tmp_path) == []


def test_kill_of_something_that_is_no_cgroup_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(cgroup.AttributeRefused):
        cgroup.kill(tmp_path)


def test_gone_group_reads_as_nothing(group: Path) -> None:
    gone = group / "gone"
    cgroup.kill(gone)
    cgroup.remove(gone)
    assert cgroup.stat(gone) == {}
    assert cgroup.procs(gone, recursive=True) == []
    assert cgroup.children(gone) == []
    assert cgroup.read(gone, "cgroup.type") is None
    assert not cgroup.populated(gone)
    assert not cgroup.frozen(gone)
    assert cgroup.controllers(gone) == frozenset()
    assert asyncio.run(cgroup.wait_empty(gone, 1))
    with pytest.raises(OSError):
        asyncio.run(cgroup.freeze(gone, 1))


def test_attribute_of_a_group_removed_after_the_open_reads_as_nothing(group: Path) -> None:
    """ENODEV on read, not ENOENT on open: the order cgroups vanish in."""
    cgroup.create(group / "short")
    fd = os.open(group / "short", os.O_RDONLY)
    events = os.open("cgroup.events", os.O_RDONLY, dir_fd=fd)
    cgroup.remove(group / "short")
    with pytest.raises(OSError) as caught:
        os.read(events, 100)
    assert caught.value.errno == errno.ENODEV
    os.close(fd)
    # The same through our function: a link to the open file stands for the race.
    assert cgroup.read(Path("/proc/self/fd"), str(events)) is None
    os.close(events)


def test_stat_counts_without_controllers(group: Path) -> None:
    cgroup.create(group / "a")
    cgroup.create(group / "b")
    pid = start(group / "a", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; exec sleep 60")
    until(lambda: cgroup.stat(group).get("cpu.usage_usec", 0) > 0)
    found = cgroup.stat(group)
    assert found["cgroup.nr_descendants"] == 2
    # The kernel counts nanoseconds, and rounds each of the three down by itself.
    assert found["cpu.usage_usec"] - found["cpu.user_usec"] - found["cpu.system_usec"] in (0, 1)
    os.kill(pid, signal.SIGKILL)


def test_controllers_agree_with_the_file(group: Path) -> None:
    text = proc.run_blocking(["cat", group / "cgroup.controllers"], timeout_s=60).stdout.decode()
    assert cgroup.controllers(group) == frozenset(text.split())


def test_enabling_an_absent_controller_is_refused(group: Path) -> None:
    with pytest.raises(cgroup.AttributeRefused, match=r"\+nonsense"):
        cgroup.enable(group, frozenset({"nonsense"}))
    cgroup.enable(group, frozenset())
