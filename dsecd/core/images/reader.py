# SPDX-License-Identifier: Apache-2.0
"""Forward-only byte streams: files, pipes and decompressors behind one small reader.

What belongs here: reading on, skipping, recognising and undoing compression (gzip, bzip2, xz by Python's modules,
zstd by the zstd program).  What does not: what the bytes mean.

Everything here blocks and runs in the import's own process.
"""

import bz2
import contextlib
import hashlib
import lzma
import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from dsecd.linux import proc
from libdsec.errors import BackendFailed, DsecError, InvalidSpec

CHUNK_BYTES = 1 << 20
#: What one read of archive structure (a header, an extended header) may ask for.  File contents have their own way.
STRUCTURE_MAX_BYTES = 8 << 20
#: xz archives may claim to need any amount of memory to unpack; xz -9 needs 65 MiB.
_XZ_MEMORY_BYTES = 256 << 20
_ZSTD_TIMEOUT_S = 24 * 3600.0

GZIP_MAGIC = b"\x1f\x8b"
BZIP2_MAGIC = b"BZh"
XZ_MAGIC = b"\xfd7zXZ\x00"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

COMPRESSION_MAGICS = (GZIP_MAGIC, BZIP2_MAGIC, XZ_MAGIC, ZSTD_MAGIC)

Read = Callable[[int], bytes]


class Truncated(InvalidSpec):
    """The source ended in the middle of something."""


class ForwardReader:
    """A stream that knows its position: enough of a file object for tarfile to walk an archive.

    `seek` goes forward only.  `read` serves structure and is bounded; `chunks` serves contents.
    """

    def __init__(self, read: Read, what: str) -> None:
        self._read = read
        self.what = what
        self._buffer = memoryview(b"")
        self._position = 0
        self._hash: hashlib._Hash | None = None

    def hashing(self) -> "ForwardReader":
        """Also compute the SHA-256 of everything read from here on, for `hexdigest`."""
        self._hash = hashlib.sha256()
        return self

    def tell(self) -> int:
        return self._position

    def _fill(self) -> bool:
        data = self._read(CHUNK_BYTES)
        if self._hash is not None:
            self._hash.update(data)
        self._buffer = memoryview(data)
        return bool(data)

    def some(self, limit: int) -> memoryview:
        """The next bytes, at most `limit`, as few reads as possible; empty at the end."""
        if not self._buffer and not self._fill():
            return self._buffer
        part = self._buffer[:limit]
        self._buffer = self._buffer[len(part) :]
        self._position += len(part)
        return part

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes of structure, fewer only at the end.  Raises InvalidSpec for an absurd size."""
        if not 0 <= size <= STRUCTURE_MAX_BYTES:
            raise InvalidSpec(f"import {self.what}: a header claims to be {size} bytes long")
        return self._gather(size)

    def contents(self, size: int, name: str) -> bytes:
        """Exactly `size` bytes of a member's contents, for small members.  Raises Truncated."""
        data = self._gather(size)
        if len(data) != size:
            raise self.truncated(name, size, len(data))
        return data

    def chunks(self, size: int, name: str) -> Iterator[memoryview]:
        """`size` bytes of a member's contents in pieces.  Raises Truncated."""
        left = size
        while left:
            part = self.some(min(left, CHUNK_BYTES))
            if not part:
                raise self.truncated(name, size, size - left)
            left -= len(part)
            yield part

    def truncated(self, name: str, size: int, found: int) -> Truncated:
        return Truncated(f"import {self.what}: it ends inside {name}, after {found} of {size} bytes")

    def seek(self, position: int) -> int:
        """Skip forward to `position`; stops at the end of the stream like a file's read would."""
        if position < self._position:
            raise InvalidSpec(f"import {self.what}: its structure points backwards")
        while self._position < position and self.some(position - self._position):
            pass
        return self._position

    def drain(self) -> None:
        """Read to the end, so that a checksum at the end is verified and a program that writes can finish."""
        while self.some(CHUNK_BYTES):
            pass

    def hexdigest(self) -> str:
        """SHA-256 of everything read, to be asked after `drain`."""
        assert self._hash is not None
        return self._hash.hexdigest()

    def _gather(self, size: int) -> bytes:
        part = self.some(size)
        if len(part) == size:
            return bytes(part)
        parts = [part]
        have = len(part)
        while have < size:
            part = self.some(size - have)
            if not part:
                break
            parts.append(part)
            have += len(part)
        return b"".join(parts)


