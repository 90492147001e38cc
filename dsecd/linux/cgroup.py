# SPDX-License-Identifier: Apache-2.0
"""Directories of the cgroup v2 file system: make, delegate, freeze, kill, read, remove.

What belongs here: the files of one cgroup, whatever controllers there are (none is fine).  What does not:
which limits a sandbox gets and where its cgroup lies.  Linux documentation, admin-guide/cgroup-v2.

cgroups vanish at any time, so reading functions answer with nothing for one that is gone; writing ones raise.
"""

import asyncio
import errno
import os
import time
from pathlib import Path

from dsecd.linux import mount as mounts

#: The files whose owner may manage a delegated subtree, beside the directory itself; "Delegation" in the
#: kernel's page.
DELEGATED_FILES = ("cgroup.procs", "cgroup.threads", "cgroup.subtree_control")

_GONE = (errno.ENOENT, errno.ENODEV)
_FIRST_POLL_S, _LONGEST_POLL_S = 0.0005, 0.05


class AttributeRefused(OSError):
    """The kernel refused a value for an attribute file."""

    def __init__(self, number: int, path: Path, value: str) -> None:
        super().__init__(number, f"write '{value}': {os.strerror(number)}", os.fspath(path))
        self.path = path
        self.value = value


def root() -> Path:
    """Where cgroup v2 is mounted for the calling thread.  Raises FileNotFoundError when it is not."""
    found = [m.target for m in mounts.mountinfo("thread-self") if m.fstype == "cgroup2"]
    if Path("/sys/fs/cgroup") in found:
        return Path("/sys/fs/cgroup")
    if not found:
        raise FileNotFoundError(errno.ENOENT, "find cgroup v2: not mounted", "/sys/fs/cgroup")
    return found[0]


