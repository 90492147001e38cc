# SPDX-License-Identifier: Apache-2.0
"""Where a monitor runs: an OCI container of its own that holds the program, the machine's files and nothing else.

What belongs here: its configuration and its start by crun. What does not: the monitor's arguments.

The monitor is the wall around a hostile guest, and this is the wall around the monitor: a user of its own without any
capability, new namespaces, a root that is read-only but for the disk, no network, and a cgroup. Its system calls are
restricted by its own filter, which knows what it needs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsecd.linux import cgroup, mount, mountns, proc
from dsecd.vmm.base import Place

#: Where the machine's files are inside.
FILES = Path("/m")
_START_TIMEOUT_S = 60.0
_OPEN_FILES = 1024
_NAMESPACES = ("pid", "network", "ipc", "uts", "mount", "cgroup")
# What a Debian system has at its top since /usr holds everything.
_LINKS = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/sbin"}


@dataclass(frozen=True)
class Cage:
    """Directories of all cages of this host."""

    runtime_dir: Path
    launch_ns: int  # fd of a mount namespace with few mounts

    def start(
        self, place: Place, argv: Sequence[str], *, files: Mapping[str, Path], writable: Mapping[str, Path],
        devices: Sequence[Path], fds: Sequence[int], stdio: int,
    ) -> None:
        """Start ``argv`` with ``files`` and ``writable`` by their names below FILES, and ``fds`` from 3 on.

        What crun and the program print goes to ``stdio``. Blocks. Runs in one of mountns.FreshThreads, which it
        changes. Raises OSError, proc.ProcessFailed.
        """
        mountns.enter_copy(self.launch_ns)
        root = self._stage()
        mounts = [_bind(Path("/usr"), Path("/usr"), "ro")]
        mounts += [_bind(path, FILES / name, "ro") for name, path in files.items()]
        mounts += [_bind(path, FILES / name) for name, path in writable.items()]
        mounts += [_bind(path, path) for path in devices]
        groups = sorted({os.stat(path).st_gid for path in devices} - {0})
        config = _configuration(place, argv, root, mounts, groups)
        (place.rundir / "config.json").write_text(json.dumps(config))
        crun = [
            "crun", f"--root={self.crun_root}", "--cgroup-manager=cgroupfs", "run", "--detach",
            f"--bundle={place.rundir}", f"--pid-file={_pid_file(place)}", f"--preserve-fds={len(fds)}", place.id,
        ]  # fmt: skip
        proc.run_blocking(crun, input=b"", timeout_s=_START_TIMEOUT_S, fd_map=dict(enumerate(fds, 3)), stdio_to=stdio)

    @property
    def crun_root(self) -> Path:
        """What crun notes down about its containers."""
        return self.runtime_dir / "crun-vm"

    def prepare(self) -> None:
        """Make the directories."""
        for path in (self.crun_root, self.runtime_dir / "launch"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def forget(self, place: Place) -> None:
        """Remove crun's record of a container whose processes are gone; absent is fine."""
        shutil.rmtree(self.crun_root / place.id, ignore_errors=True)

    def residents(self) -> set[str]:
        """Ids of all that crun has a record of."""
        return {path.name for path in self.crun_root.iterdir() if not path.name.startswith(".")}

    def _stage(self) -> Path:
        """An empty root on a file system that only this thread and the container see."""
        stage = self.runtime_dir / "launch"
        fd = mount.new_mount("tmpfs", source="dsec", options=[("mode", "0755"), ("size", "1m")])
        try:
            mount.attach(fd, stage)
        finally:
            os.close(fd)
        for link, target in _LINKS.items():
            (stage / link).symlink_to(target)
        return stage


def pid(place: Place) -> int | None:
    """The monitor's process, as crun noted it down."""
    try:
        return int(_pid_file(place).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _pid_file(place: Place) -> Path:
    return place.rundir / "pid"


def _bind(source: Path, target: Path, *options: str) -> dict[str, Any]:
    return {
        "destination": str(target), "type": "bind", "source": str(source),
        "options": ["bind", "nosuid", *(["nodev"] if not str(target).startswith("/dev/") else []), *options],
    }  # fmt: skip


def _configuration(
    place: Place, argv: Sequence[str], root: Path, binds: Sequence[dict[str, Any]], groups: Sequence[int]
) -> dict[str, Any]:
    """config.json: runtime-spec config.md and config-linux.md, version 1.0.2."""
    dev = {
        "destination": "/dev", "type": "tmpfs", "source": "tmpfs",
        "options": ["nosuid", "noexec", "mode=755", "size=65536"],
    }  # fmt: skip
    # A profile is chosen by writing there; once it is, the profile lets nobody write.
    writing = [] if place.profile else ["ro"]
    proc_fs = {
        "destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev", *writing],
    }  # fmt: skip
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": place.uid, "gid": place.uid, "umask": 0o077, "additionalGids": list(groups)},
            "args": list(argv),
            "env": ["PATH=/usr/bin", "LANG=C.UTF-8"],
            "cwd": "/",
            "capabilities": {},
            "noNewPrivileges": True,
            **({"apparmorProfile": place.profile} if place.profile else {}),
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "soft": _OPEN_FILES, "hard": _OPEN_FILES},
                {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
            ],
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": [proc_fs, dev, *binds],
        "linux": {
            "cgroupsPath": f"/{place.cgroup.relative_to(cgroup.root())}",
            "namespaces": [{"type": name} for name in _NAMESPACES],
            "rootfsPropagation": "private",
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/sysrq-trigger", "/proc/timer_list"],
        },
    }
