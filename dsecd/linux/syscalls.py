# SPDX-License-Identifier: Apache-2.0
"""The ctypes door to the kernel: one function per syscall, named like it, raising OSError with the path.

What belongs here: calls that Python's os module lacks (or has only from 3.12 on), and the constants they
take, under their header's names.  What does not: anything that combines two calls; that is the mechanism's
own module.  Every fd returned is close-on-exec and belongs to the caller.
"""

import ctypes
import errno
import os
import platform
import sys
from pathlib import Path

StrPath = str | os.PathLike[str]

# include/uapi/linux/fcntl.h
AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

# include/uapi/linux/mount.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_MOVE, MS_REC = 4096, 8192, 16384
MS_UNBINDABLE, MS_PRIVATE, MS_SLAVE, MS_SHARED = 1 << 17, 1 << 18, 1 << 19, 1 << 20
MNT_FORCE, MNT_DETACH, MNT_EXPIRE, UMOUNT_NOFOLLOW = 1, 2, 4, 8
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_SYMLINKS, MOVE_MOUNT_F_AUTOMOUNTS, MOVE_MOUNT_F_EMPTY_PATH = 0x1, 0x2, 0x4
MOVE_MOUNT_T_SYMLINKS, MOVE_MOUNT_T_AUTOMOUNTS, MOVE_MOUNT_T_EMPTY_PATH = 0x10, 0x20, 0x40
FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, FSCONFIG_SET_BINARY = 0, 1, 2
FSCONFIG_SET_PATH, FSCONFIG_SET_PATH_EMPTY, FSCONFIG_SET_FD = 3, 4, 5
FSCONFIG_CMD_CREATE, FSCONFIG_CMD_RECONFIGURE = 6, 7
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 0x1, 0x2, 0x4, 0x8
MOUNT_ATTR_NOATIME, MOUNT_ATTR_NODIRATIME = 0x10, 0x80
MOUNT_ATTR_IDMAP, MOUNT_ATTR_NOSYMFOLLOW = 0x100000, 0x200000

# include/uapi/linux/sched.h
CLONE_VM, CLONE_FS, CLONE_FILES = 0x100, 0x200, 0x400
CLONE_NEWTIME, CLONE_NEWNS, CLONE_NEWCGROUP = 0x80, 0x20000, 0x2000000
CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
CLONE_INTO_CGROUP = 0x200000000

# include/uapi/linux/prctl.h, include/uapi/linux/securebits.h
PR_SET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_DUMPABLE, PR_SET_NAME = 1, 3, 4, 15
PR_GET_SECCOMP, PR_SET_SECCOMP = 21, 22
PR_GET_SECUREBITS, PR_SET_SECUREBITS = 27, 28
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
PR_SCHED_CORE, PR_SCHED_CORE_GET, PR_SCHED_CORE_CREATE = 62, 0, 1
PR_SCHED_CORE_SHARE_FROM, PR_SCHED_CORE_SCOPE_THREAD = 3, 0
SECBIT_NO_SETUID_FIXUP = 1 << 2

# include/uapi/linux/openat2.h
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS = 0x1, 0x2, 0x4
RESOLVE_BENEATH, RESOLVE_IN_ROOT, RESOLVE_CACHED = 0x8, 0x10, 0x20

# include/uapi/linux/fs.h
RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4

# include/uapi/linux/magic.h
NSFS_MAGIC, OVERLAYFS_SUPER_MAGIC, EROFS_SUPER_MAGIC, CGROUP2_SUPER_MAGIC = (
    0x6E736673, 0x794C7630, 0xE0F5E1E2, 0x63677270
)

# include/linux/swap.h
SWAP_FLAG_PREFER, SWAP_FLAG_PRIO_MASK = 0x8000, 0x7FFF

# include/uapi/linux/wait.h
WALL = 0x40000000

# Syscall numbers above 423 are the same on every architecture (include/uapi/asm-generic/unistd.h).  Called by
# number because musl and older C libraries have no wrapper for some of them.
_NR = {
    "pidfd_send_signal": 424,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "pidfd_open": 434,
    "openat2": 437,
    "mount_setattr": 442,
}

