# SPDX-License-Identifier: Apache-2.0
"""Many files in one request, for the daemon in memory (``fake_daemon.py``).

Here: the two routes and records as they are written down in docs/api.md, by other code than the SDK's.
"""

from __future__ import annotations

import stat
import struct
from typing import Any

from aiohttp import web

from libdsec import types as t
from tests.support.fake_state import State

_HEADER = struct.Struct("<IqII")


class Batches(State):
    """Routes about many files."""

    async def on_put_files(self, request: web.Request) -> dict[str, Any] | web.StreamResponse:
        files, top = self._box(request).files, request.query["path"].rstrip("/")
        cut = self.body_cuts.pop(0) if self.body_cuts else None
        body = await request.read()
        at = 0
        while at < len(body):
            if cut is not None and at >= cut:
                return self._break(request)
            mode, mtime_ns, name_bytes, size = _HEADER.unpack_from(body, at)
            begin = at + _HEADER.size + name_bytes
            at = begin + size
            path = f"{top}/{body[begin - name_bytes : begin].decode('utf-8', 'surrogateescape')}"
            if stat.S_ISDIR(mode):
                files.setdefault(path, {"type": "directory", "mode": stat.S_IMODE(mode)})
            else:
                files[path] = {
                    "type": "file", "data": body[begin:at], "mode": stat.S_IMODE(mode), "mtime_ns": mtime_ns,
                }  # fmt: skip
        return {}

    async def on_get_files(self, request: web.Request) -> web.StreamResponse:
        wanted = t.GetFilesRequest.model_validate_json(await request.read())
        files = self._box(request).files
        cut = self.body_cuts.pop(0) if self.body_cuts else None
        response = web.StreamResponse(headers={"Content-Type": "application/x-dsec-files"})
        await response.prepare(request)
        for name in wanted.names:
            entry = files.get(f"{wanted.fs_path.rstrip('/')}/{name}", {"type": "gone"})
            data = entry.get("data", b"")
            fit = entry["type"] == "file" and len(data) <= wanted.max_bytes
            mode, data = (stat.S_IFREG | entry.get("mode", 0o644), data) if fit else (0, b"")
            piece = _HEADER.pack(mode, entry.get("mtime_ns", 0), 0, len(data)) + data
            if cut is not None:
                await response.write(piece[:cut])
                cut -= min(cut, len(piece))
                if not cut:
                    self._break(request)
                    return response
            else:
                await response.write(piece)
        await response.write_eof()
        return response
