# SPDX-License-Identifier: Apache-2.0
"""Commands about the network of sandboxes.

Here: looking at it. Not here: choosing what one may reach (``create.py``, ``sandboxes.py``), the language of policies
(``libdsec.network``).
"""

from __future__ import annotations

import click

from dsecctl import output
from dsecctl.app import App, command
from dsecctl.params import SANDBOX
from libdsec import types as t


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
    return rows


def _refusal(denial: t.NetworkDenial) -> tuple[str, ...]:
    return (
        f"{output.ago(denial.at)} ago", denial.address or "-", str(denial.port or "-"), denial.protocol, denial.reason
    )
