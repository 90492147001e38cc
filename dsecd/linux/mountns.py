# SPDX-License-Identifier: Apache-2.0
"""Mount namespaces: make one, keep one by pinning it to a file, and work inside one from a throw-away thread.

What belongs here: namespaces as file descriptors and pins.  What does not: the mounts made in them.

A thread cannot leave a mount namespace it shares with the process without giving up its shared root and
working directory, so nothing here ever changes an existing thread but enter_process, which is for the start
of a process.  mount_namespaces(7).
"""

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

from dsecd.linux import mount as mounts
from dsecd.linux import syscalls

T = TypeVar("T")
R = TypeVar("R")

_SELF = Path("/proc/thread-self/ns/mnt")


def create_private(*, cpu: int | None = None) -> int:
    """fd of a new mount namespace: a copy of the caller's whose mounts neither send nor receive events.

    Made on processor `cpu` if given, see `_pin_new`.  Blocks.
    """
    def make() -> int:
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})
        syscalls.unshare(syscalls.CLONE_FS | syscalls.CLONE_NEWNS)
        mounts.make_private("/")
        return open_namespace(_SELF)

    return _on_new_thread(make)


def open_namespace(path: syscalls.StrPath) -> int:
    """fd of the namespace behind a pin or a /proc/PID/ns/ file."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def is_pinned(path: Path) -> bool:
    """Whether a namespace is bound to `path`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return syscalls.fstatfs_type(fd) == syscalls.NSFS_MAGIC
    finally:
        os.close(fd)


def pin(ns_fd: int, path: Path) -> None:
    """Keep a namespace alive after its last process: bind it to `path`, a file that is made if absent.

    The mount that holds `path` must be private, and belong to a namespace older than `ns_fd`'s: the kernel
    forbids chains of namespaces that could keep each other alive (EINVAL).
    """
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    syscalls.mount(syscalls.path_of_fd(ns_fd), path, None, syscalls.MS_BIND)


def ensure_pinned(path: Path) -> int:
    """fd of the namespace pinned at `path`, made first if there is none.  Blocks.

    Call it in the namespace that is to hold the pin, on a path that outlives the process; any number of
    processes may do so at once.  The directory of `path` becomes a private mount of its own if its mount is
    shared, since a namespace file cannot be propagated to others.
    """
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_pinned(path):
            _make_holder_private(path.parent)
            _pin_new(path)
        return open_namespace(path)
    finally:
        os.close(lock)


def _pin_new(path: Path) -> None:
    """Make a namespace and pin it.

    Newer kernels take the numbers by which they tell older namespaces from newer ones out of a batch for each
    processor, so a namespace made on another processor than ours was may pass for older than ours: EINVAL, on
    6.18 in half of the tries on two processors.  The processor that ours was made on always gives higher ones.
    """
    processors = sorted(os.sched_getaffinity(0))
    for cpu in processors:
        fd = create_private(cpu=cpu)
        try:
            pin(fd, path)
        except OSError as error:
            if error.errno != errno.EINVAL or cpu == processors[-1]:
                raise
        else:
            return
        finally:
            os.close(fd)


def _make_holder_private(directory: Path) -> None:
    """Make `directory` a mount that does not propagate."""
    inside = [m for m in mounts.mountinfo("thread-self") if directory.resolve().is_relative_to(m.target)]
    # The longest target holds the directory; of several on the same target, the last is on top.
    holder = max(enumerate(inside), key=lambda pair: (len(pair[1].target.parts), pair[0]))[1]
    if not any(flag.startswith("shared:") for flag in holder.propagation):
        return
    if holder.target != directory.resolve():
        fd = mounts.clone_tree(directory)
        try:
            mounts.attach(fd, directory)
        finally:
            os.close(fd)
    mounts.make_private(directory, recursive=False)


def unpin(path: Path) -> None:
    """Undo pin: the namespace ends with its last user.  The file goes too; absent is fine."""
    while is_pinned(path):
        mounts.detach(path)
    path.unlink(missing_ok=True)


def enter_process(namespace: int | syscalls.StrPath) -> None:
    """Move this process into a mount namespace, given as fd or pin, with / as its working directory.

    Only at the start of a process, before it has threads: others would stay behind.
    """
    _enter(namespace)
    os.chdir("/")


def _enter(namespace: int | syscalls.StrPath) -> None:
    fd = namespace if isinstance(namespace, int) else open_namespace(namespace)
    try:
        # The kernel refuses the switch while root and working directory are shared with another task.
        syscalls.unshare(syscalls.CLONE_FS)
        syscalls.setns(fd, syscalls.CLONE_NEWNS)
    finally:
        if fd is not namespace:
            os.close(fd)


def run_in(namespace: int | syscalls.StrPath, fn: Callable[[], T]) -> T:
    """`fn()` on a throw-away thread inside a mount namespace: mounts it makes there stay there.  Blocks."""
    def enter() -> T:
        _enter(namespace)
        return fn()

    return _on_new_thread(enter)


def run_in_copy(ns_fd: int, fn: Callable[[], T]) -> T:
    """`fn()` on a throw-away thread inside a private copy of a mount namespace.  Blocks.

    Mounts made by `fn` are seen by it and by the processes it starts, and go when the last of these has gone
    (very soon after the return, if there is none).  Exceptions of `fn` come out here.
    """
    def enter() -> T:
        enter_copy(ns_fd)
        return fn()

    return _on_new_thread(enter)


class FreshThreads(Executor):
    """An executor that gives each call a thread of its own, which may change itself for good: see `enter_copy`."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> "Future[R]":
        future: Future[R] = Future()

        def body() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            # Broad, and not Exception: whatever ends fn is raised again, where the result is asked for.
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)

        threading.Thread(target=body, name="mountns", daemon=True).start()
        return future


def enter_copy(ns_fd: int) -> None:
    """Move the calling thread, one of FreshThreads, into a private copy of a mount namespace: see `run_in_copy`."""
    _enter(ns_fd)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    mounts.make_private("/")


def _on_new_thread(fn: Callable[[], T]) -> T:
    """Run `fn` on a thread of its own and hand its result or exception over; the thread is not used again."""
    results: list[T] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            results.append(fn())
        # Broad, and not Exception: whatever ends fn is raised again, in the caller.
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    thread = threading.Thread(target=body, name="mountns", daemon=True)
    thread.start()
    thread.join()
    with contextlib.ExitStack() as stack:
        # The traceback refers to this frame, which refers to the exception: break the cycle.
        stack.callback(failures.clear)
        if failures:
            raise failures[0]
    return results[0]
