# SPDX-License-Identifier: Apache-2.0
"""What commands print: tables, JSON, sizes and times for people, progress.

Here: writing to the terminal, also what became of many things. Not here: what is written (the commands), errors
(``cli.py``).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
from pydantic import BaseModel
from pydantic_core import to_json

from dsecctl.app import App
from libdsec import types as t
from libdsec.errors import DsecError

R = TypeVar("R")

_COLOURS = {
    "running": "green", "done": "green", "yes": "green", "ok": "green",
    "failed": "red", "no": "red", "wrong": "red",
    "paused": "yellow", "unknown": "yellow",
}  # fmt: skip


def document(value: BaseModel | Sequence[BaseModel] | Mapping[str, Any] | Any) -> None:
    """One JSON document; laid out for people on a terminal."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    indent = 2 if sys.stdout.isatty() else None
    click.echo(to_json(plain, indent=indent).decode())


def line(value: BaseModel) -> None:
    """One line of a stream of JSON."""
    click.echo(value.model_dump_json())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be: on a terminal the known states have colours."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    colour = sys.stdout.isatty()
    for number, row in enumerate([header, *rows]):
        cells = []
        for text, width in zip(row, widths, strict=True):
            padded = one_line(text).ljust(width)
            style = _COLOURS.get(text) if colour and number else None
            cells.append(click.style(padded, fg=style) if style else padded)
        click.echo("  ".join(cells).rstrip())


def one_line(text: str) -> str:
    """Text without control characters: what a sandbox says must not drive our terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def printable(text: str) -> str:
    """The same for text of several lines."""
    return "\n".join(one_line(line.expandtabs(4)) for line in text.split("\n"))


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def cpu(microseconds: int | None) -> str:
    """CPU time for people."""
    if microseconds is None:
        return "-"
    minutes, seconds = divmod(microseconds / 1e6, 60)
    return f"{minutes:.0f} min {seconds:.0f} s" if minutes >= 10 else f"{microseconds / 1e6:.2f} s"


def ago(moment: datetime | None) -> str:
    """How long since then, in the one unit that says it best."""
    if moment is None:
        return "-"
    seconds = max(0, int((datetime.now(UTC) - moment).total_seconds()))
    for limit, unit, per in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds // per} {unit}"
    return f"{seconds // 86400} d"


def note(app: App, text: str) -> None:
    """A word to the user beside the result; none with ``--quiet``."""
    if not app.quiet:
        click.echo(text, err=True)


def collect(names: Sequence[str], action: Callable[[str], R], *, at_once: int = 1) -> tuple[list[R], DsecError | None]:
    """What came of each, also when one fails, and the first error, for the caller to raise; the others are said.

    Both in the order of the names, however many are under way at once, in threads. What is no DsecError ends it all.
    """
    outcomes: dict[int, R | Exception] = {}
    waiting = iter(list(enumerate(names)))

    def work() -> None:
        for number, name in waiting:
            try:
                outcomes[number] = action(name)
            except DsecError as exc:
                outcomes[number] = exc
            except Exception as exc:  # noqa: BLE001  raised below
                outcomes[number] = exc
                return

    # Daemons: one that hangs must not keep an interrupted command from ending.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(at_once, len(names)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    failure: DsecError | None = None
    results = []
    for _, outcome in sorted(outcomes.items(), key=lambda item: item[0]):
        if not isinstance(outcome, Exception):
            results.append(outcome)
        elif not isinstance(outcome, DsecError):
            raise outcome
        elif failure is None:
            failure = outcome
        else:
            click.echo(f"dsecctl: {printable(outcome.message)}", err=True)
    return results, failure


def each(app: App, names: Sequence[str], action: Callable[[str], BaseModel | None], *, at_once: int = 1) -> None:
    """Do it to each of what was named, also when one fails; the first error is the command's, the others are said."""

    def one(name: str) -> BaseModel | None:
        result = action(name)
        if not app.json:
            click.echo(name)
        return result

    results, failure = collect(names, one, at_once=at_once)
    if app.json:
        done = [result for result in results if result is not None]
        document([result.model_dump(mode="json") for result in done] if done else {})
    if failure is not None:
        raise failure


# --- operations --------------------------------------------------------------------------------------------------


def finish(app: App, operation: t.Operation, what: str) -> t.Operation:
    """Wait for an operation with its progress on stderr: a bar on a terminal, else a line now and then."""
    if app.quiet:
        return app.client.finish(operation)
    with _progress(what) as show:
        return app.client.finish(operation, progress=show)


def _progress(what: str) -> Any:
    return _bar(what) if sys.stderr.isatty() else _lines(what)


@contextmanager
def _bar(what: str) -> Iterator[Callable[[t.Operation], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)

        def show(operation: t.Operation) -> None:
            state = t.ImportProgress.model_validate({"phase": "", **operation.progress})
            progress.update(
                task,
                description=one_line(f"{what}: {state.phase}" if state.phase else what),
                completed=state.bytes_done,
                total=state.bytes_total,
            )

        yield show


@contextmanager
def _lines(what: str) -> Iterator[Callable[[t.Operation], None]]:
    said, at = "", 0.0

    def show(operation: t.Operation) -> None:
        nonlocal said, at
        state = t.ImportProgress.model_validate({"phase": "", **operation.progress})
        if state.phase and (state.phase != said or time.monotonic() > at + 10):
            said, at = state.phase, time.monotonic()
            done = f", {size(state.bytes_done)}" if state.bytes_done else ""
            total = f" of {size(state.bytes_total)}" if done and state.bytes_total else ""
            click.echo(f"{what}: {one_line(state.phase)}{done}{total}", err=True)

    yield show
