# SPDX-License-Identifier: Apache-2.0
"""What the wire types are made of: their bases, bytes in JSON, paths and users in a sandbox.

Here: that. Not here: requests and responses (``types.py``, ``filetypes.py``).
"""

from __future__ import annotations

import base64
from typing import Annotated

from pydantic import BaseModel, ConfigDict, PlainSerializer, StringConstraints, WithJsonSchema

User = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=128)]
GuestPath = Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$", max_length=4096)]


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


#: Raw bytes in Python, base64 with the standard alphabet in JSON. (pydantic's Base64Bytes wants base64 in Python too.)
Bytes = Annotated[
    bytes,
    PlainSerializer(_base64, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]


class Model(BaseModel):
    """Base of all wire types: unknown fields are errors, instances are not mutated."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, val_json_bytes="base64")


class OpenModel(BaseModel):
    """Base of responses: a newer daemon may add fields that an older client ignores."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True, val_json_bytes="base64")
