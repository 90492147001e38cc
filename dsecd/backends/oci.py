# SPDX-License-Identifier: Apache-2.0
"""The OCI runtime configuration of a container sandbox.

What belongs here: turning a box into ``config.json``. What does not: running it (``container.py``), the
system call filter (``seccomp.py``). Source: runtime-spec config.md and config-linux.md, version 1.0.2.
"""

from __future__ import annotations

import functools
import resource
from pathlib import Path
from typing import Any

from dsecd.backends import seccomp
from dsecd.linux.userns import SIZE
from libdsec.types import SandboxSpec

#: Descriptors that the agent finds open, see docs/agent-protocol.md.
AGENT_FDS = LISTEN_FD, PROGRAM_FD, CGROUP_FD = 3, 4, 5
#: Descriptor of the user namespace, which the runtime enters and does not pass on.
USERNS_FD = 6

# What the agent needs; it takes from commands what only it may have. Never SYS_ADMIN or SYS_PTRACE: with either, the
# agent could be read and driven from inside.
_CAPABILITIES = [
    f"CAP_{name}"
    for name in (
        "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_ADMIN", "NET_BIND_SERVICE",
        "NET_RAW", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
    )
]  # fmt: skip

_MASKED = [
    "/proc/acpi", "/proc/asound", "/proc/bus", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/kpagecgroup",
    "/proc/kpagecount", "/proc/kpageflags", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi",
    "/proc/timer_list", "/proc/timer_stats", "/sys/dev/block", "/sys/devices/virtual/powercap",
    "/sys/firmware", "/sys/fs/bpf",
    "/sys/kernel/debug", "/sys/kernel/mm/damon", "/sys/kernel/security", "/sys/kernel/tracing",
]  # fmt: skip
# Some programs close or scan every possible descriptor up to the soft limit, so that one stays moderate.
_SOFT_OPEN_FILES, _HARD_OPEN_FILES = 65_536, 1_048_576

_NEW_NAMESPACES = ("pid", "network", "ipc", "uts", "mount", "cgroup")
# Made by us, since the one that makes it owns it: see ``userns.create``.
_USER_NAMESPACE = {"type": "user", "path": f"/proc/self/fd/{USERNS_FD}"}
_READONLY = ["/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]


# Pseudo terminals come out of one pool of the host (kernel.pty.max, 4,096 by default); without a limit of its own, one
# sandbox could take all that the others need.  Documentation/filesystems/devpts.rst
_TERMINALS = "max=128"
# An inode takes about 1 KiB of kernel memory that "size=" does not count.
_DEV_INODES, _PAGE_BYTES, _FEWEST_INODES = 4096, 4096, 1024


def _inodes(size_bytes: int) -> str:
    """As many files as the tmpfs has pages: no limit for files that hold something.  tmpfs(5)."""
    return f"nr_inodes={max(size_bytes // _PAGE_BYTES, _FEWEST_INODES)}"


def _mounts(spec: SandboxSpec) -> list[dict[str, Any]]:
    def entry(target: str, kind: str, *options: str) -> dict[str, Any]:
        return {"destination": target, "type": kind, "source": kind, "options": ["nosuid", *options]}

    def tmpfs(target: str, size_bytes: int, *options: str) -> dict[str, Any]:
        return entry(target, "tmpfs", "nodev", "mode=1777", f"size={size_bytes}", _inodes(size_bytes), *options)

    return [
        entry("/proc", "proc", "noexec", "nodev"),
        entry("/dev", "tmpfs", "noexec", "strictatime", "mode=755", "size=65536", f"nr_inodes={_DEV_INODES}"),
        entry("/dev/pts", "devpts", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5", _TERMINALS),
        entry("/dev/mqueue", "mqueue", "noexec", "nodev"),
        tmpfs("/dev/shm", spec.shm_size_bytes, "noexec"),
        tmpfs("/tmp", spec.tmp_size_bytes),
        entry("/sys", "sysfs", "noexec", "nodev", "ro"),
        entry("/sys/fs/cgroup", "cgroup", "noexec", "nodev", "ro"),
    ]


@functools.cache
def _open_files() -> dict[str, Any]:
    """As many open files as the daemon may have: raising a limit further is not allowed in a user namespace."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"type": "RLIMIT_NOFILE", "soft": min(hard, _SOFT_OPEN_FILES), "hard": min(hard, _HARD_OPEN_FILES)}


@functools.cache
def _seccomp() -> dict[str, Any]:
    return seccomp.profile()


def hostname(sandbox_id: str, spec: SandboxSpec) -> str:
    """The sandbox's host name: at most 63 bytes (RFC 1123), while ids may hold dots."""
    return spec.hostname or sandbox_id.replace(".", "-")[:63].strip("-")


def configuration(
    sandbox_id: str, spec: SandboxSpec, *, root: Path, cgroups_path: str, uid_base: int, profile: str = ""
) -> dict[str, Any]:
    """``config.json`` for a box whose composed tree is mounted at ``root``; ``profile`` is AppArmor's, if any."""
    mapping = [{"containerID": 0, "hostID": uid_base, "size": SIZE}]
    program = [f"/proc/self/fd/{PROGRAM_FD}", f"--listen-fd={LISTEN_FD}", f"--cgroup-fd={CGROUP_FD}", "--container"]
    capabilities = dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES)
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0, "umask": 0o022},
            # The program is not in the sandbox's tree: it is executed through a descriptor, and /proc/1/exe is of no
            # use to anybody inside, since the agent is not dumpable and its file belongs to an unmapped user.
            "args": program,
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "capabilities": capabilities,
            "noNewPrivileges": True,
            "rlimits": [_open_files()],
            # For the agent; commands inherit it.
            **({"apparmorProfile": profile} if profile else {}),
        },
        "root": {"path": str(root), "readonly": spec.readonly_root},
        "hostname": hostname(sandbox_id, spec),
        "mounts": _mounts(spec),
        "linux": {
            "cgroupsPath": cgroups_path,
            "namespaces": [*({"type": t} for t in _NEW_NAMESPACES), _USER_NAMESPACE],
            "uidMappings": mapping,
            "gidMappings": mapping,
            "seccomp": _seccomp(),
            "maskedPaths": _MASKED,
            "readonlyPaths": _READONLY,
            "rootfsPropagation": "private",
        },
    }
