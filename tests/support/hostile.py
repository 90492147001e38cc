#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hostile code: tries what code in a sandbox must not manage, and prints the outcome of each try as JSON.

Run inside a sandbox, and outside as root as the control: an attempt that fails in both places proves nothing. The only
argument is the pid of a process to attack (1 inside). Nothing here leaves a trace when it succeeds.
"""

import ctypes
import errno
import fcntl
import json
import os
import pty
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)

# arch/x86/entry/syscalls/syscall_64.tbl
ADD_KEY, IO_URING_SETUP, BPF, USERFAULTFD, PERF_EVENT_OPEN, OPEN_TREE, CLONE3 = 248, 425, 321, 323, 298, 428, 435
NAME_TO_HANDLE_AT, KEYCTL, PIVOT_ROOT, FSOPEN = 303, 250, 155, 430
PRLIMIT64, RLIMIT_NOFILE = 302, 7
CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWNET = 0x10000000, 0x20000, 0x40000000
PTRACE_ATTACH, PTRACE_DETACH = 16, 17
TIOCSTI, TIOCSETD = 0x5412, 0x5423


def call(number: int, *args: object) -> int:
    result = libc.syscall(number, *args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def libc_call(name: str, *args: object) -> int:
    result = getattr(libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def in_child(fn: Callable[[], object]) -> None:
    """Run an attempt that would change this process in a child; its errno comes back as the exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            fn()
        except OSError as error:
            os._exit(error.errno or 255)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise OSError(status if status > 0 else errno.EINTR, os.strerror(abs(status)))


def mount_tmpfs() -> None:
    libc_call("unshare", CLONE_NEWNS)
    libc_call("mount", b"none", b"/", None, 0x44000, None)
    libc_call("mount", b"x", b"/mnt", b"tmpfs", 0, None)


def join_namespace() -> None:
    fd = os.open("/proc/self/ns/uts", os.O_RDONLY)
    libc_call("setns", fd, 0)


def clone3_new_user() -> None:
    # struct clone_args, 64 bytes: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls
    args = (ctypes.c_uint64 * 8)(CLONE_NEWUSER, 0, 0, 0, 17, 0, 0, 0)
    pid = call(CLONE3, ctypes.byref(args), ctypes.sizeof(args))
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def attach(pid: int) -> None:
    libc_call("ptrace", PTRACE_ATTACH, pid, 0, 0)
    os.waitpid(pid, 0x40000000)
    libc_call("ptrace", PTRACE_DETACH, pid, 0, 0)


def push_terminal_input(command: int) -> None:
    """Type into a terminal from a child that leads its session; above 32 bits the kernel looks at no bit."""
    pid, master = pty.fork()
    if pid == 0:
        number = 0
        if libc.ioctl(0, ctypes.c_ulong(command), b"x") < 0:
            number = ctypes.get_errno()
        os._exit(number)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(master)
    if status:
        raise OSError(status, os.strerror(status))


def make_device() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        os.mknod(f"{place}/disk", 0o60600, os.makedev(7, 0))
        os.close(os.open(f"{place}/disk", os.O_RDONLY))


def give_away() -> None:
    with tempfile.NamedTemporaryFile() as file:
        os.chown(file.name, 70000, 70000)


def open_for_writing(path: str) -> Callable[[], None]:
    return lambda: os.close(os.open(path, os.O_WRONLY))


def open_for_reading(path: str) -> Callable[[], None]:
    def read() -> None:
        with open(path, "rb") as file:
            file.read(16)

    return read


def raise_limit() -> None:
    import resource

    _soft, hard = resource.getrlimit(resource.RLIMIT_NICE)
    resource.setrlimit(resource.RLIMIT_NICE, (hard + 1, hard + 1))


def swap_extents() -> None:
    """XFS_IOC_SWAPEXT: any answer but "no such call" means that it reached a file system."""
    with tempfile.TemporaryFile() as file:
        try:
            fcntl.ioctl(file, 0xC0C0586D, b"\0" * 192)
        except OSError as error:
            if error.errno == errno.ENOSYS:
                raise


def lower_limits(pid: int) -> None:
    """Of open files, to 64."""
    call(PRLIMIT64, ctypes.c_long(pid), RLIMIT_NOFILE, (ctypes.c_uint64 * 2)(64, 64), None)


def change_line_discipline() -> None:
    """To the one that it has."""
    master, slave = pty.openpty()
    try:
        fcntl.ioctl(slave, TIOCSETD, b"\0\0\0\0")
    finally:
        os.close(master)
        os.close(slave)