def own() -> str:
    """The cgroup of this process as a path below the root, "/" for the root itself.  cgroups(7)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:]
    raise FileNotFoundError(errno.ENOENT, "find own cgroup: no cgroup v2", "/proc/self/cgroup")


def create(path: Path) -> None:
    """Make the cgroup and its missing parents; existing ones are fine."""
    path.mkdir(mode=0o755, parents=True, exist_ok=True)


def delegate(path: Path, uid: int, gid: int | None = None) -> None:
    """Let `uid` (and `gid`, the same number by default) manage the subtree: move processes, make children."""
    group = uid if gid is None else gid
    os.chown(path, uid, group)
    for name in DELEGATED_FILES:
        os.chown(path / name, uid, group)


def controllers(path: Path) -> frozenset[str]:
    """Controllers that may be enabled in the children of this cgroup; empty when there are none."""
    return frozenset((read(path, "cgroup.controllers") or "").split())


def enable(path: Path, names: frozenset[str]) -> None:
    """Enable controllers for the children of this cgroup.

    Raises AttributeRefused (ENOENT: not available here).
    """
    missing = names - frozenset((read(path, "cgroup.subtree_control") or "").split())
    if missing:
        write(path, "cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(missing)))


def write(path: Path, attr: str, value: str | int) -> None:
    """Write an attribute file.

    Raises AttributeRefused with the kernel's errno, also if the file is not there.
    """
    text = str(value)
    file = path / attr
    try:
        # No O_CREAT, no truncation: on a path that is no cgroup this must not make a plain file.
        fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise AttributeRefused(error.errno or 0, file, text) from error
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise AttributeRefused(error.errno or 0, file, text) from error
    finally:
        os.close(fd)


def read(path: Path, attr: str) -> str | None:
    """Content of an attribute file without the final newline; None if it, or the cgroup, is not there."""
    try:
        return (path / attr).read_text("ascii").rstrip("\n")
    except OSError as error:
        # ENOENT on open, ENODEV on read when the cgroup went in between; EOPNOTSUPP: for example
        # cgroup.procs of a threaded cgroup, or pressure files without PSI.
        if error.errno in (*_GONE, errno.EOPNOTSUPP, errno.ENOTDIR):
            return None
        raise


def read_keyed(path: Path, attr: str) -> dict[str, int]:
    """A flat keyed file ("populated 1\\nfrozen 0") as numbers; empty if it is not there."""
    pairs = (line.split() for line in (read(path, attr) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].lstrip("-").isdigit()}


def populated(path: Path) -> bool:
    """Whether a process lives in the cgroup or below; False if it is gone."""
    return read_keyed(path, "cgroup.events").get("populated") == 1


def frozen(path: Path) -> bool:
    """Whether everything in the cgroup and below stands still; False if it is gone."""
    return read_keyed(path, "cgroup.events").get("frozen") == 1


def procs(path: Path, *, recursive: bool = False) -> list[int]:
    """Pids in the cgroup, with `recursive` also below; 0 stands for a process outside our pid namespace."""
    pids: list[int] = []
    for directory in (_tree(path) if recursive else [path]):
        pids += [int(pid) for pid in (read(directory, "cgroup.procs") or "").split()]
    return pids


def children(path: Path) -> list[Path]:
    """The cgroups right below, sorted; empty if it is gone."""
    try:
        with os.scandir(path) as entries:
            return sorted(path / entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        if error.errno in (*_GONE, errno.ENOTDIR):
            return []
        raise


def _tree(path: Path) -> list[Path]:
    """The cgroup and all below it, parents first.  A loop, not recursion: a sandbox chooses its own depth."""
    found = [path]
    for directory in found:
        found += children(directory)
    return found


def stat(path: Path) -> dict[str, int]:
    """What the kernel counts for this cgroup.

    Keys carry the kernel's names ("cpu.usage_usec", "memory.current", "cgroup.nr_descendants"); what a
    controller that is absent would count, or a cgroup that is gone, is left out.
    """
    counts: dict[str, int] = {}
    for attr in ("memory.current", "memory.swap.current", "memory.peak", "pids.current", "pids.peak"):
        text = read(path, attr)
        if text is not None and text.isdigit():
            counts[attr] = int(text)
    for attr in ("cpu.stat", "cgroup.stat", "memory.events", "pids.events"):
        prefix = attr.removesuffix(".stat")
        counts.update({f"{prefix}.{key}": value for key, value in read_keyed(path, attr).items()})
    return counts


def attach(path: Path, pid: int) -> None:
    """Move a process into the cgroup.  Raises AttributeRefused (ESRCH: no such process)."""
    write(path, "cgroup.procs", pid)


def kill(path: Path) -> None:
    """SIGKILL to every process in the cgroup and below, also frozen ones and those being forked.

    A cgroup that is gone is fine.  Returns before the processes have gone: see `populated`.
    """
    try:
        write(path, "cgroup.kill", 1)
    except AttributeRefused as error:
        # A file missing in a directory that exists is a kernel before 5.14, or no cgroup at all: not success.
        if error.errno not in _GONE or path.exists():
            raise


async def freeze(path: Path, timeout_s: float) -> bool:
    """Stop everything in the cgroup and below; False if not all of it stands still after `timeout_s`.

    Then the request stays in force; `thaw` takes it back.  A process in an uninterruptible sleep delays it.
    """
    write(path, "cgroup.freeze", 1)
    return await _until_frozen(path, timeout_s, state=1)


async def thaw(path: Path, timeout_s: float = 5.0) -> bool:
    """Let the cgroup run again; False if it is still frozen after `timeout_s` (an ancestor is frozen)."""
    write(path, "cgroup.freeze", 0)
    return await _until_frozen(path, timeout_s, state=0)


async def _until_frozen(path: Path, timeout_s: float, *, state: int) -> bool:
    """Re-read cgroup.events until `frozen` is `state`.

    The file signals changes as POLLPRI, which asyncio cannot wait for (its readers mean POLLIN, and that this
    file always reports).  Freezing takes well under a millisecond unless a process sleeps in the kernel, so a
    few short pauses that grow cost less than a thread with poll(2).
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_POLL_S
    while True:
        now = read_keyed(path, "cgroup.events").get("frozen")
        if now == state:
            return True
        if now is None:
            raise FileNotFoundError(errno.ENOENT, "freeze cgroup: it is gone", os.fspath(path))
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)


async def wait_empty(path: Path, timeout_s: float) -> bool:
    """Wait until no process is left in the cgroup or below; False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_POLL_S
    while populated(path):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)
    return True


def remove(path: Path, timeout_s: float = 5.0) -> None:
    """Remove the cgroup and all below it, leaves first; gone is fine.  Blocks, at most `timeout_s`.

    EBUSY is retried: killed processes leave a moment after the signal.  Raises OSError (EBUSY) with the first
    pids still inside.  On the event loop: wait_empty, then try_remove.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_POLL_S
    while not try_remove(path):
        if time.monotonic() >= deadline:
            pids = ", ".join(map(str, procs(path, recursive=True)[:5])) or "none seen"
            text = f"remove cgroup: still busy after {timeout_s:g} s, pids {pids}"
            raise OSError(errno.EBUSY, text, os.fspath(path))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)


def try_remove(path: Path) -> bool:
    """Remove what is not in use of the cgroup and all below it; whether nothing is left.  Raises OSError."""
    busy = False
    for directory in reversed(_tree(path)):
        try:
            os.rmdir(directory)
        except OSError as error:
            # ENOTEMPTY cannot happen to a cgroup directory, EBUSY also means "has children".
            if error.errno == errno.EBUSY:
                busy = True
            elif error.errno not in _GONE:
                raise
    return not busy
