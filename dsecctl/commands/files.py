# SPDX-License-Identifier: Apache-2.0
"""``dsecctl cp``: files and directories into and out of sandboxes.

Here: which side is which, and where things go. Not here: the transfer (``libdsec``).
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import click

from dsecctl import output
from dsecctl.app import App, command
from libdsec import Sandbox
from libdsec import types as t
from libdsec.errors import NotFound
from libdsec.local import TreeReport

_REMOTE = re.compile(r"([a-z0-9][a-z0-9.-]{0,62}):(/.*)", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """One side of a copy: a path in a sandbox, or a local one; ``-`` is our stdin or stdout."""

    path: str
    sandbox: str | None = None

    @classmethod
    def parse(cls, text: str) -> Place:
        """``SANDBOX:/path`` or a local path; ``./a:/b`` is local."""
        match = _REMOTE.fullmatch(text)
        return cls(match.group(2), match.group(1)) if match else cls(text)


@command("cp", example="dsecctl cp ./project web:/workspace")
@click.option(
    "-u",
    "--user",
    metavar="USER[:GROUP]",
    help="Whose permissions apply in the sandbox, and who owns what is made.",
)
@click.option("-p", "--parents", is_flag=True, help="Make missing directories in the sandbox.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
def cp(app: App, *, source: str, target: str, user: str | None, parents: bool) -> None:
    """Copy a file or a directory between this host and a sandbox.

    One of SRC and DST is SANDBOX:/PATH, the other a local path, or '-' for standard input or output. Into a directory
    that exists, it is copied under its own name. Symlinks are copied as links; what cannot be copied is told.
    """
    here, there = Place.parse(source), Place.parse(target)
    if (here.sandbox is None) == (there.sandbox is None):
        raise click.UsageError(
            "exactly one of SRC and DST must be SANDBOX:/PATH", click.get_current_context()
        )
    if there.sandbox is not None:
        report = _upload(app, app.sandbox(there.sandbox), here.path, there.path, user, parents=parents)
    else:
        report = _download(app, app.sandbox(here.sandbox or ""), here.path, there.path, user)
    if app.json and there.path != "-":
        output.document(
            {
                "files": report.files,
                "directories": report.directories,
                "symlinks": report.symlinks,
                "data_bytes": report.data_bytes,
                "skipped": [{"path": path, "reason": reason} for path, reason in report.skipped],
            }
        )
    for path, reason in report.skipped:
        click.echo(f"dsecctl: cp '{output.one_line(path)}': left out: {output.one_line(reason)}", err=True)
    if report.skipped:
        click.get_current_context().exit(1)


def _upload(
    app: App, sandbox: Sandbox, local: str, path: str, user: str | None, *, parents: bool
) -> TreeReport:
    if local == "-":
        info = sandbox.put_file(sys.stdin.fileno(), path, user=user, parents=parents)
        return TreeReport(files=1, data_bytes=info.size_bytes)
    if _is_directory(sandbox, path, user):
        path = posixpath.join(path, os.path.basename(os.path.abspath(local)))
    if os.path.isdir(local):
        with _watching(app) as watch:
            return sandbox.put_tree(local, path, user=user, parents=parents, on_path=watch)
    info = sandbox.put_file(local, path, user=user, parents=parents)
    return TreeReport(files=1, data_bytes=info.size_bytes)


def _download(app: App, sandbox: Sandbox, path: str, local: str, user: str | None) -> TreeReport:
    if local == "-":
        return _to_stdout(sandbox, path, user)
    info = sandbox.stat(path, user=user, follow=True)
    if os.path.isdir(local):
        local = os.path.join(local, posixpath.basename(path.rstrip("/")) or sandbox.id)
    if info.type == "directory":
        with _watching(app) as watch:
            return sandbox.get_tree(path, local, user=user, on_path=watch)
    sandbox.get_file(path, local, user=user, info=info)
    return TreeReport(files=1, data_bytes=info.size_bytes)


def _to_stdout(sandbox: Sandbox, path: str, user: str | None) -> TreeReport:
    out, count = click.get_binary_stream("stdout"), 0
    with sandbox.client.get_file(sandbox.id, path, user=user) as download:
        for _, data in download.extents():
            out.write(data)
            count += len(data)
    out.flush()
    return TreeReport(files=1, data_bytes=count)


def _is_directory(sandbox: Sandbox, path: str, user: str | None) -> bool:
    try:
        info: t.FileInfo = sandbox.stat(path, user=user, follow=True)
    except NotFound:
        return path.endswith("/")
    return info.type == "directory"


class _watching:  # noqa: N801  used as a with statement
    """Tells on a terminal which path is being copied."""

    def __init__(self, app: App) -> None:
        self._active = sys.stderr.isatty() and not app.quiet and not app.json

    def __enter__(self) -> Callable[[str], None] | None:
        if not self._active:
            return None
        from rich.console import Console

        self._status = Console(stderr=True).status("copying")
        self._status.start()
        return lambda path: self._status.update(output.one_line(path).replace("[", "\\["))

    def __exit__(self, *_exc: object) -> None:
        if self._active:
            self._status.stop()
