# SPDX-License-Identifier: Apache-2.0
"""Commands about sandboxes that exist: looking at them and moving them through their states.

Here: ps, inspect, stats, update, fork, pause, resume, stop, start, wait, rm. Not here: creating (``create.py``,
``run.py``).
"""

from __future__ import annotations

from typing import Any

import click

from dsecctl import output
from dsecctl.app import App, command
from dsecctl.commands.create import LIMIT_NAMES, LIMITS, NETWORK, asked_limits
from dsecctl.params import DURATION, PAIR, SANDBOX
from libdsec import types as t
from libdsec.errors import NotFound, WrongState
from libdsec.network import Policy

_STATES = click.Choice([state.value for state in t.State])
_one = click.argument("sandbox", type=SANDBOX)
#: Of many sandboxes whose processes are to end, which may take each its time of grace.
_AT_ONCE = 16
_many = click.argument("sandboxes", type=SANDBOX, nargs=-1, required=True)


@command("ps", example="dsecctl ps --label job=7 --state running")
@click.option(
    "-l",
    "--label",
    "labels",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Only with this label; all must match.",
)
@click.option("-s", "--state", "states", multiple=True, type=_STATES, help="Only in this state.")
def ps(app: App, *, labels: tuple[str, ...], states: tuple[str, ...]) -> None:
    """List sandboxes."""
    found = app.client.list_all(label=labels, state=states)
    if app.json:
        output.document([box.model_dump(mode="json") for box in found])
    elif app.quiet:
        for box in found:
            click.echo(box.id)
    else:
        output.table(("ID", "STATE", "AGE", "BACKEND", "IMAGE", "PORTS", "LABELS"), [_row(box) for box in found])


def _row(box: t.Sandbox) -> tuple[str, ...]:
    labels = ",".join(f"{name}={value}" for name, value in sorted(box.spec.labels.items()))
    # As they are reached by default, and only as long as a glance takes.
    ports = ",".join(text.removeprefix("127.0.0.1:") for text in box.spec.publish)
    if box.unpublished:
        ports += " (not published: see inspect)"
    return box.id, box.state.value, output.ago(box.created_at), box.spec.backend, box.spec.image, ports, labels


@command("inspect", example="dsecctl inspect web")
@_many
def inspect(app: App, *, sandboxes: tuple[str, ...]) -> None:
    """Print all that is known of sandboxes, as JSON."""
    found = [app.client.inspect(id).model_dump(mode="json") for id in sandboxes]
    output.document(found[0] if len(found) == 1 else found)


@command("stats", example="dsecctl stats web")
@click.argument("sandboxes", type=SANDBOX, nargs=-1)
def stats(app: App, *, sandboxes: tuple[str, ...]) -> None:
    """Show what sandboxes use: all running ones unless some are named.

    CPU, memory and tasks are counted by the host ('-' where it cannot). Processes, execs and the largest process that
    has ended are what the sandbox itself says.
    """

    def one(id: str) -> t.SandboxUsage | None:
        try:
            return app.client.usage(id)
        except (NotFound, WrongState):
            if sandboxes:
                raise
            return None  # it ended since it was listed

    names = sandboxes or [box.id for box in app.client.list_all(state=(t.State.RUNNING.value,))]
    results, failure = output.collect(names, one)
    found = [usage for usage in results if usage is not None]
    if app.json:
        output.document([usage.model_dump(mode="json") for usage in found])
    elif app.quiet:
        for usage in found:
            click.echo(usage.id)
    else:
        output.table(("ID", "CPU", "MEMORY", "TASKS", "PROCESSES", "EXECS", "LARGEST"), [_used(u) for u in found])
    if failure is not None:
        raise failure


def _used(usage: t.SandboxUsage) -> tuple[str, ...]:
    memory, tasks = usage.memory_current_bytes, usage.pids_current
    return (
        usage.id, output.cpu(usage.cpu_usage_us), "-" if memory is None else output.size(memory),
        "-" if tasks is None else str(tasks), str(usage.processes), f"{usage.execs_running} of {usage.execs_total}",
        output.size(usage.max_rss_kib << 10),
    )  # fmt: skip


