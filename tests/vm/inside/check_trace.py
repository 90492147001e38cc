# SPDX-License-Identifier: Apache-2.0
"""Runs inside the test host: `dsecctl trace` of the installed package, with Debian's bcc on Debian's kernel."""

import time
from pathlib import Path

from libdsec import Client
from libdsec.types import SandboxSpec
from tests.support import own_python, traced

_IMAGE = "own:python"


def test_all_that_a_program_does_is_shown_and_nothing_of_its_neighbours(tmp_path: Path) -> None:
    with Client() as client:
        tar = own_python.tar(tmp_path / "python.tar", "/bin/echo")
        client.finish(client.image_import(name=_IMAGE, source=str(tar), kind="rootfs-tar"))
        box, other = (client.create(SandboxSpec(image=_IMAGE)).id for _ in range(2))
        began = time.monotonic()
        with traced.tracing(["dsecctl"], tmp_path, box) as tracer:
            took = time.monotonic() - began
            traced.check_all_is_shown_and_nothing_of_others(tracer, client, box, other)
        mode = "tracepoints" if "by tracepoints" in tracer.said else "functions (fexit)"
        Path("/root/trace-mode").write_text(f"by {mode}, compiled and attached after {took:.0f} s\n")
        # Debian's kernel has BTF and lets programs attach to functions.
        assert mode == "functions (fexit)", tracer.said
