#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the manual pages that follow from code: dsecctl(1) from its commands, dsecd.toml(5) from the settings.

``--check`` only tells whether the files in docs/man are current and exits with 1 when they are not; ``--conffile``
prints the configuration file that the package installs. dsecd(8) is written by hand. Macros: man(7).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsecctl.cli import cli  # noqa: E402  the checkout's, whatever is installed
from dsecctl.commands import GROUPS  # noqa: E402
from dsecd.config import Config  # noqa: E402
from libdsec import __version__  # noqa: E402

MADE = '.\\" Made by tools/manpages.py; edit that, or the code it reads.\n'

STATUSES = (
    ("0", "Done."),
    ("1", "The infrastructure failed, or a copy left something out, or 'doctor' found something wrong."),
    ("2", "The command line or a value is wrong."),
    ("3", "The daemon cannot be reached."),
    ("4", "There is no such sandbox, image, exec or file."),
    ("5", "It exists already, is used, or is in another state than needed."),
    ("6", "This host lacks a feature that was asked for by name."),
    ("7", "There is no room for it now."),
    ("8", "It belongs to somebody else, or needs an administrator."),
    ("124", "Time was up."),
    (
        "125, 126, 127",
        "Of 'run', 'exec' and 'attach': own failure, command not executable, command not found; else theirs is "
        "the status of the command, 128 and the signal's number when a signal ended it.",
    ),
)  # fmt: skip

#: What a setting means, where the code's own description does not say it all.
SETTINGS = {
    "socket": "The Unix socket the daemon listens on. With systemd's socket activation that unit's path counts.",
    "state_dir": "Where images, writable layers and the database lie: a disk file system with extended attributes.",
    "cache_dir": "What may be lost: build caches.",
    "runtime_dir": "Mounts, the pinned mount namespace, agents' sockets. On a tmpfs.",
    "apparmor": "auto confines sandboxes where the kernel has AppArmor and marks them unconfined elsewhere; require "
    "does not start without it; off confines none and refuses those that ask for rules of their own.",
    "log_level": "debug, info, warning or error.",
}


# --- roff --------------------------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """Text that means itself: backslashes, dashes that can be copied, no line that looks like a macro."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def bold(text: str) -> str:
    """Text in bold."""
    return f"\\fB{escape(text)}\\fR"


def italic(text: str) -> str:
    """Text that stands for something."""
    return f"\\fI{escape(text)}\\fR"


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of a docstring."""
    for number, block in enumerate(inspect.cleandoc(text).split("\n\n")):
        if number:
            yield ".PP"
        yield escape(" ".join(block.split()))


def definitions(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Tagged paragraphs."""
    for tag, text in items:
        yield from (".TP", tag, escape(text) or "\\&")


# --- dsecctl(1) --------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its whole name, groups dissolved."""
    context = click.Context(cli, info_name="dsecctl")
    for group in GROUPS.values():
        for name in group:
            command = cli.get_command(context, name)
            assert command is not None
            if isinstance(command, click.Group):
                yield from ((f"{name} {sub}", command.commands[sub]) for sub in sorted(command.commands))
            else:
                yield name, command


def option_tag(option: click.Option) -> str:
    """``-l, --label NAME=VALUE``."""
    names = ", ".join(bold(name) for name in sorted(option.opts, key=lambda name: (len(name) > 2, name)))
    if option.secondary_opts:
        names += " / " + ", ".join(bold(name) for name in option.secondary_opts)
    if option.is_flag:
        return names
    return f"{names} {italic(option.make_metavar())}"


def option_text(option: click.Option) -> str:
    """Its help, with the default where the help shows it."""
    text = option.help or ""
    shown = option.show_default
    if isinstance(shown, str):
        return f"{text} Default: {shown}."
    if shown:
        return f"{text} Default: {option.default}."
    return text


def of_command(name: str, command: click.Command) -> Iterator[str]:
    """The section of one command."""
    arguments = [param.make_metavar() for param in command.params if isinstance(param, click.Argument)]
    usage = " ".join([bold(f"dsecctl {name}"), "[options]", *(italic(text) for text in arguments)])
    yield from (f".SS {escape(name)}", usage, ".PP", *paragraphs(command.help or ""))
    visible = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    yield from definitions((option_tag(option), option_text(option)) for option in visible)
    yield from (".PP", "Example:", ".PP", ".EX", "    " + escape(getattr(command, "example", "")), ".EE")


