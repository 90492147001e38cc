# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests against the running kernel: places to work in that vanish with the test, and the agent alone."""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent_process import AgentProcess, build, running

_CLONE_FS, _CLONE_NEWNS, _MS_PRIVATE_REC = 0x200, 0x20000, 0x44000


@pytest.fixture(scope="module", params=["plain", "asan"])
def agent(request: pytest.FixtureRequest) -> Iterator[AgentProcess]:
    """The agent without a sandbox: as it is shipped, and with sanitizers."""
    build()
    with running(request.param) as process:
        yield process


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty directory on a disk file system: tmp_path may be a tmpfs, which cannot back an EROFS mount."""
    path = Path(tempfile.mkdtemp(prefix="test-", dir="/var/lib/dsec"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def own_mounts(disk: Path, tmp_path: Path) -> Iterator[None]:
    """The test runs in a private mount namespace of its own, so every mount it makes goes with it.

    It asks for the directories that tests mount in only to leave the namespace before they are removed.
    """
    del disk, tmp_path
    libc = ctypes.CDLL(None, use_errno=True)
    old, cwd = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY), os.getcwd()
    assert libc.unshare(_CLONE_FS | _CLONE_NEWNS) == 0
    assert libc.mount(None, b"/", None, ctypes.c_ulong(_MS_PRIVATE_REC), None) == 0
    yield
    assert libc.setns(old, _CLONE_NEWNS) == 0
    os.close(old)
    os.chdir(cwd)
