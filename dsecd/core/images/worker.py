# SPDX-License-Identifier: Apache-2.0
"""The import's own process: reads a source into a staging area and makes the metadata image there.

What belongs here: everything of an import that takes long or reads hostile bytes.  What does not: the database and
the store's directories, which only the daemon changes.

A process of its own keeps the daemon's event loop free of tar parsing, gives memory back at the end, and dies with
all its children: `command` starts it as process 1 of a PID namespace that ends with the daemon.

Protocol: one JSON object on stdin (Job), lines of JSON on fd 3 (progress), one JSON object on stdout (Staged, or
an error in its wire form).
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import posixpath
import re
import resource
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsecd.core.images import bundle, pull
from dsecd.core.images.directory import DirectoryImport
from dsecd.core.images.headers import tar_of
from dsecd.core.images.objects import ObjectWriter, write_manifest
from dsecd.core.images.reader import COMPRESSION_MAGICS, ForwardReader, open_stream
from dsecd.core.images.tarstream import TarImport
from dsecd.core.images.tree import Limits, Tree, split_name
from dsecd.linux import erofs, proc, syscalls
from libdsec.errors import BackendFailed, DsecError, InvalidSpec, NoCapacity, Refused

PROGRESS_FD = 3
_PROGRESS_INTERVAL_S = 0.1
LOCK = "lock"
LAYER = "layer.erofs"
MANIFEST = "objects.list"
OBJECTS = "objects"
_SCRATCH = "scratch"
_ARCHIVE_MEMBER = re.compile(r"\.|blobs(/.*)?|oci-layout|repositories|[0-9a-f]{64}(/.*|\.json|\.tar)?")
#: Free space that an import leaves to others, and what is asked for before it starts.
RESERVE_BYTES = 64 << 20
#: Memory for the process and each program it starts, as far as it is data (RLIMIT_DATA, getrlimit(2)).
MEMORY_BYTES = 4 << 30


@dataclass(frozen=True)
class Job:
    """What to import.  Plain data: it crosses a process boundary as JSON."""

    staging: str
    objects: str
    source: str
    kind: str
    reference: str | None = None
    prefix: str = "/"
    config: dict[str, object] = dataclasses.field(default_factory=dict)
    max_entries: int = Limits.max_entries
    max_bytes: int = Limits.max_bytes
    reserve_bytes: int = RESERVE_BYTES
    #: For kind "debian": suite is `source`.
    include: tuple[str, ...] = ()
    variant: str = "minbase"
    mirror: str | None = None


@dataclass(frozen=True)
class Staged:
    """What lies in the staging area, complete and synced."""

    digest: str
    entries: int
    size_bytes: int
    metadata_bytes: int
    objects: int
    objects_new: int
    bytes_new: int
    config: dict[str, object]
    prefix: str
    manifest_digest: str | None


class Progress:
    """Says what has been done so far, at most ten times a second and at every new phase."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._next = 0.0
        #: Called as often as progress is sent; raises to stop the import.
        self.check: Callable[[], None] = lambda: None
        self.phase = "starting"
        self.done = 0
        self.total: int | None = None
        self.counts: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)

    def start(self, phase: str, total: int | None = None) -> None:
        self.phase, self.total, self.done = phase, total, 0
        self._send()

    def count(self, amount: int) -> None:
        self.done += amount
        self.tick()

    def tick(self) -> None:
        if time.monotonic() >= self._next:
            self._send()

    def _send(self) -> None:
        self._next = time.monotonic() + _PROGRESS_INTERVAL_S
        self.check()
        if self._fd < 0:
            return
        entries, new, new_bytes = self.counts()
        line = json.dumps({
            "phase": self.phase, "bytes_done": self.done, "bytes_total": self.total, "entries": entries,
            "objects_new": new, "bytes_new": new_bytes,
        })
        try:
            os.write(self._fd, line.encode() + b"\n")
        except BrokenPipeError:
            os._exit(1)  # the daemon is gone, and so is whoever would want this image


def stage(job: Job, progress: Progress) -> Staged:
    """Do the job.  Blocks, for as long as the source is long.  Raises DsecError."""
    staging = Path(job.staging)
    try:
        with contextlib.ExitStack() as stack:
            return _stage(job, staging, progress, stack)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoCapacity(
                f"import {job.source!r}: the disk of the image store is full", hint="remove images or add space",
                retryable=False,
            ) from error
        place = f" {os.fsdecode(error.filename)!r}" if isinstance(error.filename, (str, bytes)) else ""
        raise Refused(f"import {job.source!r}:{place} {error.strerror or error}") from error
    except proc.ProcessFailed as error:
        raise BackendFailed(f"import {job.source!r}: {error}") from error
    except MemoryError as error:
        raise InvalidSpec(f"import {job.source!r}: reading it takes more than {MEMORY_BYTES >> 20} MiB") from error


