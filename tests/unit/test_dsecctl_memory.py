# SPDX-License-Identifier: Apache-2.0
"""dsecctl and memory, against a daemon in memory."""

import json
import re
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from dsecctl.cli import cli
from libdsec import types as t
from tests.support.fake_daemon import FakeDaemon


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        fake.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie"), id="web"))
        yield fake


def call(daemon: FakeDaemon, *arguments: str) -> Result:
    return CliRunner(mix_stderr=False).invoke(cli, ["--socket", daemon.socket, *arguments])


def test_mem_shows_the_host_and_all_pages_of_sandboxes(daemon: FakeDaemon) -> None:
    daemon.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie"), id="bare"))
    lines = call(daemon, "mem").stdout.splitlines()
    assert lines[:3] == [
        "host: 1.0 GiB of 4.0 GiB available; sandboxes together use 6.0 MiB; pressure 1.5/0 %",
        "swap: 180 MiB of 2.0 GiB used; zram holds 180 MiB in 40 MiB",
        "reclaim: memory.reclaim (1 kdamond(s) of somebody else are set up); 200 MiB so far",
    ]
    assert [re.split("  +", line) for line in lines[4:]] == [
        ["ID", "USED", "COLD", "SWAPPED", "RECLAIMED", "REFAULTS", "IDLE", "PRESSURE"],
        ["bare", "-", "-", "-", "100 MiB", "-", "-", "0.25/0 %"],
        ["web", "3.0 MiB", "1.0 MiB", "90 MiB", "100 MiB", "7", "62s", "0.25/0 %"],
    ]
    assert call(daemon, "-q", "mem").stdout == "bare\nweb\n"


def test_mem_tells_of_machines_what_the_host_pays_and_what_the_guest_says(daemon: FakeDaemon) -> None:
    daemon.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie", backend="microvm"), id="vm"))
    lines = call(daemon, "mem", "vm").stdout.splitlines()[-2:]
    assert [re.split("  +", line) for line in lines] == [
        ["MACHINE", "SIZE", "GUEST", "LAYERS", "MONITOR", "SAYS AVAILABLE", "SAYS FREE"],
        ["vm", "256 MiB", "60 MiB", "8.0 MiB", "30 MiB", "180 MiB", "-"],
    ]
    found = json.loads(call(daemon, "--json", "mem", "web").stdout)
    assert [one["id"] for one in found["sandboxes"]] == ["web"]
    assert found["host"]["zram_memory_bytes"] == 40 << 20
