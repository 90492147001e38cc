# SPDX-License-Identifier: Apache-2.0
"""Commands about the network of sandboxes.

Here: looking at it, and listening here for ports in there. Not here: choosing what one may reach (``create.py``,
``sandboxes.py``), the language of policies (``libdsec.network``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal

import click

from dsecctl import output
from dsecctl.app import App, command
from dsecctl.interrupts import heeded
from dsecctl.params import SANDBOX
from libdsec import AsyncClient, __version__
from libdsec import types as t
from libdsec._async.tunnel import AsyncTunnel
from libdsec.errors import DsecError

_LOOPBACK = "127.0.0.1"
_READ_BYTES = 1 << 16


@command("net", example="dsecctl net web")
@click.argument("sandbox", type=SANDBOX)
def net(app: App, *, sandbox: str) -> None:
    """Show what a sandbox may reach, what it sent, and the last things that were refused."""
    state = app.client.network(sandbox)
    if app.json:
        output.document(state)
    else:
        output.table(("NETWORK", ""), _rows(state))
        if state.recent:
            click.echo()
            output.table(("REFUSED", "TO", "PORT", "PROTOCOL", "REASON"), [_refusal(denial) for denial in state.recent])
        if state.recent_names:
            click.echo()
            rows = [(f"{output.ago(denial.at)} ago", denial.name) for denial in state.recent_names]
            output.table(("REFUSED", "NAME"), rows)


def _rows(state: t.NetworkState) -> list[tuple[str, str]]:
    rules = (state.policy,) if isinstance(state.policy, str) else state.policy
    rows = [("may reach", rules[0]), *(("", rule) for rule in rules[1:])]
    if state.addresses:
        rows += [
            ("addresses", " ".join(state.addresses)),
            ("sent", f"{state.sent_packets} packets, {output.size(state.sent_bytes)}"),
            ("received", f"{state.received_packets} packets, {output.size(state.received_bytes)}"),
            ("refused", f"{state.denied} from it, {state.denied_inbound} to it"),
        ]
    if state.dns:
        refused = f"{state.denied_names} names, {state.denied_answers} answers, {state.dropped_queries} queries dropped"
        rows += [
            ("DNS", state.dns), ("opened by names", f"{state.opened_addresses} addresses"), ("names refused", refused)
        ]  # fmt: skip
    return rows


def _refusal(denial: t.NetworkDenial) -> tuple[str, ...]:
    return (
        f"{output.ago(denial.at)} ago", denial.address or "-", str(denial.port or "-"), denial.protocol, denial.reason
    )


class Ports(click.ParamType):
    """``[LOCAL:]PORT``; without LOCAL the same number, and 0 for any free one."""

    name = "ports"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        local, colon, remote = str(value).rpartition(":")
        numbers = [int(text) for text in (local if colon else remote, remote) if text.isdecimal()]
        if len(numbers) != 2 or not 0 <= numbers[0] <= 65535 or not 1 <= numbers[1] <= 65535:
            self.fail(f"'{value}' is not of the form [LOCAL:]PORT", param, ctx)
        return numbers[0], numbers[1]


@command("forward", example="dsecctl forward web 8080:80")
@click.argument("sandbox", type=SANDBOX)
@click.argument("ports", type=Ports(), nargs=-1, required=True, metavar="[LOCAL:]PORT...")
def forward(app: App, *, sandbox: str, ports: tuple[tuple[int, int], ...]) -> None:
    """Listen on ports of this machine's loopback and lead each connection to a port in a sandbox, until interrupted.

    The sandbox needs no network for it. LOCAL 0 takes any free port; which one is printed.
    """
    app.client.inspect(sandbox)
    asyncio.run(_listen(app, sandbox, ports))


async def _listen(app: App, sandbox: str, ports: tuple[tuple[int, int], ...]) -> None:
    told = _signal_told()
    async with AsyncClient(app.socket, agent=f"dsecctl/{__version__}") as client, contextlib.AsyncExitStack() as stack:
        for local, remote in ports:

            async def serve(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = remote
            ) -> None:
                try:
                    tunnel = await client.forward(sandbox, port)
                    try:
                        await _pass(tunnel, reader, writer)
                    finally:
                        await tunnel.close()
                except (DsecError, OSError) as error:
                    output.note(app, f"dsecctl: {error}")
                finally:
                    writer.close()

            server = await stack.enter_async_context(await asyncio.start_server(serve, _LOOPBACK, local))
            # Else its end would wait for theirs.
            stack.callback(server.abort_clients)
            chosen = server.sockets[0].getsockname()[1]
            listening = {"address": _LOOPBACK, "port": chosen, "sandbox": sandbox, "sandbox_port": remote}
            click.echo(json.dumps(listening) if app.json else f"{_LOOPBACK}:{chosen} -> {sandbox}:{remote}")
        number = await told
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _signal_told() -> asyncio.Future[int]:
    """The first signal that ends us, from now on. By the loop: raised in the middle of it, what it was about to do is
    lost, and with that a connection's end, which the server's end waits for."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[int] = loop.create_future()

    def tell(number: int) -> None:
        if not told.done():
            told.set_result(number)

    for number in heeded():
        loop.add_signal_handler(number, tell, number)
    return told


async def _pass(tunnel: AsyncTunnel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Bytes both ways, until both have ended or one breaks."""

    async def out() -> None:
        while data := await reader.read(_READ_BYTES):
            await tunnel.send(data)
        await tunnel.end()

    async def back() -> None:
        while data := await tunnel.receive():
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(out())
            group.create_task(back())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
