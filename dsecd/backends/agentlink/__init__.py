# SPDX-License-Identifier: Apache-2.0
"""The daemon's client of the agent that is PID 1 in every sandbox (docs/agent-protocol.md).

`link` has what callers use; `records` its values and errors. `frames` is the pure codec, `connection` the transport,
`flow` credit, `calls`, `execs` and `files` the channels. Nothing here knows sandboxes, and nothing trusts the agent.
"""

from dsecd.backends.agentlink.execs import ExecChannel
from dsecd.backends.agentlink.files import FileReader, FileWriter
from dsecd.backends.agentlink.link import AgentLink, connect, connect_socket
from dsecd.backends.agentlink.records import (
    AgentError,
    Collected,
    ExecRecord,
    Exit,
    ExitKind,
    ExitReason,
    FileInfo,
    LinkLost,
    Output,
    Peeked,
    StartRequest,
    Usage,
)

__all__ = [
    "AgentError",
    "AgentLink",
    "Collected",
    "ExecChannel",
    "ExecRecord",
    "Exit",
    "ExitKind",
    "ExitReason",
    "FileInfo",
    "FileReader",
    "FileWriter",
    "LinkLost",
    "Output",
    "Peeked",
    "StartRequest",
    "Usage",
    "connect",
    "connect_socket",
]
