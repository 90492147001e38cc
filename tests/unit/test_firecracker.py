# SPDX-License-Identifier: Apache-2.0
"""What Firecracker is told: requests by release, the calls of a whole machine, the jailer's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsecd.vmm.base import Machine, Nic, Snapshot
from dsecd.vmm.firecracker import models, plan
from dsecd.vmm.firecracker.errors import BadAnswer, InvalidRequest, TooOld
from dsecd.vmm.firecracker.jail import Bind, Jail, Limits, Programs
from dsecd.vmm.firecracker.models import (
    Balloon,
    BalloonStats,
    MachineConfiguration,
    MemoryBackend,
    NetworkInterface,
    NetworkOverride,
    Pmem,
    RateLimiter,
    Request,
    Serial,
    SnapshotLoad,
    TokenBucket,
    body,
    check_version,
    parse_version,
)

MACHINE = Machine(
    kernel=Path("/k"), initramfs=Path("/i"), cmdline="dsec.layers=2", vcpus=2, memory_bytes=256 << 20,
    layers=(Path("/a"), Path("/b")), disk=Path("/d"), nics=(Nic("tap7", "02:00:00:00:00:07"),),
)  # fmt: skip


def test_only_what_differs_from_its_default_is_sent() -> None:
    assert body(MachineConfiguration(1, 128)) == {"vcpu_count": 1, "mem_size_mib": 128}
    assert body(MachineConfiguration(2, 128, smt=True)) == {"vcpu_count": 2, "mem_size_mib": 128, "smt": True}
    limited = Pmem("a", "/a", rate_limiter=RateLimiter(ops=TokenBucket(1, 2)))
    assert body(limited)["rate_limiter"] == {"ops": {"size": 1, "refill_time": 2}}


@pytest.mark.parametrize(
    ("request_", "since", "what"),
    [
        (Pmem("a", "/a"), (1, 14, 0), "PUT /pmem/a"),
        (Pmem("a", "/a", rate_limiter=RateLimiter()), (1, 16, 0), "PUT /pmem/a with rate_limiter"),
        (Balloon(0, True, free_page_reporting=True), (1, 14, 0), "PUT /balloon with free_page_reporting"),
        (NetworkInterface("e", "t", mtu=1500), (1, 16, 0), "PUT /network-interfaces/e with mtu"),
        (Serial("/c"), (1, 14, 0), "PUT /serial"),
        (Serial("/c", rate_limiter=TokenBucket(1, 1)), (1, 16, 0), "PUT /serial with rate_limiter"),
        (
            SnapshotLoad("/s", MemoryBackend("File", "/m"), clock_realtime=True), (1, 16, 0),
            "PUT /snapshot/load with clock_realtime",
        ),
        (
            SnapshotLoad("/s", MemoryBackend("File", "/m"), track_dirty_pages=True), (1, 13, 0),
            "PUT /snapshot/load with track_dirty_pages",
        ),
    ],
)  # fmt: skip
def test_what_a_release_does_not_know_is_not_sent_to_it(request_: Request, since: models.Version, what: str) -> None:
    check_version(request_, since)
    before = (since[0], since[1] - 1, 9)
    with pytest.raises(TooOld) as caught:
        check_version(request_, before)
    needed, found = models.version_text(since), models.version_text(before)
    assert str(caught.value) == f"{what}: needs Firecracker {needed}, this is {found}"
    assert caught.value.hint == f"install Firecracker {needed} or newer"


def test_a_default_needs_no_release() -> None:
    check_version(Balloon(0, True), models.OLDEST)
    check_version(NetworkInterface("e", "t"), models.OLDEST)


def test_all_faults_of_a_request_are_named_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        body(MachineConfiguration(33, 0, smt=True))
    assert caught.value.faults == (
        "vcpu_count: must be 1 or even with smt, got 33",
        "vcpu_count: must be 1 to 32, got 33",
        "mem_size_mib: must be 1 to 9223372036854775807, got 0",
    )
    nested = SnapshotLoad("", MemoryBackend("File", ""), network_overrides=(NetworkOverride("a/../b", "tap0"),))
    with pytest.raises(InvalidRequest) as caught:
        body(nested)
    assert caught.value.faults == (
        "snapshot_path: must not be empty",
        "mem_backend.backend_path: must not be empty",
        "network_overrides.iface_id: must look like [A-Za-z0-9_]{1,64}, got 'a/../b'",
    )


@pytest.mark.parametrize("name", ["", "a-b", "a/b", "ä", "x" * 65, "a b\r\nHost: x"])
def test_a_name_that_would_not_stay_in_its_path_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        body(Pmem(name, "/a"))


def test_a_machine_is_told_in_the_order_its_guest_finds_it() -> None:
    calls = [(request.what(), body(request)) for request in plan.requests(MACHINE, (1, 16, 1))]
    assert calls == [
        ("PUT /machine-config", {"vcpu_count": 2, "mem_size_mib": 256}),
        ("PUT /boot-source", {
            "kernel_image_path": "/kernel", "initrd_path": "/initramfs",
            "boot_args": "dsec.layers=2 console=ttyS0 quiet panic=-1 reboot=t random.trust_cpu=1 dsec.vsock=5005 "
            "i8042.noaux i8042.nomux i8042.nopnp i8042.dumbkbd",
        }),
        ("PUT /pmem/layer0", {"id": "layer0", "path_on_host": "/layer0", "read_only": True}),
        ("PUT /pmem/layer1", {"id": "layer1", "path_on_host": "/layer1", "read_only": True}),
        ("PUT /drives/disk", {
            "drive_id": "disk", "path_on_host": "/disk", "is_root_device": False, "cache_type": "Writeback",
        }),
        ("PUT /network-interfaces/eth0", {
            "iface_id": "eth0", "host_dev_name": "tap7", "guest_mac": "02:00:00:00:00:07",
        }),
        ("PUT /vsock", {"guest_cid": 3, "uds_path": "/run/agent.sock"}),
        ("PUT /entropy", {}),
        ("PUT /balloon", {
            "amount_mib": 0, "deflate_on_oom": True, "stats_polling_interval_s": 10, "free_page_reporting": True,
        }),
        ("PUT /serial", {
            "serial_out_path": "/console", "rate_limiter": {"size": 262144, "refill_time": 3600000},
        }),
        ("PUT /actions", {"action_type": "InstanceStart"}),
    ]  # fmt: skip


def test_older_releases_are_told_less() -> None:
    def told(version: models.Version) -> set[str]:
        return {request.what() for request in plan.requests(MACHINE, version)}

    assert told((1, 16, 0)) - told((1, 15, 0)) == {"PUT /serial"}
    reporting = {
        version: body(next(r for r in plan.requests(MACHINE, version) if isinstance(r, Balloon)))
        for version in ((1, 13, 0), (1, 14, 0))
    }
    assert "free_page_reporting" not in reporting[1, 13, 0]
    assert reporting[1, 14, 0]["free_page_reporting"] is True


def test_a_clone_opens_the_same_names_and_its_own_tap() -> None:
    snapshot = Snapshot(Path("/s"), Path("/m"))
    assert plan.binds(MACHINE, snapshot) == [
        Bind(Path("/a"), "layer0"), Bind(Path("/b"), "layer1"), Bind(Path("/d"), "disk", writable=True),
        Bind(Path("/s"), "state"), Bind(Path("/m"), "memory"),
    ]  # fmt: skip
    assert body(plan.load(MACHINE)) == {
        "snapshot_path": "/state", "mem_backend": {"backend_type": "File", "backend_path": "/memory"},
        "network_overrides": [{"iface_id": "eth0", "host_dev_name": "tap7"}],
    }  # fmt: skip


def test_the_jailer_is_told_everything() -> None:
    home = Jail(Path("/j/a.b"), "a.b", 7001, Programs(Path("/usr/bin/firecracker"), Path("/usr/bin/jailer")))
    assert home.root == Path("/j/a.b/firecracker/a-b/root")
    assert " ".join(home.argv("dsec/a.b/vmm", Limits(file_bytes=1 << 30))) == (
        "/usr/bin/jailer --id a-b --exec-file /usr/bin/firecracker --uid 7001 --gid 7001 --chroot-base-dir /j/a.b "
        "--cgroup-version 2 --parent-cgroup dsec/a.b/vmm --resource-limit fsize=1073741824 "
        "--resource-limit no-file=256 --daemonize --new-pid-ns "
        "-- --api-sock /run/api.sock --log-path /log --level Warning"
    )


def test_versions() -> None:
    assert parse_version("1.17.0-dev") == (1, 17, 0)
    assert parse_version("v1.9.10") == (1, 9, 10)
    for text in ("", "1.2", "1.2.3.4", "one", "1.2.3\n", "1." + "9" * 50 + ".0"):
        with pytest.raises(ValueError, match="not three numbers"):
            parse_version(text)


def test_answers_are_checked_and_may_be_newer() -> None:
    found = BalloonStats.read({"target_mib": 1, "actual_mib": 2, "free_memory": 3, "pages_of_tomorrow": 4})
    assert (found.target_mib, found.free_memory, found.total_memory) == (1, 3, None)
    # A figure below `stats` is no figure: agents that looked there never gave memory back.
    figures: list[dict[str, Any]] = [{"target_mib": value, "actual_mib": 1} for value in (True, -1, "1")]
    for wrong in ({"stats": {"target_mib": 1}}, *figures):
        with pytest.raises(BadAnswer, match="target_mib is"):
            BalloonStats.read(wrong)
