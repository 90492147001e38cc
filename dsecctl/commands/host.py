# SPDX-License-Identifier: Apache-2.0
"""Commands about the host and the daemon: host, doctor, events, ops.

Here: printing what the daemon reports. Not here: finding it out (the daemon).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from textwrap import fill as wrap

import click

from dsecctl import output
from dsecctl.app import RETRY_S, App, command
from libdsec import types as t
from libdsec.errors import ConnectionFailed

_WORKS = {True: "yes", False: "no", None: "unknown"}
_OK = {True: "ok", False: "wrong", None: "unknown"}
#: Events: shown when nothing else is asked for, and the most that one request takes.
_RECENT, _MOST = 100, 10_000
#: The same where dsec works without it.
_OPTIONAL = _OK | {False: "missing"}


@command("host", example="dsecctl host")
@click.option("-v", "--verbose", is_flag=True, help="Also what was found, and what to do about what is missing.")
def host(app: App, *, verbose: bool) -> None:
    """Show what this host is and which features it offers."""
    report = app.client.host()
    if app.json:
        output.document(report)
        return
    click.echo(f"{report.hostname}: Linux {report.kernel} on {report.machine}, dsec {report.dsec_version}")
    memory = f"{output.size(report.memory_available_bytes)} of {output.size(report.memory_bytes)} memory free"
    click.echo(
        f"{report.cpus} CPUs, {memory}, {output.size(report.disk_free_bytes)} free in {report.state_dir}"
    )
    if report.pressure is not None:
        click.echo(f"pressure: {_pressed(report.pressure)}")
    counts = ", ".join(f"{count} {state}" for state, count in sorted(report.sandboxes.items()) if count)
    click.echo(f"sandboxes: {counts or 'none'}")
    click.echo()
    output.table(
        ("BACKEND", "WORKS", "DETAIL"), [(b.name, _WORKS[b.works], b.detail) for b in report.backends]
    )
    click.echo()
    output.table(("FEATURE", "WORKS", "FOR"), [(f.name, _WORKS[f.works], f.why) for f in report.features])
    lacking = [feature for feature in report.features if not feature.works]
    if verbose:
        _explain(report.features)
    elif lacking and not app.quiet:
        click.echo(f"\nwhat to do about the {len(lacking)} that do not work: 'dsecctl host --verbose'")


def _pressed(pressure: t.PressureReport) -> str:
    shown = (
        ("memory", pressure.memory_some_percent), ("memory, everything", pressure.memory_full_percent),
        ("disk, everything", pressure.io_full_percent), ("CPU", pressure.cpu_some_percent),
    )  # fmt: skip
    figures = ", ".join(f"{name} {percent:g} %" for name, percent in shown if percent is not None) or "not told"
    return f"{figures}; {pressure.short_of or 'room for new sandboxes'} (admission {pressure.admission})"


def _explain(features: Sequence[t.FeatureState]) -> None:
    for feature in features:
        hint = feature.hint if not feature.works else ""
        texts = [text for text in (feature.detail, hint) if text]
        if texts:
            click.echo(f"\n{feature.name}:")
        for text in texts:
            click.echo(wrap(output.one_line(text), 98, initial_indent="  ", subsequent_indent="  "))


@command("doctor", example="dsecctl doctor")
def doctor(app: App) -> None:
    """Check the host and look for residue; the status is 1 when something is wrong.

    'missing' is what dsec works without, but then offers or protects less; 'wrong' is what it needs.
    """
    report = app.client.doctor()
    if app.json:
        output.document(report)
    else:
        for finding in report.findings:
            word = (_OK if finding.needed else _OPTIONAL)[finding.ok]
            click.echo(f"{word:8} {finding.check}: {output.one_line(finding.detail)}".rstrip(": "))
            if finding.hint and not finding.ok:
                click.echo(f"{'':8} (hint: {finding.hint})")
    if any(finding.ok is False and finding.needed for finding in report.findings):
        click.get_current_context().exit(1)


@command("events", example="dsecctl events -f --json")
@click.option("-f", "--follow", is_flag=True, help="What happens from now on, or after --since, for ever.")
@click.option(
    "--since", type=click.IntRange(0), metavar="SEQ", help="After this sequence number; 0 is all that is known."
)
@click.option("--limit", type=click.IntRange(1, 10000), help="At most so many; not with --follow.")
def events(app: App, *, follow: bool, since: int | None, limit: int | None) -> None:
    """Print what happened: creations, failures, deletions, imports.

    The newest 100, or --limit of them; with --since those that came next, up to the newest. About 10,000 are kept.
    """
    if not follow:
        for event in _history(app, since, limit):
            _tell(app, event)
        return
    if since is None:
        # A number to go on from, should the daemon be gone before the first event.
        since = _newest(app)
    lost_at = 0.0
    while True:
        try:
            with app.client.events_stream(since=since) as stream:
                for event in stream:
                    _tell(app, event)
                    since, lost_at = event.seq, 0.0
        except ConnectionFailed:
            # A daemon that restarts: go on after the last event seen.
            lost_at = lost_at or time.monotonic()
            if time.monotonic() > lost_at + RETRY_S:
                raise
            time.sleep(0.2)


def _history(app: App, since: int | None, limit: int | None) -> Sequence[t.Event]:
    if since is not None:
        return app.client.events(since=since, limit=limit or _MOST).events
    return app.client.events(limit=_MOST).events[-(limit or _RECENT) :]


def _newest(app: App) -> int:
    """The newest event's number: where it ends for somebody who claims to have seen all."""
    return app.client.events(since=2**62, limit=1).last


def _tell(app: App, event: t.Event) -> None:
    if app.json:
        output.line(event)
        return
    details = " ".join(f"{name}={value}" for name, value in event.details.items())
    when = event.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    click.echo(
        output.one_line(f"{event.seq:>6}  {when}  {event.kind:20}  {event.subject}  {details}").rstrip()
    )


@command("ops", example="dsecctl ops --wait op-3f2a")
@click.option("--wait", is_flag=True, help="Wait until it has ended.")
@click.option("--cancel", is_flag=True, help="Cancel it.")
@click.argument("operation", required=False)
def ops(app: App, *, operation: str | None, wait: bool, cancel: bool) -> None:
    """List operations, the jobs that take longer; or show, await or cancel one."""
    if operation is None:
        found = app.client.operations().operations
        if app.json:
            output.document([item.model_dump(mode="json") for item in found])
        else:
            rows = [(op.id, op.kind, op.state.value, output.ago(op.created_at)) for op in found]
            output.table(("ID", "KIND", "STATE", "AGE"), rows)
        return
    job = app.client.operation_cancel(operation) if cancel else app.client.operation(operation)
    if wait:
        job = output.finish(app, job, job.kind)
    output.document(job)
