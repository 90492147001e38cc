# SPDX-License-Identifier: Apache-2.0
"""DAMON for real: what nobody touches leaves memory, what is touched stays, and nothing is taken from anybody.

DAMON is one for the whole host: where somebody uses it already, these tests keep away.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.core import turns
from dsecd.core.turns import DamonTurns, worth_watching
from dsecd.linux import cgroup, damon, mechanisms, swap
from tests.support.waiting import until

MIB = 1 << 20
_RULES = damon.Rules(age_s=3, quota_bytes_per_s=256 * MIB)
#: Writes to 64 MiB once, then touches the first quarter of it for ever. Below lies much with nothing in it, as below
#: the heap of any program: DAMON left to itself comes to what is behind it only when this test is over.
_PROGRAM = """
import mmap
space = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
space.madvise(mmap.MADV_NOHUGEPAGE)
nothing = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE, prot=0)
noise = open("/dev/urandom", "rb").read(2048) + bytes(2048)
for at in range(0, len(space), 4096):
    space[at : at + 4096] = noise
print("ready", flush=True)
while True:
    for at in range(0, len(space) // 4, 4096):
        space[at]
"""


def _why_not() -> str:
    answer = mechanisms.by_name("damon-sysfs").check(again=True)
    if answer.works is not True:
        return f"damon-sysfs: {answer.reason}"
    return f"{damon.count()} kdamond(s) are set up here by somebody else" if damon.count() else ""


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


@pytest.fixture
def mark() -> Iterator[int]:
    chosen = damon.new_mark()
    yield chosen
    damon.give_back(chosen)
    assert damon.count() == 0


@pytest.fixture
def zram() -> Iterator[None]:
    """Somewhere to put anonymous pages."""
    number = swap.add_zram()
    try:
        swap.use_zram(number, 256 * MIB)
        yield
    finally:
        swap.remove_zram(number)


@pytest.fixture
def idle_group() -> Iterator[Path]:
    """A cgroup with a process that wrote to 64 MiB and does no more."""
    # Below the root of all, where the memory controller is.
    path = cgroup.root() / f"test-damon-{os.getpid()}"
    path.mkdir()
    program = f"open('{path}/cgroup.procs', 'w').write('0'); space = b'x' * (64 << 20); print('ready', flush=True); "
    try:
        with subprocess.Popen(["python3", "-c", f"{program}input()"], stdin=-1, stdout=-1) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield path
            process.kill()
    finally:
        path.rmdir()


@pytest.fixture
def toucher() -> Iterator[int]:
    with subprocess.Popen(["python3", "-c", _PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


def resident(pid: int, field: str = "VmRSS") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


@pytest.mark.usefixtures("zram")
def test_what_nobody_touches_is_paged_out_and_what_is_touched_stays(toucher: int, mark: int) -> None:
    before = resident(toucher)
    damon.take(1, mark)
    damon.start(0, worth_watching([toucher]), _RULES)
    until(lambda: resident(toucher, "VmSwap") >= 40 * MIB, 300)
    damon.stop(0)
    assert before > 64 * MIB
    # 16 MiB are touched all the time, beside the program itself.
    assert resident(toucher) > 16 * MIB


@pytest.mark.usefixtures("zram", "mark")
def test_a_turn_that_has_taken_next_to_all_ends_before_its_time(
    idle_group: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its time is never over while this runs.
    monkeypatch.setattr(turns, "_SETTLE_S", 3600.0)
    taken = DamonTurns(tmp_path / "mark", 1, 256 * MIB)
    taken.take()
    try:
        assert taken.start("sandbox", idle_group, 1.0)
        ended: list[turns.Ended] = []

        def over() -> bool:
            ended.extend(taken.end())
            return bool(ended)

        until(over, 240)
        assert ended[0].before_bytes - ended[0].after_bytes > 48 * MIB
        assert (taken.free, damon.runs(0)) == (1, False)
    finally:
        taken.give_back()


def test_a_kdamond_ends_with_what_it_watches_and_is_used_again(mark: int) -> None:
    damon.take(2, mark)
    for _ in range(2):
        process = subprocess.Popen(["sleep", "600"])
        damon.start(1, [damon.Target(process.pid, ((1 << 20, 2 << 20),))], _RULES)
        assert damon.runs(1)
        # proc_pid_stat(5), field 19: it has the least claim to a processor.
        thread = (damon.ADMIN / "1/pid").read_text().strip()
        assert Path(f"/proc/{thread}/stat").read_text().rpartition(")")[2].split()[16] == "19"
        assert not damon.runs(0)
        process.kill()
        process.wait()
        until(lambda: not damon.runs(1), 120)


def test_a_process_that_is_gone_cannot_be_watched(mark: int) -> None:
    damon.take(1, mark)
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(ProcessLookupError):
        damon.start(0, [damon.Target(process.pid, ((1 << 20, 2 << 20),))], _RULES)
    assert not damon.runs(0)


def test_a_later_process_takes_over_what_an_earlier_one_left_running(toucher: int, mark: int) -> None:
    damon.take(2, mark)
    damon.start(0, worth_watching([toucher]), _RULES)
    damon.take(3, mark)
    assert damon.count() == 3
    assert not any(damon.runs(index) for index in range(3))


def test_somebody_elses_kdamond_is_left_alone_running_or_not(toucher: int, mark: int) -> None:
    other = damon.new_mark() if mark != damon.new_mark() else mark + 1
    damon.take(1, other)
    try:
        for running in (False, True):
            if running:
                damon.start(0, worth_watching([toucher]), _RULES)
            with pytest.raises(damon.InUse):
                damon.take(2, mark)
            damon.give_back(mark)
            assert (damon.count(), damon.runs(0)) == (1, running)
    finally:
        damon.give_back(other)
    assert damon.count() == 0
