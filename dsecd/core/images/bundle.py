# SPDX-License-Identifier: Apache-2.0
"""OCI layouts and docker-archives: which layers an image has, and its configuration.

What belongs here: finding blobs by name in a directory or in an uncompressed tar, choosing the image, checking
digests.  What does not: applying a layer (tarstream) and pulling (pull).

Formats: OCI image-spec (image-layout.md, manifest.md, config.md) and `docker save` (a manifest.json that lists a
configuration and layers).  Everything in them is untrusted: names are looked up, never resolved by the kernel.
"""

import contextlib
import hashlib
import json
import os
import platform
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from dsecd.core.images.reader import CHUNK_BYTES, ForwardReader, open_stream
from libdsec.errors import InvalidSpec, NotFound

_JSON_MAX_BYTES = 16 << 20
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json",
)
_REF_NAME = "org.opencontainers.image.ref.name"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "riscv64": "riscv64", "ppc64le": "ppc64le", "s390x": "s390x"}
_MAX_LAYERS = 1000
_MAX_INDEX_DEPTH = 4

#: A configuration is called by its digest: of all that a docker-archive names, only there.
_DIGEST_IN_NAME = re.compile(r"(?:blobs/sha256/)?([0-9a-f]{64})(?:\.json)?")

T = TypeVar("T")
Json = Mapping[str, object]


@dataclass(frozen=True)
class Config:
    """What an image says about running it: plain data for the wire type ImageConfig."""

    env: tuple[str, ...] = ()
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Layer:
    """One layer of a bundle: where it lies, and the digests of what lies there and of what that unpacks to."""

    name: str
    size: int
    digest: str | None
    diff_id: str | None


@dataclass(frozen=True)
class Image:
    """One image of a bundle, layers from the bottom up."""

    layers: tuple[Layer, ...]
    config: Config
    manifest_digest: str | None


class Bundle(Protocol):
    """Files by name, wherever they are."""

    def size(self, name: str) -> int: ...
    def reader(self, name: str) -> Iterator[bytes]: ...
    def exists(self, name: str) -> bool: ...


class DirectoryBundle:
    """A bundle unpacked in a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def _open(self, name: str) -> int:
        # Component by component without following links: a layout may not point out of itself.
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in name.split("/"):
            parent = fd
            try:
                fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
            except OSError as error:
                raise InvalidSpec(f"import {str(self._root)!r}: open {name!r}: {error.strerror}") from error
            finally:
                os.close(parent)
        return fd

    def exists(self, name: str) -> bool:
        return (self._root / name).is_file()

    def size(self, name: str) -> int:
        fd = self._open(name)
        with os.fdopen(fd, "rb") as file:
            return os.fstat(file.fileno()).st_size

    def reader(self, name: str) -> Iterator[bytes]:
        with os.fdopen(self._open(name), "rb", buffering=0) as file:
            while data := file.read(CHUNK_BYTES):
                yield data


class TarBundle:
    """A bundle in an uncompressed tar file, read at the members' offsets."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members: dict[str, tuple[int, int]] = {}
        links: dict[str, str] = {}
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    name = posixpath.normpath(member.name)
                    if member.isreg() and member.sparse is None:
                        self._members[name] = (member.offset_data, member.size)
                    elif member.issym():
                        links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
                    elif member.islnk():
                        links[name] = posixpath.normpath(member.linkname)
        except (tarfile.TarError, ValueError, OverflowError) as error:
            raise InvalidSpec(f"import {str(path)!r}: {error}") from error
        for name, target in links.items():
            # Old `docker save` wrote a layer once and links to it.
            if target in self._members:
                self._members.setdefault(name, self._members[target])

    def exists(self, name: str) -> bool:
        return posixpath.normpath(name) in self._members

    def _find(self, name: str) -> tuple[int, int]:
        found = self._members.get(posixpath.normpath(name))
        if found is None:
            raise InvalidSpec(f"import {str(self._path)!r}: it has no member {name!r}, which its manifest names")
        return found

    def size(self, name: str) -> int:
        return self._find(name)[1]

    def reader(self, name: str) -> Iterator[bytes]:
        offset, left = self._find(name)
        with open(self._path, "rb", buffering=0) as file:
            file.seek(offset)
            while left:
                data = file.read(min(CHUNK_BYTES, left))
                if not data:
                    raise InvalidSpec(f"import {str(self._path)!r}: it ends inside {name!r}")
                left -= len(data)
                yield data


def read_image(bundle: Bundle, reference: str | None, what: str) -> Image:
    """Choose an image and read what it consists of.  Raises InvalidSpec, NotFound for an unknown `reference`."""
    docker = bundle.exists("manifest.json")
    if bundle.exists("index.json") and bundle.exists("oci-layout"):
        try:
            return _oci_image(bundle, reference, what)
        except NotFound:
            # Newer `docker save` writes both; the whole names are in the older form only.
            if not docker:
                raise
    if docker:
        return _docker_image(bundle, reference, what)
    raise InvalidSpec(
        f"import {what}: neither an OCI layout (oci-layout, index.json) nor a docker-archive (manifest.json)"
    )


