# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/api.md and README.md, run as they stand against a real daemon."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from libdsec import types as t
from libdsec.errors import BY_CODE
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar

ROOT = Path(__file__).resolve().parents[2]
SOCKET = "/run/dsec/dsecd.sock"
#: What an example's answer has to be.
ANSWERS: dict[str, type[BaseModel]] = {"/v1/host": t.HostReport, "/v1/sandboxes": t.Sandbox}


def examples() -> list[str]:
    """Every curl command of the pages, in indented blocks and in running text."""
    found = []
    for page in ("docs/api.md", "README.md"):
        text = (ROOT / page).read_text()
        found += re.findall(r"^ {4}(curl .+)$", text, re.MULTILINE)
        found += re.findall(r"`(curl [^`]+)`", text)
    return found


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        with running.client() as client:
            client.finish(client.image_import(name="debian:trixie", source=str(debian_tar()), kind="rootfs-tar"))
        yield running


def test_there_are_examples() -> None:
    assert len(examples()) >= 3


@pytest.mark.parametrize("line", examples())
def test_an_example_works(daemon: Daemon, line: str) -> None:
    words = shlex.split(line)
    assert SOCKET in words, line
    words[words.index(SOCKET)] = str(daemon.socket)
    done = subprocess.run([*words, "--silent", "--fail-with-body"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (word.partition("/v1")[2] for word in words if "/v1" in word)
    ANSWERS[f"/v1{path}"].model_validate_json(done.stdout)


def test_the_error_in_the_page_is_one_that_the_daemon_sends(daemon: Daemon) -> None:
    (shown,) = re.findall(r'^ {4}(\{"code".+?\})$', (ROOT / "docs/api.md").read_text(), re.MULTILINE | re.DOTALL)
    wanted = json.loads(shown)
    with daemon.client() as client:
        client.create(t.SandboxSpec(image="debian:trixie"), id="web")
        client.stop("web", grace_s=0)
    command = ["curl", "--silent", "--unix-socket", str(daemon.socket), "http://d/v1/sandboxes/web/execs", "--json"]
    done = subprocess.run([*command, '{"argv": ["true"]}'], capture_output=True, text=True, check=True)
    sent = json.loads(done.stdout)
    assert sent | {"request_id": ""} == wanted | {"request_id": ""}


def test_the_table_of_errors_has_every_code_with_its_status() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \| ([0-9, ]+) \|", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    table = {(code, int(status)) for codes, statuses in rows for code in re.findall(r"`([a-z-]+)`", codes)
             for status in statuses.split(", ")}  # fmt: skip
    # The SDK makes these two out of results.
    sent = BY_CODE.keys() - {"exec-failed", "exec-timeout"}
    wanted = {(code, BY_CODE[code].http_status) for code in sent if BY_CODE[code].http_status}
    assert wanted <= table, wanted - table
