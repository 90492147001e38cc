# SPDX-License-Identifier: Apache-2.0
"""Handlers about files in sandboxes.

Here: see the routes. Not here: files (``dsecd.core.files``), the forms of their contents
(``dsecd.api.bodies``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing

from aiohttp import web
from pydantic import BaseModel

from dsecd.api import bodies
from dsecd.api.call import Call, check_encoding, expect_continue, media_type
from dsecd.api.router import Handler
from dsecd.api.wire import REQUEST_ID, WrongMediaType
from libdsec import types as t
from libdsec.errors import Conflict, TimedOut

#: Entries on one page of a directory, when the client does not say.
PAGE = 1000
_UMASK = 0o022


async def get_file(call: Call) -> web.StreamResponse:
    """Plain, or extents for a client that asks for them. A failure on the way breaks the connection off."""
    offset, length = call.integer("offset") or 0, call.integer("length") or 0
    path, user = call.required("path"), call.text("user")
    extents = bodies.EXTENTS in call.request.headers.get("Accept", "")
    stream = await call.core.files.open_get(call.principal, call.id, path, user, offset, length)
    async with aclosing(stream):
        size = stream.info.size_bytes
        end = max(offset, min(size, offset + length) if length else size)
        response = web.StreamResponse(
            headers={
                "Content-Type": bodies.EXTENTS if extents else bodies.PLAIN,
                "X-Dsec-Size": str(size),
                # JSON in ASCII is fit for a header, whatever the file's name.
                "X-Dsec-Info": json.dumps(stream.info.model_dump(mode="json"), separators=(",", ":")),
                REQUEST_ID: call.request_id,
            }
        )
        response.enable_chunked_encoding()
        await response.prepare(call.request)
        if extents:
            await bodies.send_extents(response, aiter(stream), end)
        else:
            await bodies.send_plain(response, aiter(stream), offset, end)
        await response.write_eof()
    return response


async def put_file(call: Call) -> BaseModel:
    """Committed only once the whole body has arrived; a client that breaks off has uploaded nothing."""
    request = call.request
    check_encoding(request)
    kind = media_type(request) or bodies.PLAIN
    if kind not in (bodies.PLAIN, bodies.EXTENTS):
        raise WrongMediaType(f"the body must be {bodies.PLAIN} or {bodies.EXTENTS}, got {kind[:80]!r}")
    path, part = call.required("path"), call.text("part")
    umask, first = call.integer("umask"), call.integer("offset") or 0
    stream = await call.core.files.open_put(
        call.principal, call.id, path=path, user=call.text("user"), mode=call.integer("mode"),
        umask=_UMASK if umask is None else umask, parents=call.flag("parents"), exclusive=call.flag("exclusive"),
        mtime_ns=call.integer("mtime_ns"), part=part,
    )  # fmt: skip
    async with aclosing(stream):
        if first > stream.offset:
            raise Conflict(
                f"put {path!r}: the body begins at {first}, but only {stream.offset} bytes have arrived before",
                hint="ask /files/part where to go on",
                offset=stream.offset,
            )
        end = await _receive(call, stream, path, first, extents=kind == bodies.EXTENTS)
        size = call.integer("size")
        return await stream.commit(end if size is None else size)


async def _receive(call: Call, sink: bodies.Sink, path: str, first: int, *, extents: bool) -> int:
    await expect_continue(call.request)
    try:
        return await bodies.receive(call.request, sink, first, extents=extents)
    except TimeoutError as error:
        raise TimedOut(f"put {path!r}: nothing moved for {bodies.IDLE_TIMEOUT_S:g} s") from error


async def get_files(call: Call) -> web.StreamResponse:
    """Records as the agent makes them. A failure on the way breaks the connection off."""
    stream = await call.core.files.open_get_many(call.principal, call.id, call.json(t.GetFilesRequest))
    async with aclosing(stream):
        response = web.StreamResponse(headers={"Content-Type": bodies.RECORDS, REQUEST_ID: call.request_id})
        response.enable_chunked_encoding()
        await response.prepare(call.request)
        await bodies.send_plain(response, aiter(stream), 0, 0)
        await response.write_eof()
    return response


async def put_files(call: Call) -> BaseModel:
    """The records are the agent's to understand: they are bytes that go in as they come."""
    request = call.request
    check_encoding(request)
    kind = media_type(request)
    if kind != bodies.RECORDS:
        raise WrongMediaType(f"the body must be {bodies.RECORDS}, got {kind[:80]!r}")
    path = call.required("path")
    stream = await call.core.files.open_put_many(call.principal, call.id, path, call.text("user"))
    async with aclosing(stream):
        await stream.commit(await _receive(call, stream, path, 0, extents=False))
    return t.Empty()


async def put_state(call: Call) -> BaseModel:
    return await call.core.files.put_state(
        call.principal, call.id, call.required("path"), call.text("user"), call.required("part")
    )


async def stat(call: Call) -> BaseModel:
    path, user = call.required("path"), call.text("user")
    return await call.core.files.stat(call.principal, call.id, path, user, follow=call.flag("follow"))


async def list_dir(call: Call) -> BaseModel:
    path, user = call.required("path"), call.text("user")
    cursor, limit = call.text("cursor"), call.integer("limit") or PAGE
    return await call.core.files.list_dir(call.principal, call.id, path, user, cursor, limit)


async def remove_file(call: Call) -> BaseModel:
    path, user = call.required("path"), call.text("user")
    await call.core.files.remove(call.principal, call.id, path, user, recursive=call.flag("recursive"))
    return t.Empty()


async def mkdir(call: Call) -> BaseModel:
    await call.core.files.mkdir(call.principal, call.id, call.json(t.MkdirRequest))
    return t.Empty()


async def rename(call: Call) -> BaseModel:
    await call.core.files.rename(call.principal, call.id, call.json(t.RenameRequest))
    return t.Empty()


HANDLERS: Mapping[str, Handler] = {
    handler.__name__: handler
    for handler in (
        get_file, put_file, get_files, put_files, put_state, stat, list_dir, remove_file, mkdir, rename,
    )
}  # fmt: skip
