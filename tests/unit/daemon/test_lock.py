# SPDX-License-Identifier: Apache-2.0
"""One daemon per runtime directory."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsecd import lock
from libdsec.errors import Conflict, Refused

# Locks, starts a child that keeps a copy of every descriptor, tells both pids and waits.
_HOLD = """
import os, subprocess, sys, time
from pathlib import Path
from dsecd import lock
fd = lock.hold(Path(sys.argv[1]))
os.set_inheritable(fd, True)
child = subprocess.Popen(["sleep", "100"], close_fds=False)
print(os.getpid(), child.pid, flush=True)
time.sleep(100)
"""


def test_a_second_daemon_is_told_who_holds_it_until_that_one_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        pid, child = (int(word) for word in holder.stdout.readline().split())
        try:
            with pytest.raises(Conflict, match=rf"another dsecd runs there, pid {pid}$"):
                lock.hold(tmp_path)
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            assert re.match(r"\d+", Path(f"/proc/{child}/stat").read_text())  # it still has the descriptor
            os.close(lock.hold(tmp_path))
        finally:
            os.kill(child, signal.SIGKILL)


# Locks as it does a cgroup, starts a child with copies that ends soon, tells its pid and is killed.
_HOLD_AND_DIE = """
import os, signal, subprocess, sys
from pathlib import Path
from dsecd import lock
os.set_inheritable(lock.hold_cgroup(Path(sys.argv[1])), True)
child = subprocess.Popen(["sleep", sys.argv[2]], close_fds=False, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("lives_s", "is_waited_for"), [("1.5", True), ("100", False)])
def test_a_child_of_a_killed_daemon_is_waited_for_as_long_as_one_lives(
    tmp_path: Path, lives_s: str, *, is_waited_for: bool
) -> None:
    program = [sys.executable, "-c", _HOLD_AND_DIE, str(tmp_path), lives_s]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    try:
        if is_waited_for:
            os.close(lock.hold_cgroup(tmp_path))
        else:
            with pytest.raises(Conflict, match="another dsecd has its sandboxes there"):
                lock.hold_cgroup(tmp_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(done.stdout), signal.SIGKILL)


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"lock '.*/none/dsecd.lock': No such file or directory"):
        lock.hold(tmp_path / "none")


def test_the_lock_is_no_way_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "dsecd.lock").symlink_to(tmp_path / "target")
    with pytest.raises(Refused):
        lock.hold(tmp_path)
    assert not (tmp_path / "target").exists()
