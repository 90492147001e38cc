# SPDX-License-Identifier: Apache-2.0
"""What every command is given: the global options and a client, opened when first used.

Here: that, and the base of all commands. Not here: printing (``output.py``), parameter types (``params.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click

from libdsec import Client, Sandbox, __version__

#: How long a command waits for a daemon that restarts while it works.
RETRY_S = 20.0


@dataclass
class App:
    """Global options and the connection."""

    socket: str | None = None
    json: bool = False
    quiet: bool = False
    _client: Client | None = field(default=None, repr=False)

    @property
    def client(self) -> Client:
        """The client."""
        if self._client is None:
            self._client = Client(self.socket, retry_s=RETRY_S, agent=f"dsecctl/{__version__}")
        return self._client

    def sandbox(self, id: str) -> Sandbox:
        """A handle to a sandbox that exists. Raises NotFound."""
        return Sandbox.get(id, client=self.client)

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()


def _set(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    app = ctx.find_object(App)
    if value and app is not None and param.name is not None:
        setattr(app, param.name, value)


def _common() -> list[click.Option]:
    """The global options once more, for behind a command's name."""
    return [
        click.Option(["--socket"], expose_value=False, hidden=True, callback=_set),
        click.Option(["--json"], is_flag=True, expose_value=False, hidden=True, callback=_set),
        click.Option(["-q", "--quiet"], is_flag=True, expose_value=False, hidden=True, callback=_set),
    ]


class Command(click.Command):
    """A command that also takes the global options behind its name, and ends its help with an example."""

    def __init__(self, name: str | None, *, example: str, **kwargs: Any) -> None:
        super().__init__(name, epilog=f"Example: {example}", **kwargs)
        self.example = example
        taken = {name for parameter in self.params for name in parameter.opts}
        self.params += [option for option in _common() if not taken & set(option.opts)]


def command(name: str, *, example: str, **kwargs: Any) -> Callable[[Callable[..., Any]], Command]:
    """Decorator: a command whose function gets the App first."""

    def decorate(function: Callable[..., Any]) -> Command:
        return click.command(name, cls=Command, example=example, **kwargs)(click.pass_obj(function))

    return decorate


def passes_rest(**more: Any) -> dict[str, Any]:
    """Settings for a command whose arguments after the first belong to what it runs."""
    return {"allow_interspersed_args": False, **more}
