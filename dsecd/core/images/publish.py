# SPDX-License-Identifier: Apache-2.0
"""The steps that make an import visible and that take an image away.

What belongs here: their order, which is what survives SIGKILL and loss of power, and finishing what a dead daemon
left.  What does not: reading sources (worker) and the users' view (store).

Order of an import: everything is written to the staging area and synced; the row is entered and the references are
counted; objects are linked into the store; then the metadata image; all that is synced; then the row is published.
Dying anywhere before the last step leaves a row that says how much to count out again, or no row and only a staging
area.  A removal goes the other way round.  A file of the store goes only after the transaction that made it unneeded
is durable.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from dsecd.backends.plan import Step, in_thread
from dsecd.core.images import objects, records, worker
from dsecd.linux import syscalls
from libdsec.types import ImageInfo

log = logging.getLogger(__name__)

T = TypeVar("T")

#: How long the process of a dead import may take to go away.
_STALE_WORKER_S = 15.0
_COLLECT_STEP = 500


class Database(Protocol):
    """What images need of the state database."""

    def write(self, fn: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> Awaitable[T]: ...
    def read(self, fn: Callable[[sqlite3.Connection], T]) -> T: ...


@dataclass(frozen=True)
class Places:
    """The image store's directories."""

    root: Path

    @property
    def objects(self) -> Path:
        return self.root / "objects"

    @property
    def layers(self) -> Path:
        return self.root / "layers"

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    def layer(self, digest: str) -> Path:
        return self.layers / f"{digest}.erofs"

    def manifest(self, digest: str) -> Path:
        return self.layers / f"{digest}.objects"

    def make(self) -> None:
        """Make them.  Only root enters: an image's set-uid programs are not for the host's users."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.chmod(0o700)
        objects.make_fan_out(self.objects)
        self.layers.mkdir(mode=0o755, exist_ok=True)
        self.staging.mkdir(mode=0o755, exist_ok=True)


@dataclass
class Publication:
    """One staged import on its way into the store."""

    db: Database
    places: Places
    import_id: str
    info: ImageInfo
    name: tuple[str, str]
    #: The same image was there already: only the name is given.
    existing: bool = False
    #: The digest that had the name before.
    replaced: str | None = None

    @property
    def digest(self) -> str:
        return records.bare(self.info.digest)

    @property
    def staging(self) -> Path:
        return self.places.staging / self.import_id

    def steps(self) -> list[Step]:
        """Nothing is visible before the last one; each undo also works in another process."""
        return [
            Step("record", f"enter {self.digest[:12]} as publishing and count its objects", self.record, self.unrecord),
            Step("objects", "link new objects into the store", self.link_objects),
            Step("layer", f"link the metadata image to {self.places.layer(self.digest)}", self.link_layer),
            Step("sync", "sync the store's directories", self.sync),
            Step("publish", f"name it {':'.join(self.name)}", self.publish),
        ]

    async def record(self) -> None:
        found = self.db.read(lambda db: records.row(db, self.digest))
        if found is not None and found.state == "published":
            self.existing = True
            return
        if found is not None:
            await self.unrecord()
        await self.db.write(lambda db: records.begin(db, self.info, self.import_id))
        await count_in(self.db, self.digest, self.staging / worker.MANIFEST)

    async def unrecord(self) -> None:
        if not self.existing:
            await self.db.write(lambda db: records.begin_undo(db, self.digest))
            await finish_removal(self.db, self.places, self.digest)

    async def link_objects(self) -> None:
        if not self.existing:
            await in_thread(_move_in, self.staging, self.places)

    async def link_layer(self) -> None:
        if not self.existing:
            await in_thread(_link_layer, self.staging, self.places, self.digest)

    async def sync(self) -> None:
        if not self.existing:
            await in_thread(_sync, self.places.root)

    async def publish(self) -> None:
        self.replaced = await self.db.write(
            lambda db: records.publish(db, self.digest, self.name), durable=True
        )


async def count_in(db: Database, digest: str, manifest: Path) -> None:
    """Add an image's references, in steps; durable at the end."""
    needed = [item for item, _ in await in_thread(objects.read_manifest, manifest)]
    for start in range(0, len(needed), records.COUNT_STEP):
        part = needed[start : start + records.COUNT_STEP]
        await db.write(_Count(records.count_in, digest, start, part))
    await db.write(lambda _db: None, durable=True)


