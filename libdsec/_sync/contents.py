# SPDX-License-Identifier: Apache-2.0
# Made by tools/unasync.py from libdsec/_async; edit that.
"""Files of a sandbox, one at a time: of any size in bounded memory, resumed after a cut.

Here: what ties a local file (``libdsec/local.py``) or bytes to a transfer. Not here: trees (``tree.py``).
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Callable, Iterator

from libdsec import connection as c
from libdsec import types as t
from libdsec._sync.client import Client
from libdsec._sync.primitives import in_thread, sleep
from libdsec.errors import AlreadyExists, ConnectionFailed, InfraError, NotFound, TooLarge
from libdsec.frames import EXTENT_BYTES, extent
from libdsec.local import Source, Target
from libdsec.options import guest_path

MIB = 1 << 20
#: Uploads above this are resumed where they were cut; smaller ones are sent again.
RESUME_BYTES = 4 * MIB


class Contents:
    """What a sandbox can do with files. Paths in the sandbox are absolute; ``user`` is whose permissions apply."""

    client: Client

    @property
    def id(self) -> str:
        """The sandbox's id."""
        raise NotImplementedError

    # --- single calls ------------------------------------------------------------------------------------------

    def stat(self, path: str, *, user: str | None = None, follow: bool = False) -> t.FileInfo:
        """stat(2), of a symlink itself unless ``follow``. Raises NotFound, Denied."""
        return self.client.stat(self.id, guest_path(path), user=user, follow=follow)

    def list_dir(self, path: str, *, user: str | None = None) -> Iterator[t.FileInfo]:
        """The entries of a directory, page by page."""
        cursor: str | None = None
        while True:
            page = self.client.list_dir(self.id, guest_path(path), user=user, cursor=cursor)
            for entry in page.entries:
                yield entry
            if not page.next:
                return
            cursor = page.next

    def remove(self, path: str, *, user: str | None = None, recursive: bool = False) -> None:
        """Remove a file, or with ``recursive`` a tree; never follows a symlink. Raises NotFound."""
        self.client.remove_file(self.id, guest_path(path), user=user, recursive=recursive)

    def mkdir(
        self,
        path: str,
        *,
        mode: int = 0o777,
        umask: int = 0o022,
        parents: bool = False,
        user: str | None = None,
    ) -> None:
        """Make a directory. Raises AlreadyExists."""
        self.client.mkdir(self.id, guest_path(path), mode=mode, umask=umask, parents=parents, user=user)

    def rename(self, path: str, target: str, *, user: str | None = None) -> None:
        """Rename inside the sandbox, replacing ``target``."""
        self.client.rename(self.id, guest_path(path), guest_path(target), user=user)

    # --- contents in memory ------------------------------------------------------------------------------------

    def read(self, path: str, *, user: str | None = None, max_bytes: int = 64 * MIB) -> bytes:
        """The contents of a file. Raises TooLarge above ``max_bytes``: use ``fetch`` for large ones."""
        for _ in range(2):
            try:
                return self._read(path, user, max_bytes)
            except ConnectionFailed as exc:
                if not exc.details.get("sent"):
                    raise
                self.client.version()  # waits for a daemon that restarts
        return self._read(path, user, max_bytes)

    def _read(self, path: str, user: str | None, max_bytes: int) -> bytes:
        data = bytearray()
        with self.client.get_file(self.id, guest_path(path), user=user) as download:
            for _, piece in download.extents():
                data += piece
                if len(data) > max_bytes:
                    raise TooLarge(f"read '{path}' of '{self.id}': it is larger than {max_bytes} bytes")
        return bytes(data)

    def read_text(self, path: str, *, user: str | None = None, encoding: str = "utf-8") -> str:
        """The contents of a file as text; bytes that are none are replaced."""
        return (self.read(path, user=user)).decode(encoding, "replace")

    def write(
        self,
        path: str,
        data: bytes | str,
        *,
        user: str | None = None,
        mode: int | None = None,
        parents: bool = False,
        exclusive: bool = False,
    ) -> t.FileInfo:
        """Make ``data`` the contents of a file, which readers see whole or not at all.

        Without ``mode`` a file that exists keeps its own and a new one gets 0644. ``parents`` makes missing
        directories; ``exclusive`` raises AlreadyExists when there is one.
        """
        raw = data.encode() if isinstance(data, str) else data
        upload = Upload(self.client, self.id, guest_path(path), _Memory(raw))
        return upload.run(user=user, mode=mode, parents=parents, exclusive=exclusive)

    # --- files -------------------------------------------------------------------------------------------------

    def put_file(
        self,
        source: str | os.PathLike[str] | int,
        path: str,
        *,
        user: str | None = None,
        mode: int | None = None,
        parents: bool = False,
        exclusive: bool = False,
        follow: bool = True,
    ) -> t.FileInfo:
        """Upload a local file (a number is an open descriptor, such as of a pipe) to ``path``.

        Holes stay holes; time and permissions are the local ones unless ``mode``; after a cut it goes on where it was.
        Raises OSError for the local side, else as ``Client.put_file``.
        """
        local = in_thread(Source, source, follow=follow)
        try:
            upload = Upload(self.client, self.id, guest_path(path), local)
            upload.mtime_ns = local.status.st_mtime_ns if local.regular else None
            if mode is None and local.regular:
                mode = local.status.st_mode & 0o777
            return upload.run(user=user, mode=mode, parents=parents, exclusive=exclusive)
        finally:
            local.close()

    def get_file(
        self,
        path: str,
        target: str | os.PathLike[str],
        *,
        user: str | None = None,
        info: t.FileInfo | None = None,
    ) -> t.FileInfo:
        """Download a file to ``target``, which appears whole or not at all; holes stay holes.

        Raises OSError for the local side, InfraError when the file changed between two halves of a resumed download.
        """
        return self._get_into(lambda: Target(os.fspath(target)), path, user, info)

    def _get_into(
        self, open_target: Callable[[], Target], path: str, user: str | None, info: t.FileInfo | None
    ) -> t.FileInfo:
        info = info or self.stat(path, user=user, follow=True)
        local = in_thread(open_target)
        try:
            size = self._fill(local, path, user, info)
            in_thread(local.commit, size, info.mode, info.mtime_ns)
        finally:
            local.close()
        return info

    def _fill(self, local: Target, path: str, user: str | None, info: t.FileInfo) -> int:
        """Download the contents; the file's size."""
        position, since = 0, time.monotonic()
        while True:
            try:
                with self.client.get_file(
                    self.id, path, user=user, offset=position or None, extents=True
                ) as download:
                    end = max(download.end, position)
                    for offset, data in download.extents():
                        in_thread(local.write, offset, data)
                        position, since = offset + len(data), time.monotonic()
                    return max(download.end, end, 0 if download.end else info.size_bytes)
            except ConnectionFailed as exc:
                if time.monotonic() > since + self.client.retry_s:
                    raise
                sleep(0.1)
                now = self.stat(path, user=user, follow=True)
                if (now.size_bytes, now.mtime_ns) != (info.size_bytes, info.mtime_ns):
                    raise InfraError(f"get '{path}' of '{self.id}': it changed while it was read") from exc


