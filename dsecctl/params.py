# SPDX-License-Identifier: Apache-2.0
"""Types of parameters: sizes, durations, variables, names that complete from the daemon.

Here: text to values, and completion. Not here: what is done with them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from libdsec import Client
from libdsec.errors import DsecError
from libdsec.network import Policy, normal
from libdsec.ports import parse as parse_port

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?)(?:iB|B)?", re.IGNORECASE)
_DURATION = re.compile(
    r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?"
)
_SECONDS = (86400.0, 3600.0, 60.0, 1.0)


class Size(click.ParamType):
    """Bytes: ``4096``, ``512M``, ``1.5GiB``; units are powers of 1024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value.strip())
        count = math.inf
        if match is not None:
            count = float(match.group(1)) * 1024 ** " KMGTP".index(match.group(2).upper() or " ")
        if math.isinf(count):
            self.fail(f"'{value[:100]}' is no size such as 4096, 512M or 1.5G", param, ctx)
        return int(count)


class Duration(click.ParamType):
    """Seconds: ``90``, ``1.5s``, ``10m``, ``1h30m``, ``2d``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        match = _DURATION.fullmatch(value.strip())
        if match is None or not any(match.groups()):
            self.fail(f"'{value}' is no time such as 90, 10m or 1h30m", param, ctx)
        return sum(float(part or 0) * unit for part, unit in zip(match.groups(), _SECONDS, strict=True))


class Cpus(click.ParamType):
    """CPUs as permil of one: ``1.5`` is 1500."""

    name = "cpus"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            permil = round(float(value) * 1000)
        except (ValueError, OverflowError):
            permil = 0
        if permil < 1:
            self.fail(f"'{value}' is no number of CPUs such as 2 or 0.5", param, ctx)
        return permil


class Pair(click.ParamType):
    """``NAME=VALUE``."""

    name = "name=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, content = value.partition("=")
        if not equals or not name:
            self.fail(f"'{value}' is not of the form NAME=VALUE", param, ctx)
        return name, content


class Variable(Pair):
    """``NAME=VALUE``, or ``NAME`` alone to pass on our own variable, which keeps secrets off command lines."""

    name = "name[=value]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, str) and value and "=" not in value:
            if value not in os.environ:
                self.fail(f"'{value}' is not set here", param, ctx)
            return value, os.environ[value]
        return super().convert(value, param, ctx)


class NetworkPolicy(click.ParamType):
    """``none``, ``all``, or rules with commas between them."""

    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Policy:
        try:
            return normal(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        begun, comma, last = incomplete.rpartition(",")
        words = ("none", "all", "tcp:", "udp:", "icmp:", "host:")
        return [CompletionItem(begun + comma + word) for word in words if word.startswith(last)]


class PublishedPort(click.ParamType):
    """``[ADDRESS:]HOST_PORT:PORT``, in its normal form."""

    name = "port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return str(parse_port(str(value)))
        except ValueError as error:
            self.fail(f"'{value}': {error}", param, ctx)


class _FromDaemon(click.ParamType):
    """A name that the daemon knows; completed from it, silently when it does not answer."""

    def names(self, client: Client, ctx: click.Context) -> list[tuple[str, str]]:
        """Names with a word about each; ``ctx`` has what was typed before."""
        raise NotImplementedError

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        socket = ctx.find_root().params.get("socket")
        try:
            with Client(socket, timeout_s=2.0, retry_s=0) as client:
                return [
                    CompletionItem(name, help=about)
                    for name, about in self.names(client, ctx)
                    if name.startswith(incomplete)
                ]
        except DsecError:
            return []


class SandboxName(_FromDaemon):
    """The id of a sandbox."""

    name = "sandbox"

    def names(self, client: Client, ctx: click.Context) -> list[tuple[str, str]]:
        return [(box.id, f"{box.state} {box.spec.image}") for box in client.list_all()]


class ImageName(_FromDaemon):
    """The name of an image."""

    name = "image"

    def names(self, client: Client, ctx: click.Context) -> list[tuple[str, str]]:
        return [(name, image.prefix) for image in client.images().images for name in image.names]


class SnapshotName(_FromDaemon):
    """The name of a snapshot."""

    name = "snapshot"

    def names(self, client: Client, ctx: click.Context) -> list[tuple[str, str]]:
        return [(item.id, f"of {item.source}") for item in client.snapshots().snapshots]


class ExecId(_FromDaemon):
    """The id of an exec in the sandbox that is named before it."""

    name = "exec"

    def names(self, client: Client, ctx: click.Context) -> list[tuple[str, str]]:
        execs = client.exec_list(ctx.params["sandbox"]).execs
        return [(item.exec_id, "running" if item.running else "ended") for item in execs]


SIZE, DURATION, CPUS, PAIR, VARIABLE = Size(), Duration(), Cpus(), Pair(), Variable()
NETWORK_POLICY, PORT = NetworkPolicy(), PublishedPort()
SANDBOX, IMAGE, SNAPSHOT, EXEC = SandboxName(), ImageName(), SnapshotName(), ExecId()


def read_env_file(ctx: click.Context, param: click.Parameter, value: Any) -> dict[str, str]:
    """Callback of ``--env-file``: lines NAME=VALUE; empty ones and those that begin with # do not count."""
    found: dict[str, str] = {}
    for file in value:
        for number, line in enumerate(file, 1):
            text = line.rstrip("\n")
            if not text or text.startswith("#"):
                continue
            name, equals, content = text.partition("=")
            if not equals or not name:
                raise click.BadParameter(f"{file.name}:{number}: not of the form NAME=VALUE", ctx, param)
            found[name] = content
    return found


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several option decorators as one, in the order they are listed in the help."""

    def decorate(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate
