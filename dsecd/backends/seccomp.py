# SPDX-License-Identifier: Apache-2.0
"""The seccomp profile of container sandboxes, as the OCI runtime takes it.

What belongs here: which system calls code in a sandbox may make. What does not: who loads it (the runtime),
and the second filter that the agent adds for commands (``agent/seccomp.c``): clone3 answers ENOSYS there,
because a filter cannot see the flags behind its pointer, while the agent itself needs it to start commands
inside their cgroup.

An allowlist. What is not on it answers ENOSYS, so that programs fall back to an older call; what is refused
for good answers EPERM. Arguments are compared under a 32-bit mask where the kernel reads 32 bits: a
comparison of all 64 would be passed by setting a bit above them. Native architecture only: calls in another
ABI kill the process. Sources: seccomp(2), runtime-spec config-linux.md "Seccomp", the kernel's
syscall_64.tbl.
"""

from __future__ import annotations

import platform
from typing import Any

_LOW32 = 0xFFFFFFFF

# include/uapi/linux/sched.h: every flag of clone(2) that makes a namespace.
_CLONE_NEW = 0x7E020000
# include/uapi/linux/prctl.h
_PR_SCHED_CORE = 62
# include/uapi/linux/socket.h
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
# include/uapi/linux/in.h. Asking for a protocol loads its module; these have had holes that anybody could reach, and
# programs that use them need a network, which there is none of. UDP-Lite and multipath TCP are not among the allowed
# either: whoever tries them falls back.
_INET_PROTOCOLS = {"any": 0, "icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58, "raw": 255}
# include/uapi/linux/netlink.h: addresses and routes, lists of sockets, device events, and what login programs note.
_NETLINK_PROTOCOLS = {"route": 0, "sock_diag": 4, "audit": 9, "kobject_uevent": 15}

#: ioctls that ordinary programs need. Everything else answers ENOSYS: no injecting of input into a terminal (TIOCSTI,
#: TIOCLINUX), no other line discipline for it (TIOCSETD loads the kernel's oldest drivers), no swapping of extents
#: between files (XFS_IOC_SWAPEXT, EXT4_IOC_MOVE_EXT), no drivers.
#: include/uapi/asm-generic/ioctls.h, linux/sockios.h, linux/fs.h
_IOCTLS = (
    *range(0x5401, 0x5412),  # TCGETS … TIOCOUTQ
    0x5413, 0x5414, 0x5415, 0x5416, 0x5417, 0x5418, 0x5419, 0x541A, 0x541B,  # TIOCGWINSZ … FIONREAD
    0x5420, 0x5421, 0x5422, 0x5424, 0x5425, 0x5426, 0x5427, 0x5428, 0x5429,  # TIOCPKT … TIOCGSID
    0x542A, 0x542B, 0x542C, 0x542D,  # TCGETS2 …
    0x5450, 0x5451, 0x5452,  # FIONCLEX FIOCLEX FIOASYNC
    0x5460,  # FIOQSIZE
    0x80045430, 0x40045431, 0x80045438, 0x80045439, 0x80045440, 0x5441,  # pseudo terminals
    0x80086601, 0x40086602, 0x801C581F, 0x401C5820,  # FS_IOC_{GET,SET}FLAGS, FS_IOC_FS{GET,SET}XATTR
    0xC020660B, 0x40049409, 0x4020940D, 0xC0189436,  # FIEMAP FICLONE FICLONERANGE FIDEDUPERANGE
    *range(0x8901, 0x8908),  # FIOSETOWN … SIOCGSTAMPNS
    *range(0x8910, 0x8938), 0x8942, 0x8943, 0x8946,  # network device queries
    0x80081270, 0x1260, 0x1268,  # BLKGETSIZE64 BLKGETSIZE BLKSSZGET: answers ENOTTY on files anyway
)  # fmt: skip

_ALLOWED = [
    "accept", "accept4", "access", "alarm", "arch_prctl", "bind", "brk", "cachestat", "capget",
    "capset", "chdir", "chmod", "chown", "chroot", "clock_getres", "clock_gettime", "clock_nanosleep",
    "clone3", "close", "close_range", "connect", "copy_file_range", "creat", "dup", "dup2", "dup3",
    "epoll_create", "epoll_create1", "epoll_ctl", "epoll_ctl_old", "epoll_pwait", "epoll_pwait2",
    "epoll_wait", "epoll_wait_old", "eventfd", "eventfd2", "execve", "execveat", "exit", "exit_group",
    "faccessat", "faccessat2", "fadvise64", "fallocate", "fchdir", "fchmod", "fchmodat", "fchmodat2",
    "fchown", "fchownat", "fcntl", "fdatasync", "fgetxattr", "flistxattr", "flock", "fork",
    "fremovexattr", "fsetxattr", "fstat", "fstatfs", "fsync", "ftruncate", "futex", "futex_requeue",
    "futex_wait", "futex_waitv", "futex_wake", "futimesat", "get_robust_list", "get_thread_area",
    "getcpu", "getcwd", "getdents", "getdents64", "getegid", "geteuid", "getgid", "getgroups",
    "getitimer", "getpeername", "getpgid", "getpgrp", "getpid", "getppid", "getpriority", "getrandom",
    "getresgid", "getresuid", "getrlimit", "getrusage", "getsid", "getsockname", "getsockopt", "gettid",
    "gettimeofday", "getuid", "getxattr", "getxattrat", "inotify_add_watch", "inotify_init",
    "inotify_init1", "inotify_rm_watch", "ioprio_get", "ioprio_set", "kill", "landlock_add_rule",
    "landlock_create_ruleset", "landlock_restrict_self", "lchown", "lgetxattr", "link", "linkat",
    "listen", "listxattr", "listxattrat", "llistxattr", "lremovexattr", "lseek", "lsetxattr", "lstat",
    "madvise", "map_shadow_stack", "membarrier", "memfd_create", "mincore", "mkdir", "mkdirat", "mknod",
    "mknodat", "mlock", "mlock2", "mlockall", "mmap", "modify_ldt", "mprotect", "mq_getsetattr",
    "mq_notify", "mq_open", "mq_timedreceive", "mq_timedsend", "mq_unlink", "mremap", "mseal", "msgctl",
    "msgget", "msgrcv", "msgsnd", "msync", "munlock", "munlockall", "munmap", "nanosleep", "newfstatat",
    "open", "openat", "openat2", "pause", "pidfd_getfd", "pidfd_open", "pidfd_send_signal", "pipe",
    "pipe2", "pkey_alloc", "pkey_free", "pkey_mprotect", "poll", "ppoll", "pread64", "preadv",
    "preadv2", "process_madvise", "process_mrelease", "process_vm_readv",
    "process_vm_writev", "pselect6", "ptrace", "pwrite64", "pwritev", "pwritev2", "read", "readahead",
    "readlink", "readlinkat", "readv", "recvfrom", "recvmmsg", "recvmsg", "remap_file_pages",
    "removexattr", "removexattrat", "rename", "renameat", "renameat2", "restart_syscall", "rmdir",
    "rseq", "rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigqueueinfo", "rt_sigreturn",
    "rt_sigsuspend", "rt_sigtimedwait", "rt_tgsigqueueinfo", "sched_get_priority_max",
    "sched_get_priority_min", "sched_getaffinity", "sched_getattr", "sched_getparam",
    "sched_getscheduler", "sched_rr_get_interval", "sched_setaffinity", "sched_setattr",
    "sched_setparam", "sched_setscheduler", "sched_yield", "seccomp", "select", "semctl", "semget",
    "semop", "semtimedop", "sendfile", "sendmmsg", "sendmsg", "sendto", "set_robust_list",
    "set_thread_area", "set_tid_address", "setfsgid", "setfsuid", "setgid", "setgroups", "setitimer",
    "setpgid", "setpriority", "setregid", "setresgid", "setresuid", "setreuid", "setrlimit", "setsid",
    "setsockopt", "setuid", "setxattr", "setxattrat", "shmat", "shmctl", "shmdt", "shmget", "shutdown",
    "sigaltstack", "signalfd", "signalfd4", "splice", "stat", "statfs", "statx",
    "symlink", "symlinkat", "sync", "sync_file_range", "syncfs", "sysinfo", "tee", "tgkill", "time",
    "timer_create", "timer_delete", "timer_getoverrun", "timer_gettime", "timer_settime",
    "timerfd_create", "timerfd_gettime", "timerfd_settime", "times", "tkill", "truncate", "umask",
    "uname", "unlink", "unlinkat", "utime", "utimensat", "utimes", "vfork", "vmsplice", "wait4",
    "waitid", "write", "writev",
]  # fmt: skip

# Refused for good, and said so with EPERM: the mount API, namespaces, other processes' keys, kernel attack surface.
_REFUSED = [
    "_sysctl", "acct", "add_key", "adjtimex", "bpf", "clock_adjtime", "clock_settime", "create_module",
    "delete_module", "fanotify_init", "fanotify_mark", "finit_module", "fsconfig", "fsmount", "fsopen",
    "fspick", "get_kernel_syms", "get_mempolicy", "init_module", "io_uring_enter", "io_uring_register",
    "io_uring_setup", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl", "listmount",
    "lookup_dcookie", "mbind", "migrate_pages", "mount", "mount_setattr", "move_mount", "move_pages",
    "name_to_handle_at", "nfsservctl", "open_by_handle_at", "open_tree", "open_tree_attr",
    "perf_event_open", "pivot_root", "query_module", "quotactl", "quotactl_fd", "reboot", "request_key",
    "set_mempolicy", "set_mempolicy_home_node", "setdomainname", "sethostname", "setns", "settimeofday",
    "statmount", "swapoff", "swapon", "syslog", "umount", "umount2", "unshare", "uselib", "userfaultfd",
    "ustat", "vhangup", "vm86", "vm86old",
]  # fmt: skip

_EPERM, _ENOSYS = 1, 38
_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}


def _allow(names: list[str], *conditions: dict[str, Any]) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": names, "action": "SCMP_ACT_ALLOW"}
    return rule | {"args": list(conditions)} if conditions else rule


def _refuse(names: list[str], errno: int, *conditions: dict[str, Any]) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": errno}
    return rule | {"args": list(conditions)} if conditions else rule


def _masked(index: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _clone_rules() -> list[dict[str, Any]]:
    """clone(2) without namespaces; each namespace flag alone is enough for EPERM."""
    flags = [1 << bit for bit in range(32) if _CLONE_NEW & (1 << bit)]
    refused = [_refuse(["clone"], _EPERM, _masked(0, flag, flag)) for flag in flags]
    return [_allow(["clone"], _masked(0, _CLONE_NEW, 0)), *refused]


def _all_but(name: str, index: int, value: int) -> list[dict[str, Any]]:
    """A call unless the low 32 bits of an argument are ``value``, which is refused.

    A number is another one if one of its bits is; a comparison by "not equal" is one of 64 bits.
    """
    others = (_allow([name], _masked(index, 1 << bit, ~value & 1 << bit)) for bit in range(32))
    return [*others, _refuse([name], _EPERM, _masked(index, _LOW32, value))]


def _socket_rules() -> list[dict[str, Any]]:
    """Sockets by family and protocol, pairs only of AF_UNIX: a pair of another family would make its sockets first."""
    protocols = {_AF_INET: _INET_PROTOCOLS, _AF_INET6: _INET_PROTOCOLS, _AF_NETLINK: _NETLINK_PROTOCOLS}
    return [
        _allow(["socket", "socketpair"], _masked(0, _LOW32, _AF_UNIX)),
        *(
            _allow(["socket"], _masked(0, _LOW32, family), _masked(2, _LOW32, protocol))
            for family, allowed in protocols.items()
            for protocol in allowed.values()
        ),
    ]


def profile() -> dict[str, Any]:
    """The ``linux.seccomp`` object of an OCI runtime configuration for this machine."""
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": _ENOSYS,
        "architectures": [_ARCHITECTURES[platform.machine()]],
        "syscalls": [
            _allow(_ALLOWED),
            _refuse(_REFUSED, _EPERM),
            *_clone_rules(),
            *(_allow(["ioctl"], _masked(1, _LOW32, command)) for command in _IOCTLS),
            *_socket_rules(),
            # The agent, process 1: whoever has the same uid may set its limits.
            *_all_but("prlimit64", 0, 1),
            # A cookie of one's own keeps everybody else off the sibling of whatever core one runs on.
            *_all_but("prctl", 0, _PR_SCHED_CORE),
            # PER_LINUX, and the query 0xffffffff; the others change what the kernel does with addresses and exec.
            *(_allow(["personality"], _masked(0, _LOW32, value)) for value in (0x0, 0x0008, 0x20000, 0x20008, _LOW32)),
        ],
    }
