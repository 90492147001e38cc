# SPDX-License-Identifier: Apache-2.0
"""A machine as Firecracker is told it: the calls that make it, and the files that must be in the jail.

What belongs here: values out of values.  What does not: sending and mounting them.

The guest finds the same devices as with any monitor: layers as /dev/pmem0, /dev/pmem1, … in their order, the disk as
/dev/vda.  Names in the jail are the same for each machine, since a snapshot opens its files by the names of the
machine that was saved.
"""

from __future__ import annotations

from dsecd.vmm.base import Machine, Snapshot
from dsecd.vmm.firecracker import jail
from dsecd.vmm.firecracker.jail import Bind
from dsecd.vmm.firecracker.models import (
    PMEM,
    Action,
    Balloon,
    BootSource,
    Drive,
    Entropy,
    MachineConfiguration,
    MemoryBackend,
    NetworkInterface,
    NetworkOverride,
    Pmem,
    Request,
    Serial,
    SnapshotLoad,
    TokenBucket,
    Version,
    Vsock,
)

#: Where the agent listens in the guest.
AGENT_PORT = 5005
#: Each guest's own; only one is on the other side of each device, so all may have the same.
_GUEST_CID = 3
_MIB = 1 << 20
_STATISTICS_EVERY_S = 10
#: The console may fill a file: so much at once, and again within an hour.
_CONSOLE = TokenBucket(size=256 << 10, refill_time=3_600_000)
_CONSOLE_LIMITS: Version = (1, 16, 0)
_SLACK_BYTES = 64 * _MIB

#: How it ends (by a triple fault, which ends Firecracker), how the agent is reached, no waiting for a keyboard.
_CMDLINE = (
    f"console=ttyS0 quiet panic=-1 reboot=t random.trust_cpu=1 dsec.vsock={AGENT_PORT} "
    "i8042.noaux i8042.nomux i8042.nopnp i8042.dumbkbd"
)


def binds(machine: Machine, restore: Snapshot | None) -> list[Bind]:
    """The files that the process opens."""
    given = [Bind(path, _layer(number)) for number, path in enumerate(machine.layers)]
    if machine.disk is not None:
        given.append(Bind(machine.disk, jail.DISK, writable=True))
    if restore is not None:
        return [*given, Bind(restore.state, jail.STATE), Bind(restore.memory, jail.MEMORY)]
    given.append(Bind(machine.kernel, jail.KERNEL))
    if machine.initramfs is not None:
        given.append(Bind(machine.initramfs, jail.INITRAMFS))
    return given


def largest_file(machine: Machine) -> int:
    """How far the process may write into any file: its disk, a snapshot of its memory.  Blocks."""
    disk_bytes = machine.disk.stat().st_size if machine.disk is not None else 0
    return max(machine.memory_bytes, disk_bytes) + _SLACK_BYTES


def requests(machine: Machine, version: Version) -> list[Request]:
    """The calls that make a machine and start it, in their order."""
    made: list[Request] = [
        MachineConfiguration(vcpu_count=machine.vcpus, mem_size_mib=machine.memory_bytes // _MIB),
        BootSource(
            kernel_image_path=f"/{jail.KERNEL}",
            initrd_path=f"/{jail.INITRAMFS}" if machine.initramfs is not None else None,
            boot_args=f"{machine.cmdline} {_CMDLINE}".strip(),
        ),
    ]
    made += [
        Pmem(id=_layer(number), path_on_host=f"/{_layer(number)}", read_only=True)
        for number in range(len(machine.layers))
    ]
    if machine.disk is not None:
        # Writeback: what the guest flushes is flushed.
        made.append(Drive(drive_id="disk", path_on_host=f"/{jail.DISK}", is_root_device=False, cache_type="Writeback"))
    made += [
        NetworkInterface(iface_id=_nic(number), host_dev_name=nic.tap, guest_mac=nic.mac)
        for number, nic in enumerate(machine.nics)
    ]
    made += [Vsock(guest_cid=_GUEST_CID, uds_path=f"/{jail.VSOCK_SOCKET}"), Entropy()]
    reports = version >= PMEM
    made.append(Balloon(0, True, stats_polling_interval_s=_STATISTICS_EVERY_S, free_page_reporting=reports))
    if version >= _CONSOLE_LIMITS:
        made.append(Serial(serial_out_path=f"/{jail.CONSOLE}", rate_limiter=_CONSOLE))
    return [*made, Action("InstanceStart")]


def load(machine: Machine) -> SnapshotLoad:
    """The call that makes a machine of a snapshot; it stands still then."""
    return SnapshotLoad(
        snapshot_path=f"/{jail.STATE}",
        mem_backend=MemoryBackend("File", f"/{jail.MEMORY}"),
        network_overrides=tuple(NetworkOverride(_nic(number), nic.tap) for number, nic in enumerate(machine.nics)),
    )


def _layer(number: int) -> str:
    return f"layer{number}"


def _nic(number: int) -> str:
    return f"eth{number}"
