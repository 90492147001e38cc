# SPDX-License-Identifier: Apache-2.0
"""libdsec: the Python SDK of dsec and its wire contract.

    from libdsec import Sandbox

    with Sandbox(image="debian:trixie") as sandbox:
        print(sandbox.exec("cat", "/etc/debian_version").text)

``Sandbox`` and ``Client`` are synchronous, ``AsyncSandbox`` and ``AsyncClient`` the same for asyncio. The clients
are loaded when first used, so that the daemon, which imports types and errors only, does not carry them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from libdsec._async.client import AsyncClient as AsyncClient
    from libdsec._async.sandbox import AsyncSandbox as AsyncSandbox
    from libdsec._async.stream import AsyncExecStream as AsyncExecStream
    from libdsec._sync.client import Client as Client
    from libdsec._sync.sandbox import Sandbox as Sandbox
    from libdsec._sync.stream import ExecStream as ExecStream
    from libdsec.errors import DsecError as DsecError

__version__ = "0.1.0"

_HOME = {
    "AsyncClient": "libdsec._async.client",
    "AsyncExecStream": "libdsec._async.stream",
    "AsyncSandbox": "libdsec._async.sandbox",
    "Client": "libdsec._sync.client",
    "ExecStream": "libdsec._sync.stream",
    "Sandbox": "libdsec._sync.sandbox",
    "DsecError": "libdsec.errors",
}
__all__ = ["AsyncClient", "AsyncExecStream", "AsyncSandbox", "Client", "DsecError", "ExecStream", "Sandbox"]


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'libdsec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
