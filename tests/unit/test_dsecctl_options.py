# SPDX-License-Identifier: Apache-2.0
"""Where options of dsecctl end and the command begins."""

from collections.abc import Iterator

import pytest

from libdsec import types as t
from tests.support.fake_daemon import FakeDaemon
from tests.unit.test_dsecctl import call


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as running:
        running.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie"), id="web"))
        yield running


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("create", "debian:trixie", "--name", "web"), "option '--name'"),
        (("create", "debian:trixie", "--memory=512M"), "option '--memory'"),
        (("run", "debian:trixie", "-it", "sh"), "'-it'"),
        (("run", "debian:trixie", "--keep"), "option '--keep'"),
        (("exec", "web", "--json", "true"), "option '--json'"),
    ],
)
def test_an_option_behind_the_image_is_told_and_makes_nothing(
    daemon: FakeDaemon, arguments: tuple[str, ...], word: str
) -> None:
    result = call(daemon, *arguments)
    assert result.exit_code in (2, 125)
    assert f"{word} stands behind " in result.stderr
    assert not {"create", "exec", "exec_start", "exec_stream"} & {name for name, _ in daemon.seen}


def test_a_path_or_body_of_odd_characters_is_an_answer_and_no_traceback(daemon: FakeDaemon) -> None:
    done = call(daemon, "api", "GET", "/v1/\n")
    assert (done.exit_code, "control characters" in done.stderr) == (2, True), done.stderr
    done = call(daemon, "api", "POST", "/v1/nowhere", "\udcff")
    assert isinstance(done.exception, SystemExit), done.exception


def test_dashes_make_a_command_of_what_looks_like_an_option(daemon: FakeDaemon) -> None:
    call(daemon, "create", "--name", "odd", "debian:trixie", "--", "--name")
    assert daemon.boxes["odd"].info.spec.command == ("--name",)
