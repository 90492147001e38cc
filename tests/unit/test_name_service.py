# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of names, spoken to over a real socket as dsec-dns speaks to it."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

from dsecd.backends.dns_link import DnsLink
from dsecd.backends.name_rules import name_rules
from dsecd.backends.name_service import NameService
from dsecd.dns import frames


async def _told(path: Path) -> list[str]:
    """The sandboxes that a dsec-dns which connects is told before it may forget those that it was not told of."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(frames.pack(frames.Hello(version=frames.VERSION)))
        told: list[str] = []
        while not isinstance(message := await frames.read(reader, frames.TO_DNS), frames.Synced):
            if isinstance(message, frames.Policy):
                told.append(message.sandbox)
        return told
    finally:
        writer.close()
        await writer.wait_closed()


def test_dsec_dns_is_told_of_all_that_is_taken_over_late(tmp_path: Path) -> None:
    unused: Any = None  # what an address would be opened in; none is asked for

    async def scenario() -> list[str]:
        names = NameService(DnsLink(frames.Settings(listen=()), {os.getuid()}))
        rules = name_rules(("host:*.example.org:443",))

        async def put(sandbox: str, device: int) -> None:
            await names.put(sandbox, device, (), rules, unused, refused=lambda _denied: None)

        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(tmp_path / "dns.sock"))
        listening.listen()
        await put("early", 1)
        serving = asyncio.create_task(names.serve(listening, ["early", "late", "ended"]))
        told = asyncio.create_task(_told(tmp_path / "dns.sock"))
        # More than enough for it to be told too early.
        await asyncio.wait([told], timeout=0.3)
        await put("late", 2)
        await names.forget("ended")
        try:
            return await asyncio.wait_for(told, 60)
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    assert asyncio.run(scenario()) == ["early", "late"]
