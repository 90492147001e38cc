# SPDX-License-Identifier: Apache-2.0
# Made by tools/unasync.py from libdsec/_async; edit that.
"""The routes that carry file contents.

Here: bodies as streams of bytes or extents. Not here: local files and resuming (``contents.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from libdsec import connection as c
from libdsec import types as t
from libdsec._sync.calls import FileCalls
from libdsec.errors import InfraError
from libdsec.frames import Extents


@dataclass
class Download:
    """The contents of a file on their way here."""

    response: httpx.Response
    first: int
    #: Where the file ends; known when the body has been read.
    end: int

    def extents(self) -> Iterator[tuple[int, bytes]]:
        """Offset and data of each part, holes left out. Raises InfraError when the body is cut."""
        if not self.response.headers.get("content-type", "").startswith(c.EXTENTS):
            offset = self.first
            for piece in self.response.iter_raw():
                yield offset, piece
                offset += len(piece)
            self.end = offset
            return
        decoder = Extents()
        for piece in self.response.iter_raw():
            for offset, data in decoder.feed(piece):
                self.end = max(self.end, offset + len(data))
                yield offset, data
        if not decoder.complete:
            raise InfraError("read a file: its last extent is cut short")
        self.end = decoder.end if decoder.end is not None else self.end


class Transfers(FileCalls):
    """Files in sandboxes with their contents."""

    @contextmanager
    def get_files(
        self, id: str, path: str, names: Sequence[str], *, user: str | None = None
    ) -> Iterator[Iterator[bytes]]:
        """Download small files below the directory ``path``: pieces of a body for ``libdsec.frames.Records``.

        The body has a record for each name, in their order. Raises NotFound, Denied, InvalidSpec, ConnectionFailed.
        """
        where = c.path_fields("path", path)
        request = c.build(t.GetFilesRequest, "", **where, names=tuple(names), user=user)
        with self.download("get_files", query={}, accept=c.RECORDS, body=request, id=id) as response:
            yield response.iter_raw()

    def put_files(
        self, id: str, path: str, records: Sequence[bytes], *, user: str | None = None
    ) -> None:
        """Upload files and directories below the directory ``path``, each made by ``libdsec.frames.record``.

        Each file appears whole or not at all. The first failure ends it; what came before stays. Raises NotFound,
        Denied, InvalidSpec, ConnectionFailed.
        """

        def body() -> Iterator[bytes]:
            yield b"".join(records)

        query: dict[str, c.QueryValue] = {"path": path, "user": user}
        self.upload("put_files", body(), query=query, content_type=c.RECORDS, id=id)

    @contextmanager
    def get_file(
        self,
        id: str,
        path: str,
        *,
        user: str | None = None,
        offset: int | None = None,
        length: int | None = None,
        extents: bool = False,
    ) -> Iterator[Download]:
        """Download a file, or ``length`` bytes from ``offset``; with ``extents`` its holes are not sent.

        Raises NotFound, Denied, InvalidSpec (no regular file), ConnectionFailed.
        """
        query: dict[str, c.QueryValue] = {"path": path, "user": user, "offset": offset, "length": length}
        accept = c.EXTENTS if extents else c.PLAIN
        with self.download("get_file", query=query, accept=accept, id=id) as response:
            size = response.headers.get("x-dsec-size", "")
            yield Download(response, offset or 0, int(size) if size.isdecimal() else 0)

    def put_file(
        self,
        id: str,
        path: str,
        content: Iterator[bytes],
        *,
        user: str | None = None,
        mode: int | None = None,
        umask: int | None = None,
        parents: bool = False,
        exclusive: bool = False,
        mtime_ns: int | None = None,
        part: str | None = None,
        offset: int | None = None,
        size: int | None = None,
        extents: bool = False,
    ) -> t.FileInfo:
        """Upload a file, which appears whole or not at all.

        ``content`` holds bytes from ``offset`` on, or with ``extents`` frames made by ``libdsec.frames.extent``;
        ``part`` names an upload that can be resumed (``put_state`` tells where); ``size`` is the final size when the
        file ends in a hole. Raises NotFound, Denied, AlreadyExists (``exclusive``), ConnectionFailed.
        """
        query: dict[str, c.QueryValue] = {
            "path": path,
            "user": user,
            "mode": mode,
            "umask": umask,
            "parents": parents or None,
            "exclusive": exclusive or None,
            "mtime_ns": mtime_ns,
            "part": part,
            "offset": offset,
            "size": size,
        }
        kind = c.EXTENTS if extents else c.PLAIN
        data = self.upload("put_file", content, query=query, content_type=kind, id=id)
        return c.parse(t.FileInfo, data, "put_file")
