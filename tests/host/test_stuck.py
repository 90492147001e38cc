# SPDX-License-Identifier: Apache-2.0
"""Deleting a sandbox with a process that no signal ends: it waits for a file system that never answers."""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.linux import mount, mountns
from libdsec import Client
from libdsec.errors import NotFound, TimedOut
from libdsec.types import ExecRequest, SandboxSpec
from tests.support import cgroups
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

FUSE_DEVICE = Path("/dev/fuse")
#: fuse_init_out: version 7.31, and no feature (linux/fuse.h).
INIT_OUT = struct.pack("<IIIIHHIIHHI", 7, 31, 0, 0, 12, 9, 4096, 1, 1, 0, 0).ljust(64, b"\0")


@pytest.fixture
def dead_mount() -> Iterator[tuple[int, int]]:
    """The device of a FUSE file system that nobody serves, and its mount."""
    if not FUSE_DEVICE.exists():
        pytest.skip("no /dev/fuse here")
    device = os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    options = {"fd": str(device), "rootmode": "40000", "user_id": "0", "group_id": "0", "allow_other": None}
    mounted = mount.new_mount("fuse", options=options)
    yield device, mounted
    os.close(mounted)
    os.close(device)


def test_deletion_is_bounded_and_made_up_for_later_fl30(dead_mount: tuple[int, int]) -> None:
    device, mounted = dead_mount
    with Daemon() as daemon, daemon.client() as client:
        client.finish(client.image_import(name="debian:trixie", source=str(debian_tar()), kind="rootfs-tar"))
        box = client.create(SandboxSpec(image="debian:trixie"))
        pid = cgroups.first_process(daemon.cgroup_dir / f"sandbox-{box.id}")
        mountns.run_in(f"/proc/{pid}/ns/mnt", lambda: mount.attach(mounted, Path("/mnt")))
        _length, operation, unique = struct.unpack_from("<IIQ", os.read(device, 1 << 17))
        assert operation == 26  # FUSE_INIT
        os.write(device, struct.pack("<IiQ", 16 + len(INIT_OUT), 0, unique) + INIT_OUT)
        client.exec_start(box.id, ExecRequest(argv=("ls", "/mnt/x")))
        # Once the request has been taken, its process waits for the answer and for nothing else.
        os.read(device, 1 << 17)
        began = time.monotonic()
        with pytest.raises(TimedOut, match="stuck in the kernel"):
            client.delete(box.id)
        assert time.monotonic() - began < 120
        assert client.inspect(box.id).state == "deleting"
        other = client.create(SandboxSpec(image="debian:trixie"))
        client.delete(other.id)
        # Aborts the connection: the process is let go and dies of the signal it has had all along.
        abort(device)
        wait_gone(client, box.id)


def abort(device: int) -> None:
    """End all requests of the file system, as its server's end would."""
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, device)
    os.close(null)


def wait_gone(client: Client, sandbox_id: str) -> None:
    def gone() -> bool:
        try:
            client.delete(sandbox_id)
            client.inspect(sandbox_id)
        except NotFound:
            return True
        except TimedOut:
            return False
        return False

    until(gone, 120)
