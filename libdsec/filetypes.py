# SPDX-License-Identifier: Apache-2.0
"""Wire types of calls about files in a sandbox.

Here: what they ask and answer in JSON. Not here: contents (``frames.py``), trees (``treestream.py``).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from libdsec.model import GuestPath, Model, OpenModel, User


class FileInfo(OpenModel):
    """stat(2) of a path in a sandbox."""

    name: str
    type: Literal["file", "directory", "symlink", "fifo", "socket", "char", "block", "unknown"]
    mode: int = Field(description="permission bits, 07777")
    uid: int
    gid: int
    size_bytes: int
    mtime_ns: int
    nlink: int = 1
    target: str | None = None


class FileList(OpenModel):
    entries: tuple[FileInfo, ...]
    next: str | None = Field(None, description="pass as `cursor` for the next page")


class MkdirRequest(Model):
    path: GuestPath
    mode: int = Field(0o777, ge=0, le=0o7777)
    umask: int = Field(0o022, ge=0, le=0o777)
    parents: bool = False
    user: User | None = Field(None)


class RenameRequest(Model):
    path: GuestPath
    target: GuestPath
    user: User | None = Field(None)
