# SPDX-License-Identifier: Apache-2.0
"""Handlers about images.

Here: see the routes. Not here: images (``dsecd.core.image_jobs``).
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from dsecd.api.call import Call
from dsecd.api.router import Handler
from libdsec import types as t


async def images(call: Call) -> BaseModel:
    return t.ImageList(images=call.core.images.list(call.principal))


async def image_inspect(call: Call) -> BaseModel:
    return call.core.images.get(call.principal, call.required("ref"))


async def image_import(call: Call) -> BaseModel:
    return await call.core.images.import_image(call.principal, call.json(t.ImportRequest))


async def image_build_debian(call: Call) -> BaseModel:
    return await call.core.images.build_debian(call.principal, call.json(t.BuildDebianRequest))


async def image_tag(call: Call) -> BaseModel:
    request = call.json(t.TagRequest)
    return await call.core.images.tag(request.ref, request.name)


async def image_remove(call: Call) -> BaseModel:
    await call.core.images.remove(call.required("ref"))
    return t.Empty()


HANDLERS: Mapping[str, Handler] = {
    handler.__name__: handler
    for handler in (images, image_inspect, image_import, image_build_debian, image_tag, image_remove)
}
