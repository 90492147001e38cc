# SPDX-License-Identifier: Apache-2.0
"""Commands about the host and the daemon: host, doctor, events, ops.

Here: printing what the daemon reports. Not here: finding it out (the daemon).
"""

from __future__ import annotations

import time

import click

from dsecctl import output
from dsecctl.app import RETRY_S, App, command
from libdsec import types as t
from libdsec.errors import ConnectionFailed

_WORKS = {True: "yes", False: "no", None: "unknown"}
_OK = {True: "ok", False: "wrong", None: "unknown"}
#: The same where dsec works without it.
_OPTIONAL = _OK | {False: "missing"}


@command("host", example="dsecctl host")
def host(app: App) -> None:
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
    counts = ", ".join(f"{count} {state}" for state, count in sorted(report.sandboxes.items()) if count)
    click.echo(f"sandboxes: {counts or 'none'}")
    click.echo()
    output.table(
        ("BACKEND", "WORKS", "DETAIL"), [(b.name, _WORKS[b.works], b.detail) for b in report.backends]
    )
    click.echo()
    output.table(("FEATURE", "WORKS", "FOR", "DETAIL"), [_feature(feature) for feature in report.features])


def _feature(feature: t.FeatureState) -> tuple[str, ...]:
    hint = f"; {feature.hint}" if feature.hint and not feature.works else ""
    return feature.name, _WORKS[feature.works], feature.why, f"{feature.detail}{hint}".lstrip("; ")


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
@click.option("-f", "--follow", is_flag=True, help="Go on for ever.")
@click.option("--since", type=click.IntRange(0), default=0, metavar="SEQ", help="After this sequence number.")
@click.option("--limit", type=click.IntRange(1, 10000), help="At most so many; not with --follow.")
def events(app: App, *, follow: bool, since: int, limit: int | None) -> None:
    """Print what happened: creations, failures, deletions, imports."""
    if not follow:
        for event in app.client.events(since=since or None, limit=limit).events:
            _tell(app, event)
        return
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
