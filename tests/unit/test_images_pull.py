# SPDX-License-Identifier: Apache-2.0
"""What the words of the programs that bring images are taken to mean."""

import pytest

from dsecd.core.images.pull import _why
from dsecd.linux.proc import ProcessFailed
from libdsec.errors import BackendFailed, InvalidSpec

AROUND = "apt-get update --error-on=any -oDpkg::Use-Pty=false failed: process exited with 100"


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ("E: The repository 'http://d nosuch Release' does not have a Release file.", InvalidSpec, "has no such suite"),
        ("E: Unable to locate package b\nE: Unable to locate package a", InvalidSpec, "has no package a, b for it"),
        ("E: Package 'gone' has no installation candidate", InvalidSpec, "has no package gone for it"),
        ("E: Failed to fetch http://d/x  Could not connect", BackendFailed, "': Failed to fetch http://d/x"),
        ("E: disk is odd", BackendFailed, "': disk is odd"),
        ("Killed", BackendFailed, "exit status 1: "),
    ],
)
def test_mmdebstrap(words: str, kind: type[Exception], message: str) -> None:
    text = f"I: running apt-get\n{words}\nE: {AROUND}\nE: setup failed: E: {AROUND}\nE: mmdebstrap failed to run\n"
    error = _why(ProcessFailed(["mmdebstrap"], 1, text), "nosuch", None)
    assert type(error) is kind
    assert message in error.message
    assert error.message.startswith("build Debian 'nosuch': ")