class SupportsDecompress(Protocol):
    """What bz2 and lzma decompressors have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gzip:
    """zlib's decompressor with the interface of the other two."""

    def __init__(self) -> None:
        self._z = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._z.eof

    @property
    def needs_input(self) -> bool:
        return not self._z.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._z.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        return self._z.decompress(self._z.unconsumed_tail + data, max(0, max_length))


def _xz() -> SupportsDecompress:
    return lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)


def decompressed(read: Read, make: Callable[[], SupportsDecompress], what: str) -> Iterator[bytes]:
    """The plain form of a compressed stream, chunk by chunk, so that a bomb never unpacks into memory.

    Several compressed streams in a row are one (gzip, bzip2 and xz all say so); zero padding after is ignored.
    """
    data = b""
    while True:
        machine = make()
        while not machine.eof:
            if machine.needs_input and not data:
                data = read(CHUNK_BYTES)
                if not data:
                    raise Truncated(f"import {what}: its compressed data ends in the middle")
            try:
                plain = machine.decompress(data, CHUNK_BYTES)
            except (zlib.error, lzma.LZMAError, OSError) as error:
                raise InvalidSpec(f"import {what}: damaged compressed data: {error}") from error
            data = b""
            if plain:
                yield plain
        data = machine.unused_data.lstrip(b"\0") or read(CHUNK_BYTES).lstrip(b"\0")
        while data == b"":
            data = read(CHUNK_BYTES)
            if not data:
                return
            data = data.lstrip(b"\0")


class Ahead:
    """Runs an iterator in a thread of its own, a few chunks ahead of its reader."""

    _END = b""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._queue: queue.Queue[bytes | BaseException] = queue.Queue(maxsize=8)
        self._stop = threading.Event()
        self._source = source
        self._thread = threading.Thread(target=self._run, name="import-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for chunk in self._source:
                self._put(chunk)
                if self._stop.is_set():
                    return
            self._put(self._END)
        # Broad: a boundary between threads; the reading one raises it.
        except BaseException as error:  # noqa: BLE001
            self._put(error)

    def _put(self, item: bytes | BaseException) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.1)
                return

    def read(self, _size: int) -> bytes:
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._put(item)
            raise item
        if item == self._END:
            self._put(self._END)
        return item

    def close(self) -> None:
        """Stop the thread; the source is left wherever it is."""
        self._stop.set()
        self._thread.join(timeout=10)


