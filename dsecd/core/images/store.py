# SPDX-License-Identifier: Apache-2.0
"""The image store as the rest of the daemon sees it.

What belongs here: import, names, removal, layers, on the event loop.  What does not: how each is done (the modules
beside this one), HTTP, and who may do it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from dsecd.backends.base import translated
from dsecd.backends.plan import Checkpoint, Step, in_thread, no_checkpoint, perform
from dsecd.core.images import names, publish, pull, records, worker
from dsecd.core.images.mounts import LayerMounts
from dsecd.core.images.staging import Progress, Settings, check_space, stage
from libdsec.errors import DsecError, InvalidSpec
from libdsec.types import BuildDebianRequest, ImageConfig, ImageInfo, ImportProgress, ImportRequest

log = logging.getLogger(__name__)


def _ignore(_progress: ImportProgress) -> None:
    """The progress of an import nobody watches."""


class ImageStore:
    """Used on the event loop's thread only.  `reconcile` comes first."""

    def __init__(
        self, db: publish.Database, state_dir: Path, runtime_dir: Path, *, settings: Settings | None = None,
        checkpoint: Checkpoint = no_checkpoint,
    ) -> None:
        self._db = db
        self._places = publish.Places(state_dir / "images")
        self._mounts = LayerMounts(runtime_dir / "layers")
        self._settings = settings or Settings()
        self._checkpoint = checkpoint
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    # --- looking -------------------------------------------------------------------------------------------------

    @property
    def objects_dir(self) -> Path:
        """The data-only layer of every sandbox."""
        return self._places.objects

    def list(self) -> tuple[ImageInfo, ...]:
        """All images, oldest first."""
        return self._db.read(records.infos)

    def get(self, ref: str) -> ImageInfo:
        """One image.  Raises InvalidSpec, NotFound, Conflict if several fit."""
        reference = names.parse(ref)
        return self._db.read(lambda db: records.info(db, records.find(db, reference)))

    def resolve(self, ref: str) -> str:
        """The digest a reference stands for now, `sha256:...`.  Raises as `get` does."""
        return self.get(ref).digest

    def layer_path(self, digest: str) -> Path:
        """The metadata image of a digest."""
        return self._places.layer(records.bare(digest))

    # --- changing ------------------------------------------------------------------------------------------------

    async def import_image(self, request: ImportRequest, *, progress: Progress = _ignore) -> ImageInfo:
        """Import an image and give it its name, which moves from the image that had it.

        Nothing of it is visible before all of it is.  Raises InvalidSpec, NoCapacity, BackendFailed, Refused.
        """
        name = names.parse_name(request.name)
        pulled = request.kind == "registry" or (request.kind == "auto" and request.source.startswith(pull.TRANSPORTS))
        if not pulled and not request.source.startswith("/"):
            raise InvalidSpec(f"import {request.source!r}: expected an absolute path or one of {pull.TRANSPORTS}")
        config = request.config.model_dump(mode="json", exclude_none=True)
        return await self._import(name, request.source, progress, {
            "source": request.source, "kind": request.kind, "reference": request.reference,
            "prefix": request.prefix, "config": config,
        })

    async def build_debian(self, request: BuildDebianRequest, *, progress: Progress = _ignore) -> ImageInfo:
        """Build a Debian root file system with mmdebstrap and import it.  Raises as `import_image` does."""
        name = names.parse_name(request.name or f"debian:{request.suite}")
        return await self._import(name, f"debian {request.suite}", progress, {
            "source": request.suite, "kind": "debian", "include": list(request.include),
            "variant": request.variant, "mirror": request.mirror,
        })

    async def tag(self, ref: str, newname: str) -> ImageInfo:
        """Give an image another name, which moves from the image that had it.  Raises NotFound, InvalidSpec."""
        reference, name = names.parse(ref), names.parse_name(newname)

        digest, replaced = await self._db.write(
            lambda db: ((found := records.find(db, reference)), records.set_name(db, found, name)), durable=True
        )
        await self._remove_unused(replaced)
        return self._db.read(lambda db: records.info(db, digest))

    async def remove(self, ref: str, *, force: bool = False) -> None:
        """Take a name away; with the last name, the image and every object that only it needs.

        Raises NotFound, and Conflict naming the holders while something uses the image; with `force` the names go
        now and the files with the last holder.
        """
        reference = names.parse(ref)
        digest = await self._db.write(lambda db: records.untag(db, reference, force=force), durable=True)
        await self._remove_unused(digest)

    async def remove_unused(self) -> None:
        """Remove images that have lost their last name and their last holder: call it after releasing."""
        for digest in self._db.read(records.unused_images):
            await self._remove_unused(digest)

    # --- layers --------------------------------------------------------------------------------------------------

    async def mount_layer(self, digest: str) -> Path:
        """Mount an image's metadata once, for all its sandboxes.  Hold the image first.  Raises NotFound, Refused."""
        bare = records.bare(digest)
        return await self._mounts.mount(bare, self._places.layer(bare))

    async def unmount_unused(self) -> None:
        """Unmount the layers of images that no holder needs."""
        await self._mounts.unmount_others(lambda: self._db.read(records.held))

    # --- starting ------------------------------------------------------------------------------------------------

    async def reconcile(self) -> None:
        """Finish or undo what an earlier daemon left half done.  Call once, before anything else."""
        await in_thread(self._places.make)
        for row in self._db.read(records.unfinished):
            log.info("image left %s by an earlier daemon is taken back digest=%s", row.state, row.digest[:12])
            try:
                await self._take_away(row.digest)
            except (DsecError, OSError) as error:
                # One image that cannot be removed today is no reason for no sandbox to run: the next start tries.
                log.warning("image could not be taken back digest=%s: %s", row.digest[:12], error)
        await publish.collect(self._db, self._places)
        await self.remove_unused()
        await in_thread(publish.clear_all_staging, self._places, self._unfinished())

    # --- inside --------------------------------------------------------------------------------------------------

    async def _import(
        self, name: tuple[str, str], source: str, progress: Progress, what: dict[str, object]
    ) -> ImageInfo:
        await check_space(self._places.root, self._settings.reserve_bytes, source)
        import_id = await in_thread(publish.make_staging, self._places)
        staging = self._places.staging / import_id
        try:
            self._checkpoint("import/stage/do/before")
            staged = await stage(staging, self._places.objects, self._settings, what, progress)
            self._checkpoint("import/stage/do/after")
            info = _info(staged, source)
            publication = publish.Publication(self._db, self._places, import_id, info, name)
            progress(ImportProgress(
                phase="publish", entries=info.entries, objects_new=info.objects_new, bytes_new=info.bytes_new
            ))
            async with self._locked(publication.digest):
                with translated(f"import {source!r}"):
                    await perform("import", publication.steps(), self._checkpoint)
        finally:
            # What could not be undone now needs its manifest when the next start tries again.
            if import_id not in self._unfinished():
                await in_thread(publish.clear_staging, staging)
        log.info("image imported name=%s digest=%s", ":".join(name), publication.digest[:12])
        await self._remove_unused(publication.replaced)
        return self._db.read(lambda db: records.info(db, publication.digest))

    def _unfinished(self) -> set[str]:
        """The imports whose images are neither published nor gone."""
        return {row.import_id for row in self._db.read(records.unfinished)}

    async def _remove_unused(self, digest: str | None) -> None:
        """Remove an image if nothing names or holds it."""
        if digest is None:
            return
        async with self._locked(digest):
            if await self._db.write(lambda db: records.begin_removal(db, digest), durable=True):
                with translated(f"remove image {digest[:12]}"):
                    await self._take_away(digest)

    async def _take_away(self, digest: str) -> None:
        await self._db.write(lambda db: records.begin_undo(db, digest))
        for step in self._removal(digest):
            self._checkpoint(f"remove/{step.name}/do/before")
            await step.do()
            self._checkpoint(f"remove/{step.name}/do/after")

    def _removal(self, digest: str) -> Sequence[Step]:
        """What follows once the row says `removing`; there is no way back, only forward again after a crash."""
        unmount = Step("unmount", "unmount its layer", lambda: self._mounts.unmount(digest))
        return [unmount, *publish.removal_steps(self._db, self._places, digest)]

    @contextlib.asynccontextmanager
    async def _locked(self, digest: str) -> AsyncIterator[None]:
        """One publishing or removal of a digest at a time."""
        lock, users = self._locks.get(digest, (asyncio.Lock(), 0))
        self._locks[digest] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[digest]
            if users == 1:
                del self._locks[digest]
            else:
                self._locks[digest] = (lock, users - 1)


def _info(staged: worker.Staged, source: str) -> ImageInfo:
    config = dict(staged.config)
    return ImageInfo(
        digest=f"sha256:{staged.digest}", source=source, manifest_digest=staged.manifest_digest,
        prefix=staged.prefix, config=ImageConfig.model_validate(config),
        created_at=datetime.now(UTC), entries=staged.entries, size_bytes=staged.size_bytes,
        metadata_bytes=staged.metadata_bytes, objects=staged.objects, objects_new=staged.objects_new,
        bytes_new=staged.bytes_new,
    )
