# SPDX-License-Identifier: Apache-2.0
"""Commands about commands in sandboxes: exec, attach, logs, kill, execs.

Here: those. Not here: terminals and pipes (``dsecctl/terminal.py``), ``run`` (``run.py``).
"""

from __future__ import annotations

import signal as signals
import sys
from typing import Any

import click

from dsecctl import output
from dsecctl.app import App, command, passes_rest
from dsecctl.commands.create import LIMIT_NAMES, LIMITS, asked_limits, command_of
from dsecctl.params import DURATION, EXEC, SANDBOX, VARIABLE, options, read_env_file
from dsecctl.terminal import Attachment, check_terminal, status_of, write_out
from libdsec import ExecStream, Sandbox
from libdsec import types as t
from libdsec.connection import new_key
from libdsec.options import ExecOptions

STREAMS = options(
    click.option("-i", "--interactive", is_flag=True, help="Pass standard input on."),
    click.option(
        "-t", "--tty", is_flag=True, help="Give it a terminal; with -i, ctrl-p ctrl-q leaves it running."
    ),
    click.option(
        "--timeout", "timeout_s", type=DURATION, help="Kill it after this long; the status is then 124."
    ),
    click.option(
        "--idle-timeout", "idle_timeout_s", type=DURATION, help="Kill it when it prints nothing for so long."
    ),
)
_MAIN = "main"


def conduct(
    sandbox: Sandbox,
    argv: tuple[str, ...],
    *,
    interactive: bool,
    tty: bool,
    as_json: bool,
    fields: ExecOptions,
) -> int | None:
    """Run a command with our standard streams; its status, or None when the user left it running."""
    if as_json:
        stdin = click.get_binary_stream("stdin") if interactive else None
        result = sandbox.client.exec(sandbox.id, _request(argv, fields, stdin.read() if stdin else None))
        output.document(result)
        return (
            124 if result.reason in (t.ExecReason.TIMEOUT, t.ExecReason.IDLE_TIMEOUT) else status_of(result)
        )
    check_terminal(wanted=tty, stdin=interactive)
    with sandbox.popen(argv, stdin=interactive, pty=tty, **fields) as stream:
        return _follow(stream, stdin=interactive, terminal=tty)


def _request(argv: tuple[str, ...], fields: ExecOptions, stdin: bytes | None) -> t.ExecRequest:
    from libdsec.options import exec_request

    return exec_request([argv], stdin=stdin, **fields)


def _follow(stream: ExecStream, *, stdin: bool, terminal: bool) -> int | None:
    attachment = Attachment(stream, stdin=stdin, terminal=terminal)
    info = attachment.run()
    return None if info is None else status_of(info)


@command("exec", example="dsecctl exec -it web -- bash", context_settings=passes_rest())
@STREAMS
@click.option("-d", "--detach", is_flag=True, help="Start it, print its exec id and leave it.")
@click.option("--id", "exec_id", metavar="ID", help="An exec id of one's own, unique in the sandbox.")
@click.option(
    "-e", "--env", "env", type=VARIABLE, multiple=True, help="A variable; NAME alone passes on ours."
)
@click.option(
    "--env-file", type=click.File(), multiple=True, callback=read_env_file, help="Lines NAME=VALUE."
)
@click.option("-u", "--user", metavar="USER[:GROUP]", help="Default: the sandbox's.")
@click.option("-w", "--workdir", "cwd", metavar="PATH", help="Default: the sandbox's.")
@LIMITS
@click.argument("sandbox", type=SANDBOX)
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def exec_(
    app: App, *, sandbox: str, argv: tuple[str, ...], interactive: bool, tty: bool, detach: bool, **given: Any
) -> int:
    """Run a command in a sandbox and end with its status.

    COMMAND is run without a shell. Own failures: 125, command not executable 126, not found 127, timed out 124.
    """
    argv = command_of(argv, "SANDBOX")
    if not argv:
        raise click.UsageError("missing argument 'COMMAND...'", click.get_current_context())
    given["env"] = {**given.pop("env_file"), **dict(given["env"])}
    given["exec_id"] = given["exec_id"] or new_key()
    given["limits"] = asked_limits(given)
    wanted = {name: value for name, value in given.items() if value is not None and name not in LIMIT_NAMES}
    fields: ExecOptions = wanted  # type: ignore[assignment]
    handle = app.sandbox(sandbox)
    if detach:
        info = app.client.exec_start(sandbox, _request(argv, fields, None))
        if app.json:
            output.document(info)
        else:
            click.echo(info.exec_id)
        return 0
    status = conduct(handle, argv, interactive=interactive, tty=tty, as_json=app.json, fields=fields)
    if status is None:
        name = given["exec_id"]
        output.note(app, f"\nexec '{name}' is left running; go on with 'dsecctl attach -it {sandbox} {name}'")
    return status or 0


