# SPDX-License-Identifier: Apache-2.0
"""Handlers about commands in sandboxes.

Here: see the routes. Not here: commands (``dsecd.core.execs``), their WebSocket (``dsecd.api.exec_stream``).
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from dsecd.api.call import Call
from dsecd.api.exec_stream import exec_stream
from dsecd.api.router import Handler
from libdsec import types as t

_MAX_OUTPUT_BYTES = 8 * t.MIB
_PIECE_BYTES = t.MIB


async def exec_(call: Call) -> BaseModel:
    return await call.core.execs.run(call.principal, call.id, call.json(t.ExecRequest))


async def exec_start(call: Call) -> BaseModel:
    return await call.core.execs.start(call.principal, call.id, call.json(t.ExecRequest))


async def exec_list(call: Call) -> BaseModel:
    return await call.core.execs.list(call.principal, call.id)


async def exec_inspect(call: Call) -> BaseModel:
    return await call.core.execs.inspect(call.principal, call.id, call.exec_id)


async def exec_wait(call: Call) -> BaseModel:
    limit = call.integer("max_output_bytes")
    return await call.core.execs.wait(
        call.principal,
        call.id,
        call.exec_id,
        call.seconds("wait_s"),
        _MAX_OUTPUT_BYTES if limit is None else limit,
    )


async def exec_output(call: Call) -> BaseModel:
    stream = call.text("stream") or "stdout"
    offset, limit = call.integer("offset") or 0, call.integer("limit") or _PIECE_BYTES
    return await call.core.execs.output(call.principal, call.id, call.exec_id, stream, offset, limit)


async def exec_signal(call: Call) -> BaseModel:
    await call.core.execs.signal(call.principal, call.id, call.exec_id, call.json(t.SignalRequest))
    return t.Empty()


async def exec_resize(call: Call) -> BaseModel:
    await call.core.execs.resize(call.principal, call.id, call.exec_id, call.json(t.ResizeRequest))
    return t.Empty()


async def exec_forget(call: Call) -> BaseModel:
    await call.core.execs.forget(call.principal, call.id, call.exec_id)
    return t.Empty()


HANDLERS: Mapping[str, Handler] = {
    "exec": exec_,
    **{
        handler.__name__: handler
        for handler in (
            exec_start, exec_stream, exec_list, exec_inspect, exec_wait, exec_output, exec_signal, exec_resize,
            exec_forget,
        )
    },
}  # fmt: skip
