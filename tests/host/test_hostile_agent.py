# SPDX-License-Identifier: Apache-2.0
"""A real daemon whose sandboxes' agents are hostile: it names the fault, gives up the sandbox and stays as it was."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import Client
from libdsec.errors import BackendFailed, DsecError, NotFound, SandboxLost, WrongState
from libdsec.types import ExecRequest, SandboxSpec
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar
from tests.support.waiting import until

IMAGE = "debian:python"
_PROGRAM = Path(__file__).resolve().parents[1] / "support" / "bad_agent.py"
_VICES = (
    "half-greeting", "garbage", "unasked-output", "endless-listing", "dies-in-a-frame", "exit-before-start",
    "impossible-exit", "output-from-nowhere", "output-without-credit",
)  # fmt: skip
_DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    program = tmp_path_factory.mktemp("agent") / "agent"
    shutil.copy(_PROGRAM, program)
    program.chmod(0o755)
    with Daemon(config=f'agent = "{program}"\n') as running:
        with running.client() as client:
            tar = str(debian_tar(include=("python3",)))
            client.finish(client.image_import(name=IMAGE, source=tar, kind="rootfs-tar"))
            warm_up(client)
        yield running


def warm_up(client: Client) -> None:
    """What the daemon makes once: threads, pools, compiled filters."""
    client.create(SandboxSpec(image=IMAGE), id="well-behaved")
    client.delete("well-behaved")


def resident_kib(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1])


def descriptors(pid: int) -> list[str]:
    """What its open files are, without clients' connections and user namespaces, of which it keeps some."""
    found = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return sorted(name for name in found if not name.startswith("socket:") and not name.startswith("user:"))


def settled(pid: int) -> list[str]:
    """The same, once it stays the same: what was just done holds some for a moment."""
    found: list[str] = []
    while (now := descriptors(pid)) != found:
        found = now
        time.sleep(0.3)
    return found


@pytest.mark.parametrize("vice", _VICES)
def test_vice(daemon: Daemon, vice: str) -> None:
    with daemon.client(retry_s=0) as client:
        memory, files = resident_kib(daemon.pid), settled(daemon.pid)
        refused: DsecError | None = None
        try:
            client.create(SandboxSpec(image=IMAGE), id=vice)
            client.exec(vice, ExecRequest(argv=("true",), timeout_s=5))
        except (BackendFailed, SandboxLost, WrongState) as error:
            refused = error
        assert refused is not None, "it was believed"
        deadline = time.monotonic() + _DEADLINE_S
        with contextlib.suppress(NotFound):
            while client.inspect(vice).state != "failed":
                assert time.monotonic() < deadline, client.inspect(vice)
                client.version()
                time.sleep(0.05)
            assert client.inspect(vice).reason
        client.delete(vice)
        assert resident_kib(daemon.pid) - memory < 64 << 10
        until(lambda: descriptors(daemon.pid) == files)
        assert "Traceback" not in daemon.log.read_text()
