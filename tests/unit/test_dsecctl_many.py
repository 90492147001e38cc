# SPDX-License-Identifier: Apache-2.0
"""One command about many sandboxes: those that take their time take it at once, and each is told of."""

import asyncio
import json
from collections.abc import Iterator

import pytest
from aiohttp import web
from click.testing import CliRunner

from dsecctl.cli import cli
from libdsec import types as t
from tests.support.fake_daemon import FakeDaemon

NAMES = tuple(f"box-{number}" for number in range(8))


class _Together(FakeDaemon):
    """Stops nobody before so many are to be stopped."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.met = asyncio.Barrier(count)

    async def on_stop(self, request: web.Request) -> t.Sandbox:
        self._box(request)
        async with asyncio.timeout(60):
            await self.met.wait()
        return await super().on_stop(request)


@pytest.fixture
def daemon() -> Iterator[_Together]:
    fake = _Together(len(NAMES))
    with fake:
        for name in NAMES:
            fake.make(t.CreateRequest(spec=t.SandboxSpec(image="debian:trixie"), id=name))
        yield fake


def call(daemon: FakeDaemon, *arguments: str) -> tuple[int, str, str]:
    result = CliRunner(mix_stderr=False).invoke(cli, ["--socket", daemon.socket, *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_many_are_stopped_at_once_and_the_result_is_in_order(daemon: _Together) -> None:
    status, shown, _ = call(daemon, "--json", "stop", *NAMES)
    assert status == 0
    assert [box.id for box in map(t.Sandbox.model_validate, json.loads(shown))] == list(NAMES)
    assert {daemon.boxes[name].info.state for name in NAMES} == {t.State.STOPPED}


def test_each_failure_is_told_and_the_first_in_order_is_the_commands(daemon: _Together) -> None:
    status, shown, errors = call(daemon, "stop", "none-1", *NAMES, "none-2")
    assert status == 4
    assert sorted(shown.split()) == sorted(NAMES)
    assert [line.split("'")[1] for line in errors.splitlines() if "'none-" in line] == ["none-2", "none-1"]
