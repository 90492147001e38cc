# SPDX-License-Identifier: Apache-2.0
"""Trees of files into and out of a sandbox.

Here: walking, and what becomes of links and special files. Not here: single files (``contents.py``), local directories
(``libdsec/local.py``).
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Awaitable, Callable
from functools import partial

from libdsec import connection as c
from libdsec import types as t
from libdsec._async.batches import AsyncBatches
from libdsec._async.primitives import Crew, in_thread, sleep
from libdsec.errors import AlreadyExists, ConnectionFailed, DsecError, RequestError
from libdsec.filetypes import MANY_BYTES
from libdsec.local import (
    Batch,
    Entry,
    Found,
    Target,
    Tree,
    TreeReport,
    escapes,
    safe_name,
    walk,
)
from libdsec.options import guest_path

#: Makes a batch of symlinks: path and target of each on standard input, every one ended by a zero byte.
_LINK = ("xargs", "-0", "-r", "-n", "2", "ln", "-sfT", "--")
#: Files at once, and how large those are that go beside others: a small one is nothing but waiting for answers. Large
#: ones go alone, so that what is given up has ended soon.
_AT_ONCE, _SMALL_BYTES = 8, 1 << 20
#: Directories made by one request.
_DIRECTORIES = 1000


class AsyncFiles(AsyncBatches):
    """What a sandbox can do with files: one at a time, and trees."""

    async def put(
        self, source: str | os.PathLike[str], path: str, *, user: str | None = None, parents: bool = False
    ) -> TreeReport:
        """Upload a local file or directory to ``path``; with a slash at its end, into that directory."""
        local = os.fspath(source)
        if path.endswith("/") and path != "/":
            path = posixpath.join(path, (posixpath.basename(local.rstrip("/")) or "root"))
        if await in_thread(os.path.isdir, local):
            return await self.put_tree(local, path, user=user, parents=parents)
        info = await self.put_file(local, path, user=user, parents=parents)
        return TreeReport(files=1, data_bytes=info.size_bytes)

    async def fetch(
        self, path: str, target: str | os.PathLike[str], *, user: str | None = None
    ) -> TreeReport:
        """Download a file or directory to ``target``; into it when it is a directory and ``path`` a file."""
        info = await self.stat(path, user=user, follow=True)
        local = os.fspath(target)
        if info.type == "directory":
            return await self.get_tree(path, local, user=user)
        if await in_thread(os.path.isdir, local):
            local = os.path.join(local, posixpath.basename(path.rstrip("/")))
        await self.get_file(path, local, user=user, info=info)
        return TreeReport(files=1, data_bytes=info.size_bytes)

    async def put_tree(
        self,
        source: str | os.PathLike[str],
        path: str,
        *,
        user: str | None = None,
        parents: bool = False,
        on_path: Callable[[str], None] | None = None,
    ) -> TreeReport:
        """Upload a directory as ``path``, into what is there.

        Symlinks are uploaded as links and never followed; FIFOs, sockets and devices are left out and reported.
        Owner is ``user``; permissions, times and holes are kept, hard links become copies.
        """
        report = TreeReport(on_path=on_path)
        top = os.fspath(source)
        await self._make_directory(
            guest_path(path), (await in_thread(os.stat, top)).st_mode & 0o777, user, parents
        )
        entries = await in_thread(lambda: list(walk(top)))
        directories = [entry for entry in entries if entry.kind == "directory" and not entry.reason]
        await self._make_directories(top, path, directories, user, report)
        links: list[Entry] = []
        small: Batch[Entry] = Batch()
        async with Crew(_AT_ONCE) as crew:
            for entry in entries:
                if entry.reason:
                    report.skipped.append((entry.path, entry.reason))
                elif entry.kind == "file":
                    report.at(entry.path)
                    size = entry.status.st_size
                    if size > MANY_BYTES:
                        await _do(crew, partial(self._put_entry, top, path, user, report, entry), size)
                    elif small.add(entry, entry.path, size):
                        await crew.start(partial(self._put_entries, top, path, user, report, small.take()))
                elif entry.kind == "symlink":
                    links.append(entry)
                elif entry.kind != "directory":
                    report.skipped.append((entry.path, f"it is a {entry.kind}"))
            await crew.start(partial(self._put_entries, top, path, user, report, small.take()))
        await self._make_links(path, links, user, report)
        return report

    async def _put_entries(
        self, top: str, path: str, user: str | None, report: TreeReport, entries: list[Entry]
    ) -> None:
        for entry in await self._put_together(top, path, entries, user, report):
            await self._put_entry(top, path, user, report, entry)

    async def _put_entry(
        self, top: str, path: str, user: str | None, report: TreeReport, entry: Entry
    ) -> None:
        local, where = os.path.join(top, entry.path), posixpath.join(path, entry.path)
        try:
            info = await self.put_file(local, where, user=user, follow=False)
        except OSError as exc:
            report.skipped.append((entry.path, os.strerror(exc.errno or 0).lower()))
            return
        report.add_file(info.size_bytes)

    async def _make_directories(
        self, top: str, path: str, entries: list[Entry], user: str | None, report: TreeReport
    ) -> None:
        for begin in range(0, len(entries), _DIRECTORIES):
            batch = entries[begin : begin + _DIRECTORIES]
            for entry in batch:
                report.at(entry.path)
            for entry in await self._put_together(top, path, batch, user, report):
                where = posixpath.join(path, entry.path)
                await self._make_directory(where, entry.mode & 0o777, user, parents=False)
            report.directories += len(batch)

    async def _make_directory(self, path: str, mode: int, user: str | None, parents: bool) -> None:  # noqa: FBT001
        began = time.monotonic()
        while True:
            try:
                await self.mkdir(path, mode=mode, umask=0, parents=parents, user=user)
                return
            except AlreadyExists:
                if (await self.stat(path, user=user, follow=True)).type != "directory":
                    raise
                return
            except ConnectionFailed:  # repeated though it may have been heard: here one that is there is as good
                if time.monotonic() > began + self.client.retry_s:
                    raise
            await sleep(0.1)

    async def _make_links(self, path: str, links: list[Entry], user: str | None, report: TreeReport) -> None:
        # The API has no call that makes a symlink, so the sandbox's own ln does.
        for begin in range(0, len(links), 500):
            batch = links[begin : begin + 500]
            names = [(entry.target, posixpath.join(path, entry.path)) for entry in batch]
            stdin = b"".join(os.fsencode(name) + b"\0" for pair in names for name in pair)
            reason = await self._run_quietly(_LINK, stdin, user)
            if reason is None:
                report.symlinks += len(batch)
            else:
                report.skipped += [(entry.path, f"symlink: {reason}") for entry in batch]

    async def _run_quietly(self, argv: tuple[str, ...], stdin: bytes, user: str | None) -> str | None:
        """Run a helper command; None when it worked, else why not."""
        request = t.ExecRequest(argv=argv, exec_id=c.new_key(), stdin=stdin, user=user, timeout_s=60)
        try:
            result = await self.client.exec(self.id, request)
        except RequestError:
            raise
        except DsecError as exc:
            return exc.message
        return (
            None
            if result.exit_code == 0
            else result.stderr.decode("utf-8", "replace").strip()[:200] or "failed"
        )

    async def get_tree(
        self,
        path: str,
        target: str | os.PathLike[str],
        *,
        user: str | None = None,
        on_path: Callable[[str], None] | None = None,
    ) -> TreeReport:
        """Download a directory as ``target``, into what is there.

        Nothing outside ``target`` is written, whatever the sandbox says: symlinks that may lead out of the tree, and
        names that are none, are left out and reported, as are FIFOs, sockets and devices. Permissions lose set-id bits.
        """
        report = TreeReport(on_path=on_path)
        local = await in_thread(Tree, target)
        try:
            await self._get_directories(local, guest_path(path), user, report)
        finally:
            local.close()
        return report

    async def _get_directories(self, local: Tree, path: str, user: str | None, report: TreeReport) -> None:
        waiting = [""]
        made: list[tuple[str, t.FileInfo]] = []
        links: list[tuple[str, str]] = []
        small: Batch[Found] = Batch()
        async with Crew(_AT_ONCE) as crew:
            while waiting:
                directory = waiting.pop()
                try:
                    async for entry in self.list_dir(posixpath.join(path, directory), user=user):
                        where = posixpath.join(directory, entry.fs_name)
                        report.at(where)
                        reason = _unfit(directory, entry)
                        if reason is not None:
                            report.skipped.append((where, reason))
                        elif entry.type == "directory":
                            await in_thread(local.make_directory, where)
                            waiting.append(where)
                            made.append((where, entry))
                        elif entry.type == "file":
                            size = entry.size_bytes
                            if size > MANY_BYTES:
                                get = partial(self._get_entry, local, path, where, user, report, entry)
                                await _do(crew, get, size)
                            elif small.add((where, entry), where, size):
                                get = partial(self._get_entries, local, path, user, report, small.take())
                                await crew.start(get)
                        else:
                            links.append((where, entry.fs_target or ""))
                except RequestError as exc:
                    if not directory:
                        raise
                    report.skipped.append((directory, exc.message))  # it vanished, or is not ours to read
            await crew.start(partial(self._get_entries, local, path, user, report, small.take()))
        await in_thread(_finish, local, links, made, report)

    async def _get_entries(
        self, local: Tree, path: str, user: str | None, report: TreeReport, found: list[Found]
    ) -> None:
        for where, entry in await self._get_together(local, path, found, user, report):
            await self._get_entry(local, path, where, user, report, entry)

    async def _get_entry(
        self, local: Tree, path: str, where: str, user: str | None, report: TreeReport, entry: t.FileInfo
    ) -> None:
        inside = posixpath.join(path, where)
        directory, name = os.path.split(where)
        fd = await in_thread(local.directory, directory, make=False)
        try:
            await self._get_into(lambda: Target(name, parent_fd=fd), inside, user, entry)
        except (RequestError, OSError) as exc:
            report.skipped.append((where, str(exc)))
            return
        finally:
            os.close(fd)
        report.add_file(entry.size_bytes)


async def _do(crew: Crew, job: Callable[[], Awaitable[None]], size_bytes: int) -> None:
    await (crew.start(job) if size_bytes <= _SMALL_BYTES else job())


def _unfit(directory: str, entry: t.FileInfo) -> str | None:
    """Why an entry of a sandbox's tree is not made here; None when it is."""
    if not safe_name(entry.fs_name):
        return f"{entry.name!r} is no name"
    if entry.type == "symlink":
        if escapes(directory, entry.fs_target or ""):
            return f"symlink: it leads out of the tree, to {entry.target!r}"
    elif entry.type not in ("directory", "file"):
        return f"it is a {entry.type}"
    return None


def _finish(
    local: Tree, links: list[tuple[str, str]], made: list[tuple[str, t.FileInfo]], report: TreeReport
) -> None:
    """Make links, last so that nothing is written through one; then give directories their permissions."""
    for where, target in links:
        try:
            local.symlink(where, target)
            report.symlinks += 1
        except OSError as exc:
            report.skipped.append((where, f"symlink: {os.strerror(exc.errno or 0).lower()}"))
    for where, info in reversed(made):
        try:
            local.finish_directory(where, info.mode, info.mtime_ns)
            report.directories += 1
        except OSError as exc:
            report.skipped.append((where, os.strerror(exc.errno or 0).lower()))
