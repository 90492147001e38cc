# SPDX-License-Identifier: Apache-2.0
"""`make test-trace`: `dsecctl trace` with Debian's bcc and kernel, ``inside/check_trace.py`` in the guest.

Not part of `make test`, which fetches nothing once its caches are there: bcc with its compiler is 50 MB. The packages
are those that the guest lacks; they are kept in the cache, and installed in this machine alone.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.vm import image
from tests.vm.host import VmHost
from tests.vm.inside import run_pytest

pytestmark = pytest.mark.timeout(3600)


def _fetched(status: bytes) -> Path:
    """A folder with python3-bpfcc and all that a system with this dpkg status lacks of what it needs."""
    folder = image.cache() / "bcc"
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").write_bytes(status)
    # Lists of its own: those of the system are gone, or another run's.
    options = [
        "-q", "--yes", "-o", "APT::Sandbox::User=root", "-o", f"Dir::State::lists={folder}/lists",
        "-o", f"Dir::Cache={folder}", "-o", f"Dir::State::status={folder}/status",
    ]  # fmt: skip
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["--download-only", "--no-install-recommends", "install", "python3-bpfcc"]):
        subprocess.run(["apt-get", *options, *command], check=True, capture_output=True, env=env)
    return folder / "archives"


def test_trace_by_functions_on_debians_kernel(dsec_vm: VmHost) -> None:
    archives = _fetched(dsec_vm.read("/var/lib/dpkg/status"))
    began = time.monotonic()
    for path in sorted(archives.glob("*.deb")):
        dsec_vm.put(path, "/root/bcc")
    put = time.monotonic()
    dsec_vm.run("dpkg --force-unsafe-io --install /root/bcc/*.deb", timeout_s=1200)
    print(f"bcc: {put - began:.0f} s to put, {time.monotonic() - put:.0f} s to install")
    try:
        run_pytest(dsec_vm, "check_trace.py", timeout_s=1500)
    finally:
        print(dsec_vm.run("cat /root/trace-mode", check=False).text)
