# SPDX-License-Identifier: Apache-2.0
"""Ports of sandboxes that are published on the host's loopback: how they are written.

Here: reading ``[ADDRESS:]HOST_PORT:PORT[/tcp]``. Not here: listening (``dsecd.core.publishing``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

PORTS_MAX = 64
_FORM = re.compile(
    r"(?:(?P<address>[0-9.]+|\[[0-9a-fA-F:.]+\]):)?(?P<host>\d{1,5}):(?P<port>\d{1,5})(?P<rest>/.*)?", re.ASCII
)
_DEFAULT = IPv4Address("127.0.0.1")
_LOOPBACK6 = IPv6Address("::1")


@dataclass(frozen=True)
class Published:
    """A port of the host's loopback that leads to a port of a sandbox's; ``host_port`` 0 is any free one."""

    address: IPv4Address | IPv6Address
    host_port: int
    port: int

    def __str__(self) -> str:
        """The one form that is stored and shown."""
        address = f"[{self.address}]" if self.address.version == 6 else str(self.address)
        return f"{address}:{self.host_port}:{self.port}"


def parse(text: str) -> Published:
    """Raises ValueError that says what is wrong."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ValueError("must be of the form [ADDRESS:]HOST_PORT:PORT")
    if found["rest"] not in (None, "/tcp"):
        raise ValueError(f"only tcp can be published, not '{found['rest'][1:]}'")
    try:
        address = ip_address(found["address"].strip("[]")) if found["address"] else _DEFAULT
    except ValueError as error:
        raise ValueError(f"'{found['address']}' is no address") from error
    if not (address == _LOOPBACK6 if address.version == 6 else address.is_loopback):
        raise ValueError(f"'{address}' is not an address of the loopback: 127.0.0.0/8 and [::1] are")
    host_port, port = int(found["host"]), int(found["port"])
    if host_port > 65535 or not 1 <= port <= 65535:
        raise ValueError("ports are numbers up to 65535, and that of the sandbox is not 0")
    return Published(address, host_port, port)


def normal(value: Any) -> tuple[str, ...]:
    """Ports in their normal form, of a text with commas or a list. Raises ValueError with all faults at once."""
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, Sequence) or isinstance(entries, bytes):
        raise ValueError("must be a list of ports")
    if len(entries) > PORTS_MAX:
        raise ValueError(f"must be at most {PORTS_MAX} ports, got {len(entries)}")
    found: list[Published] = []
    faults: list[str] = []
    for number, entry in enumerate(entries, 1):
        try:
            if not isinstance(entry, str):
                raise ValueError("must be a text")
            found.append(parse(entry))
        except ValueError as fault:
            faults.append(f"port {number} '{str(entry)[:60]}': {fault}")
    chosen = [(item.address, item.host_port) for item in found if item.host_port]
    faults += [f"{at[0]} port {at[1]} is there twice" for at in dict.fromkeys(chosen) if chosen.count(at) > 1]
    if faults:
        raise ValueError("; ".join(faults))
    return tuple(map(str, found))


#: Published ports in a spec.
Publish = Annotated[
    tuple[str, ...],
    BeforeValidator(normal),
    WithJsonSchema({
        "type": "array", "maxItems": PORTS_MAX, "items": {"type": "string", "examples": ["8080:80", "[::1]:0:443"]},
    }),
]  # fmt: skip