class _Memory:
    """Bytes in memory, to be uploaded like a file."""

    regular = True

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size: int | None = len(data)

    def read(self, offset: int | None, length: int = EXTENT_BYTES) -> bytes:
        return self._data[offset or 0 : (offset or 0) + length]

    def next_data(self, offset: int) -> tuple[int, int] | None:
        return (offset, len(self._data)) if offset < len(self._data) else None


class Upload:
    """One upload: sent again, or resumed, until it is there or nothing moves for the client's ``retry_s``."""

    def __init__(self, client: Client, sandbox: str, path: str, source: Source | _Memory) -> None:
        self._client = client
        self._sandbox = sandbox
        self._path = path
        self._source = source
        large = source.size is not None and source.size > RESUME_BYTES
        self._part = c.new_key() if large else None
        self._moved = time.monotonic()
        self.mtime_ns: int | None = None

    def run(self, *, user: str | None, mode: int | None, parents: bool, exclusive: bool) -> t.FileInfo:
        """Do it. Raises as ``Client.put_file``."""
        if parents and mode is not None:
            # The request has one umask for both: none for the file's exact mode, the usual one for directories.
            self._make_parents(user)
            parents = False
        offset = 0
        while True:
            try:
                return self._client.put_file(
                    self._sandbox,
                    self._path,
                    self._frames(offset) if self._source.regular else self._plain(),
                    user=user,
                    mode=mode,
                    umask=0 if mode is not None else None,
                    parents=parents,
                    exclusive=exclusive,
                    mtime_ns=self.mtime_ns,
                    part=self._part,
                    offset=offset or None,
                    size=self._source.size,
                    extents=self._source.regular,
                )
            except ConnectionFailed as exc:
                unsafe = exclusive and exc.details.get("sent", True)
                stuck = time.monotonic() > self._moved + self._client.retry_s
                if unsafe or stuck or not self._source.regular:
                    raise
                sleep(0.1)
            offset = self._arrived(user)

    def _make_parents(self, user: str | None) -> None:
        try:
            self._client.mkdir(self._sandbox, posixpath.dirname(self._path), parents=True, user=user)
        except AlreadyExists:
            pass

    def _arrived(self, user: str | None) -> int:
        if self._part is None:
            return 0
        try:
            return (self._client.put_state(self._sandbox, self._path, self._part, user=user)).size_bytes
        except NotFound:
            return 0

    def _frames(self, offset: int) -> Iterator[bytes]:
        """The data from ``offset`` on as extent frames."""
        while (found := in_thread(self._source.next_data, offset)) is not None:
            offset, end = found
            while offset < end:
                data = in_thread(self._source.read, offset, min(EXTENT_BYTES, end - offset))
                if not data:
                    raise InfraError(
                        f"put '{self._path}' into '{self._sandbox}': the local file became shorter"
                    )
                yield extent(offset, data)
                offset += len(data)
                self._moved = time.monotonic()

    def _plain(self) -> Iterator[bytes]:
        """What a pipe holds, to its end."""
        while data := in_thread(self._source.read, None):
            yield data