@contextlib.contextmanager
def open_layer(
    bundle: Bundle, layer: Layer, count: Callable[[int], None]
) -> Iterator[ForwardReader]:
    """The plain tar stream of a layer.  Checks its digest when all of it was read; `count` gets its bytes as read."""
    digest = hashlib.sha256()
    source = bundle.reader(layer.name)

    def read(_size: int) -> bytes:
        data = next(source, b"")
        if layer.digest is not None:
            digest.update(data)
        count(len(data))
        return data

    with contextlib.ExitStack() as stack:
        reader = open_stream(read, f"layer {layer.name!r}", stack)
        if layer.diff_id is not None:
            reader.hashing()
        yield reader
        reader.drain()
        while read(CHUNK_BYTES):
            pass  # what lies after the compressed stream counts for the digest
        if layer.digest is not None and digest.hexdigest() != layer.digest:
            raise InvalidSpec(f"import layer {layer.name!r}: its digest is {digest.hexdigest()}, not {layer.digest}")
        if layer.diff_id is not None and (found := reader.hexdigest()) != layer.diff_id:
            raise InvalidSpec(f"import layer {layer.name!r}: it unpacks to digest {found}, not {layer.diff_id}")


# --- OCI ---------------------------------------------------------------------------------------------------------


def _oci_image(bundle: Bundle, reference: str | None, what: str) -> Image:
    index = _json(bundle, "index.json", None)
    choices = _objects(index, "manifests", what)
    if reference is not None:
        choices = [
            choice for choice in choices
            if choice.get("digest") == reference or _text(_mapping(choice.get("annotations")), _REF_NAME) == reference
        ]
        if not choices:
            raise NotFound(f"import {what}: no image {reference!r} in it")
    descriptor = _choose(choices, what)
    depth = 0
    while descriptor.get("mediaType") in _INDEX_TYPES:
        depth += 1
        if depth > _MAX_INDEX_DEPTH:
            raise InvalidSpec(f"import {what}: its indexes are nested, at most {_MAX_INDEX_DEPTH} deep are followed")
        descriptor = _choose(_objects(_described(bundle, descriptor, what), "manifests", what), what)
    manifest = _described(bundle, descriptor, what)
    config = _described(bundle, _mapping(manifest.get("config")), what)
    items = _objects(manifest, "layers", what)
    return Image(_layers(bundle, items, _diff_ids(config, len(items), what), what), _config(config),
                 f"sha256:{_hex(descriptor, what)}")  # fmt: skip


def _layers(bundle: Bundle, items: list[Json], diff_ids: list[str], what: str) -> tuple[Layer, ...]:
    layers = []
    for item, diff_id in zip(_bounded(items, what), diff_ids, strict=True):
        name = _sized(bundle, item, what)
        layers.append(Layer(name, bundle.size(name), _hex(item, what), diff_id))
    return tuple(layers)


def _diff_ids(config: Json, count: int, what: str) -> list[str]:
    """The digests of the unpacked layers, which only the configuration tells: one for each of ``count`` layers."""
    diff_ids = _texts(_mapping(config.get("rootfs")), "diff_ids")
    if len(diff_ids) != count:
        raise InvalidSpec(f"import {what}: {count} layers, but {len(diff_ids)} digests of them (rootfs.diff_ids)")
    return [_hex({"digest": diff_id}, what) for diff_id in diff_ids]


def _described(bundle: Bundle, descriptor: Json, what: str) -> Json:
    """The JSON that a descriptor leads to, once its size and digest are what the descriptor says."""
    return _json(bundle, _sized(bundle, descriptor, what), _hex(descriptor, what))


def _sized(bundle: Bundle, descriptor: Json, what: str) -> str:
    """The name of a descriptor's blob, which has the size that the descriptor says."""
    name, size = _blob(descriptor, what), descriptor.get("size")
    if not isinstance(size, int) or isinstance(size, bool):
        raise InvalidSpec(f"import {what}: its descriptor of {name!r} has no size")
    if (found := bundle.size(name)) != size:
        raise InvalidSpec(f"import {what}: {name!r} has {found} bytes, not {size} as its descriptor says")
    return name


def _choose(choices: list[Json], what: str) -> Json:
    """The one manifest for this machine.  An attestation has platform unknown/unknown and never fits."""
    here = ("linux", _ARCHITECTURES.get(platform.machine(), platform.machine()))
    fitting = [choice for choice in choices if _platform(choice) in (None, here)]
    exact = [choice for choice in fitting if _platform(choice) == here]
    found = exact or fitting
    if not found:
        raise InvalidSpec(f"import {what}: no image for {'/'.join(here)} among {len(choices)}")
    if len(found) > 1:
        names = sorted(
            _text(_mapping(choice.get("annotations")), _REF_NAME) or _text(choice, "digest") for choice in found
        )
        raise InvalidSpec(
            f"import {what}: it holds {len(found)} images: {', '.join(names[:8])}", hint="say which with the reference"
        )
    return found[0]


