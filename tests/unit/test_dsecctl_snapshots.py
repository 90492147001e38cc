# SPDX-License-Identifier: Apache-2.0
"""The commands about snapshots, over a daemon that keeps everything in memory."""

from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from dsecctl.cli import cli
from libdsec import types as t
from tests.support.fake_daemon import FakeDaemon


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        fake.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie", labels={"job": "7"}), id="web"))
        yield fake


def call(daemon: FakeDaemon, *arguments: str) -> Result:
    return CliRunner(mix_stderr=False).invoke(cli, ["--socket", daemon.socket, *arguments])


def test_from_a_sandbox_to_a_snapshot_to_clones(daemon: FakeDaemon) -> None:
    assert call(daemon, "snapshot", "create", "web", "warm").stdout == "warm\n"
    row = call(daemon, "snapshot", "ls").stdout.splitlines()[1].split()
    assert row[:3] == ["warm", "web", "debian:trixie"]
    assert call(daemon, "snapshot", "ls", "-q").stdout == "warm\n"
    made = call(daemon, "create", "--snapshot", "warm", "--count", "2", "--label", "job=8")
    assert len(made.stdout.split()) == 2
    assert {daemon.boxes[name].info.spec.labels["job"] for name in made.stdout.split()} == {"8"}
    assert call(daemon, "create", "--snapshot", "warm", "--name", "one", "--ttl", "1h").stdout == "one\n"
    assert daemon.boxes["one"].info.spec.ttl_s == 3600
    refused = call(daemon, "snapshot", "rm", "warm")
    assert refused.exit_code == 5
    assert "one" in refused.stderr
    for name in (*made.stdout.split(), "one"):
        call(daemon, "rm", name)
    assert call(daemon, "snapshot", "rm", "warm").exit_code == 0
    assert call(daemon, "snapshot", "inspect", "warm").exit_code == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--snapshot", "warm", "--memory", "1G"), "--memory: a clone has that from its snapshot"),
        (("--snapshot", "warm", "debian:trixie"), "image: a clone has that from its snapshot"),
        (("--snapshot", "warm", "--name", "x", "--count", "2"), "several clones cannot have one name"),
        (("--count", "2", "debian:trixie"), "--count goes with --snapshot"),
        ((), "missing argument 'IMAGE'"),
    ],
)
def test_what_a_clone_cannot_be_given_is_refused(daemon: FakeDaemon, arguments: tuple[str, ...], text: str) -> None:
    call(daemon, "snapshot", "create", "web", "warm")
    done = call(daemon, "create", *arguments)
    assert (done.exit_code, text in done.stderr) == (2, True), done.stderr
