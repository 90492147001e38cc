# SPDX-License-Identifier: Apache-2.0
"""Images as clients ask for them: imports and builds run as operations, changes are told as events.

Here: who may name which source, and the events. Not here: how an image is made (``images/``).
"""

from __future__ import annotations

from dsecd.core.events import Events
from dsecd.core.images.store import ImageStore
from dsecd.core.operations import Operations, Report
from dsecd.core.principal import Principal
from dsecd.core.registry import Registry
from libdsec.errors import Denied, InvalidSpec
from libdsec.types import BuildDebianRequest, ImageInfo, ImportRequest, Operation

#: Where skopeo fetches over the network; its other transports read files of the host, with the daemon's
#: rights.
_REMOTE = ("docker://",)


class ImageJobs:
    """The image store for principals. The scope ``image`` has been checked already."""

    def __init__(
        self, images: ImageStore, registry: Registry, operations: Operations, events: Events
    ) -> None:
        self._images = images
        self._registry = registry
        self._operations = operations
        self._events = events

    def list(self, principal: Principal) -> tuple[ImageInfo, ...]:
        return tuple(self._shown(principal, info) for info in self._images.list())

    def get(self, principal: Principal, ref: str) -> ImageInfo:
        """Raises NotFound."""
        return self._shown(principal, self._images.get(ref))

    def _shown(self, principal: Principal, info: ImageInfo) -> ImageInfo:
        """What is known of an image, without the sandboxes of others."""
        if principal.is_admin:
            return info
        lives = [(holder, self._registry.get(holder)) for holder in info.held_by]
        seen = tuple(holder for holder, live in lives if live and principal.sees(live.record.owner_uid))
        return info.model_copy(update={"held_by": seen})

    async def import_image(self, principal: Principal, request: ImportRequest) -> Operation:
        """Start an import.  Raises Denied when someone else than root names a file of the host."""
        if not request.source.startswith(_REMOTE):
            _only_root(principal, f"import {request.source!r}", "pull it from a registry ('docker://…'), or ask root")
            if not request.source.startswith("/") and ":" not in request.source.partition("/")[0]:
                raise InvalidSpec(f"import {request.source!r}: a path of the host must be absolute")

        async def job(report: Report) -> ImageInfo:
            return self._told("image.imported", await self._images.import_image(request, progress=report))

        return await self._operations.start("image-import", principal, job)

    async def build_debian(self, principal: Principal, request: BuildDebianRequest) -> Operation:
        """Start a build.  Raises Denied when someone else than root names a mirror on the host."""
        if request.mirror is not None and not request.mirror.startswith(("http://", "https://")):
            _only_root(principal, f"build from {request.mirror!r}", "name an http or https mirror, or ask root")

        async def job(report: Report) -> ImageInfo:
            return self._told("image.built", await self._images.build_debian(request, progress=report))

        return await self._operations.start("image-build-debian", principal, job)

    async def tag(self, ref: str, name: str) -> ImageInfo:
        """Give an image another name.  Raises NotFound."""
        return self._told("image.tagged", await self._images.tag(ref, name))

    async def remove(self, ref: str) -> None:
        """Remove a name, or an image.  Raises NotFound, Conflict while a sandbox holds it."""
        await self._images.remove(ref)
        self._events.emit("image.removed", ref)

    def _told(self, kind: str, info: ImageInfo) -> ImageInfo:
        self._events.emit(kind, info.digest, names=list(info.names))
        return info


def _only_root(principal: Principal, doing: str, hint: str) -> None:
    # The daemon reads with root's rights; a path is not the client's to choose unless it could read it
    # itself.
    if principal.uid != 0:
        text = f"{doing}: the daemon reads files of the host for root only, you are uid {principal.uid}"
        raise Denied(text, hint=hint)