def _stage(job: Job, staging: Path, progress: Progress, stack: contextlib.ExitStack) -> Staged:
    objects = staging / OBJECTS
    objects.mkdir()
    tree = Tree(Limits(job.max_entries, job.max_bytes))
    writer = stack.enter_context(ObjectWriter(Path(job.objects), objects))
    progress.counts = lambda: (tree.entries, writer.written.new, writer.written.new_bytes)
    progress.check = lambda: _check_space(job)
    config, manifest_digest = _read_source(job, tree, writer, staging / _SCRATCH, progress, stack)
    written = writer.finish()
    config = bundle.changed(config, job.config)
    above = split_name(os.fsencode(job.prefix))
    prefix = "/" + os.fsdecode(b"/".join(above))
    tree.graft(above)
    used = {node.digest for _, node in tree.walk() if node.digest is not None}
    writer.drop_unused(used)
    progress.start("index")
    plain = _plain_config(config, prefix)
    entries, size = _make_layer(tree, staging, plain)
    write_manifest(staging / MANIFEST, written.sizes)
    progress.start("sync")
    fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    syscalls.syncfs(fd)
    layer = staging / LAYER
    return Staged(
        digest=_sha256(layer), entries=entries, size_bytes=size, metadata_bytes=layer.stat().st_size,
        objects=len(written.sizes), objects_new=written.new, bytes_new=written.new_bytes,
        config={key: value for key, value in plain.items() if key != "prefix"}, prefix=prefix,
        manifest_digest=manifest_digest,
    )


def _check_space(job: Job) -> None:
    """Stop before the disk is full: sandboxes write to it too."""
    space = os.statvfs(job.staging)
    if space.f_bavail * space.f_frsize < job.reserve_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _make_layer(tree: Tree, staging: Path, config: dict[str, object]) -> tuple[int, int]:
    """Write the metadata image; the number of names in the tree and the apparent size of its files."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    headers = staging / "headers.tar"
    with open(headers, "wb", buffering=1 << 20) as file:
        file.writelines(tar_of(tree, hashlib.sha256(canonical).hexdigest().encode()))
    erofs.make_index(headers, staging / LAYER)
    headers.unlink()
    (staging / LAYER).chmod(0o444)
    nodes = {id(node): node.size for _, node in tree.walk()}
    return sum(1 for _ in tree.walk()) + 1, sum(nodes.values())


def _plain_config(config: bundle.Config, prefix: str) -> dict[str, object]:
    plain: dict[str, object] = dataclasses.asdict(config)
    plain["labels"] = dict(config.labels or {})
    plain["prefix"] = prefix
    return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- sources -----------------------------------------------------------------------------------------------------


def _read_source(
    job: Job, tree: Tree, writer: ObjectWriter, scratch: Path, progress: Progress, stack: contextlib.ExitStack
) -> tuple[bundle.Config, str | None]:
    kind = detect_kind(job.source) if job.kind == "auto" else job.kind
    if kind == "directory":
        progress.start("read")
        DirectoryImport(tree, writer, tick=progress.tick).run(job.source)
        return bundle.Config(), None
    if kind == "rootfs-tar":
        with _opened(job.source, progress) as (reader, _):
            TarImport(tree, writer, layered=False, tick=progress.tick).run(reader)
        return bundle.Config(), None
    scratch.mkdir(mode=0o700)
    if kind == "debian":
        progress.start("bootstrap")
        read, close = pull.debian(job.source, job.variant, job.include, job.mirror, scratch)
        stack.callback(close)
        reader = ForwardReader(read, f"Debian {job.source}")
        TarImport(tree, writer, layered=False, tick=progress.tick).run(reader)
        return bundle.Config(env=("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",)), None
    if kind == "registry":
        progress.start("pull")
        layout = bundle.DirectoryBundle(pull.registry(job.source, scratch))
        return _read_bundle(layout, None, tree, writer, job, progress)
    if kind == "oci-layout":
        return _read_bundle(bundle.DirectoryBundle(Path(job.source)), job.reference, tree, writer, job, progress)
    with contextlib.ExitStack() as plain:
        path = _plain_archive(job.source, scratch, progress, plain)
        return _read_bundle(bundle.TarBundle(path), job.reference, tree, writer, job, progress)


def _read_bundle(
    source: bundle.Bundle, reference: str | None, tree: Tree, writer: ObjectWriter, job: Job, progress: Progress
) -> tuple[bundle.Config, str | None]:
    image = bundle.read_image(source, reference, repr(job.source))
    progress.start("read", sum(layer.size for layer in image.layers))
    for number, layer in enumerate(image.layers):
        if number:
            tree.start_layer()
        with bundle.open_layer(source, layer, progress.count) as reader:
            TarImport(tree, writer, layered=True, tick=progress.tick).run(reader)
    return image.config, image.manifest_digest


@contextlib.contextmanager
def _opened(path: str, progress: Progress) -> Iterator[tuple[ForwardReader, int]]:
    """The plain bytes of a file that may be compressed, and its size as it is."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidSpec(f"import {path!r}: {error.strerror}") from error
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise InvalidSpec(f"import {path!r}: it is a directory, not an archive")
        size = os.fstat(fd).st_size
        progress.start("read", size or None)

        def read(amount: int) -> bytes:
            try:
                data = os.read(fd, amount)
            except OSError as error:
                raise InvalidSpec(f"import {path!r}: {(error.strerror or str(error)).lower()}") from error
            progress.done += len(data)
            return data

        yield open_stream(read, repr(path), stack), size


