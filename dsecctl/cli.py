# SPDX-License-Identifier: Apache-2.0
"""The root of the command line: finding commands, global options, errors and exit statuses.

Here: what all commands share when they start and when they fail. Not here: a single command (``dsecctl/commands/``),
output (``output.py``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from dsecctl.app import App
from dsecctl.commands import COMMANDS, GROUPS
from dsecctl.interrupts import end_in_order
from dsecctl.output import printable
from libdsec import __version__
from libdsec.errors import DsecError, ExecNotStarted, ExecTimeout

#: Commands that end with the status of what they ran; their own failures have statuses that a shell uses the same way.
RUNNERS = frozenset({"run", "exec", "attach"})
OWN_FAILURE, NOT_EXECUTABLE, NOT_FOUND, TIMED_OUT = 125, 126, 127, 124
INTERRUPTED, BROKEN_PIPE = 130, 141


class NobodyReads(Exception):
    """Our standard output was closed. Instead of BrokenPipeError, which click would turn into a status of its own."""


class Root(click.Group):
    """All commands. A command's module is imported when it is needed: most of the start-up time is imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        where = COMMANDS.get(cmd_name)
        if where is None:
            return None
        module, _, attribute = where.partition(":")
        command = getattr(import_module(f"dsecctl.commands.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in GROUPS.items():
            rows = []
            for name in names:
                command = self.get_command(ctx, name)
                assert command is not None
                rows.append((name, command.get_short_help_str(formatter.width)))
            with formatter.section(title):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as exc:
            raise NobodyReads from exc

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run, and end the process with the right status."""
        given = list(sys.argv[1:] if args is None else args)
        extra |= {"standalone_mode": False, "prog_name": "dsecctl"}
        with _failures(given):
            status = super().main(given, *rest, **extra)
        sys.exit(status if isinstance(status, int) else 0)


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: dsecctl run debian:trixie -- cat /etc/debian_version",
)
@click.version_option(__version__, prog_name="dsecctl")
@click.option("--socket", metavar="PATH", envvar="DSEC_SOCKET", help="The daemon's socket.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: one document, or a line for each item of a stream."
)
@click.option("-q", "--quiet", is_flag=True, help="Print ids only, and no progress.")
@click.pass_context
def cli(ctx: click.Context, *, socket: str | None, as_json: bool, quiet: bool) -> None:
    """Create and drive sandboxes on this host.

    The daemon 'dsecd' does the work; this program talks to it over its Unix socket. The global options may also
    be given after the command.
    """
    ctx.obj = App(socket=socket, json=as_json, quiet=quiet)
    ctx.call_on_close(ctx.obj.close)


def main() -> None:
    """Entry point."""
    end_in_order()
    cli()


# --- failures ----------------------------------------------------------------------------------------------------


@contextmanager
def _failures(given: Sequence[str]) -> Iterator[None]:
    """Turn exceptions into one message and an exit status."""
    runs = _command_of(given) in RUNNERS
    as_json = "--json" in (given[: given.index("--")] if "--" in given else given)
    try:
        yield
    except click.exceptions.Exit as exc:
        sys.exit(exc.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except click.ClickException as exc:
        _say(_sentence(exc.format_message()), _help_hint(exc))
        sys.exit(OWN_FAILURE if runs else exc.exit_code)
    except DsecError as exc:
        if as_json:
            click.echo(json.dumps(exc.to_wire(), default=str), err=True)
        else:
            _say(exc.message, exc.hint)
        sys.exit(_runner_status(exc) if runs else exc.exit_status)
    except NobodyReads:
        _give_up_output()
        sys.exit(BROKEN_PIPE)
    except OSError as exc:
        name = f" {os.fspath(exc.filename)!r}" if exc.filename is not None else ""
        _say(f"{_command_of(given) or 'dsecctl'}{name}: {exc.strerror or exc}", None)
        _give_up_output()
        sys.exit(OWN_FAILURE if runs else 1)


def _give_up_output() -> None:
    """What could not be written stays unwritten; Python would complain once more while closing it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _runner_status(exc: DsecError) -> int:
    if isinstance(exc, ExecTimeout):
        return TIMED_OUT
    if isinstance(exc, ExecNotStarted):
        return NOT_FOUND if exc.details.get("reason") == "not-found" else NOT_EXECUTABLE
    return OWN_FAILURE


def _command_of(given: Sequence[str]) -> str | None:
    """The command's name among the arguments, also when they cannot be parsed."""
    words = iter(given)
    for word in words:
        if word == "--socket":
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def _sentence(text: str) -> str:
    """click's messages in our grammar: no capital, no full stop."""
    return text[:1].lower() + text[1:].rstrip(".")


def _help_hint(exc: click.ClickException) -> str | None:
    context = getattr(exc, "ctx", None)
    return f"see '{context.command_path} --help'" if context is not None else None


def _say(message: str, hint: str | None) -> None:
    """What failed, in which a sandbox, an image or an argument may have a word: it must not drive the terminal."""
    click.echo(f"dsecctl: {printable(message)}", err=True)
    if hint:
        click.echo(f"(hint: {printable(hint)})", err=True)
