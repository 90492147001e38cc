#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""A program with the jailer's command line that does what its documentation says, in that order.

Beyond the jailer it lets a Python program run in the jail: /usr of the host is mounted there, which the fake of
Firecracker needs and the real one does not. It shares nothing with the code under test.
"""

import argparse
import contextlib
import ctypes
import os
import re
import resource
import shutil
import stat
import sys
import time
from pathlib import Path

VERSION = "1.16.1"
MS_BIND, MS_REC, MS_SLAVE, MNT_DETACH = 4096, 16384, 1 << 19, 2
GIVEN = ("", "dev", "dev/net", "run")
DEVICES = {"dev/net/tun": (10, 200), "dev/kvm": (10, 232), "dev/urandom": (1, 9)}
LIMITS = {"fsize": resource.RLIMIT_FSIZE, "no-file": resource.RLIMIT_NOFILE}
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        sys.exit(f"Error: {what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | Path, target: str | Path, flags: int) -> None:
    check(LIBC.mount(os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(flags), None), f"mount {target}")


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--id")
    parser.add_argument("--exec-file")
    parser.add_argument("--uid", type=int)
    parser.add_argument("--gid", type=int)
    parser.add_argument("--cgroup-version", default="1", choices=("1", "2"))
    parser.add_argument("--cgroup", action="append", default=[])
    parser.add_argument("--parent-cgroup")
    parser.add_argument("--chroot-base-dir", default="/srv/jailer")
    parser.add_argument("--netns")
    parser.add_argument("--resource-limit", action="append", default=[])
    parser.add_argument("--daemonize", action="store_true")
    parser.add_argument("--new-pid-ns", action="store_true")
    parser.add_argument("--version", action="store_true")
    own, extra = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, extra = own[:cut], own[cut + 1 :]
    return parser.parse_args(own), extra


def join_cgroup(given: argparse.Namespace) -> None:
    """With version 2 and no values to set, the process moves into the parent itself, if there is one."""
    if given.cgroup_version != "2" or given.cgroup:
        sys.exit("Error: this jailer only knows cgroup v2 and sets no values")
    if re.search(r"(^|/)\.{0,2}(/|$)", given.parent_cgroup):
        sys.exit("Error: invalid parent cgroup")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    group = Path(next(words[1] for words in mounts if words[2] == "cgroup2")) / given.parent_cgroup
    if group.exists():
        (group / "cgroup.procs").write_text(str(os.getpid()))


def set_limits(given: argparse.Namespace) -> None:
    values = {"no-file": 2048} | {name: int(value) for name, value in (one.split("=") for one in given.resource_limit)}
    for name, value in values.items():
        resource.setrlimit(LIMITS[name], (value, value))


def enter(root: Path) -> None:
    """Make `root` the root of this process, with the mounts below it, and nothing else in sight."""
    os.unshare(os.CLONE_NEWNS)
    mount("none", "/", MS_SLAVE | MS_REC)
    mount(root, root, MS_BIND | MS_REC)
    (root / "usr").mkdir()
    mount("/usr", root / "usr", MS_BIND | MS_REC)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    os.chdir(root)
    os.mkdir("old_root", 0o600)
    check(LIBC.pivot_root(b".", b"old_root"), "pivot_root")
    os.chdir("/")
    check(LIBC.umount2(b"old_root", MNT_DETACH), "umount old_root")
    os.rmdir("old_root")


def give(given: argparse.Namespace) -> None:
    for name in GIVEN:
        path = Path("/", name)
        path.mkdir(exist_ok=True)
        path.chmod(0o700)
        os.chown(path, given.uid, given.gid)
    for name, numbers in DEVICES.items():
        os.mknod(Path("/", name), stat.S_IFCHR | 0o600, os.makedev(*numbers))
        os.chown(Path("/", name), given.uid, given.gid)


def daemonize(null: int) -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def main() -> None:
    given, extra = arguments()
    if given.version:
        print(f"Jailer v{VERSION}")
        return
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", given.id):
        sys.exit(f"Error: invalid instance id {given.id!r}")
    program = Path(given.exec_file).resolve(strict=True)
    root = Path(given.chroot_base_dir).resolve(strict=True) / program.name / given.id / "root"
    join_cgroup(given)
    root.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(program, root / program.name)
    (root / program.name).chmod(0o755)
    os.chown(root / program.name, given.uid, given.gid)
    null = os.open("/dev/null", os.O_RDWR)
    set_limits(given)
    enter(root)
    give(given)
    if given.daemonize:
        daemonize(null)
    if given.new_pid_ns:
        os.unshare(os.CLONE_NEWPID)
        pid = os.fork()
        if pid:
            with open(f"/{program.name}.pid", "x") as file:
                file.write(str(pid))
            os._exit(0)
    os.setgroups([])
    os.setgid(given.gid)
    os.setuid(given.uid)
    now = str(time.monotonic_ns() // 1000)
    argv = [
        f"/{program.name}", "--id", given.id, "--start-time-us", now, "--start-time-cpu-us", "1",
        "--parent-cpu-time-us", "1", *extra,
    ]  # fmt: skip
    with contextlib.suppress(OSError):
        os.execve(argv[0], argv, {})


if __name__ == "__main__":
    main()
