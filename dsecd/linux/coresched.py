# SPDX-License-Identifier: Apache-2.0
"""Core scheduling: only tasks with the same cookie run on the siblings of one core at the same time.

What belongs here: the cookie of a thread.  What does not: who is to have which.  prctl(2), PR_SCHED_CORE; Linux
documentation, admin-guide/hw-vuln/core-scheduling.

Always one thread, never a process or a group: a scope of those leaves out, or reaches, others than one thinks.  What a
thread starts inherits its cookie.
"""

from dsecd.linux import syscalls


def create() -> None:
    """Give the calling thread a cookie that nobody else has."""
    syscalls.prctl(
        syscalls.PR_SCHED_CORE, syscalls.PR_SCHED_CORE_CREATE, 0, syscalls.PR_SCHED_CORE_SCOPE_THREAD
    )  # fmt: skip


def share_from(tid: int) -> None:
    """Give the calling thread the cookie of another, also when that is none.  ESRCH if it has gone."""
    syscalls.prctl(
        syscalls.PR_SCHED_CORE, syscalls.PR_SCHED_CORE_SHARE_FROM, tid, syscalls.PR_SCHED_CORE_SCOPE_THREAD
    )  # fmt: skip


def cookie(tid: int = 0) -> int:
    """The cookie of a thread, by default the caller's; 0 is none.  ESRCH if it has gone."""
    return syscalls.sched_core_get(tid)