@command("attach", example="dsecctl attach -it web main")
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input on.")
@click.option("-t", "--tty", is_flag=True, help="It has a terminal: make ours raw; ctrl-p ctrl-q leaves it.")
@click.argument("sandbox", type=SANDBOX)
@click.argument("exec_id", type=EXEC, default=_MAIN)
def attach(app: App, *, sandbox: str, exec_id: str, interactive: bool, tty: bool) -> int:
    """Follow a command that runs, from the oldest output still held, and end with its status.

    EXEC_ID is 'main' by default, what the sandbox was created with. Whoever followed it before is detached.
    """
    check_terminal(wanted=tty, stdin=interactive)
    stream = app.sandbox(sandbox).attach(exec_id, stdin=interactive, allow_gap=True)
    try:
        status = _follow(stream, stdin=interactive, terminal=tty)
    finally:
        stream.detach()
    if stream.missed_bytes:
        output.note(app, f"{stream.missed_bytes} bytes were printed before and are no longer held")
    return status or 0


@command("logs", example="dsecctl logs -f web")
@click.option("-f", "--follow", is_flag=True, help="Go on until the command ends.")
@click.argument("sandbox", type=SANDBOX)
@click.argument("exec_id", type=EXEC, default=_MAIN)
def logs(app: App, *, sandbox: str, exec_id: str, follow: bool) -> None:
    """Print what a command printed, as far as it is still held.

    EXEC_ID is 'main' by default, what the sandbox was created with.
    """
    for name, data in app.sandbox(sandbox).logs(exec_id, follow=follow):
        if app.json:
            click.echo(_log_line(name, data))
        else:
            write_out(name, data)
    sys.stdout.flush()


def _log_line(name: str, data: bytes) -> str:
    import base64
    import json

    return json.dumps({"stream": name, "data": base64.b64encode(data).decode()})


def _signal_number(ctx: click.Context, param: click.Parameter, value: str) -> int:
    text = value.upper().removeprefix("SIG")
    if text.isdecimal() and 1 <= int(text) <= 64:
        return int(text)
    try:
        return int(signals.Signals[f"SIG{text}"])
    except KeyError:
        raise click.BadParameter(f"'{value}' is no signal such as TERM or 15", ctx, param) from None


@command("kill", example="dsecctl kill -s HUP web main")
@click.option(
    "-s", "--signal", default="TERM", show_default=True, callback=_signal_number, help="Name or number."
)
@click.option("--tree", is_flag=True, help="Every process the command started; only with KILL.")
@click.argument("sandbox", type=SANDBOX)
@click.argument("exec_id", type=EXEC, default=_MAIN)
def kill(app: App, *, sandbox: str, exec_id: str, signal: int, tree: bool) -> None:
    """Send a signal to a command in a sandbox.

    EXEC_ID is 'main' by default, what the sandbox was created with. To end a sandbox, use stop or rm.
    """
    app.client.exec_signal(sandbox, exec_id, signal, tree=tree)
    if app.json:
        output.document({})


@command("execs", example="dsecctl execs web")
@click.argument("sandbox", type=SANDBOX)
def execs(app: App, *, sandbox: str) -> None:
    """List a sandbox's commands: those that run, and those that ended within the last ten minutes.

    Their ids are what attach, logs and kill take.
    """
    found = app.client.exec_list(sandbox).execs
    if app.json:
        output.document([item.model_dump(mode="json") for item in found])
    elif app.quiet:
        for item in found:
            click.echo(item.exec_id)
    else:
        output.table(("EXEC", "STATE", "PID", "AGE", "STDOUT", "STDERR"), [_row(item) for item in found])


def _row(item: t.ExecInfo) -> tuple[str, ...]:
    return (
        item.exec_id,
        _state(item),
        str(item.pid) if item.running else "-",
        output.ago(item.started_at),
        output.size(item.stdout_bytes),
        output.size(item.stderr_bytes),
    )


def _state(item: t.ExecInfo) -> str:
    if item.running:
        return "running"
    end = f"signal {item.signal}" if item.exit_code is None else f"exit {item.exit_code}"
    plain = (None, t.ExecReason.EXITED, t.ExecReason.KILLED)
    return end if item.reason in plain else f"{end} ({item.reason})"
