# SPDX-License-Identifier: Apache-2.0
"""``dsecctl api`` and ``dsecctl completion``: the API as it is, and shells.

Here: those two. Not here: what completes what (``params.py``).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from dsecctl import output
from dsecctl.app import App, command


@command("api", example='dsecctl api POST /v1/sandboxes \'{"spec": {"image": "debian:trixie"}}\'')
@click.argument("method", type=click.Choice(["GET", "POST", "PUT", "PATCH", "DELETE"], case_sensitive=False))
@click.argument("path")
@click.argument("body", required=False)
def api(app: App, *, method: str, path: str, body: str | None) -> None:
    """Send one request of the API and print the answer.

    PATH begins with /v1. BODY is JSON, @FILE, or '-' for standard input. See 'dsecctl api GET /v1/openapi.json'.
    """
    if not path.startswith("/"):
        raise click.BadParameter("must begin with /", param_hint="PATH")
    if not path.isprintable():
        raise click.BadParameter("control characters and what is not UTF-8 go in as %XX", param_hint="PATH")
    data: bytes | None = None
    if body == "-":
        data = click.get_binary_stream("stdin").read()
    elif body is not None:
        data = Path(body[1:]).read_bytes() if body.startswith("@") else os.fsencode(body)
    answer = app.client.raw(method.upper(), path, data)
    try:
        output.document(json.loads(answer))
    except ValueError:
        out = click.get_binary_stream("stdout")
        out.write(answer)
        out.flush()


@command("completion", example='eval "$(dsecctl completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(app: App, *, shell: str) -> None:
    """Print what makes the tab key complete commands, options, sandboxes and images in a shell."""
    from dsecctl.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "dsecctl", "_DSECCTL_COMPLETE").source()
    if app.json:
        output.document({"shell": shell, "script": script})
    else:
        click.echo(script)