def inet_socket_pair() -> None:
    """The kernel makes two sockets of the family, with all that this loads, before it finds that they make no pair."""
    try:
        libc_call("socketpair", socket.AF_INET, socket.SOCK_STREAM, 0, (ctypes.c_int * 2)())
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise


def attempts(victim: int) -> dict[str, Callable[[], object]]:
    null = ctypes.c_void_p(None)
    return {
        "unshare a user namespace": lambda: in_child(lambda: libc_call("unshare", CLONE_NEWUSER)),
        "unshare a network namespace": lambda: in_child(lambda: libc_call("unshare", CLONE_NEWNET)),
        "clone3 a user namespace": clone3_new_user,
        "mount": lambda: in_child(mount_tmpfs),
        "open_tree": lambda: os.close(call(OPEN_TREE, -100, b"/", 1)),
        "fsopen": lambda: os.close(call(FSOPEN, b"tmpfs", 0)),
        "setns": lambda: in_child(join_namespace),
        "ptrace the victim": lambda: attach(victim),
        "read the victim's environment": open_for_reading(f"/proc/{victim}/environ"),
        "read the victim's memory map": open_for_reading(f"/proc/{victim}/maps"),
        "lower the victim's limits": lambda: lower_limits(victim),
        "lower the victim's limits past 32 bits": lambda: lower_limits(1 << 32 | victim),
        "offer the victim to the OOM killer": lambda: Path(f"/proc/{victim}/oom_score_adj").write_text("1000"),
        "follow the victim's root": lambda: os.listdir(f"/proc/{victim}/root/"),
        "list the victim's program": lambda: os.readlink(f"/proc/{victim}/exe"),
        "push terminal input": lambda: push_terminal_input(TIOCSTI),
        "push terminal input past 32 bits": lambda: push_terminal_input(0x7_0000_0000 | TIOCSTI),
        "change the line discipline": change_line_discipline,
        "a pair of sockets that are not AF_UNIX": inet_socket_pair,
        "UDP-Lite socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 136).close(),
        "netfilter socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12).close(),
        "swap extents": swap_extents,
        "add a key": lambda: call(ADD_KEY, b"user", b"dsec", b"x", 1, -2),
        "io_uring": lambda: os.close(call(IO_URING_SETUP, 4, ctypes.create_string_buffer(120))),
        "bpf": lambda: os.close(call(BPF, 0, (ctypes.c_uint32 * 18)(2, 4, 8, 1), 72)),
        "userfaultfd": lambda: os.close(call(USERFAULTFD, 1)),
        "name_to_handle_at": lambda: _handle(null),
        "packet socket": lambda: socket.socket(17, socket.SOCK_RAW, 0).close(),
        "crypto socket": lambda: socket.socket(38, socket.SOCK_SEQPACKET, 0).close(),
        "make a disk": make_device,
        "give a file to an id out of range": give_away,
        "write a kernel setting": open_for_writing("/proc/sys/vm/drop_caches"),
        "write sysrq": open_for_writing("/proc/sysrq-trigger"),
        "write the cgroup": open_for_writing("/sys/fs/cgroup/cgroup.procs"),
        "read kernel keys": lambda: _nonempty("/proc/interrupts"),
        "set the host's name": lambda: in_child(lambda: libc_call("sethostname", b"x", 1)) if victim == 1 else None,
        "set the clock": lambda: in_child(_set_clock),
        "raise a hard limit": raise_limit,
        "reach the network": _other_network_devices,
    }


def _nonempty(path: str) -> None:
    if not Path(path).read_bytes():
        raise OSError(errno.ENODATA, "empty")


def _handle(_null: object) -> None:
    buffer = (ctypes.c_uint32 * 64)(128)
    call(NAME_TO_HANDLE_AT, -100, b"/", ctypes.byref(buffer), ctypes.byref(ctypes.c_int()), 0)


def _set_clock() -> None:
    """Set it to what it is."""
    import time

    time.clock_settime_ns(time.CLOCK_REALTIME, time.clock_gettime_ns(time.CLOCK_REALTIME))


def _other_network_devices() -> None:
    if not [name for name in os.listdir("/sys/class/net") if name != "lo"]:
        raise OSError(errno.ENETUNREACH, "only loopback")


def main() -> None:
    results: dict[str, str] = {}
    for name, attempt in attempts(int(sys.argv[1])).items():
        try:
            attempt()
            results[name] = "succeeded"
        except OSError as error:
            results[name] = errno.errorcode.get(error.errno or 0, str(error.errno))
        except ValueError as error:
            results[name] = f"EINVAL ({error})"
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