# Older calls have numbers by architecture; syscall_64.tbl, asm-generic/unistd.h.
_SETRESUID = ctypes.c_long(117 if platform.machine() == "x86_64" else 147)

# The Linux release each call came with, for the message that explains ENOSYS.
_SINCE = {
    "pidfd_send_signal": "5.1",
    "open_tree": "5.2",
    "move_mount": "5.2",
    "fsopen": "5.2",
    "fsconfig": "5.2",
    "fsmount": "5.2",
    "pidfd_open": "5.3",
    "openat2": "5.6",
    "mount_setattr": "5.12",
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.clone.restype = ctypes.c_int


def oserror(name: str, *paths: StrPath | None) -> OSError:
    """The OSError for the errno the last call on this thread left, naming the call and up to two paths."""
    number = ctypes.get_errno()
    text = f"{name}: {os.strerror(number)}"
    if number == errno.ENOSYS:
        needs = f" (needs {_SINCE[name]})" if name in _SINCE else ""
        text = f"{name}: not implemented by kernel {os.uname().release}{needs}, or blocked by seccomp"
    names = [os.fspath(p) for p in paths if p is not None and os.fspath(p) != ""]
    if len(names) >= 2:
        return OSError(number, text, names[0], None, names[1])
    return OSError(number, text, names[0]) if names else OSError(number, text)


def _path(path: StrPath | None) -> bytes | None:
    return None if path is None else os.fsencode(path)


def _call(name: str, *args: object, paths: tuple[StrPath | None, ...] = ()) -> int:
    """Call `name`; ints become longs, since a variadic C function would read garbage as the upper half."""
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = int(_libc.syscall(ctypes.c_long(_NR[name]), *converted))
    if result < 0:
        raise oserror(name, *paths)
    return result


def _check(result: int, name: str, *paths: StrPath | None) -> int:
    if result < 0:
        raise oserror(name, *paths)
    return result


def open_tree(dirfd: int, path: StrPath, flags: int) -> int:
    """A mount fd for `path`; with OPEN_TREE_CLONE a detached copy of the mount there.  open_tree(2)."""
    return _call("open_tree", dirfd, _path(path), flags | OPEN_TREE_CLOEXEC, paths=(path,))


def move_mount(from_fd: int, from_path: StrPath, to_fd: int, to_path: StrPath, flags: int) -> None:
    """Attach a detached mount, or move an attached one.  move_mount(2)."""
    _call("move_mount", from_fd, _path(from_path), to_fd, _path(to_path), flags, paths=(from_path, to_path))


def fsopen(fstype: str) -> int:
    """A file system context for `fstype`; ENODEV if the kernel has no such file system.  fsopen(2)."""
    return _call("fsopen", fstype.encode(), FSOPEN_CLOEXEC, paths=(fstype,))


def fsconfig_set_string(fd: int, key: str, value: StrPath) -> None:
    """Set option `key` to `value`; the kernel takes at most 255 bytes (EINVAL above).  fsconfig(2)."""
    shown = f"{key}={os.fspath(value)}"
    _call("fsconfig", fd, FSCONFIG_SET_STRING, key.encode(), _path(value), 0, paths=(shown,))


def fsconfig_set_flag(fd: int, key: str) -> None:
    """Set the option `key` that takes no value.  fsconfig(2)."""
    _call("fsconfig", fd, FSCONFIG_SET_FLAG, key.encode(), None, 0, paths=(key,))


def fsconfig_set_fd(fd: int, key: str, value: int) -> None:
    """Set option `key` to an open file.  OverlayFS takes layers this way from 6.13 on only.  fsconfig(2)."""
    _call("fsconfig", fd, FSCONFIG_SET_FD, key.encode(), None, value, paths=(key,))


def fsconfig_create(fd: int) -> None:
    """Make the superblock from the options set so far.  fsconfig(2)."""
    _call("fsconfig", fd, FSCONFIG_CMD_CREATE, None, None, 0)


def fsmount(fd: int, attrs: int = 0) -> int:
    """A detached mount (O_PATH fd) of the superblock made by fsconfig_create; `attrs` are MOUNT_ATTR_*.

    fsmount(2).
    """
    return _call("fsmount", fd, FSMOUNT_CLOEXEC, attrs)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def mount_setattr(
    dirfd: int, path: StrPath, flags: int, *,
    attr_set: int = 0, attr_clr: int = 0, propagation: int = 0, userns_fd: int = 0,
) -> None:
    """Change a mount's attributes; an id mapping goes only onto a mount not attached yet.

    mount_setattr(2).
    """
    attr = _MountAttr(attr_set, attr_clr, propagation, userns_fd)
    _call("mount_setattr", dirfd, _path(path), flags, ctypes.byref(attr), ctypes.sizeof(attr), paths=(path,))


def umount2(target: StrPath, flags: int) -> None:
    """Unmount what is on top at `target`.  umount2(2)."""
    _check(_libc.umount2(_path(target), ctypes.c_int(flags)), "umount2", target)


def mount(
    source: StrPath | None, target: StrPath, fstype: str | None, flags: int, data: str | None = None
) -> None:
    """The classic mount; used only for propagation and for binding namespace files.  mount(2)."""
    result = _libc.mount(
        _path(source), _path(target), fstype.encode() if fstype else None,
        ctypes.c_ulong(flags), data.encode() if data else None,
    )
    _check(result, "mount", source, target)


def unshare(flags: int) -> None:
    """Give the calling thread its own copy of what `flags` names.  unshare(2)."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, nstype: int) -> None:
    """Move the calling thread into the namespace behind `fd`.  setns(2)."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(nstype)), "setns")


def pidfd_open(pid: int) -> int:
    """A pidfd; ESRCH if there is no such process.  pidfd_open(2)."""
    return _call("pidfd_open", pid, 0)


def pidfd_send_signal(pidfd: int, sig: int) -> None:
    """Signal the process behind `pidfd`; ESRCH once it is reaped.  pidfd_send_signal(2)."""
    _call("pidfd_send_signal", pidfd, sig, None, 0)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def openat2(dirfd: int, path: StrPath, flags: int, *, mode: int = 0, resolve: int = 0) -> int:
    """Open with the path walk restricted by RESOLVE_* flags (EXDEV or ELOOP when it would leave).

    openat2(2).
    """
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    return _call("openat2", dirfd, _path(path), ctypes.byref(how), ctypes.sizeof(how), paths=(path,))


def setfsuid(uid: int) -> int:
    """Set the calling thread's uid for file access; returns the one before.  setfsuid(2).

    The call cannot report failure: ask again with -1, which changes nothing, to see what is in force.
    """
    return int(_libc.setfsuid(ctypes.c_uint(uid & 0xFFFFFFFF))) & 0xFFFFFFFF


def seteuid(uid: int) -> None:
    """Set the effective uid of the calling thread alone (the C library's function changes all threads).

    setresuid(2); "C library/kernel differences".
    """
    _check(_libc.syscall(_SETRESUID, ctypes.c_int(-1), ctypes.c_uint(uid), ctypes.c_int(-1)), "setresuid")


def setfsgid(gid: int) -> int:
    """Set the calling thread's gid for file access; returns the one before.  setfsgid(2)."""
    return int(_libc.setfsgid(ctypes.c_uint(gid & 0xFFFFFFFF))) & 0xFFFFFFFF


def prctl(option: int, arg2: int = 0, arg3: int = 0, arg4: int = 0, arg5: int = 0) -> int:
    """An operation on the calling thread or process.  prctl(2)."""
    args = [ctypes.c_ulong(a) for a in (arg2, arg3, arg4, arg5)]
    return _check(_libc.prctl(ctypes.c_int(option), *args), "prctl")


def syncfs(fd: int) -> None:
    """Write out the whole file system that holds `fd`; EIO if any write back failed since the fd was opened.

    syncfs(2).
    """
    _check(_libc.syncfs(ctypes.c_int(fd)), "syncfs")


def renameat2(old_dirfd: int, old: StrPath, new_dirfd: int, new: StrPath, flags: int) -> None:
    """Rename with RENAME_NOREPLACE, RENAME_EXCHANGE or RENAME_WHITEOUT.  renameat2(2)."""
    result = _libc.renameat2(
        ctypes.c_int(old_dirfd), _path(old), ctypes.c_int(new_dirfd), _path(new), ctypes.c_uint(flags)
    )
    _check(result, "renameat2", old, new)


def getsockopt(fd: int, level: int, option: int, size_bytes: int) -> bytes:
    """A socket option of up to `size_bytes`; Python's own stops at 1,024.  getsockopt(2)."""
    buffer = ctypes.create_string_buffer(size_bytes)
    length = ctypes.c_uint32(size_bytes)
    result = _libc.getsockopt(
        ctypes.c_int(fd), ctypes.c_int(level), ctypes.c_int(option), buffer, ctypes.byref(length)
    )
    _check(result, "getsockopt")
    return buffer.raw[: length.value]


def inotify_init1(flags: int) -> int:
    """An inotify instance.  inotify_init1(2)."""
    return _check(_libc.inotify_init1(ctypes.c_int(flags)), "inotify_init1")


def inotify_add_watch(fd: int, path: StrPath, mask: int) -> int:
    """Watch a path for the events of `mask`; gives a watch descriptor.  inotify_add_watch(2)."""
    result = _libc.inotify_add_watch(ctypes.c_int(fd), _path(path), ctypes.c_uint32(mask))
    return _check(result, "inotify_add_watch", path)


def inotify_rm_watch(fd: int, watch: int) -> None:
    """Watch no longer; EINVAL when it has gone by itself.  inotify_rm_watch(2)."""
    _check(_libc.inotify_rm_watch(ctypes.c_int(fd), ctypes.c_int(watch)), "inotify_rm_watch")


def sched_core_get(pid: int = 0) -> int:
    """Core scheduling cookie of a process, 0 for none; EINVAL without CONFIG_SCHED_CORE, ENODEV without SMT.

    prctl(2), PR_SCHED_CORE; Linux documentation, admin-guide/hw-vuln/core-scheduling.
    """
    cookie = ctypes.c_uint64()
    prctl(PR_SCHED_CORE, PR_SCHED_CORE_GET, pid, 0, ctypes.addressof(cookie))
    return cookie.value


def swapon(path: StrPath, flags: int = 0) -> None:
    """swapon(2)."""
    if _libc.swapon(_path(path), ctypes.c_int(flags)) == -1:
        raise oserror("swapon", path)


def swapoff(path: StrPath) -> None:
    """swapoff(2): what is on it goes back to memory, however long that takes."""
    if _libc.swapoff(_path(path)) == -1:
        raise oserror("swapoff", path)


def clone3_errno_with_bad_cgroup() -> int:
    """errno of a clone3(2) into a cgroup fd that cannot be open: EBADF where CLONE_INTO_CGROUP is known.

    For the probe alone: it never makes a process, since INT_MAX is above every limit of open files.
    """
    # struct clone_args, include/uapi/linux/sched.h: flags, pidfd, child_tid, parent_tid, exit_signal, stack,
    # stack_size, tls, set_tid, set_tid_size, cgroup
    args = (ctypes.c_uint64 * 11)(CLONE_INTO_CGROUP, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0x7FFFFFFF)
    _libc.syscall(ctypes.c_long(435), args, ctypes.c_size_t(ctypes.sizeof(args)))
    return ctypes.get_errno()


def clone_sleeper(flags: int, stack: ctypes.Array[ctypes.c_char], seconds: int) -> int:
    """Clone a child that runs the C library's sleep(seconds) on `stack` and exits; returns its pid.
    clone(2).

    The child never executes Python, so this is safe in a process with threads even when `flags` has CLONE_VM.
    `stack` must stay alive until the child is reaped.
    """
    function = ctypes.cast(_libc.sleep, ctypes.c_void_p)
    top = ctypes.c_void_p((ctypes.addressof(stack) + len(stack)) & ~0xF)
    return _check(_libc.clone(function, top, ctypes.c_int(flags), ctypes.c_void_p(seconds)), "clone")


def fstatfs_type(fd: int) -> int:
    """The f_type field, which os.statvfs does not have.  fstatfs(2)."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes; f_type comes first, one word
    _check(_libc.fstatfs(ctypes.c_int(fd), buffer), "fstatfs")
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)


def path_of_fd(fd: int) -> Path:
    """A path that leads to the open file `fd` on the calling thread, for calls that take only paths."""
    return Path(f"/proc/thread-self/fd/{fd}")
