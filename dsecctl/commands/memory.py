# SPDX-License-Identifier: Apache-2.0
"""The command about memory: mem.

Here: printing what sandboxes and the host use. Not here: CPU and processes (``sandboxes.py``).
"""

from __future__ import annotations

import click

from dsecctl import output
from dsecctl.app import App, command
from dsecctl.params import SANDBOX
from libdsec import memory as m

_MACHINES = ("MACHINE", "SIZE", "GUEST", "LAYERS", "MONITOR", "SAYS AVAILABLE", "SAYS FREE")
_HEADER = ("ID", "USED", "COLD", "SWAPPED", "RECLAIMED", "REFAULTS", "IDLE", "PRESSURE")


@command("mem", example="dsecctl mem")
@click.argument("sandboxes", type=SANDBOX, nargs=-1)
def mem(app: App, *, sandboxes: tuple[str, ...]) -> None:
    """Show memory: of the host, each page once, and of sandboxes that run, all unless some are named.

    COLD was not touched of late, SWAPPED was taken (its size before compression), REFAULTS are pages that were taken
    and then needed again, PRESSURE is the time in which some task, or all of them, waited for memory, of the last 10 s.

    Of virtual machines a second table tells what the host pays, shared pages by their part: for the guest's memory
    (GUEST, of SIZE), for images that it maps (LAYERS) and for the monitor; and what the guest says it has free.
    """
    report = app.client.memory(sandbox=sandboxes) if sandboxes else app.client.memory_all()
    if app.json:
        output.document(report)
        return
    if app.quiet:
        for one in report.sandboxes:
            click.echo(one.id)
        return
    _host(report.host)
    if report.sandboxes:
        click.echo()
        output.table(_HEADER, [_row(one) for one in report.sandboxes])
    if rows := [_machine(one.id, one.machine) for one in report.sandboxes if one.machine is not None]:
        click.echo()
        output.table(_MACHINES, rows)


def _host(host: m.HostMemory) -> None:
    size = output.size
    click.echo(f"host: {size(host.available_bytes)} of {size(host.total_bytes)} available; sandboxes together use "
               f"{_known(host.sandboxes_bytes)}; pressure {_pressure(host)}")  # fmt: skip
    swapped = f"swap: {size(host.swap_used_bytes)} of {size(host.swap_total_bytes)} used"
    if host.zram_memory_bytes is not None and host.zram_stored_bytes is not None:
        swapped += f"; zram holds {size(host.zram_stored_bytes)} in {size(host.zram_memory_bytes)}"
    click.echo(swapped if host.swap_total_bytes else "swap: none")
    detail = f" ({output.one_line(host.reclaim_detail)})" if host.reclaim_detail else ""
    click.echo(f"reclaim: {host.reclaim}{detail}; {size(host.reclaimed_bytes)} so far")


def _row(one: m.SandboxMemory) -> tuple[str, ...]:
    return (
        one.id, _known(one.used_bytes), _known(one.cold_bytes), _known(one.swapped_bytes),
        output.size(one.reclaimed_bytes), "-" if one.refaults is None else str(one.refaults),
        "-" if one.idle_s is None else f"{one.idle_s:.0f}s", _pressure(one),
    )  # fmt: skip


def _machine(id: str, of: m.MachineMemory) -> tuple[str, ...]:
    paid = (of.size_bytes, of.guest_bytes, of.layers_bytes, of.monitor_bytes)
    return (id, *map(output.size, paid), *(_known(of.told.get(name)) for name in ("available", "free")))


def _known(count: int | None) -> str:
    return "-" if count is None else output.size(count)


def _pressure(of: m.HostMemory | m.SandboxMemory) -> str:
    if of.pressure_some_percent is None or of.pressure_full_percent is None:
        return "-"
    return f"{of.pressure_some_percent:g}/{of.pressure_full_percent:g} %"