@command("update", example="dsecctl update web --ttl 2h --label job=8")
@_one
@click.option("-l", "--label", "labels", multiple=True, type=PAIR, help="Set a label; others stay.")
@click.option("--rm-label", "dropped", multiple=True, metavar="NAME", help="Remove a label.")
@click.option("--ttl", "ttl_s", type=DURATION, help="Delete it this long from now.")
@NETWORK
@LIMITS
@click.option(
    "--lift",
    "lift",
    multiple=True,
    type=click.Choice(LIMIT_NAMES),
    metavar="LIMIT",
    help="Take a limit off; by its name in 'dsecctl inspect'.",
)
def update(
    app: App,
    *,
    sandbox: str,
    labels: tuple[tuple[str, str], ...],
    dropped: tuple[str, ...],
    ttl_s: float | None,
    network: Policy | None,
    lift: tuple[t.LimitName, ...],
    **limits: Any,
) -> None:
    """Change labels, time to live, limits or network; what is not named stays."""
    wanted = None
    if labels or dropped:
        old = app.client.inspect(sandbox).spec.labels
        wanted = {name: value for name, value in {**old, **dict(labels)}.items() if name not in dropped}
    box = app.client.update(
        sandbox, labels=wanted, ttl_s=ttl_s, limits=asked_limits(limits), lift=lift, network=network
    )
    if app.json:
        output.document(box)
    else:
        click.echo(box.id)


@command("fork", example="dsecctl fork --count 8 web")
@_one
@click.argument("names", nargs=-1)
@click.option("-n", "--count", type=click.IntRange(1, 64), default=1, help="How many, when no names are given.")
def fork(app: App, *, sandbox: str, names: tuple[str, ...], count: int) -> None:
    """Copy a running sandbox, with all that runs in it, and print the names of the copies."""
    copies = app.client.fork(sandbox, count=count, ids=names).sandboxes
    if app.json:
        output.document([copy.model_dump(mode="json") for copy in copies])
        return
    for copy in copies:
        click.echo(copy.id)


@command("pause", example="dsecctl pause web")
@_many
def pause(app: App, *, sandboxes: tuple[str, ...]) -> None:
    """Freeze all processes of sandboxes."""
    output.each(app, sandboxes, app.client.pause)


@command("resume", example="dsecctl resume web")
@_many
def resume(app: App, *, sandboxes: tuple[str, ...]) -> None:
    """Let the processes of paused sandboxes go on."""
    output.each(app, sandboxes, app.client.resume)


@command("stop", example="dsecctl stop --grace 30 web")
@_many
@click.option(
    "--grace", "grace_s", type=DURATION, default=5.0, show_default="5 s", help="From SIGTERM to SIGKILL."
)
def stop(app: App, *, sandboxes: tuple[str, ...], grace_s: float) -> None:
    """End all processes of sandboxes and keep their files."""
    client = app.client
    output.each(app, sandboxes, lambda id: client.stop(id, grace_s=grace_s), at_once=_AT_ONCE)


@command("start", example="dsecctl start web")
@_many
@click.option("--wait", "wait_s", type=DURATION, help="How long each may wait for the host to have room (30s).")
def start(app: App, *, sandboxes: tuple[str, ...], wait_s: float | None) -> None:
    """Run stopped sandboxes again, with the files they had."""
    output.each(app, sandboxes, lambda id: app.client.start(id, wait_s=wait_s))


@command("wait", example="dsecctl wait --state running --timeout 30 web")
@_many
@click.option(
    "-s",
    "--state",
    "states",
    multiple=True,
    type=_STATES,
    help="Default: stopped or failed.",
)
@click.option(
    "--timeout", "timeout_s", type=DURATION, help="Give up after this long; the status is then 124."
)
def wait(app: App, *, sandboxes: tuple[str, ...], states: tuple[str, ...], timeout_s: float | None) -> None:
    """Wait until sandboxes are in a state; one that is deleted ends the wait too."""
    wanted = states or (t.State.STOPPED.value, t.State.FAILED.value)

    def one(id: str) -> t.Sandbox | None:
        try:
            return app.sandbox(id).wait(*wanted, timeout_s=timeout_s)
        except NotFound:
            if states:
                raise
            return None

    output.each(app, sandboxes, one)


@command("rm", example="dsecctl rm $(dsecctl ps -q --state failed)")
@click.argument("sandboxes", type=SANDBOX, nargs=-1)
@click.option("-a", "--all", "everything", is_flag=True, help="All of one's sandboxes.")
@click.option("-l", "--label", "labels", multiple=True, metavar="NAME[=VALUE]", help="All with this label.")
def rm(app: App, *, sandboxes: tuple[str, ...], everything: bool, labels: tuple[str, ...]) -> None:
    """Delete sandboxes with their files, in whatever state they are."""
    ids = list(sandboxes)
    if everything or labels:
        ids += [box.id for box in app.client.list_all(label=labels) if box.id not in ids]
    elif not ids:
        raise click.UsageError(
            "missing argument 'SANDBOXES...', --label or --all", click.get_current_context()
        )
    missing = [] if everything or labels else [id for id in ids if not _exists(app, id)]
    output.each(app, [id for id in ids if id not in missing], app.client.delete, at_once=_AT_ONCE)
    if missing:
        raise NotFound(f"rm '{missing[0]}': no such sandbox")


def _exists(app: App, id: str) -> bool:
    try:
        app.client.inspect(id)
    except NotFound:
        return False
    return True
