# SPDX-License-Identifier: Apache-2.0
"""One daemon per runtime directory."""

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


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"lock '.*/none/dsecd.lock': No such file or directory"):
        lock.hold(tmp_path / "none")


def test_the_lock_is_no_way_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "dsecd.lock").symlink_to(tmp_path / "target")
    with pytest.raises(Refused):
        lock.hold(tmp_path)
    assert not (tmp_path / "target").exists()
