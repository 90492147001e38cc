# SPDX-License-Identifier: Apache-2.0
"""What virtual machine a sandbox becomes: its sizes, its command line, and which limits are whose.

What belongs here: pure functions of a spec and the host's settings. What does not: making it (``microvm_steps.py``).

Memory is the guest's size, and processes are counted in the guest; processor time and disk rates are limits of the
monitor's cgroup, since only the host can hold a guest to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from ipaddress import IPv4Address
from pathlib import Path

from dsecd.backends import oci
from dsecd.backends.base import MachineSettings
from dsecd.backends.limits import DEFAULT_PIDS_MAX, attributes_without_disk
from dsecd.vmm.base import ALIGN_BYTES, Machine, Nic
from dsecd.vmm.guest import Boot
from libdsec import errors
from libdsec.types import Limits, SandboxSpec

#: What a monitor needs beside its guest's memory: its own, and translated code.
_OVERHEAD_BYTES = 192 << 20
_MEMORY_MIN_BYTES = 128 << 20
_VCPUS_MAX = 32
_PAGE_BYTES = 4096
#: Limits that the guest keeps, or that are the size of the machine.
_OF_GUEST = ("memory_max_bytes", "memory_oom_group", "pids_max")


def machine(
    sandbox_id: str, spec: SandboxSpec, settings: MachineSettings, boot: Boot, *, environment: Path, disk: Path,
    dns_server: IPv4Address | None = None, nics: tuple[Nic, ...] = (),
) -> Machine:
    """The machine of a sandbox."""
    permil = spec.limits.cpu_max_permil
    return Machine(
        kernel=boot.kernel, initramfs=boot.initramfs, cmdline=command_line(sandbox_id, spec, settings, dns_server),
        vcpus=settings.vcpus if permil is None else min(_VCPUS_MAX, -(-permil // 1000)),
        memory_bytes=_memory(spec.limits, settings) // ALIGN_BYTES * ALIGN_BYTES,
        layers=(environment,), disk=disk, nics=nics,
    )  # fmt: skip


def note(machine: Machine, path: Path) -> None:
    """Write down what a copy of the machine must have like it. Blocks."""
    sizes = {
        "cmdline": machine.cmdline, "vcpus": machine.vcpus, "memory_bytes": machine.memory_bytes,
        "network": bool(machine.nics),
    }  # fmt: skip
    path.write_text(json.dumps(sizes))


def noted(path: Path, boot: Boot, *, environment: Path, disk: Path, nics: tuple[Nic, ...]) -> Machine:
    """The machine that ``note`` wrote down, over files and devices of its own. Blocks."""
    sizes = json.loads(path.read_text())
    sizes.pop("network", None)
    return Machine(
        kernel=boot.kernel, initramfs=boot.initramfs, layers=(environment,), disk=disk, nics=nics, **sizes
    )


def noted_network(path: Path) -> bool:
    """Whether the machine that ``note`` wrote down has a network device. Blocks."""
    return bool(json.loads(path.read_text()).get("network", False))


def command_line(
    sandbox_id: str, spec: SandboxSpec, settings: MachineSettings, dns_server: IPv4Address | None
) -> str:
    """What the agent is told by the kernel's command line (``agent/guest.c``)."""
    words = {
        "layers": 1,
        "hostname": oci.hostname(sandbox_id, spec),
        "pids": spec.limits.pids_max or DEFAULT_PIDS_MAX,
        "oom_group": int(spec.limits.memory_oom_group or False),
        "tmp": spec.tmp_size_bytes,
        "shm": spec.shm_size_bytes,
        "readonly": int(spec.readonly_root),
    }
    if dns_server is not None:
        words["dns"] = str(dns_server)
    words |= {
        "damon_age": settings.reclaim_age_s,
        "damon_quota": settings.reclaim_bytes_per_s,
        "damon_sample": settings.reclaim_sample_us,
        "zram": _memory(spec.limits, settings) * settings.zram_percent // 100 // _PAGE_BYTES * _PAGE_BYTES,
    }
    told = [f"dsec.{name}={value}" for name, value in words.items()]
    return " ".join([*told, f"page_reporting.page_reporting_order={settings.report_order}"])


def _memory(limits: Limits, settings: MachineSettings) -> int:
    return limits.memory_max_bytes or settings.memory_bytes


def asked_of_host(limits: Limits) -> Limits:
    """Those of the limits that the monitor's cgroup has to hold."""
    return limits.model_copy(update=dict.fromkeys(_OF_GUEST))


def host_limits(limits: Limits, settings: MachineSettings) -> Limits:
    """What lies on the monitor's cgroup."""
    most = _memory(limits, settings) + _OVERHEAD_BYTES
    return asked_of_host(limits).model_copy(update={"memory_max_bytes": most})


def check(spec: SandboxSpec) -> None:
    """Raise InvalidSpec for a machine that could not boot, FeatureMissing for what only containers have."""
    if spec.apparmor is not None:
        raise errors.FeatureMissing("spec.apparmor: a microVM has a kernel of its own", feature="microvm-apparmor")
    asked = spec.limits.memory_max_bytes
    if asked is not None and asked < _MEMORY_MIN_BYTES:
        raise errors.InvalidSpec(
            f"spec.limits.memory_max_bytes: a microVM needs at least {_MEMORY_MIN_BYTES >> 20} MiB, got {asked} bytes"
        )


def check_change(sandbox_id: str, old: Limits, new: Limits) -> None:
    """Raise FeatureMissing for what cannot change while a machine runs."""
    changed = [name for name in ("memory_max_bytes", "memory_oom_group") if getattr(old, name) != getattr(new, name)]
    if changed:
        raise errors.FeatureMissing(
            f"limit '{sandbox_id}': {', '.join(changed)} of a microVM are set when it is created",
            hint="create another with the limit you need", feature="microvm-limit-change",
        )  # fmt: skip


def exec_limits(limits: Limits) -> Mapping[str, str]:
    """Limits of one command as attributes of its cgroup in the guest, whose kernel has these controllers."""
    named = limits.model_dump(exclude_none=True)
    foreign = sorted(name for name in named if name.startswith("io_"))
    if foreign:
        raise errors.FeatureMissing(
            f"limit {', '.join(foreign)}: a microVM's disk rates are limited as a whole", feature="microvm-exec-io"
        )
    return attributes_without_disk(limits)
