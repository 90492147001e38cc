# SPDX-License-Identifier: Apache-2.0
"""The jail of one Firecracker process: its directory, what is in it, and the call of the jailer that closes it.

What belongs here: the files that the process sees and who may write them.  What does not: what is said to the
process (api, driver).

The jailer changes the process's root to `<base>/<program's name>/<id>/root`, where we have put the guest's files
before: as bind mounts, in a mount namespace that only the jailer inherits, so they go with the process, and names
are the same for each machine, which a snapshot needs.  The jailer gives the directories inside to the process;
`seal` takes them back once its sockets are made, so that a process that was taken over by its guest can make no
files and replace none.  docs/jailer.md of Firecracker.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsecd.linux import mount, syscalls
from dsecd.linux.fd import closing

#: Names inside the jail.
API_SOCKET, VSOCK_SOCKET, LOG, CONSOLE = "run/api.sock", "run/agent.sock", "log", "console"
KERNEL, INITRAMFS, DISK, STATE, MEMORY = "kernel", "initramfs", "disk", "state", "memory"

#: What the jailer gives to the process, and what `seal` takes back.
_GIVEN = (".", "run", "dev", "dev/net")
_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_TAIL_BYTES = 2000


@dataclass(frozen=True)
class Programs:
    """The two programs, which must be of one release. Firecracker is linked statically, so it needs no more."""

    firecracker: Path
    jailer: Path


@dataclass(frozen=True)
class Bind:
    """A file of the host under a name in the jail."""

    source: Path
    name: str
    writable: bool = False


@dataclass(frozen=True)
class Limits:
    """What the jailer sets: the largest file the process may write, and how many it may have open."""

    file_bytes: int
    open_files: int = 256


@dataclass(frozen=True)
class Jail:
    """Where the jail of one machine is, and whose."""

    directory: Path
    id: str
    uid: int
    programs: Programs

    @property
    def root(self) -> Path:
        """What the process sees as `/`."""
        return self.directory / self.programs.firecracker.name / self.instance / "root"

    @property
    def instance(self) -> str:
        """The id as Firecracker takes it: 64 letters, digits and hyphens at most.  For people to read."""
        return "".join(char if char.isalnum() else "-" for char in self.id)[:64]

    def argv(self, cgroup: str, limits: Limits) -> list[str]:
        """The call that starts the process; `cgroup` is relative to the root of cgroup v2.

        The jailer would move a process into no cgroup, without a word, if that one were not there: the caller looks.
        """
        return [
            str(self.programs.jailer), "--id", self.instance, "--exec-file", str(self.programs.firecracker),
            "--uid", str(self.uid), "--gid", str(self.uid), "--chroot-base-dir", str(self.directory),
            "--cgroup-version", "2", "--parent-cgroup", cgroup,
            "--resource-limit", f"fsize={limits.file_bytes}", "--resource-limit", f"no-file={limits.open_files}",
            "--daemonize", "--new-pid-ns",
            "--", "--api-sock", f"/{API_SOCKET}", "--log-path", f"/{LOG}", "--level", "Warning",
        ]  # fmt: skip

    def prepare(self, binds: Sequence[Bind]) -> None:
        """Make the directory with what the process writes and places for what it is given.  Blocks."""
        self.directory.mkdir(mode=0o700, parents=True)
        self.root.mkdir(mode=0o700, parents=True)
        for bind in binds:
            (self.root / bind.name).touch(mode=0o400)
        # Firecracker opens both, and makes neither.
        for name in (LOG, CONSOLE):
            (self.root / name).touch(mode=0o600)
            os.chown(self.root / name, self.uid, self.uid)

    def attach(self, binds: Sequence[Bind]) -> None:
        """Mount what the process is given, in the calling thread's mount namespace.  Blocks."""
        for bind in binds:
            with closing(mount.clone_tree(bind.source)) as clone:
                flags = syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NOEXEC
                mount.set_attrs(clone, attr_set=flags | (0 if bind.writable else syscalls.MOUNT_ATTR_RDONLY))
                mount.attach(clone, self.root / bind.name)

    def detach(self, binds: Sequence[Bind]) -> None:
        """Undo `attach`, whichever part of it was done: on a mount of the caller's nothing can be removed.  Blocks."""
        for bind in reversed(binds):
            with contextlib.suppress(OSError):
                mount.detach(self.root / bind.name)

    def opened(self) -> contextlib.AbstractContextManager[int]:
        """A descriptor of the root for the length of the block."""
        return closing(os.open(self.root, _DIRECTORY | os.O_CLOEXEC))

    def seal(self) -> None:
        """Leave the process nothing to write but what it has open.  Blocks."""
        with self.opened() as root:
            for name in _GIVEN:
                with closing(syscalls.openat2(root, name, _DIRECTORY, resolve=_BENEATH)) as given:
                    os.fchown(given, 0, 0)
                    os.fchmod(given, 0o711)

    def lend(self, name: str) -> None:
        """Make a directory that the process may write to, until `take_back`.  Blocks."""
        (self.root / name).mkdir(mode=0o700)
        os.chown(self.root / name, self.uid, self.uid)

    def take_back(self, name: str) -> None:
        """From now on the process can neither change nor make entries of a lent directory.  Blocks."""
        with self.opened() as root, closing(syscalls.openat2(root, name, _DIRECTORY, resolve=_BENEATH)) as lent:
            os.fchown(lent, 0, 0)
            os.fchmod(lent, 0o700)

    def take(self, name: str, target: Path, *, limit_bytes: int) -> None:
        """Make a file in a directory taken back root's, read-only and known as `target`, on the same disk.  Blocks.

        Raises OSError for anything but a plain file of its own, of at most that size.
        """
        # The directory is ours again, so the name stays what the descriptor is.
        with self.opened() as root, closing(self.open_within(name)) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != self.uid:
                raise OSError(errno.EPERM, "take from a jail: not a plain file of its own", name)
            if not 0 < status.st_size <= limit_bytes:
                raise OSError(errno.EFBIG, f"take from a jail: {status.st_size} bytes, at most {limit_bytes}", name)
            os.fchown(fd, 0, 0)
            os.fchmod(fd, 0o444)
            os.link(name, target, src_dir_fd=root, follow_symlinks=False)

    def drop(self, name: str) -> None:
        """Remove a lent directory with what is in it; absent is fine.  Blocks."""
        with contextlib.suppress(FileNotFoundError):
            self.take_back(name)
            shutil.rmtree(self.root / name)

    def open_within(self, name: str) -> int:
        """An fd, for reading, of what is there under a name that the process may have given to anything.

        Raises OSError (ELOOP, EXDEV) for what leads elsewhere; a FIFO does not make it wait.
        """
        with self.opened() as root:
            return syscalls.openat2(root, name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, resolve=_BENEATH)

    def tail(self, name: str) -> str:
        """The end of a file that the process wrote; empty if there is nothing to read."""
        try:
            with closing(self.open_within(name)) as fd:
                size = os.fstat(fd).st_size
                text = os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode("utf-8", "replace")
        except OSError:
            return ""
        return "".join(char if char.isprintable() or char == "\n" else " " for char in text).strip()

    def pid(self) -> int | None:
        """The process as the jailer noted it down, which may be anything once the process has run."""
        text = self.tail(f"{self.programs.firecracker.name}.pid")
        return int(text) if 0 < len(text) < 10 and text.isascii() and text.isdigit() else None

    def remove(self) -> None:
        """Remove it all; absent is fine.  The processes in it are gone.  Blocks."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)