def removal_steps(db: Database, places: Places, digest: str) -> list[Step]:
    """What takes an image in state `removing` away, from wherever that has got to.

    There is no way back, so no undo: a step that was cut off is done again.
    """
    return [
        Step("count", f"count the objects of {digest[:12]} out", lambda: _count_out(db, places, digest)),
        Step("collect", "remove objects that no image needs", lambda: collect(db, places)),
        Step("files", f"remove {places.layer(digest)}", lambda: in_thread(_unlink_layer, places, digest)),
        Step("forget", "drop its row", lambda: _forget(db, digest)),
    ]


async def finish_removal(db: Database, places: Places, digest: str) -> None:
    """Do all of `removal_steps`; nothing if there is no such row."""
    for step in removal_steps(db, places, digest):
        await step.do()


async def _count_out(db: Database, places: Places, digest: str) -> None:
    row = db.read(lambda connection: records.row(connection, digest))
    if row is None or not row.counted:
        return
    manifest = places.manifest(digest)
    if not manifest.exists():
        manifest = places.staging / row.import_id / worker.MANIFEST
    needed = [item for item, _ in await in_thread(objects.read_manifest, manifest)]
    end = row.counted
    while end:
        start = max(0, end - records.COUNT_STEP)
        await db.write(_Count(records.count_out, digest, start, needed[start:end]))
        end = start
    # Files go next, so what made them unneeded must not be undone by a loss of power.
    await db.write(lambda _db: None, durable=True)


async def _forget(db: Database, digest: str) -> None:
    await db.write(lambda connection: records.forget(connection, digest))


@dataclass(frozen=True)
class _Count:
    """One counting transaction; a value, because a lambda in a loop would see the next turn's part."""

    function: Callable[[sqlite3.Connection, str, int, list[bytes]], None]
    digest: str
    start: int
    part: list[bytes]

    def __call__(self, db: sqlite3.Connection) -> None:
        self.function(db, self.digest, self.start, self.part)


async def collect(db: Database, places: Places) -> None:
    """Remove the objects that no image needs.  Never looks at any other."""
    trash = places.staging / f"trash-{secrets.token_hex(8)}"
    # In the writer's transaction nothing can be counted in between the look and the deed.  Moving is quick; the
    # space is freed outside.
    while await db.write(lambda connection: _discard(connection, places.objects, trash)) == _COLLECT_STEP:
        pass
    await in_thread(shutil.rmtree, trash, True)


def _discard(connection: sqlite3.Connection, store: Path, trash: Path) -> int:
    unused = records.unused_objects(connection, _COLLECT_STEP)
    if unused:
        trash.mkdir(exist_ok=True)
    for digest in unused:
        with contextlib.suppress(FileNotFoundError):
            os.rename(store / objects.object_path(digest), trash / digest.hex())
    records.drop_objects(connection, unused)
    return len(unused)


# --- files; all block and run in threads -------------------------------------------------------------------------


def _move_in(staging: Path, places: Places) -> None:
    needed = [digest for digest, _ in objects.read_manifest(staging / worker.MANIFEST)]
    objects.move_in(staging / worker.OBJECTS, places.objects, needed)


def _link_layer(staging: Path, places: Places, digest: str) -> None:
    # The manifest first: where the layer is, the means to count it out must be.
    for source, target in ((worker.MANIFEST, places.manifest(digest)), (worker.LAYER, places.layer(digest))):
        # Left by a removal that died: the same digest, the same bytes.
        with contextlib.suppress(FileExistsError):
            os.link(staging / source, target)


def _unlink_layer(places: Places, digest: str) -> None:
    places.layer(digest).unlink(missing_ok=True)
    places.manifest(digest).unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        syscalls.syncfs(fd)
    finally:
        os.close(fd)


def make_staging(places: Places) -> str:
    """A new staging area, its name."""
    import_id = f"import-{secrets.token_hex(8)}"
    (places.staging / import_id).mkdir(mode=0o700)
    return import_id


def clear_staging(directory: Path) -> None:
    """Remove a staging area, once the process that may still write there has gone.  Blocks.

    That process is killed with the daemon that started it, by the kernel, but not in the same instant.
    """
    with contextlib.suppress(FileNotFoundError):
        lock = os.open(directory / worker.LOCK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + _STALE_WORKER_S
            while not _try_lock(lock):
                if time.monotonic() > deadline:
                    log.warning("staging area is still written to, left for later path=%s", directory)
                    return
                time.sleep(0.02)
        finally:
            os.close(lock)
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        log.warning("staging area could not be removed, left for later path=%s", directory)


def clear_all_staging(places: Places, keep: Collection[str]) -> None:
    """Remove every staging area and all trash of earlier daemons, but for the imports in `keep`."""
    for left in sorted(places.staging.iterdir()):
        if left.name not in keep:
            clear_staging(left)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
