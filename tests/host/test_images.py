# SPDX-License-Identifier: Apache-2.0
"""Images end to end: imported by the real worker, mounted by the kernel, compared with their source."""

import asyncio
import errno
import functools
import gzip
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dsecd.core.images import records
from dsecd.core.images.staging import Settings
from dsecd.core.images.store import ImageStore
from dsecd.linux import mount, overlay
from libdsec.errors import Conflict, InvalidSpec, NoCapacity, Refused
from libdsec.types import ImageInfo, ImportRequest
from tests.support import images
from tests.support.images import resident_bytes
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("own_mounts")


def import_one(root: Path, **fields: object) -> ImageInfo:
    """One import by a daemon that starts, imports and stops."""
    async def run() -> ImageInfo:
        with images.opened(root) as (store, _):
            await store.reconcile()
            return await store.import_image(ImportRequest.model_validate({"name": "test", **fields}))

    return asyncio.run(run())


@contextmanager
def mounted(root: Path, *digests: str) -> Iterator[Path]:
    """The images stacked, first on top, read-only, as a sandbox would see them."""
    async def layers(store: ImageStore) -> list[Path]:
        return [await store.mount_layer(digest) for digest in digests]

    with images.opened(root) as (store, _):
        lower = asyncio.run(layers(store))
        objects = store.objects_dir
    target = root / "view"
    target.mkdir(exist_ok=True)
    fd = overlay.mount(lower=lower, data=[objects], upper=None, work=None, fsuid=None)
    mount.attach(fd, target)
    os.close(fd)
    yield target
    mount.detach(target)
    for path in lower:
        mount.detach(path)


def test_a_directory_comes_back_as_it_was(disk: Path) -> None:
    source = disk / "source"
    images.make_tree(source)
    before = images.fingerprint(source)
    info = import_one(disk, source=str(source))
    with mounted(disk, info.digest) as view:
        assert images.fingerprint(view) == before
    assert info.entries == len(before)
    assert images.residue(disk) == []


