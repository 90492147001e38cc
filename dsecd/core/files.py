# SPDX-License-Identifier: Apache-2.0
"""Files in sandboxes.

What belongs here: file calls on behalf of a principal, as wire types. What does not: paths of the host.
Everything happens in the sandbox, by its agent, as a user of the sandbox: no path that a client names is
ever resolved by the daemon.
"""

from __future__ import annotations

import stat as stat_module
from collections.abc import AsyncIterator
from pathlib import PurePosixPath
from typing import Literal

from dsecd.backends.agentlink.files import FileReader, FileWriter
from dsecd.backends.agentlink.link import AgentLink
from dsecd.backends.agentlink.records import FileInfo as AgentFileInfo
from dsecd.core import translate
from dsecd.core.principal import Principal
from dsecd.core.registry import Registry
from libdsec import errors
from libdsec.filetypes import in_bytes
from libdsec.types import FileInfo, FileList, GetFilesRequest, MkdirRequest, RenameRequest

_Type = Literal["file", "directory", "symlink", "fifo", "socket", "char", "block", "unknown"]

_TYPES: dict[int, _Type] = {
    stat_module.S_IFREG: "file", stat_module.S_IFDIR: "directory", stat_module.S_IFLNK: "symlink",
    stat_module.S_IFIFO: "fifo", stat_module.S_IFSOCK: "socket", stat_module.S_IFCHR: "char",
    stat_module.S_IFBLK: "block",
}  # fmt: skip


class GetStream:
    """A download: ``async for offset, data``; holes are skipped, ``info.size_bytes`` says where the file ends."""

    def __init__(self, doing: str, info: FileInfo, reader: FileReader) -> None:
        self._doing = doing
        self._reader = reader
        self.info = info

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        with translate.files(self._doing):
            async for offset, data in self._reader:
                yield offset, data

    async def aclose(self) -> None:
        await self._reader.aclose()


class PutStream:
    """An upload; ``offset`` is where a resumed one goes on. Without ``commit`` nothing becomes visible."""

    def __init__(self, doing: str, name: str, writer: FileWriter, link: AgentLink, path: str, user: str) -> None:
        self._doing = doing
        self._name = name
        self._writer = writer
        self._link = link
        self._path = path
        self._user = user

    @property
    def offset(self) -> int:
        return self._writer.offset

    async def write(self, offset: int, data: bytes) -> None:
        with translate.files(self._doing):
            await self._writer.write(offset, data)

    async def commit(self, size: int) -> FileInfo:
        with translate.files(self._doing):
            info = await self._writer.commit(size)
            if info is None:
                info = await self._link.stat(self._path, self._user)
        return _info(info, self._name)

    async def aclose(self) -> None:
        await self._writer.aclose()


class PutManyStream:
    """An upload of many files as records. Each becomes visible once it is whole, and stays whatever comes after it."""

    def __init__(self, doing: str, writer: FileWriter) -> None:
        self._doing = doing
        self._writer = writer

    async def write(self, offset: int, data: bytes) -> None:
        with translate.files(self._doing):
            await self._writer.write(offset, data)

    async def commit(self, size: int) -> None:
        """Returns when the last file is there; ``size`` is that of all records."""
        with translate.files(self._doing):
            await self._writer.commit(size)

    async def aclose(self) -> None:
        await self._writer.aclose()