class Program:
    """A program that writes a stream: zstd on its file descriptor 3, mmdebstrap to the named pipe `fifo`.

    It runs in a thread through the one door for subprocesses; its failure is raised at the end of the stream, where
    it turns an archive that merely seems to end into an error.
    """

    def __init__(
        self, argv: list[str], what: str, *, timeout_s: float, env: dict[str, str] | None = None,
        feed: Read | None = None, fifo: Path | None = None,
        explain: Callable[[proc.ProcessFailed], DsecError] | None = None,
    ) -> None:
        """`explain` knows the program's words well enough to say what its failure means."""
        self._argv = argv
        self._what = what
        self._explain = explain
        self._fd, writer = os.pipe2(os.O_CLOEXEC) if fifo is None else _make_fifo(fifo)
        self._error: Exception | None = None
        self._fds = {3: writer}
        self._feeder: threading.Thread | None = None
        self._feed_fd = -1
        if feed is not None:
            self._fds[4], self._feed_fd = os.pipe2(os.O_CLOEXEC)
            self._feeder = threading.Thread(target=self._pour, args=(feed,), name="import-feed", daemon=True)
            self._feeder.start()
        self._thread = threading.Thread(
            target=self._run, args=(timeout_s, env), name=f"import-{argv[0]}", daemon=True
        )
        self._thread.start()

    def _run(self, timeout_s: float, env: dict[str, str] | None) -> None:
        try:
            proc.run_blocking(self._argv, timeout_s=timeout_s, fd_map=self._fds, env=env)
        except (proc.ProcessFailed, OSError) as error:
            self._error = error
        finally:
            for fd in self._fds.values():
                os.close(fd)

    def _pour(self, feed: Read) -> None:
        try:
            while data := feed(CHUNK_BYTES):
                view = memoryview(data)
                while view:
                    view = view[os.write(self._feed_fd, view) :]
        except BrokenPipeError:
            pass  # the program ended early; its exit status tells why
        except (DsecError, OSError) as error:
            self._error = error
        finally:
            os.close(self._feed_fd)

    def read(self, size: int) -> bytes:
        data = os.read(self._fd, size)
        if not data:
            self._thread.join()
            if self._error is not None:
                if isinstance(self._error, DsecError):
                    raise self._error
                raise self._reason(self._error) from self._error
        return data

    def _reason(self, error: Exception) -> DsecError:
        # A program that reads what we feed it and says no means the source, unless something killed it.
        if self._feeder is not None and isinstance(error, proc.ProcessFailed) and error.returncode > 0:
            last = error.stderr.rpartition("\n")[2].rpartition(" : ")[2]
            return InvalidSpec(f"import {self._what}: damaged compressed data: {last}")
        if self._explain is not None and isinstance(error, proc.ProcessFailed) and error.returncode > 0:
            return self._explain(error)
        return BackendFailed(f"import {self._what}: {error}")

    def close(self) -> None:
        """Close the reading end: a program that still writes gets SIGPIPE.

        Waits until nothing reads the source any more: its descriptor is closed next, and the number used again.
        """
        os.close(self._fd)
        if self._feeder is not None:
            self._thread.join()
            self._feeder.join()


def _make_fifo(path: Path) -> tuple[int, int]:
    """Both ends of a new named pipe.  Holding the writing end keeps the reader from an end before the program ends."""
    os.mkfifo(path, 0o600)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    writer = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.set_blocking(reader, True)
    return reader, writer


def open_stream(read: Read, what: str, stack: contextlib.ExitStack) -> ForwardReader:
    """A reader of the plain bytes of a stream that may be compressed, told by its first bytes."""
    head = b""
    while len(head) < len(XZ_MAGIC):
        more = read(CHUNK_BYTES)
        if not more:
            break
        head += more
    pending = [head]

    def joined(size: int) -> bytes:
        return pending.pop() if pending else read(size)

    if head.startswith(ZSTD_MAGIC):
        # -f: the operands are symbolic links and the output exists.  Without --no-sparse it seeks over zeros, and
        # what it writes to is a pipe.
        argv = ["zstd", "-dqf", "--no-sparse", "-o", "/dev/fd/3", "--", "/dev/fd/4"]
        program = Program(argv, what, timeout_s=_ZSTD_TIMEOUT_S, feed=joined)
        stack.callback(program.close)
        return ForwardReader(program.read, what)
    for magic, make in ((GZIP_MAGIC, _Gzip), (BZIP2_MAGIC, bz2.BZ2Decompressor), (XZ_MAGIC, _xz)):
        if head.startswith(magic):
            ahead = Ahead(decompressed(joined, make, what))
            stack.callback(ahead.close)
            return ForwardReader(ahead.read, what)
    return ForwardReader(joined, what)