def _plain_archive(path: str, scratch: Path, progress: Progress, stack: contextlib.ExitStack) -> Path:
    """An archive of archives is read here and there, so a compressed one is unpacked to the staging area first."""
    with _opened(path, progress) as (reader, size):
        if not _is_compressed(path):
            return Path(path)
        progress.start("unpack", size or None)
        plain = scratch / "archive.tar"
        stack.callback(plain.unlink)
        with open(plain, "wb", buffering=0) as file:
            while part := reader.some(1 << 20):
                file.write(part)
                progress.tick()
        return plain


def _is_compressed(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(8).startswith(COMPRESSION_MAGICS)


def detect_kind(source: str) -> str:
    """What `source` is, by its form and its first members.  Raises InvalidSpec if there is nothing."""
    if source.startswith(pull.TRANSPORTS):
        return "registry"
    path = Path(source)
    try:
        path.lstat()
    except OSError as error:  # its name is too long, or it lies below what is no directory
        raise InvalidSpec(f"import {source[:200]!r}: {(error.strerror or '').lower()}") from error
    if path.is_dir():
        return "oci-layout" if (path / "oci-layout").is_file() and (path / "index.json").is_file() else "directory"
    if not path.is_file():
        raise InvalidSpec(f"import {source!r}: no such file or directory")
    return "oci-archive" if _is_archive_of_archives(source) else "rootfs-tar"


def _is_archive_of_archives(source: str) -> bool:
    """Whether a tar's members are those of an OCI archive or docker-archive, up to one that settles it."""
    with _opened(source, Progress(-1)) as (reader, _):
        try:
            # As in tarstream: the reader has all that tarfile needs.
            archive = tarfile.TarFile(fileobj=reader, mode="r")  # type: ignore[arg-type]
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]
                name = posixpath.normpath(member.name)
                if name in ("manifest.json", "index.json"):
                    return True
                if not _ARCHIVE_MEMBER.fullmatch(name):
                    return False
        except (tarfile.TarError, ValueError, OverflowError) as error:
            raise InvalidSpec(f"import {source!r}: not a tar archive: {error}") from error
    return False


# --- the process -------------------------------------------------------------------------------------------------


def command() -> list[str]:
    """The argv that runs this module so that it and all it starts end when the calling thread does.

    setpriv's PDEATHSIG kills unshare, whose --kill-child kills process 1 of the new PID namespace, and with it the
    kernel kills everyone in there and drops their mounts.
    """
    return [
        "setpriv", "--pdeathsig", "KILL", "--", "unshare", "--mount", "--pid", "--fork", "--kill-child=KILL",
        "--mount-proc", "--", sys.executable, "-P", "-m", "dsecd.core.images.worker",
    ]


def environment() -> dict[str, str]:
    """The environment for `command`: what its programs need to reach the network, and where our code is."""
    passed = {name: os.environ[name] for name in pull.PASSED_ENV if name in os.environ}
    code = os.fspath(Path(__file__).parents[3])
    return {**proc.MINIMAL_ENV, **passed, "PYTHONPATH": code, "PYTHONDONTWRITEBYTECODE": "1"}


def _set_limits() -> None:
    """What a hostile archive may make this process take, beyond what the tree's own limits count."""
    # The daemon's protection from the OOM killer (OOMScoreAdjust=) is not meant for us; raising is always allowed.
    score = Path("/proc/self/oom_score_adj")
    if int(score.read_text()) < 0:
        score.write_text("0")
    # Parsing of headers (maps of holes above all) happens outside of what a tree counts.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    # A walk holds a file descriptor for every level of directories.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    os.umask(0)  # objects are made 0444 in one go; nobody else enters the store


def main() -> int:
    """Read a Job, do it, say how it went.  Exit status 0 with an answer on stdout, whatever it is."""
    _set_limits()
    raw = json.loads(sys.stdin.buffer.read())
    job = Job(**{**raw, "include": tuple(raw.get("include", ()))})
    lock = os.open(Path(job.staging) / LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        answer = {"staged": dataclasses.asdict(stage(job, Progress(PROGRESS_FD)))}
    except DsecError as error:
        answer = {"error": error.to_wire()}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