class Files:
    """Files of all sandboxes. Paths are absolute inside; ``user`` None means the sandbox's user."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def open_get(
        self, principal: Principal, sandbox_id: str, path: str, user: str | None, offset: int, length: int
    ) -> GetStream:
        doing = f"get '{path}' of '{sandbox_id}'"
        link, user = await self._link(principal, sandbox_id, "get a file of", path, user)
        with translate.files(doing):
            reader = link.get_file(path, user=user, offset=offset, length=length)
            info = await reader.open()
        return GetStream(doing, _info(info, _name(path)), reader)

    async def open_put(
        self, principal: Principal, sandbox_id: str, *, path: str, user: str | None, mode: int | None, umask: int,
        parents: bool, exclusive: bool, mtime_ns: int | None, part: str | None,
    ) -> PutStream:  # fmt: skip
        doing = f"put '{path}' into '{sandbox_id}'"
        link, user = await self._link(principal, sandbox_id, "put a file into", path, user)
        with translate.files(doing):
            writer = await link.put_file(
                path, user=user, mode=mode, umask=umask, parents=parents, exclusive=exclusive, part=part,
                mtime_ns=mtime_ns,
            )  # fmt: skip
        return PutStream(doing, _name(path), writer, link, path, user)

    async def open_get_many(self, principal: Principal, sandbox_id: str, request: GetFilesRequest) -> GetStream:
        path = request.fs_path
        doing = f"get files below '{path}' of '{sandbox_id}'"
        link, user = await self._link(principal, sandbox_id, "get files of", path, request.user)
        with translate.files(doing):
            reader = link.many.get(path, request.names, request.max_bytes, user)
            info = await reader.open()
        return GetStream(doing, _info(info, _name(path)), reader)

    async def open_put_many(
        self, principal: Principal, sandbox_id: str, path: str, user: str | None
    ) -> PutManyStream:
        doing = f"put files below '{path}' into '{sandbox_id}'"
        link, user = await self._link(principal, sandbox_id, "put files into", path, user)
        with translate.files(doing):
            return PutManyStream(doing, await link.many.put(path, user))

    async def put_state(
        self, principal: Principal, sandbox_id: str, path: str, user: str | None, part: str
    ) -> FileInfo:
        """How much of a resumable upload has arrived: ``size_bytes``."""
        link, user = await self._link(principal, sandbox_id, "look for a part in", path, user)
        with translate.files(f"look for part '{part}' of '{path}' in '{sandbox_id}'"):
            return _info(await link.stat(f"{PurePosixPath(path).parent}/.dsec-{part}.part", user), _name(path))

    async def stat(
        self, principal: Principal, sandbox_id: str, path: str, user: str | None, *, follow: bool
    ) -> FileInfo:
        link, user = await self._link(principal, sandbox_id, "stat a file of", path, user)
        with translate.files(f"stat '{path}' of '{sandbox_id}'"):
            return _info(await link.stat(path, user, follow=follow), _name(path))

    async def list_dir(
        self, principal: Principal, sandbox_id: str, path: str, user: str | None, cursor: str | None, limit: int
    ) -> FileList:
        link, user = await self._link(principal, sandbox_id, "list a directory of", path, user)
        if cursor is not None and not (cursor.isascii() and cursor.isdecimal() and int(cursor) < 1 << 64):
            raise errors.InvalidSpec(f"list '{path}' of '{sandbox_id}': cursor '{cursor}' is not one this call gave")
        with translate.files(f"list '{path}' of '{sandbox_id}'"):
            entries, following = await link.list_dir(path, user, int(cursor or 0), limit)
        return FileList(
            entries=tuple(_info(entry, entry.name.decode("utf-8", "surrogateescape")) for entry in entries),
            next=str(following) if following else None,
        )

    async def remove(
        self, principal: Principal, sandbox_id: str, path: str, user: str | None, *, recursive: bool
    ) -> None:
        link, user = await self._link(principal, sandbox_id, "remove a file of", path, user)
        with translate.files(f"remove '{path}' of '{sandbox_id}'"):
            await link.remove(path, user, recursive=recursive)

    async def mkdir(self, principal: Principal, sandbox_id: str, request: MkdirRequest) -> None:
        path = request.fs_path
        link, user = await self._link(principal, sandbox_id, "make a directory in", path, request.user)
        with translate.files(f"make '{path}' in '{sandbox_id}'"):
            await link.mkdir(path, user, request.mode, request.umask, parents=request.parents)

    async def rename(self, principal: Principal, sandbox_id: str, request: RenameRequest) -> None:
        path = request.fs_path
        link, user = await self._link(principal, sandbox_id, "rename a file of", path, request.user)
        with translate.files(f"rename '{path}' of '{sandbox_id}'"):
            await link.rename(path, request.fs_target, user)

    async def _link(
        self, principal: Principal, sandbox_id: str, doing: str, path: str, user: str | None
    ) -> tuple[AgentLink, str]:
        live = self._registry.find(principal, sandbox_id, doing)
        if not path.startswith("/") or "\0" in path or len(path.encode("utf-8", "surrogateescape")) >= 4096:
            raise errors.InvalidSpec(
                f"{doing} '{sandbox_id}': path must be absolute and shorter than 4,096 bytes: {path!r}"
            )
        return await live.file_link(doing), live.user(user, doing)


def _name(path: str) -> str:
    return PurePosixPath(path).name or "/"


def _info(info: AgentFileInfo, name: str) -> FileInfo:
    # A name that is no UTF-8 has no form in JSON: it is shown with replacements, and is in a field of bytes as it is.
    name_bytes, target = in_bytes(name), info.target
    shown = name if name_bytes is None else name_bytes.decode("utf-8", "replace")
    told = None if target is None else target.decode("utf-8", "replace")
    exact = target is None or (told or "").encode() == target
    return FileInfo(
        name=shown, name_bytes=name_bytes, type=_TYPES.get(stat_module.S_IFMT(info.mode), "unknown"),
        mode=stat_module.S_IMODE(info.mode), uid=info.uid, gid=info.gid, size_bytes=info.size, mtime_ns=info.mtime_ns,
        nlink=info.nlink, target=told, target_bytes=None if exact else target,
    )  # fmt: skip
