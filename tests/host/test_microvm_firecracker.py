# SPDX-License-Identifier: Apache-2.0
"""The microvm backend with Firecracker as its monitor, up to where a guest would answer: the fake has none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from libdsec import Client
from libdsec.errors import BackendFailed, DsecError
from libdsec.types import SandboxSpec
from tests.support.daemon import Daemon
from tests.support.firecracker import SPIN, fakes, tiny_kernel
from tests.support.waiting import until

IMAGE = "small:1"


@pytest.fixture
def image(disk: Path) -> Path:
    tree = disk / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc" / "motd").write_text("hello")
    return tree


def config(disk: Path, *, boot_timeout_s: float = 2, **scenario: Any) -> str:
    programs = fakes(disk / "programs", **scenario)
    kernel = tiny_kernel(disk / "vmlinux", SPIN)
    return (
        f'[microvm]\nmonitor = "firecracker"\nfirecracker = "{programs.firecracker}"\nkernel = "{kernel}"\n'
        f"memory_bytes = {128 << 20}\ndisk_bytes = {64 << 20}\nboot_timeout_s = {boot_timeout_s}\n"
    )


def spec() -> SandboxSpec:
    return SandboxSpec.model_validate({"image": IMAGE, "backend": "microvm"})


def processes(daemon: Daemon) -> list[str]:
    return [line for line in daemon.residue() if line.startswith("process")]


def import_image(client: Client, tree: Path) -> None:
    client.finish(client.image_import(name=IMAGE, source=str(tree), kind="directory"))


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ({"guest": "nobody"}, "its agent did not answer within 2 s"),
        ({"guest": "hang"}, "its agent did not answer within 2 s"),
        ({"faults": {"PUT /actions": "refuse"}}, "PUT /actions: refused with status 400: PUT /actions is refused"),
        ({"faults": {"PUT /vsock": "die"}}, "PUT /vsock: "),
        ({"version": "1.13.0"}, "PUT /pmem/layer0: needs Firecracker 1.14.0, this is 1.13.0"),
        ({"start": "exit"}, "firecracker ended before its API answered; last line: Error: the kernel has no KVM"),
    ],
)  # fmt: skip
def test_a_machine_that_does_not_start_is_told_and_nothing_is_left(
    disk: Path, image: Path, scenario: dict[str, Any], words: str
) -> None:
    # Where it is not the guest that keeps silent, a slow machine's time must not be over before the fault is met.
    patience_s = 2 if "guest" in scenario else 60
    with Daemon(config=config(disk, boot_timeout_s=patience_s, **scenario)) as daemon, daemon.client() as client:
        import_image(client, image)
        with pytest.raises(BackendFailed) as caught:
            client.create(spec(), id="never")
        assert words in str(caught.value)
        if "version" in scenario:
            assert caught.value.hint == "install Firecracker 1.14.0 or newer"
        assert client.list().sandboxes == ()
        assert daemon.residue() == []


def test_sigkill_of_the_daemon_while_a_guest_boots_leaves_nothing(disk: Path, image: Path) -> None:
    with Daemon(config=config(disk, boot_timeout_s=60, guest="nobody")) as daemon:
        with daemon.client() as client:
            import_image(client, image)

        def create() -> None:
            with pytest.raises(DsecError), daemon.client(retry_s=0) as client:
                client.create(spec(), id="never")

        caller = threading.Thread(target=create)
        caller.start()
        jails = daemon.state_dir / "jails"
        until(lambda: any("agent.sock" in str(path) for path in jails.rglob("*")), 60)
        assert processes(daemon), "there is a monitor to be left behind"
        daemon.kill()
        caller.join()
        assert processes(daemon)
        daemon.start()
        until(lambda: daemon.residue() == [], 60)
        with daemon.client() as client:
            assert client.list().sandboxes == ()


def backend_detail(client: Client) -> Iterator[str]:
    return (backend.detail for backend in client.host().backends if backend.name == "microvm")


def test_the_host_report_says_which_monitor_and_why(disk: Path) -> None:
    lines = config(disk)
    for asked, expected in (("firecracker", "Firecracker 1.16.1 "), ("auto", "Firecracker"), ("qemu", "QEMU")):
        configured = lines.replace('monitor = "firecracker"', f'monitor = "{asked}"')
        with Daemon(config=configured) as daemon, daemon.client() as client:
            detail = next(backend_detail(client))
            assert expected in detail, (asked, detail)
            assert asked != "qemu" or "Firecracker" not in detail
