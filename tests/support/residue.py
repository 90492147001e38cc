#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What is left of sandboxes on this host, read from /proc, cgroupfs and the file system.

Independent of dsecd on purpose: it shares no code with it and asks it nothing. Run as ``residue.py
STATE_DIR RUNTIME_DIR CGROUP_DIR UID_BASE UID_COUNT``; prints one line per find and exits 1 if there is any.
"""

import os
import sys
from pathlib import Path


def processes(cgroup: str, first_uid: int, uids: int) -> list[str]:
    """Processes in the cgroup, or with an id of the range."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            status = Path(f"/proc/{entry}/status").read_text()
            groups = Path(f"/proc/{entry}/cgroup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if fields["State"].startswith("Z"):
            continue
        ids = [int(number) for number in (fields["Uid"] + "\t" + fields["Gid"]).split()]
        inside = any(line.startswith("0::") and f"/{cgroup}/" in line + "/" for line in groups.splitlines())
        if inside or any(first_uid <= number < first_uid + uids for number in ids):
            found.append(f"process {entry} ({fields['Name'].strip()})")
    return found


def mounts(directories: list[Path]) -> list[str]:
    """Mounts in any process's namespace that lie in, or come from, one of the directories, layers apart."""
    found = set()
    seen = set()
    for entry in os.listdir("/proc"):
        try:
            namespace = os.readlink(f"/proc/{entry}/ns/mnt") if entry.isdigit() else None
            if namespace is None or namespace in seen:
                continue
            seen.add(namespace)
            lines = Path(f"/proc/{entry}/mountinfo").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, OSError):
            continue
        for line in lines:
            if " - overlay dsec " in line and any(str(directory) in line for directory in directories):
                found.add(f"overlay in {namespace}: {line.split()[4]}")
    return sorted(found)


def cgroups(directory: Path) -> list[str]:
    """Cgroups below the daemon's."""
    groups = [*directory.glob("*"), *directory.glob("batch/*")]
    return [f"cgroup {path}" for path in sorted(groups) if path.is_dir() and path.name not in ("daemon", "batch")]


def files(state: Path, runtime: Path) -> list[str]:
    """Directories and sockets that belong to single sandboxes, and halves of imports."""
    names = ("sandboxes", "trash", "vms", "trash-vms", "origins", "snapshots", "trash-snapshots", "jails")
    places = [state / name for name in (*names, "images/staging")]
    places += [runtime / name for name in ("sandboxes", "agents", "crun", "vms", "crun-vm", "launch", "compose")]
    entries = [entry for place in places if place.is_dir() for entry in sorted(place.iterdir())]
    # crun keeps compiled seccomp filters in .cache, for all containers.
    return [f"file {entry}" for entry in entries if entry.name != ".cache"]


def devices() -> list[str]:
    """Network devices of sandboxes in this network namespace."""
    with open("/proc/net/dev") as table:
        names = [line.split(":")[0].strip() for line in table if ":" in line]
    return [f"device {name}" for name in names if name.startswith("dsec")]


def objects_without_reference(state: Path) -> list[str]:
    """Objects that no published image's manifest names, and layers without a row, by the files alone."""
    store = state / "images"
    names = [path for path in store.rglob("*") if path.suffix in (".tmp", ".part") or path.name.startswith(".tmp")]
    return [f"temporary file {path}" for path in names]


def main() -> int:
    state, runtime, cgroup = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    first_uid, uids = int(sys.argv[4]), int(sys.argv[5])
    found = [
        *processes(cgroup.name, first_uid, uids),
        *mounts([state, runtime]),
        *cgroups(cgroup),
        *files(state, runtime),
        *devices(),
        *objects_without_reference(state),
    ]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
