# SPDX-License-Identifier: Apache-2.0
"""What dsecd and dsec-dns say to each other, and how it lies in the stream.

Here: the messages, their limits, one frame in and out of bytes. Not here: who says what when (``link`` on this
side, ``dsecd.backends.dns_link`` on the daemon's).

A frame is four bytes of length, big end first, and that much JSON: one message, told apart by ``kind``. The
daemon listens; each side begins with ``hello``. Another version on the other side ends the connection, and the
DNS process, which is then started anew with the program that was installed meanwhile. After ``hello`` the
daemon sends ``settings``, one ``policy`` for each sandbox that may resolve names, and ``synced``: what was not
repeated by then is gone. Later changes follow as ``policy`` and ``forget``; a ``mark`` after them is answered
``heard``. The DNS process sends ``open`` and waits for ``opened`` with its number; ``denied`` it sends now and
then.
"""

from __future__ import annotations

import asyncio
import struct
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

#: Of the messages below: to be raised with every change that the other side has to know.
VERSION = 2
#: Room for the longest policy: 1,024 names of 255 characters and as many networks.
FRAME_MAX = 1 << 20
PATTERNS_MAX = 1024
#: Of one name at a time; those beyond are left out of the answer.
ADDRESSES_MAX = 32
#: An address stays open for so long after the answer that told it has gone stale, unless the daemon says otherwise:
#: clients remember longer than they should, and try one address after another.
GRACE_S = 60
#: How many refused names are told with their number.
RECENT_MAX = 8

_LENGTH = struct.Struct(">I")

M = TypeVar("M")

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
SandboxId = Annotated[str, Field(min_length=1, max_length=128)]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Device = Annotated[int, Field(ge=1, lt=1 << 31)]


class LinkError(Exception):
    """The other side broke the rules; the connection is of no further use."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Endpoint(_Message):
    """An address and port, of a server or to listen on."""

    address: Address
    port: int = Field(53, ge=1, le=65535)

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if self.address.version == 6 else f"{self.address}:{self.port}"


class Hello(_Message):
    kind: Literal["hello"] = "hello"
    version: int


class Settings(_Message):
    """Where to listen for sandboxes, and whom to ask; no ``upstreams``: those of the host's resolv.conf(5).

    ``grace_s``: how long addresses are to be open after the answer that told them has gone stale.
    """

    kind: Literal["settings"] = "settings"
    listen: tuple[Endpoint, ...]
    upstreams: tuple[Endpoint, ...] = ()
    grace_s: int = Field(GRACE_S, ge=1, le=3600)


class Policy(_Message):
    """One sandbox: where its queries come from and what may be answered.

    Names that ``patterns`` cover (spelled as in a policy) are told with addresses that the daemon has opened.
    ``any_name``: all others are told as well, for what the sandbox may reach without. ``named`` are those of its
    networks that lie in special ones: names may lead there, and open nothing.
    """

    kind: Literal["policy"] = "policy"
    sandbox: SandboxId
    device: Device
    sources: Annotated[tuple[Address, ...], Field(max_length=8)]
    patterns: Annotated[tuple[Name, ...], Field(max_length=PATTERNS_MAX)] = ()
    any_name: bool = False
    named: Annotated[tuple[Network, ...], Field(max_length=PATTERNS_MAX)] = ()


class Forget(_Message):
    kind: Literal["forget"] = "forget"
    sandbox: SandboxId


class Synced(_Message):
    kind: Literal["synced"] = "synced"


class Mark(_Message):
    """To be answered when everything before it has been taken note of."""

    kind: Literal["mark"] = "mark"
    number: int


class Heard(_Message):
    """The answer to a mark."""

    kind: Literal["heard"] = "heard"
    number: int


class Open(_Message):
    """Open these addresses of a name to a sandbox for so long, by the ports that its policy has for the name."""

    kind: Literal["open"] = "open"
    number: int = Field(ge=0, lt=1 << 53)
    sandbox: SandboxId
    name: Annotated[str, Field(min_length=1, max_length=253)]
    addresses: Annotated[tuple[Address, ...], Field(min_length=1, max_length=ADDRESSES_MAX)]
    seconds: int = Field(ge=1, le=86_400)


class Opened(_Message):
    """Those of the addresses that are open now; fewer than asked for when the daemon judged otherwise."""

    kind: Literal["opened"] = "opened"
    number: int
    addresses: Annotated[tuple[Address, ...], Field(max_length=ADDRESSES_MAX)]


class Denied(_Message):
    """How many queries of a sandbox were refused since the last time, and the newest of the names."""

    kind: Literal["denied"] = "denied"
    sandbox: SandboxId
    names: int = Field(ge=0, description="not in the policy")
    addresses: int = Field(ge=0, description="of allowed names, that a name may not lead to")
    dropped: int = Field(ge=0, description="above the rate, or nonsense")
    recent: Annotated[tuple[Name, ...], Field(max_length=RECENT_MAX)] = ()


ToDns = Hello | Settings | Policy | Forget | Synced | Mark | Opened
ToDaemon = Hello | Heard | Open | Denied
TO_DNS: TypeAdapter[ToDns] = TypeAdapter(Annotated[ToDns, Field(discriminator="kind")])
TO_DAEMON: TypeAdapter[ToDaemon] = TypeAdapter(Annotated[ToDaemon, Field(discriminator="kind")])


def pack(message: ToDns | ToDaemon) -> bytes:
    body = message.model_dump_json().encode()
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader, expected: TypeAdapter[M]) -> M:
    """The next message.  Raises LinkError for what is none, and EOFError at the end of the stream."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > FRAME_MAX:
            raise LinkError(f"a frame of {size} bytes, at most {FRAME_MAX} are allowed")
        return expected.validate_json(await reader.readexactly(size))
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise LinkError("the stream ends within a frame") from error
        raise EOFError from error
    except ConnectionError as error:
        raise EOFError from error
    except ValidationError as error:
        raise LinkError(f"no message: {error.errors(include_url=False, include_input=False)[:3]}") from error