def _platform(choice: Json) -> tuple[str, str] | None:
    value = choice.get("platform")
    return None if value is None else (_text(_mapping(value), "os"), _text(_mapping(value), "architecture"))


def _hex(descriptor: Json, what: str) -> str:
    match = _DIGEST.fullmatch(_text(descriptor, "digest"))
    if match is None:
        raise InvalidSpec(f"import {what}: {_text(descriptor, 'digest')[:100]!r} is not a sha256 digest")
    return match[1]


def _blob(descriptor: Json, what: str) -> str:
    return f"blobs/sha256/{_hex(descriptor, what)}"


# --- docker-archive ----------------------------------------------------------------------------------------------


def _docker_image(bundle: Bundle, reference: str | None, what: str) -> Image:
    images = _load(bundle, "manifest.json", None)
    if not isinstance(images, list):
        raise InvalidSpec(f"import {what}: its manifest.json is not a list")
    found = [image for image in map(_mapping, images) if reference is None or reference in _texts(image, "RepoTags")]
    if not found:
        raise NotFound(f"import {what}: no image {reference!r} in it")
    if len(found) > 1:
        names = [tag for image in found for tag in _texts(image, "RepoTags")]
        raise InvalidSpec(
            f"import {what}: it holds {len(found)} images: {', '.join(names[:8])}", hint="say which with the reference"
        )
    name = _text(found[0], "Config")
    digest = _DIGEST_IN_NAME.fullmatch(name)
    config = _json(bundle, name, None if digest is None else digest[1])
    members = _bounded(_texts(found[0], "Layers"), what)
    layers = [
        Layer(member, bundle.size(member), None, diff_id)
        for member, diff_id in zip(members, _diff_ids(config, len(members), what), strict=True)
    ]
    return Image(tuple(layers), _config(config), None)


# --- JSON of unknown shape ---------------------------------------------------------------------------------------


def _bounded(layers: Sequence[T], what: str) -> Sequence[T]:
    if len(layers) > _MAX_LAYERS:
        raise InvalidSpec(f"import {what}: it has {len(layers)} layers, at most {_MAX_LAYERS} are taken")
    return layers


def _load(bundle: Bundle, name: str, digest: str | None) -> object:
    if bundle.size(name) > _JSON_MAX_BYTES:
        raise InvalidSpec(f"import: {name!r} has {bundle.size(name)} bytes, at most {_JSON_MAX_BYTES} are read")
    data = b"".join(bundle.reader(name))
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise InvalidSpec(f"import: {name!r} does not have the digest in its name")
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidSpec(f"import: {name!r} is not JSON: {error}") from error
    return value


def _json(bundle: Bundle, name: str, digest: str | None) -> Json:
    value = _load(bundle, name, digest)
    if not isinstance(value, dict):
        raise InvalidSpec(f"import: {name!r} is not a JSON object")
    return value


def _mapping(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _text(value: Json, key: str) -> str:
    found = value.get(key)
    return found if isinstance(found, str) else ""


def _texts(value: Json, key: str) -> tuple[str, ...]:
    found = value.get(key)
    return tuple(item for item in found if isinstance(item, str)) if isinstance(found, list) else ()


def _objects(value: Json, key: str, what: str) -> list[Json]:
    found = value.get(key)
    if not isinstance(found, list):
        raise InvalidSpec(f"import {what}: it has no list {key!r}")
    return [_mapping(item) for item in found]


def _config(value: Json) -> Config:
    config = _mapping(value.get("config"))
    return Config(
        env=_texts(config, "Env"), user=_text(config, "User"), workdir=_text(config, "WorkingDir"),
        entrypoint=_texts(config, "Entrypoint"), cmd=_texts(config, "Cmd"), labels=_labels(config, "Labels"),
    )


def changed(config: Config, change: Json) -> Config:
    """A configuration with some of its fields replaced; variables and labels are added or replaced by name."""
    env = {pair.partition("=")[0]: pair for pair in (*config.env, *_texts(change, "env"))}
    return Config(
        env=tuple(env.values()),
        user=_text(change, "user") if "user" in change else config.user,
        workdir=_text(change, "workdir") if "workdir" in change else config.workdir,
        entrypoint=_texts(change, "entrypoint") if "entrypoint" in change else config.entrypoint,
        cmd=_texts(change, "cmd") if "cmd" in change else config.cmd,
        labels={**(config.labels or {}), **_labels(change, "labels")},
    )


def _labels(value: Json, key: str) -> dict[str, str]:
    return {name: label for name, label in _mapping(value.get(key)).items() if isinstance(label, str)}