def test_access_lists_come_back(disk: Path) -> None:
    source = disk / "source"
    source.mkdir()
    (source / "file").write_text("x")
    # include/uapi/linux/posix_acl_xattr.h: version 2; owner rwx, user 1000 r, group r, mask r, others none.
    no_id = 0xFFFFFFFF
    entries = [(0x01, 7, no_id), (0x02, 4, 1000), (0x04, 4, no_id), (0x10, 4, no_id), (0x20, 0, no_id)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(source / "file", "system.posix_acl_access", value)
    os.setxattr(source, "system.posix_acl_default", value)
    info = import_one(disk, source=str(source))
    with mounted(disk, info.digest) as view:
        assert os.getxattr(view / "file", "system.posix_acl_access") == value
        assert os.getxattr(view, "system.posix_acl_default") == value


def test_a_tar_of_it_comes_back_as_tar_sees_it(disk: Path) -> None:
    source = disk / "source"
    images.make_tree(source)
    archive = disk / "root.tar"
    flags = ["--format=posix", "--xattrs", "--xattrs-include=*", "--sparse"]
    subprocess.run(["tar", *flags, "-C", source, "-cf", archive, "."], check=True)
    from_directory = import_one(disk, source=str(source))
    info = import_one(disk, source=str(archive))
    assert info.digest == from_directory.digest
    with mounted(disk, info.digest) as view:
        subprocess.run(["tar", "-C", view, "-df", archive], check=True)
    assert images.residue(disk) == []


@pytest.mark.parametrize("compress", ["gzip", "bzip2", "xz", "zstd"])
def test_compression_makes_no_difference(disk: Path, compress: str) -> None:
    source = disk / "source"
    images.make_tree(source)
    archive, packed = disk / "root.tar", disk / "root.packed"
    subprocess.run(["tar", "--format=gnu", "--sparse", "-C", source, "-cf", archive, "."], check=True)
    with open(packed, "wb") as file:
        subprocess.run([compress, "-qc", archive], stdout=file, check=True)
    assert import_one(disk, source=str(archive)).digest == import_one(disk, source=str(packed)).digest


# --- killed at every step ----------------------------------------------------------------------------------------


def daemon(root: Path, action: str, argument: str, point: str) -> subprocess.CompletedProcess[str]:
    """A process that does one thing to the store and is killed at `point`."""
    return subprocess.run(
        [sys.executable, "-m", "tests.support.image_daemon", root, action, argument, point],
        capture_output=True, text=True, check=False,
    )


def workers(root: Path) -> list[str]:
    """Processes that still have something to do with a store, by their command lines and working files."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue
        if process.name != str(os.getpid()) and any(link.startswith(str(root)) for link in links):
            found.append(process.name)
    return found


def lasting(root: Path) -> list[str]:
    """Those that do not end: one that was killed, or whose daemon was, takes its moment."""
    with suppress(AssertionError):
        until(lambda: not workers(root), 20)
    return workers(root)


def names_in(root: Path) -> set[str]:
    with images.opened(root) as (store, _):
        return {name for info in store.list() for name in info.names}


def test_an_import_killed_anywhere_leaves_nothing(disk: Path) -> None:
    first, second = disk / "first", disk / "second"
    images.make_tree(first)
    shutil.copytree(first / "usr", second / "usr")
    (second / "own").write_bytes(os.urandom(200_000))
    root = disk / "store"
    kept = import_one(root, name="first", source=str(first))
    every: list[str] = []
    for how in ("record", "record-undo"):
        recorded = daemon(root, "import", str(second), how)
        assert recorded.returncode == 0, recorded.stderr
        every += [point for point in recorded.stdout.split() if point not in every and not point.startswith("remove/")]
        daemon(root, "remove", "second", "nowhere")
    assert {"phase/read", "import/stage/do/after", "import/publish/do/after", "import/record/undo/before"} <= set(every)
    problems: dict[str, object] = {}
    for point in every:
        killed = daemon(root, "import", str(second), point)
        if killed.returncode != -9:
            problems[point] = killed.stderr or "was not killed"
        with images.opened(root) as (store, _):
            asyncio.run(store.reconcile())
        expected = {"first:latest"} | ({"second:latest"} if point == "import/publish/do/after" else set())
        state = (images.residue(root), lasting(root), names_in(root) - expected, expected - names_in(root))
        if any(state):
            problems[f"{point} after reconcile"] = state
        if len(expected) == 2:
            daemon(root, "remove", "second", "nowhere")
    assert problems == {}
    with mounted(root, kept.digest) as view:
        assert images.fingerprint(view) == images.fingerprint(first)


def test_a_removal_killed_anywhere_is_finished_by_the_next_daemon(disk: Path) -> None:
    first, second = disk / "first", disk / "second"
    images.make_tree(first)
    shutil.copytree(first / "usr", second / "usr")
    (second / "own").write_bytes(os.urandom(200_000))
    root = disk / "store"
    kept = import_one(root, name="first", source=str(first))
    import_one(root, name="second", source=str(second))
    recorded = daemon(root, "remove", "second", "record")
    points = recorded.stdout.split()
    assert "remove/collect/do/before" in points
    problems: dict[str, object] = {}
    for point in points:
        import_one(root, name="second", source=str(second))
        killed = daemon(root, "remove", "second", point)
        if killed.returncode != -9:
            problems[point] = killed.stderr or "was not killed"
        with images.opened(root) as (store, _):
            asyncio.run(store.reconcile())
        if (state := (images.residue(root), names_in(root))) != ([], {"first:latest"}):
            problems[f"{point} after reconcile"] = state
    assert problems == {}
    with mounted(root, kept.digest) as view:
        assert images.fingerprint(view) == images.fingerprint(first)


def test_what_cannot_be_taken_back_now_is_taken_back_later(disk: Path) -> None:
    """The undo of an import fails too: its staging area, which holds the manifest, has to stay until it works."""
    source = disk / "source"
    images.make_tree(source)
    root = disk / "store"

    def broken(point: str) -> None:
        if point in ("import/objects/do/after", "import/record/undo/before"):
            raise OSError(errno.EIO, "broken disk")

    async def run() -> None:
        with images.opened(root, checkpoint=broken) as (store, _):
            await store.reconcile()
            with pytest.raises(Refused, match="import .*broken disk"):
                await store.import_image(ImportRequest(name="test", source=str(source)))
            assert store.list() == ()
        assert os.listdir(root / "images/staging") != []
        with images.opened(root) as (store, _):
            await store.reconcile()

    asyncio.run(run())
    assert images.residue(root) == []
    assert not any(path.is_file() for path in (root / "images").rglob("*"))


# --- archives of layers ------------------------------------------------------------------------------------------


def member(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def file(name: str, data: bytes, **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, size=len(data), **fields), data


LOWER = images.tar_bytes([
    (member("etc", type=tarfile.DIRTYPE, mode=0o755), None),
    file("etc/keep", b"keep"), file("etc/gone", b"gone"), file("etc/changed", b"old"),
    (member("opaque", type=tarfile.DIRTYPE, mode=0o755), None), file("opaque/old", b"old"),
    (member("tree/deep", type=tarfile.DIRTYPE, mode=0o755), None), file("tree/deep/file", b"x"),
])
UPPER = images.tar_bytes([
    file("etc/.wh.gone", b""), file("etc/changed", b"new"), file("opaque/new", b"new"),
    file("opaque/.wh..wh..opq", b""), file(".wh.tree", b""),
    (member("etc/link", type=tarfile.LNKTYPE, linkname="etc/keep"), None),
])
RUN_CONFIG = {
    "Env": ["PATH=/bin", "LANG=C"], "User": "1000:1000", "WorkingDir": "/srv", "Entrypoint": ["/init"],
    "Cmd": ["serve"], "Labels": {"who": "test"},
}


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def oci_layout(
    root: Path, layers: list[bytes], *, diff_ids: list[str] | None = None, lie: str = "", by: int | None = 0,
    nested: int = 0,
) -> None:
    """An OCI layout with one image, its layers gzipped, below ``nested`` indexes more. ``lie`` is the kind whose
    descriptors have sizes that are wrong by ``by`` bytes, or none."""
    blobs = root / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, kind: str) -> dict[str, object]:
        digest = sha256(data)
        (blobs / digest.removeprefix("sha256:")).write_bytes(data)
        size = {} if kind == lie and by is None else {"size": len(data) + (by or 0) * (kind == lie)}
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest, **size}

    config = json.dumps({
        "architecture": "amd64", "os": "linux", "config": RUN_CONFIG,
        "rootfs": {"type": "layers", "diff_ids": diff_ids or [sha256(layer) for layer in layers]},
    }).encode()
    manifest = json.dumps({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(config, "config.v1+json"),
        "layers": [put(gzip.compress(layer), "layer.v1.tar+gzip") for layer in layers],
    }).encode()
    found = put(manifest, "manifest.v1+json")
    for _ in range(nested):
        found = put(json.dumps({"schemaVersion": 2, "manifests": [found]}).encode(), "index.v1+json")
    index = {"schemaVersion": 2, "manifests": [
        {**found, "annotations": {"org.opencontainers.image.ref.name": "one"}}
    ]}
    (root / "index.json").write_text(json.dumps(index))
    (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def docker_archive(path: Path, layers: list[bytes], *, forged: bool = False) -> None:
    """What `docker save` wrote before it wrote OCI layouts; ``forged``: its configuration is not what its name says."""
    config = json.dumps({"config": RUN_CONFIG, "rootfs": {"diff_ids": [sha256(layer) for layer in layers]}}).encode()
    names = [f"{hashlib.sha256(layer).hexdigest()}/layer.tar" for layer in layers]
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    listing = json.dumps([{"Config": config_name, "RepoTags": ["one:latest"], "Layers": names}]).encode()
    path.write_bytes(images.tar_bytes([
        *(file(name, layer) for name, layer in zip(names, layers, strict=True)),
        file(config_name, config.replace(b"serve", b"other") if forged else config), file("manifest.json", listing),
    ]))


@pytest.fixture
def bundles(disk: Path) -> dict[str, str]:
    """The same two-layer image in every form."""
    layout = disk / "layout"
    oci_layout(layout, [LOWER, UPPER])
    docker_archive(disk / "docker.tar", [LOWER, UPPER])
    subprocess.run(["tar", "-C", layout, "-cf", disk / "oci.tar", "."], check=True)
    subprocess.run(["gzip", "-k", disk / "docker.tar"], check=True)
    return {
        "layout": str(layout), "oci-archive": str(disk / "oci.tar"), "docker-archive": str(disk / "docker.tar"),
        "compressed": str(disk / "docker.tar.gz"), "skopeo": f"oci:{layout}:one",
        "skopeo-docker": f"docker-archive:{disk}/docker.tar",
    }


@pytest.mark.parametrize("form", ["layout", "oci-archive", "docker-archive", "compressed", "skopeo", "skopeo-docker"])
def test_layers_are_applied_and_the_configuration_kept(disk: Path, bundles: dict[str, str], form: str) -> None:
    info = import_one(disk, source=bundles[form])
    with mounted(disk, info.digest) as view:
        found = {str(path.relative_to(view)) for path in view.rglob("*")}
        assert found == {"etc", "etc/keep", "etc/changed", "etc/link", "opaque", "opaque/new"}
        assert (view / "etc/changed").read_text() == "new"
        assert (view / "etc/link").stat().st_ino == (view / "etc/keep").stat().st_ino
    assert info.config.env == ("PATH=/bin", "LANG=C")
    assert (info.config.user, info.config.workdir) == ("1000:1000", "/srv")
    assert (info.config.entrypoint, info.config.cmd) == (("/init",), ("serve",))
    assert info.config.labels == {"who": "test"}
    if form in ("layout", "oci-archive"):
        manifest = json.loads((disk / "layout/index.json").read_text())["manifests"][0]["digest"]
        assert info.manifest_digest == manifest
    # What the upper layer hides was written for nothing and must be gone.
    assert images.residue(disk) == []


def test_a_layer_that_is_not_what_its_digest_says_is_refused(disk: Path, bundles: dict[str, str]) -> None:
    lower = gzip.compress(LOWER).hex()
    [blob] = [path for path in (disk / "layout/blobs/sha256").iterdir() if path.read_bytes().hex()[20:] == lower[20:]]
    planted = gzip.compress(images.tar_bytes([file("etc/planted", b"x")]))
    blob.write_bytes(planted.ljust(blob.stat().st_size, b"\0"))
    with pytest.raises(InvalidSpec, match="digest is"):
        import_one(disk, source=bundles["layout"])
    assert images.residue(disk) == []


LIES: list[tuple[dict[str, Any], str]] = [
    ({"diff_ids": [sha256(LOWER), sha256(LOWER)]}, "it unpacks to digest"),
    ({"diff_ids": [sha256(LOWER)]}, r"2 layers, but 1 digests of them \(rootfs.diff_ids\)"),
    ({"diff_ids": [sha256(LOWER), "md5:0"]}, "'md5:0' is not a sha256 digest"),
    ({"lie": "layer.v1.tar+gzip", "by": 1}, "bytes, not [0-9]+ as its descriptor says"),
    ({"lie": "config.v1+json", "by": -1}, "bytes, not [0-9]+ as its descriptor says"),
    ({"lie": "manifest.v1+json", "by": 1}, "bytes, not [0-9]+ as its descriptor says"),
    ({"lie": "index.v1+json", "by": 1, "nested": 1}, "bytes, not [0-9]+ as its descriptor says"),
    ({"lie": "layer.v1.tar+gzip", "by": None}, "has no size"),
    ({"nested": 5}, "its indexes are nested, at most 4 deep are followed"),
    ({"nested": 300}, "its indexes are nested, at most 4 deep are followed"),
]


@pytest.mark.parametrize(("lies", "message"), LIES)
def test_a_layout_that_is_not_what_it_says_is_refused(disk: Path, lies: dict[str, Any], message: str) -> None:
    oci_layout(disk / "layout", [LOWER, UPPER], **lies)
    with pytest.raises(InvalidSpec, match=message):
        import_one(disk, source=str(disk / "layout"))
    assert images.residue(disk) == []
    assert not any(path.is_file() for path in (disk / "images").rglob("*"))


def test_indexes_in_indexes_are_followed(disk: Path) -> None:
    oci_layout(disk / "layout", [LOWER, UPPER], nested=4)
    with mounted(disk, import_one(disk, source=str(disk / "layout")).digest) as view:
        assert (view / "etc/changed").read_text() == "new"


def test_a_configuration_that_is_not_what_its_name_says_is_refused(disk: Path) -> None:
    docker_archive(disk / "docker.tar", [LOWER, UPPER], forged=True)
    with pytest.raises(InvalidSpec, match="does not have the digest in its name"):
        import_one(disk, source=str(disk / "docker.tar"))
    assert images.residue(disk) == []


@pytest.mark.parametrize("source", [
    "containers-storage:secret", "--help", "docker-daemon:x",
])
def test_only_known_places_are_pulled_from(disk: Path, source: str) -> None:
    with pytest.raises(InvalidSpec, match="expected one of"):
        import_one(disk, source=source, kind="registry")


@pytest.mark.parametrize(("kind", "source"), [
    ("directory", "relative"), ("auto", "relative"), ("auto", "/no/such"), ("rootfs-tar", "/dev"),
    ("auto", "/" + "n" * 4000), ("auto", "/dev/null/x"), ("auto", "/proc/self/mem"),
])
def test_a_source_that_is_not_there_is_an_error_of_the_request(disk: Path, kind: str, source: str) -> None:
    with pytest.raises(InvalidSpec):
        import_one(disk, source=source, kind=kind)
    assert images.residue(disk) == []


@pytest.mark.parametrize("source", ["/proc", "/proc/self"])
def test_what_cannot_be_read_of_a_source_is_an_error_of_the_request_and_named(disk: Path, source: str) -> None:
    """Files of /proc that refuse each read, processes that go while they are read."""
    with pytest.raises(InvalidSpec, match=r"import member '[^']+': it cannot be read: \w+"):
        import_one(disk, source=source)
    assert images.residue(disk) == []


def test_an_import_changes_of_the_configuration_what_it_is_told_to(disk: Path) -> None:
    oci_layout(disk / "layout", [images.tar_bytes([file("a", b"a")])])
    own = import_one(disk, source=str(disk / "layout")).config
    said = {"env": ["LANG=de", "C=3=4"], "user": "9:9", "entrypoint": [], "labels": {"extra": "x"}}
    config = import_one(disk, source=str(disk / "layout"), config=said).config
    assert config.env == ("PATH=/bin", "LANG=de", "C=3=4")
    assert (config.user, config.workdir, config.entrypoint, config.cmd) == ("9:9", own.workdir, (), own.cmd)
    assert config.labels == {**own.labels, "extra": "x"}
    with pytest.raises(ValidationError, match="workdir"):
        import_one(disk, source=str(disk / "layout"), config={"workdir": "relative"})
    with pytest.raises(ValidationError, match="wrkdir"):
        import_one(disk, source=str(disk / "layout"), config={"wrkdir": "/"})


# --- names, holders, space ---------------------------------------------------------------------------------------


def test_the_configuration_and_the_prefix_are_part_of_the_identity(disk: Path) -> None:
    source = disk / "source"
    images.make_tree(source)
    plain = import_one(disk, source=str(source))
    again = import_one(disk, name="again", source=str(source))
    other = import_one(disk, name="other", source=str(source), config={"env": ["A=1"]})
    placed = import_one(disk, name="placed", source=str(source), prefix="/opt/tools")
    assert plain.digest == again.digest
    assert len({plain.digest, other.digest, placed.digest}) == 3
    assert other.objects_new == placed.objects_new == 0
    with mounted(disk, placed.digest) as view:
        assert images.fingerprint(view / "opt/tools") == images.fingerprint(source)
        assert (view / "opt").stat().st_mode & 0o7777 == 0o755
        assert [path.name for path in view.iterdir()] == ["opt"]


def test_an_image_in_use_stays_until_its_last_holder_lets_go(disk: Path) -> None:
    first, second = disk / "first", disk / "second"
    images.make_tree(first)
    shutil.copytree(first / "usr", second / "usr")
    (second / "own").write_text("own")

    async def run() -> None:
        with images.opened(disk / "store") as (store, db):
            await store.reconcile()
            one = await store.import_image(ImportRequest(name="one", source=str(first)))
            two = await store.import_image(ImportRequest(name="two", source=str(second)))
            await db.write(lambda connection: records.hold(connection, two.digest, "box"))
            assert store.get("two").held_by == ("box",)
            with pytest.raises(Conflict, match="box"):
                await store.remove("two")
            # Its name moves on; what held it still has it.
            await store.tag("one", "two")
            assert {info.digest for info in store.list()} == {one.digest, two.digest}
            assert store.get("two").digest == one.digest
            await db.write(lambda connection: records.release_all(connection, "box"))
            await store.remove_unused()
            assert [info.digest for info in store.list()] == [one.digest]
            assert images.residue(disk / "store") == []
            with pytest.raises(Conflict, match="several|names"):
                await store.remove(one.digest)
            await store.remove("two")
            await store.remove("one")
            assert store.list() == ()

    asyncio.run(run())
    assert images.residue(disk / "store") == []
    assert not any(path.is_file() for path in (disk / "store/images").rglob("*"))


def test_a_full_disk_is_reported_and_nothing_stays(disk: Path) -> None:
    source = disk / "source"
    source.mkdir()
    for number in range(40):
        (source / str(number)).write_bytes(os.urandom(1 << 20))
    root = disk / "small"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "small", root], check=True)

    async def run() -> None:
        settings = Settings(reserve_bytes=0)
        with images.opened(root, settings=settings) as (store, _):
            await store.reconcile()
            with pytest.raises(NoCapacity, match="full"):
                await store.import_image(ImportRequest(name="big", source=str(source)))
        with images.opened(root) as (store, _):
            with pytest.raises(NoCapacity, match="kept back"):
                await store.import_image(ImportRequest(name="big", source=str(source)))

    asyncio.run(run())
    assert images.residue(root) == []
    subprocess.run(["umount", root], check=True)


def test_a_cancelled_import_leaves_nothing_and_no_process(disk: Path) -> None:
    source = disk / "fifo"
    os.mkfifo(source)

    async def run() -> None:
        with images.opened(disk) as (store, _):
            await store.reconcile()
            # Opening the FIFO blocks the worker for ever.
            request = ImportRequest(name="never", source=str(source), kind="rootfs-tar")
            async with asyncio.TaskGroup() as group:
                task = group.create_task(store.import_image(request))
                while not list((disk / "images/staging").glob("*/lock")):
                    await asyncio.sleep(0.01)
                task.cancel()

    asyncio.run(run())
    assert images.residue(disk) == []
    assert lasting(disk) == []


def test_imports_at_once_share_what_they_have_in_common(disk: Path) -> None:
    sources = [disk / f"source-{number}" for number in range(4)]
    for number, source in enumerate(sources):
        source.mkdir()
        for shared in range(200):
            (source / f"shared-{shared}").write_text(f"shared {shared}")
        (source / "own").write_text(f"own {number}")

    async def run() -> None:
        with images.opened(disk) as (store, _):
            await store.reconcile()
            await asyncio.gather(*(
                store.import_image(ImportRequest(name=f"image-{number}", source=str(source)))
                for number, source in enumerate(sources)
            ))
            assert images.residue(disk) == []
            await asyncio.gather(*(store.remove(f"image-{number}") for number in range(3)))

    asyncio.run(run())
    assert images.residue(disk) == []
    assert sum(1 for path in (disk / "images/objects").rglob("*") if path.is_file()) == 201


def test_an_object_removed_while_an_import_counts_on_it_comes_back(disk: Path) -> None:
    source = disk / "source"
    images.make_tree(source)
    other = disk / "other"
    shutil.copytree(source / "usr", other / "usr")

    async def remove_first() -> None:
        with images.opened(disk) as (store, _):
            await store.remove("first")

    def in_between(point: str) -> None:
        if point == "import/stage/do/after":
            remover = threading.Thread(target=asyncio.run, args=(remove_first(),))
            remover.start()
            remover.join()
            assert not any(path.is_file() for path in (disk / "images/objects").rglob("*"))

    async def run() -> str:
        with images.opened(disk, checkpoint=in_between) as (store, _):
            return (await store.import_image(ImportRequest(name="second", source=str(other)))).digest

    import_one(disk, name="first", source=str(source))
    digest = asyncio.run(run())
    assert images.residue(disk) == []
    with mounted(disk, digest) as view:
        assert images.fingerprint(view) == images.fingerprint(other)


def dropped(file: Path) -> bool:
    """Whether nothing of it is in the page cache, once the kernel was asked to have it so."""
    with open(file, "rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident_bytes(file) == 0


def test_two_images_share_the_page_cache_of_a_common_file(disk: Path) -> None:
    content = os.urandom(4 << 20)
    for name in ("one", "two"):
        (disk / name).mkdir()
        (disk / name / "common").write_bytes(content)
        (disk / name / "own").write_text(name)
    digests = [import_one(disk, name=name, source=str(disk / name)).digest for name in ("one", "two")]
    files = [path for path in (disk / "images/objects").rglob("*") if path.is_file()]
    [stored] = [path for path in files if path.stat().st_size == len(content)]
    for digest in digests:
        # Again, while what was read a moment ago is still on its way into the cache or in somebody's hands.
        until(functools.partial(dropped, stored))
        with mounted(disk, digest) as view:
            assert (view / "common").read_bytes() == content
            assert resident_bytes(stored) == len(content)


def test_a_layer_is_mounted_once_however_often_it_is_asked_for(disk: Path) -> None:
    (disk / "source").mkdir()
    info = import_one(disk, source=str(disk / "source"))

    async def run() -> None:
        places: list[Path] = []
        for _ in range(2):
            with images.opened(disk) as (store, db):
                places = await asyncio.gather(*(store.mount_layer(info.digest) for _ in range(5)))
                assert len(set(places)) == 1
                here = [entry for entry in mount.mountinfo("thread-self") if entry.target == places[0]]
                assert [entry.fstype for entry in here] == ["erofs"]
                assert {"nosuid", "nodev", "ro"} <= set(here[0].options)
                await db.write(lambda connection: records.hold(connection, info.digest, "box"))
                await store.unmount_unused()
                assert places[0].is_mount()
        with images.opened(disk) as (store, db):
            await db.write(lambda connection: records.release_all(connection, "box"))
            await store.unmount_unused()
            assert not places[0].exists()

    asyncio.run(run())
