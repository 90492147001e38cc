# SPDX-License-Identifier: Apache-2.0
"""Which monitor is used: by configuration or what works; and that a machine stays with the one that started it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsecd.linux.pidfd import Process
from dsecd.vmm.base import Machine, Nic, Place, Probe, Snapshot, VmmError
from dsecd.vmm.choice import Asked, Choice
from tests.support.firecracker import House, end, fakes, house, only_process_of


@pytest.fixture(name="h")
def the_house(disk: Path) -> Iterator[House]:
    with house(disk) as found:
        yield found


class Other:
    """Stands in for QEMU, which needs no guest to be told apart: it notes down what it was asked."""

    name = "qemu"
    memory_names: Sequence[str] = ("ram",)

    def __init__(self, works: bool = True) -> None:
        self.works = works
        self.calls: list[str] = []

    def probe(self) -> Probe:
        return Probe(self.works, "QEMU 10 with tcg")

    def start(self, place: Place, machine: Machine, restore: Snapshot | None = None) -> None:
        del machine, restore
        self.calls.append(f"start {place.id}")

    def process(self, place: Place) -> Process | None:
        self.calls.append(f"process {place.id}")
        return None

    def last_words(self, place: Place) -> str:
        return f"words of {place.id}"

    def forget(self, place: Place) -> None:
        self.calls.append(f"forget {place.id}")

    def residents(self) -> set[str]:
        return {"other"}

    async def dial(self, *_: Any) -> Any: ...
    async def pause(self, *_: Any) -> Any: ...
    async def resume(self, *_: Any) -> Any: ...
    async def save(self, *_: Any) -> Any: ...
    async def memory(self, *_: Any) -> Any: ...

    def profile(self, *, network: bool) -> str:
        del network
        return "dsec-monitor"

    def likeness(self, *, network: bool) -> dict[str, str]:
        return {"monitor": self.name, "network": str(network)}


@pytest.mark.parametrize(
    ("asked", "firecracker_works", "chosen"),
    [
        ("auto", True, "firecracker"), ("auto", False, "qemu"), ("qemu", True, "qemu"), ("qemu", False, "qemu"),
        ("firecracker", True, "firecracker"), ("firecracker", False, "firecracker"),
    ],
)  # fmt: skip
def test_the_choice(
    h: House, monkeypatch: pytest.MonkeyPatch, asked: Asked, firecracker_works: bool, chosen: str
) -> None:
    probe = Probe(firecracker_works, "Firecracker 1.16.1 with kvm" if firecracker_works else "needs KVM: none")
    monkeypatch.setattr(h.driver, "probe", lambda: probe)
    choice = Choice(asked, h.driver, Other())
    assert choice.chosen().name == chosen
    found = choice.probe()
    if chosen == "firecracker":
        assert found == probe, "asked for by name, it is not silently replaced"
    elif asked == "auto":
        assert found == Probe(True, "QEMU 10 with tcg (no Firecracker: needs KVM: none)")
    else:
        assert found == Probe(True, "QEMU 10 with tcg")


def test_a_machine_with_a_network_runs_under_qemu(h: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h.driver, "probe", lambda: Probe(True, "it"))
    machine = dataclasses.replace(h.machine(), nics=(Nic("dsec0", "06:64:73:00:00:01", 3),))
    other = Other()
    Choice("auto", h.driver, other).start(h.place(), machine)
    assert other.calls == ["start vm1"]
    assert Choice("auto", h.driver, other).likeness(network=True)["monitor"] == "qemu"
    with pytest.raises(VmmError, match="under QEMU only"):
        Choice("firecracker", h.driver, other).start(h.place(), machine)
    assert h.left_of(h.place()) == []


def test_what_is_installed_later_is_found_by_the_next_probe(h: House, monkeypatch: pytest.MonkeyPatch) -> None:
    works = False
    monkeypatch.setattr(h.driver, "probe", lambda: Probe(works, "it"))
    choice = Choice("auto", h.driver, Other())
    assert choice.chosen().name == "qemu"
    works = True
    choice.probe()
    assert choice.chosen().name == "firecracker"


def test_a_machine_stays_with_the_monitor_that_started_it(h: House) -> None:
    place = h.place()
    h.start(place, h.machine())
    pid = only_process_of(place.uid)
    other = Other()
    choice = Choice("qemu", h.use(fakes(h.base / "again")), other)
    assert choice.residents() == {"vm1", "other"}
    process = choice.process(place)
    assert process is not None
    assert process.pid == pid
    assert "Running Firecracker" in choice.last_words(place)
    assert choice.last_words(h.place("vm2", 1)) == "words of vm2"
    assert other.calls == []
    end(pid)
    choice.start(place, h.machine())
    assert other.calls == ["start vm1"]
    assert h.left_of(place) == [], "what the other one left must not claim the machine"
    choice.forget(place)
    assert other.calls[-1] == "forget vm1"