def dsecctl() -> str:
    """dsecctl(1)."""
    options = [param for param in cli.params if isinstance(param, click.Option) and param.name != "version"]
    lines = [
        f'.TH DSECCTL 1 "" "dsec {__version__}" "User commands"',
        ".SH NAME",
        "dsecctl \\- create and drive sandboxes on this host",
        ".SH SYNOPSIS",
        f"{bold('dsecctl')} [options] {italic('COMMAND')} [{italic('ARGUMENT')}]...",
        ".SH DESCRIPTION",
        *paragraphs(cli.help or ""),
        ".PP",
        escape("Sizes are bytes, or numbers with a unit: 512M, 1.5G (powers of 1024). Times are seconds, or numbers "
               "with units: 90, 10m, 1h30m, 2d."),
        ".SH OPTIONS",
        *definitions((option_tag(option), option_text(option)) for option in options),
        ".SH COMMANDS",
        *(line for name, command in commands() for line in of_command(name, command)),
        ".SH EXIT STATUS",
        *definitions((bold(code), text) for code, text in STATUSES),
        ".SH ENVIRONMENT",
        *definitions([(bold("DSEC_SOCKET"), "The daemon's socket, instead of /run/dsec/dsecd.sock.")]),
        ".SH SEE ALSO",
        f"{bold('dsecd')}(8), {bold('dsecd.toml')}(5)",
    ]  # fmt: skip
    return MADE + "\n".join(lines) + "\n"


# --- dsecd.toml(5) -----------------------------------------------------------------------------------------------


def default_text(value: Any) -> str:
    """A default as TOML writes it."""
    if value is PydanticUndefined or value is None:
        return "none"
    if isinstance(value, tuple):
        return "[]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else f'"{value}"'


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every setting with its text; tables dissolved."""
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from settings(type(field.default), f"{prefix}{name}.")
            continue
        text = SETTINGS.get(name) or field.description or ""
        default = "0o660" if name == "socket_mode" else default_text(field.default)
        text = f"{text[:1].upper()}{text[1:]}".rstrip(".")
        yield bold(f"{prefix}{name}"), f"{text}. Default: {default}." if text else ""


def dsecd_toml() -> str:
    """dsecd.toml(5)."""
    lines = [
        f'.TH DSECD.TOML 5 "" "dsec {__version__}" "File formats"',
        ".SH NAME",
        "dsecd.toml \\- configuration of the sandbox daemon",
        ".SH SYNOPSIS",
        ".I /etc/dsec/dsecd.toml",
        ".br",
        ".I /etc/dsec/dsecd.toml.d/*.toml",
        ".SH DESCRIPTION",
        escape("TOML. All files are optional; those in the directory are read after the main one, in the order of "
               "their names, and override single keys. Paths are absolute. All faults are told at once, each with "
               "file and key: try 'dsecd --check-config'."),
        ".SH SETTINGS",
        *definitions(settings(Config)),
        ".SH EXAMPLE",
        ".EX",
        escape('socket_group = "dsec"\nrequire = ["overlay", "erofs"]\n\n[limits]\nmax_connections_per_user = 1024'),
        ".EE",
        ".SH SEE ALSO",
        f"{bold('dsecd')}(8), {bold('dsecctl')}(1)",
    ]  # fmt: skip
    return MADE + "\n".join(lines) + "\n"


# --- /etc/dsec/dsecd.toml ----------------------------------------------------------------------------------------

CONFFILE = """\
# Configuration of the sandbox daemon dsecd: dsecd.toml(5).
#
# Every setting is here with its default. Files in /etc/dsec/dsecd.toml.d/ whose names end in .toml are read after this
# one, in the order of their names, and override single settings. "dsecd --check-config" tells what is wrong;
# "systemctl restart dsecd" puts it into effect and leaves the sandboxes running.
"""


def conffile(model: type[BaseModel] = Config) -> str:
    """dsecd.toml with every setting commented out; without the first "#" of its lines it says the same."""
    lines, tables = [], []
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            tables.append(f"\n#[{name}]\n{conffile(type(field.default))}")
            continue
        text = (SETTINGS.get(name) or field.description or "").rstrip(".")
        value = {"socket_mode": "0o660", "agent": '"/usr/lib/dsec/dsec-agent"'}.get(name) or default_text(field.default)
        lines.append(f"\n# {text[:1].upper()}{text[1:]}.\n#{name} = {value}\n")
    # Tables come last: in TOML what follows one belongs to it.
    return (CONFFILE if model is Config else "") + "".join([*lines, *tables])


def main(arguments: list[str]) -> int:
    """Write the pages, or check them."""
    if "--conffile" in arguments:
        print(conffile(), end="")
        return 0
    stale = []
    for name, text in (("dsecctl.1", dsecctl()), ("dsecd.toml.5", dsecd_toml())):
        path = ROOT / "docs" / "man" / name
        if not path.exists() or path.read_text() != text:
            stale.append(path)
            if "--check" not in arguments:
                path.write_text(text)
    for path in stale:
        print(f"{'stale' if '--check' in arguments else 'wrote'} {path.relative_to(ROOT)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
