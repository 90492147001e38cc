# SPDX-License-Identifier: Apache-2.0
"""An upgrade to a higher version, built of the same tree, while many sandboxes run commands."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.vm import packages
from tests.vm.host import VmHost
from tests.vm.image import CHECKOUT
from tests.vm.packages import IMAGE
from tests.vm.service import Service

_COUNT = 50
_HIGHER = "99.0"

#: Each sandbox counts as long as it lives, on its command's output.
_CREATE = """
import sys
from libdsec import Client
from libdsec.types import CreateRequest, SandboxSpec
spec = SandboxSpec(image=sys.argv[2], command=("sh", "-c", "n=0; while :; do n=$((n + 1)); echo $n; sleep 10; done"))
with Client() as client:
    items = tuple(CreateRequest(spec=spec, id=f"box{number}") for number in range(int(sys.argv[1])))
    print(client.finish(client.create_batch(items)).state.value)
"""
#: For each: its state, whether its command runs as which process, and all that it has printed.
_ASK = """
import json
from libdsec import Client
with Client() as client:
    told = {}
    for box in client.list_all():
        main = client.exec_inspect(box.id, "main")
        output = client.exec_output(box.id, "main")
        told[box.id] = [str(box.state), main.running, main.pid, [int(word) for word in output.data.split()]]
    print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def higher(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files of our packages in a higher version."""
    folder = tmp_path_factory.mktemp("higher")
    command = ["packaging/build-deb", "--version", _HIGHER, str(folder)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return packages.built(folder)


def _ask(vm: VmHost) -> dict[str, tuple[str, bool, int, list[int]]]:
    told = json.loads(vm.run(["python3", "-c", _ASK], timeout_s=600).text)
    assert isinstance(told, dict)
    return told


def test_an_upgrade_ends_no_sandbox_and_no_command(higher: list[Path], dsec_vm: VmHost) -> None:
    service = Service(dsec_vm)
    made = dsec_vm.run(["python3", "-c", _CREATE, str(_COUNT), IMAGE], timeout_s=900).text
    assert made == "done\n"
    before, daemon = _ask(dsec_vm), service.main_pid()
    processes = service.processes(f"{service.part()}/dsec")
    # The agent and the shell; the sleep below it is another one each time.
    assert len(processes) >= 2 * _COUNT and len(before) == _COUNT

    packages.install(dsec_vm, higher)

    assert dsec_vm.run(["dpkg-query", "-W", "-f", "${Version} ", "dsecd", "python3-libdsec"]).text == f"{_HIGHER} " * 2
    assert service.api("/v1/version")["version"] == _HIGHER
    assert service.main_pid() not in ("0", daemon)
    after, deadline = _ask(dsec_vm), time.monotonic() + 300
    assert after.keys() == before.keys()
    # Each goes on every ten seconds, which an upgrade need not take.
    while any(len(rounds) <= len(before[name][3]) for name, (*_, rounds) in after.items()):
        assert time.monotonic() < deadline, after
        after = _ask(dsec_vm)
    for name, (state, running, pid, rounds) in after.items():
        assert (name, state, running, pid) == (name, "running", True, before[name][2])
        assert rounds == list(range(1, len(rounds) + 1))
    left = set(processes) & set(service.processes(f"{service.part()}/dsec"))
    assert len(left) >= 2 * _COUNT
    assert dsec_vm.run(["systemctl", "--failed", "--no-legend"]).text == ""
