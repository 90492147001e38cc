# SPDX-License-Identifier: Apache-2.0
"""The command that watches what a sandbox does.

Here: options and printing. Not here: how it is seen (``dsecctl/tracing.py``).
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from dsecctl import output, tracing
from dsecctl.app import App, command
from dsecctl.params import SANDBOX
from libdsec.errors import FeatureMissing

_POLL_S = 0.2


@command("trace", example="dsecctl trace --open --connect web")
@click.option("--exec", "exec_", is_flag=True, help="Programs that are executed, with their arguments.")
@click.option("--open", "open_", is_flag=True, help="Files that are opened, and how.")
@click.option("--connect", "connect", is_flag=True, help="Addresses that are connected to.")
@click.argument("sandbox", type=SANDBOX)
def trace(app: App, *, sandbox: str, exec_: bool, open_: bool, connect: bool) -> None:
    """Show what processes of a sandbox do while they do it: all three kinds unless some are chosen.

    For root on the host, with bcc (python3-bpfcc); the kernel's headers are not needed. It ends with ctrl-c and when
    the sandbox stops. What is shown is what processes pass to the kernel, and they may change it while it is read.
    """
    box = app.client.inspect(sandbox)
    if box.spec.backend != "container":
        raise FeatureMissing(
            f"trace '{sandbox}': what a {box.spec.backend} does is seen by its own kernel only", feature="trace"
        )
    chosen = [kind for kind, wanted in zip(tracing.KINDS, (exec_, open_, connect), strict=True) if wanted]
    cgroup = Path(app.client.usage(sandbox).cgroup)
    watching = tracing.Trace(cgroup, chosen or tracing.KINDS, lambda traced: _tell(app, traced))
    try:
        if not watching.by_function:
            output.note(app, "dsecctl: by tracepoints: meanwhile each system call on this host takes a little longer")
        output.note(app, f"dsecctl: tracing '{sandbox}' until ctrl-c")
        while watching.poll(_POLL_S):
            _tell_lost(app, watching.lost())
        output.note(app, f"dsecctl: '{sandbox}' has ended")
    finally:
        _tell_lost(app, watching.lost())
        watching.close()


def _tell(app: App, traced: tracing.Traced) -> None:
    if app.json:
        _line({
            "at": datetime.fromtimestamp(traced.at, UTC).isoformat(), "kind": traced.kind, "pid": traced.pid,
            "inside_pid": traced.inside_pid, "tid": traced.tid, "comm": traced.comm, **traced.fields,
            "error": traced.error,
        })  # fmt: skip
        return
    when = datetime.fromtimestamp(traced.at, UTC).astimezone().strftime("%H:%M:%S.%f")
    fields = traced.fields
    match traced.kind:
        case "exec":
            what = " ".join([_quoted(fields["path"]), *map(_quoted, fields["argv"][1:])])
            what += " ..." if "more_arguments" in fields else ""
        case "open":
            what = f"{_quoted(fields['path'])} {'|'.join(fields['flags'])}"
        case _:
            port = f" {fields['port']}" if "port" in fields else ""
            what = f"{fields['family']} {_quoted(fields.get('address', fields.get('path', '-')))}{port}"
    line = f"{when}  {traced.pid:>7} {traced.inside_pid:>7}  {traced.comm:15}  {traced.kind:7}  {what}"
    click.echo(output.one_line(f"{line}  {traced.error}".rstrip()))


def _quoted(text: str) -> str:
    """As it is, or with everything visible that would not be, or would be taken for the end of it."""
    plain = text and text.isprintable() and " " not in text and "\\" not in text and '"' not in text
    return text if plain else json.dumps(text)


def _tell_lost(app: App, count: int) -> None:
    if count and app.json:
        _line({"kind": "lost", "count": count})
    elif count:
        click.echo(f"{count} events lost: they came faster than they could be shown")


def _line(fields: dict[str, Any]) -> None:
    click.echo(json.dumps(fields))
