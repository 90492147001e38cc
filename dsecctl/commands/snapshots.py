# SPDX-License-Identifier: Apache-2.0
"""``dsecctl snapshot …``: sandboxes that were saved with memory and files.

Here: the commands. Not here: making sandboxes of them (``create.py``, ``--snapshot``), copies at once (fork).
"""

from __future__ import annotations

import click

from dsecctl import output
from dsecctl.app import App, command
from dsecctl.params import SANDBOX, SNAPSHOT
from libdsec import snapshots as s


@click.group("snapshot", epilog="Example: dsecctl snapshot create web warm")
def snapshot() -> None:
    """Save sandboxes with memory and files; list and remove what was saved."""


@command("create", example="dsecctl snapshot create web warm")
@click.argument("sandbox", type=SANDBOX)
@click.argument("name")
def create(app: App, *, sandbox: str, name: str) -> None:
    """Save SANDBOX, which runs or is paused and goes on afterwards, as NAME.

    'dsecctl create --snapshot NAME' makes sandboxes that begin as it is now.
    """
    made = app.client.snapshot_create(sandbox, name)
    if app.json:
        output.document(made)
    else:
        click.echo(made.id)
        output.note(
            app, f"{output.size(made.used_bytes)} on disk, {output.size(made.state_bytes)} beside memory and files"
        )


@command("ls", example="dsecctl snapshot ls --json")
def ls(app: App) -> None:
    """List snapshots."""
    found = app.client.snapshots().snapshots
    if app.json:
        output.document([item.model_dump(mode="json") for item in found])
    elif app.quiet:
        for item in found:
            click.echo(item.id)
    else:
        output.table(("NAME", "SOURCE", "IMAGE", "MEMORY", "ON DISK", "AGE", "USED BY"), [_row(item) for item in found])


def _row(item: s.Snapshot) -> tuple[str, ...]:
    return (
        item.id, item.source, item.spec.image, output.size(item.memory_bytes), output.size(item.used_bytes),
        output.ago(item.created_at), str(len(item.used_by)),
    )  # fmt: skip


@command("inspect", example="dsecctl snapshot inspect warm")
@click.argument("names", type=SNAPSHOT, nargs=-1, required=True)
def inspect(app: App, *, names: tuple[str, ...]) -> None:
    """Print all that is known of snapshots, as JSON."""
    found = [app.client.snapshot_inspect(name).model_dump(mode="json") for name in names]
    output.document(found[0] if len(found) == 1 else found)


@command("rm", example="dsecctl snapshot rm warm")
@click.argument("names", type=SNAPSHOT, nargs=-1, required=True)
def rm(app: App, *, names: tuple[str, ...]) -> None:
    """Remove snapshots; one that sandboxes run from is refused with their names."""
    output.each(app, names, app.client.snapshot_remove)


for _command in (create, ls, inspect, rm):
    snapshot.add_command(_command)
