# SPDX-License-Identifier: Apache-2.0
"""The API as its own description sees it: schemathesis makes requests out of it and judges the answers."""

import os
import shutil
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from libdsec import Client
from libdsec.types import ExecRequest, SandboxSpec
from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar

IMAGE = "debian:trixie"
CHECKS = "answers_are_honest,response_schema_conformance,content_type_conformance,status_code_conformance"
#: No HTTP answers to judge, or a download for each request.
LEFT_OUT = ("exec_stream", "events_stream", "image_build_debian")
EXAMPLES, TIME_S = 6, 600


class _Relay(socketserver.BaseRequestHandler):
    """One connection to the TCP port, led on to the daemon's socket."""

    path: str

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as far:
            far.connect(self.path)
            back = threading.Thread(target=_pour, args=(far, self.request))
            back.start()
            _pour(self.request, far)
            back.join()


def _pour(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


@contextmanager
def tcp(daemon: Daemon) -> Iterator[int]:
    """A TCP port that leads to the daemon's socket: schemathesis knows no other."""
    relay = type("Relay", (_Relay,), {"path": str(daemon.socket)})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), relay) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def furnish(client: Client) -> dict[str, str]:
    """Things that requests can meet."""
    client.finish(client.image_import(name=IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
    live, moved = client.create(SandboxSpec(image=IMAGE)), client.create(SandboxSpec(image=IMAGE))
    client.exec_start(live.id, ExecRequest(argv=("sleep", "1000"), exec_id="sleeper"))
    return {"LIVE": live.id, "MOVED": moved.id, "EXEC": "sleeper", "IMAGE": IMAGE}


def test_answers_are_what_the_description_says(tmp_path: Path) -> None:
    with Daemon() as daemon, daemon.client() as client, tcp(daemon) as port:
        names = {f"DSEC_FUZZ_{name}": value for name, value in furnish(client).items()}
        schema = tmp_path / "openapi.json"
        schema.write_bytes(client.raw("GET", "/v1/openapi.json", None))
        program = shutil.which("st")
        assert program, "schemathesis is not installed: packaging/dev-tools.txt"
        command = [
            program, "run", str(schema), "--url", f"http://127.0.0.1:{port}", "--phases", "fuzzing", "--seed", "7",
            "--max-examples", str(EXAMPLES), "--no-shrink", "--continue-on-failure", "--checks", CHECKS,
            "--request-timeout", "60", "--no-color", "--warnings", "off", "--generation-database", "none",
            "--suppress-health-check", "all",
            *(word for name in LEFT_OUT for word in ("--exclude-operation-id", name)),
        ]  # fmt: skip
        hooks = {"SCHEMATHESIS_HOOKS": "tests.support.openapi_hooks", "DSEC_FUZZ_SEEN": str(tmp_path / "seen")}
        environment = {**os.environ, **names, **hooks}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIME_S, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-12000:]}{done.stderr[-2000:]}"
        # That it did something: most routes were met where they work, and what is shared still stands.
        answers = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
        worked = {name for name, status in answers if status.startswith("2")}
        assert len(worked) > 15, sorted(worked)
        assert len(answers) > 150
        live = client.inspect(names["DSEC_FUZZ_LIVE"])
        assert live.state == "running", [event for event in daemon.events() if event["subject"] == live.id]
