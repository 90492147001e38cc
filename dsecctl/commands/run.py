# SPDX-License-Identifier: Apache-2.0
"""``dsecctl run``: a sandbox for one command.

Here: creating, running, deleting in one go. Not here: the parts (``create.py``, ``execs.py``).
"""

from __future__ import annotations

from typing import Any

import click

from dsecctl import output
from dsecctl.app import App, command, passes_rest
from dsecctl.commands.create import SPEC, command_of, spec_of
from dsecctl.commands.execs import STREAMS, conduct
from dsecctl.params import IMAGE
from libdsec import Sandbox
from libdsec.options import ExecOptions


@command(
    "run",
    example="dsecctl run -it -w /workspace --workspace demo:1 debian:trixie -- bash",
    context_settings=passes_rest(),
)
@STREAMS
@click.option(
    "-d", "--detach", is_flag=True, help="Start it as exec 'main', print the sandbox's id and leave it."
)
@click.option(
    "--rm/--keep",
    "remove",
    default=True,
    show_default="--rm",
    help="Whether to delete the sandbox afterwards.",
)
@SPEC
@click.argument("image", type=IMAGE)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND]...")
def run(
    app: App,
    *,
    image: str,
    argv: tuple[str, ...],
    interactive: bool,
    tty: bool,
    detach: bool,
    remove: bool,
    timeout_s: float | None,
    idle_timeout_s: float | None,
    **given: Any,
) -> int:
    """Create a sandbox from IMAGE, run one command in it and end with its status.

    Without COMMAND, what the image says is run, else a shell. COMMAND is run without a shell. Own failures: 125,
    command not executable 126, not found 127, timed out 124.
    """
    argv = command_of(argv, "IMAGE") or _default_command(app, image)
    spec = spec_of(image, given, argv if detach else None)
    sandbox = Sandbox.of(spec, id=given["id"], wait_s=given["wait_s"], client=app.client)
    if detach:
        info = sandbox.create().info
        if app.json:
            output.document(info)
        else:
            click.echo(info.id)
        return 0
    fields: ExecOptions = {"timeout_s": timeout_s, "idle_timeout_s": idle_timeout_s}
    status: int | None = None
    left = True
    try:
        sandbox.create()
        status = conduct(sandbox, argv, interactive=interactive, tty=tty, as_json=app.json, fields=fields)
        left = status is None
    except BaseException:
        left = False
        raise
    finally:
        if remove and not left:
            sandbox.delete()
        else:
            output.note(app, f"sandbox '{sandbox.id}' is kept")
    return status or 0


def _default_command(app: App, image: str) -> tuple[str, ...]:
    config = app.client.image_inspect(image).config
    return (*config.entrypoint, *config.cmd) or ("/bin/sh",)
