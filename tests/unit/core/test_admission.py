# SPDX-License-Identifier: Apache-2.0
"""Admission by pressure: what counts as too much, who waits, in which order, and what a refusal says.

The files that the kernel writes and the clock are the test's; what is made of them is real.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dsecd.core.admission import Admission, Mode
from dsecd.core.pressure import Gauge, Shortage, Thresholds
from dsecd.core.tasks import Tasks
from dsecd.linux import psi
from libdsec.errors import NoCapacity


class Machine:
    """A host whose pressure and memory a test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        self.lost_us = dict.fromkeys(("memory", "io", "cpu"), 0)
        self.told: list[str] = []
        self.memory(50)
        for resource in ("memory", "io", "cpu"):
            self.stall(resource)

    def memory(self, percent: float) -> None:
        text = f"MemTotal: 1000000 kB\nMemFree: 1 kB\nMemAvailable: {int(percent * 10000)} kB\n"
        (self.folder / "meminfo").write_text(text)

    def stall(self, resource: str, some: float = 0.0, full: float = 0.0, lost_us: int = 0) -> None:
        """Its averages over 10 s, and time lost now."""
        self.lost_us[resource] += lost_us
        lines = (f"{name} avg10={value:.2f} avg60=0.00 avg300=0.00 total={self.lost_us[resource]}\n"
                 for name, value in (("some", some), ("full", full)))  # fmt: skip
        (self.folder / resource).write_text("".join(lines))

    def gauge(self, cgroup_dir: Path | None = None, **thresholds: float) -> Gauge:
        return Gauge(
            Thresholds(**thresholds), cgroup_dir, meminfo=self.folder / "meminfo", clock=lambda: self.now
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(psi, "HOST", tmp_path)
    return Machine(tmp_path)


def short(gauge: Gauge) -> str:
    return str(gauge.look().shortage or "")


# --- what is too much


def test_a_host_at_ease_has_room(machine: Machine) -> None:
    reading = machine.gauge().look()
    assert reading.shortage is None
    assert reading.figures["memory_available"] == 50
    assert reading.figures["cpu_some"] == 0


@pytest.mark.parametrize(
    ("resource", "some", "full", "says"),
    [
        ("memory", 41, 0, "a task waited for memory 41 % of the time, 40 % is allowed"),
        ("memory", 40, 16, "every task waited for memory 16 % of the time, 15 % is allowed"),
        ("io", 100, 81, "every task waited for io 81 % of the time, 80 % is allowed"),
        ("memory", 40, 15, ""),
        ("io", 100, 80, ""),
        ("cpu", 100, 0, ""),  # overcommitment is the point
    ],
)
def test_pressure_above_a_threshold_is_a_shortage(
    machine: Machine, resource: str, some: float, full: float, says: str
) -> None:
    machine.stall(resource, some, full)
    assert short(machine.gauge()) == says


def test_a_limit_for_processors_can_be_set(machine: Machine) -> None:
    machine.stall("cpu", 91)
    assert short(machine.gauge(cpu_some_percent=90)).startswith("a task waited for cpu 91 %")


def test_memory_below_the_floor_is_a_shortage(machine: Machine) -> None:
    machine.memory(4.9)
    assert short(machine.gauge()) == "4.9 % of memory is available, 5 % is kept free"
    assert short(machine.gauge(memory_available_min_percent=4)) == ""


def test_what_was_lost_just_now_counts_before_the_average_has_risen(machine: Machine) -> None:
    gauge = machine.gauge()
    assert short(gauge) == ""
    machine.now += 1
    machine.stall("memory", some=5, lost_us=600_000)
    assert short(gauge) == "a task waited for memory 60 % of the time, 40 % is allowed"
    # A look of long ago says nothing: the average holds.
    machine.now += 100
    machine.stall("memory", some=5, lost_us=90_000_000)
    assert short(gauge) == ""


def test_figures_are_read_at_most_ten_times_a_second(machine: Machine) -> None:
    gauge = machine.gauge()
    assert short(gauge) == ""
    machine.memory(1)
    machine.now += 0.05
    assert short(gauge) == ""
    machine.now += 0.06
    assert short(gauge) != ""


def test_the_sandboxes_own_cgroup_counts_too(machine: Machine, tmp_path: Path) -> None:
    group = tmp_path / "dsec"
    group.mkdir()
    (group / "memory.pressure").write_text("some avg10=55.00 avg60=0.00 avg300=0.00 total=1\n")
    assert short(machine.gauge(group)) == "a task waited for memory 55 % of the time, 40 % is allowed"


def test_without_pressure_figures_memory_alone_decides(machine: Machine) -> None:
    for resource in ("memory", "io", "cpu"):
        (machine.folder / resource).unlink()
    gauge = machine.gauge()
    assert gauge.look().figures == {"memory_available": 50}
    machine.memory(1)
    machine.now += 1
    assert "is kept free" in short(gauge)


# --- the door


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            await body()

    asyncio.run(bounded())


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsecd.core.admission._LOOK_S", 0.01)


def door(machine: Machine, tasks: Tasks, *, mode: Mode = "on", max_waiting: int = 100) -> Admission:
    def tell(shortage: Shortage | None) -> None:
        machine.told.append(str(shortage or "room"))

    return Admission(machine.gauge(), tasks, mode=mode, max_waiting=max_waiting, tell=tell)


@pytest.mark.usefixtures("hurried")
def test_those_who_wait_go_in_by_turns_when_there_is_room(machine: Machine) -> None:
    async def body() -> None:
        tasks = Tasks()
        entrance = door(machine, tasks)
        machine.memory(1)
        order: list[int] = []

        async def one(number: int) -> None:
            await entrance.enter(f"create '{number}'", 20)
            order.append(number)

        waiting = [asyncio.create_task(one(number)) for number in range(10)]
        await asyncio.sleep(0.1)
        assert (order, entrance.waiting) == ([], 10)
        machine.memory(50)
        machine.now += 1
        # Not all at once: what the first ones take shows only afterwards.
        while not order:
            await asyncio.sleep(0)
        assert len(order) < 10
        await asyncio.gather(*waiting)
        assert order == list(range(10))
        assert machine.told == ["1.0 % of memory is available, 5 % is kept free", "room"]
        await tasks.close()

    run(body)


@pytest.mark.usefixtures("hurried")
def test_whoever_comes_later_does_not_overtake(machine: Machine) -> None:
    async def body() -> None:
        tasks = Tasks()
        entrance = door(machine, tasks)
        machine.memory(1)
        first = asyncio.create_task(entrance.enter("create 'first'", 20))
        await asyncio.sleep(0.05)
        machine.memory(50)
        machine.now += 1
        assert not entrance.is_open()
        second = asyncio.create_task(entrance.enter("create 'second'", 20))
        await first
        await second
        assert entrance.is_open()
        await tasks.close()

    run(body)


@pytest.mark.usefixtures("hurried")
def test_a_refusal_says_what_is_short_and_when_to_come_back(machine: Machine) -> None:
    async def body() -> None:
        tasks = Tasks()
        entrance = door(machine, tasks, max_waiting=1)
        machine.stall("memory", some=77)
        with pytest.raises(NoCapacity, match="create 'a': the host is short of memory: a task waited for") as at_once:
            await entrance.enter("create 'a'", 0)
        wire = at_once.value.to_wire()
        assert wire["retryable"]
        assert wire["details"] == {
            "resource": "memory", "measure": "some", "percent": 77.0, "limit_percent": 40.0,
            "waited_s": 0.0, "retry_after_s": 10,
        }  # fmt: skip
        began = asyncio.get_running_loop().time()
        late = asyncio.create_task(entrance.enter("create 'b'", 1.5))
        await asyncio.sleep(0.05)
        with pytest.raises(NoCapacity, match=r"1 wait, 1 may"):
            await entrance.enter("create 'c'", 20)  # the queue is full
        with pytest.raises(NoCapacity, match="create 'b': the host is short of memory, also after 1.5 s"):
            await late
        assert 1.4 < asyncio.get_running_loop().time() - began < 18
        assert (entrance.waiting, entrance.refused) == (0, 3)
        await tasks.close()

    run(body)


@pytest.mark.usefixtures("hurried")
def test_who_gives_up_leaves_the_queue(machine: Machine) -> None:
    async def body() -> None:
        tasks = Tasks()
        entrance = door(machine, tasks)
        machine.memory(1)
        gone = asyncio.create_task(entrance.enter("create 'a'", 20))
        await asyncio.sleep(0.05)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert entrance.waiting == 0
        await tasks.close()

    run(body)


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_nobody_waits_where_it_only_observes_or_is_off(machine: Machine, mode: Mode) -> None:
    async def body() -> None:
        tasks = Tasks()
        entrance = door(machine, tasks, mode=mode)
        machine.memory(1)
        await entrance.enter("create 'a'", 0)
        assert len(machine.told) == (1 if mode == "observe" else 0)
        await tasks.close()

    run(body)
