# SPDX-License-Identifier: Apache-2.0
"""Wire types of calls about files in a sandbox.

Here: what they ask and answer in JSON, where a name that is not UTF-8 goes in a field of bytes. Not here: contents
(``frames.py``).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from libdsec.model import Bytes, GuestPath, Model, OpenModel, User

_PATH_MAX_BYTES = 4096
#: Of a file that goes with others; larger ones go alone.
MANY_BYTES = 64 * 1024
#: Of the names that one request may ask for, each with one byte that ends it.
NAMES_BYTES = 56 * 1024

RelativeName = Annotated[str, StringConstraints(pattern=r"^[^/\x00][^\x00]*$", max_length=4095)]


def in_bytes(name: str) -> bytes | None:
    """The bytes of a name that has no form in JSON, as Python writes it (surrogates, PEP 383); None for another."""
    raw = name.encode("utf-8", "surrogateescape")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return raw
    return None


def _given(text: str | None, raw: bytes | None, name: str) -> str:
    """The one of two fields that is set, as Python writes it."""
    if (text is None) == (raw is None):
        raise ValueError(f"exactly one of '{name}' and '{name}_bytes' is needed")
    if raw is None:
        return text or ""
    if not raw.startswith(b"/") or b"\0" in raw or len(raw) > _PATH_MAX_BYTES:
        raise ValueError(f"{name}_bytes: must be an absolute path of at most {_PATH_MAX_BYTES} bytes without NUL")
    return raw.decode("utf-8", "surrogateescape")


class FileInfo(OpenModel):
    """stat(2) of a path in a sandbox."""

    name: str = Field(description="what is not UTF-8 in it is U+FFFD")
    name_bytes: Bytes | None = Field(None, description="the name, if it is not UTF-8")
    type: Literal["file", "directory", "symlink", "fifo", "socket", "char", "block", "unknown"]
    mode: int = Field(description="permission bits, 07777")
    uid: int
    gid: int
    size_bytes: int
    mtime_ns: int
    nlink: int = 1
    target: str | None = None
    target_bytes: Bytes | None = Field(None, description="the target, if it is not UTF-8")

    @property
    def fs_name(self) -> str:
        """The name as Python writes it, with surrogates (PEP 383) for what is not UTF-8."""
        return self.name if self.name_bytes is None else self.name_bytes.decode("utf-8", "surrogateescape")

    @property
    def fs_target(self) -> str | None:
        """The same of a symlink's target."""
        return self.target if self.target_bytes is None else self.target_bytes.decode("utf-8", "surrogateescape")


class FileList(OpenModel):
    entries: tuple[FileInfo, ...]
    next: str | None = Field(None, description="pass as `cursor` for the next page")


class GetFilesRequest(Model):
    path: GuestPath | None = Field(None, description="the directory that names are below")
    path_bytes: Bytes | None = Field(None, description="instead of `path`, if it is not UTF-8")
    names: tuple[RelativeName, ...] = Field(
        min_length=1, max_length=4096, description="paths below it; with one byte for each at most 56 KiB together"
    )
    max_bytes: int = Field(MANY_BYTES, ge=0, le=MANY_BYTES, description="a larger file has to be asked for alone")
    user: User | None = Field(None)

    @property
    def fs_path(self) -> str:
        """The path as Python writes it."""
        return _given(self.path, self.path_bytes, "path")

    @model_validator(mode="after")
    def _fields_given(self) -> Self:
        _given(self.path, self.path_bytes, "path")
        if sum(len(name.encode()) + 1 for name in self.names) > NAMES_BYTES:
            raise ValueError(f"names: more than {NAMES_BYTES} bytes together, with one for each")
        return self


class MkdirRequest(Model):
    path: GuestPath | None = None
    path_bytes: Bytes | None = Field(None, description="instead of `path`, if it is not UTF-8")
    mode: int = Field(0o777, ge=0, le=0o7777)
    umask: int = Field(0o022, ge=0, le=0o777)
    parents: bool = False
    user: User | None = Field(None)

    @property
    def fs_path(self) -> str:
        """The path as Python writes it."""
        return _given(self.path, self.path_bytes, "path")

    @model_validator(mode="after")
    def _path_given(self) -> Self:
        _given(self.path, self.path_bytes, "path")
        return self


class RenameRequest(Model):
    path: GuestPath | None = None
    path_bytes: Bytes | None = Field(None, description="instead of `path`, if it is not UTF-8")
    target: GuestPath | None = None
    target_bytes: Bytes | None = Field(None, description="instead of `target`, if it is not UTF-8")
    user: User | None = Field(None)

    @property
    def fs_path(self) -> str:
        """The path as Python writes it."""
        return _given(self.path, self.path_bytes, "path")

    @property
    def fs_target(self) -> str:
        """The new path as Python writes it."""
        return _given(self.target, self.target_bytes, "target")

    @model_validator(mode="after")
    def _paths_given(self) -> Self:
        _given(self.path, self.path_bytes, "path")
        _given(self.target, self.target_bytes, "target")
        return self
