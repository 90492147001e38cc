# SPDX-License-Identifier: Apache-2.0
"""dsecctl and networks, against a daemon in memory."""

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


def test_net_shows_the_policy_and_what_was_refused(daemon: FakeDaemon) -> None:
    assert call(daemon, "net", "web").stdout.split() == ["NETWORK", "may", "reach", "none"]
    policy = "tcp:203.0.113.0/24:443,udp:*:53"
    assert call(daemon, "create", "--name", "n1", "--network", policy, "debian:trixie").exit_code == 0
    lines = call(daemon, "net", "n1").stdout.splitlines()
    assert lines[1:3] == ["may reach  tcp:203.0.113.0/24:443", "           udp:*:53"]
    assert lines[-1].split()[-4:] == ["203.0.113.9", "25", "tcp", "policy"]


def test_a_policy_is_refused_with_all_its_faults_before_the_daemon_is_asked(daemon: FakeDaemon) -> None:
    done = call(daemon, "update", "--network", "tcp:*:0,upd:*", "web")
    assert done.exit_code == 2
    assert "rule 1 'tcp:*:0', column 7" in done.stderr
    assert "rule 2 'upd:*', column 9" in done.stderr
