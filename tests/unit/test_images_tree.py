# SPDX-License-Identifier: Apache-2.0
"""Image trees: what members do to them, what is refused, and how a tree becomes headers."""

import bz2
import gzip
import io
import lzma
import os
import subprocess
import tarfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecd.core.images.headers import tar_of
from dsecd.core.images.objects import ObjectWriter, make_fan_out, object_path, read_manifest, write_manifest
from dsecd.core.images.reader import ForwardReader, Truncated, open_stream
from dsecd.core.images.tarstream import TarImport
from dsecd.core.images.tree import Kind, Limits, Node, Tree, split_name
from libdsec.errors import DsecError, InvalidSpec
from tests.support.images import tar_bytes


def member(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def read_tar(
    data: bytes, place: Path, *, layers: int = 1, limits: Limits | None = None, tree: Tree | None = None
) -> Tree:
    """Import an archive, its objects going below `place`."""
    place.mkdir(parents=True, exist_ok=True)
    make_fan_out(place / "store")
    (place / "staging").mkdir(exist_ok=True)
    tree = tree or Tree(limits or Limits())
    feed = io.BytesIO(data)
    with ExitStack() as stack, ObjectWriter(place / "store", place / "staging") as writer:
        reader = open_stream(feed.read, "test.tar", stack)
        TarImport(tree, writer, layered=layers > 1, tick=lambda: None).run(reader)
        writer.finish()
    return tree


def paths(tree: Tree) -> list[str]:
    return [path.decode() for path, _ in tree.walk()]


# --- what members do ---------------------------------------------------------------------------------------------


def test_the_last_member_of_a_name_wins_and_directories_keep_their_children(tmp_path: Path) -> None:
    tree = read_tar(tar_bytes([
        (member("d", type=tarfile.DIRTYPE, mode=0o700), None), (member("d/a", size=1), b"1"),
        (member("d", type=tarfile.DIRTYPE, mode=0o755, uid=7), None), (member("d/a", size=1), b"2"),
        (member("x", type=tarfile.DIRTYPE), None), (member("x/y", size=1), b"y"), (member("x", size=2), b"xx"),
    ]), tmp_path)
    assert paths(tree) == ["d", "d/a", "x"]
    directory, replaced = tree.find((b"d",)), tree.find((b"x",))
    assert directory is not None
    assert replaced is not None
    assert (directory.mode, directory.uid, replaced.kind) == (0o755, 7, Kind.FILE)


def test_names_lie_below_the_root_however_they_are_written() -> None:
    assert split_name(b"/etc//./passwd") == split_name(b"./etc/passwd/") == (b"etc", b"passwd")
    assert split_name(b"./") == ()


def test_missing_parents_are_plain_directories_of_root(tmp_path: Path) -> None:
    parent = read_tar(tar_bytes([(member("a/b/c", size=1), b"x")]), tmp_path).find((b"a", b"b"))
    assert parent is not None
    assert (parent.mode, parent.uid, parent.gid, parent.mtime_ns) == (0o755, 0, 0, 0)


def test_a_whiteout_hides_lower_layers_only() -> None:
    tree = Tree(Limits())
    tree.put((b"d",), Node(Kind.DIR))
    tree.put((b"d", b"old"), Node(Kind.FILE))
    tree.put((b"d", b"deep"), Node(Kind.DIR))
    tree.put((b"d", b"deep", b"old"), Node(Kind.FILE))
    tree.start_layer()
    tree.put((b"d", b"deep", b"new"), Node(Kind.FILE))
    tree.put((b"d", b"new"), Node(Kind.FILE))
    tree.whiteout((), b".wh.d")
    assert paths(tree) == ["d", "d/deep", "d/deep/new", "d/new"]


def test_whiteouts_are_names_like_others_outside_layers(tmp_path: Path) -> None:
    assert paths(read_tar(tar_bytes([(member(".wh.a", size=1), b"x"), (member("a", size=1), b"y")]), tmp_path)) == [
        ".wh.a", "a",
    ]


@pytest.mark.parametrize(
    "target", ["usr/lib", "/usr/lib", "../usr/lib", "../../usr/./lib/", "also", "usr/share/../lib"]
)
def test_members_whiteouts_and_hard_links_below_a_symlink_meet_the_directory_it_leads_to(
    target: str, tmp_path: Path
) -> None:
    tree = read_tar(tar_bytes([
        (member("usr/lib", type=tarfile.DIRTYPE), None), (member("usr/share", type=tarfile.DIRTYPE), None),
        (member("also", type=tarfile.SYMTYPE, linkname="/usr/lib"), None),
        (member("lib", type=tarfile.SYMTYPE, linkname=target), None),
        (member("usr/lib/old", size=1), b"o"), (member("usr/lib/gone", size=1), b"g"),
    ]), tmp_path, layers=2)
    tree.start_layer()
    read_tar(tar_bytes([
        (member("lib/new/deep", size=1), b"n"), (member("lib/.wh.gone"), None),
        (member("second", type=tarfile.LNKTYPE, linkname="lib/old"), None),
    ]), tmp_path, layers=2, tree=tree)
    assert paths(tree) == [
        "also", "lib", "second", "usr", "usr/lib", "usr/lib/new", "usr/lib/new/deep", "usr/lib/old", "usr/share",
    ]
    assert tree.find((b"second",)) is tree.find((b"usr", b"lib", b"old"))


def test_an_opaque_whiteout_below_a_symlink_empties_the_directory_it_leads_to(tmp_path: Path) -> None:
    tree = read_tar(tar_bytes([
        (member("a/b/x", size=1), b"x"), (member("l", type=tarfile.SYMTYPE, linkname="a"), None),
        (member("dangling", type=tarfile.SYMTYPE, linkname="nowhere"), None),
    ]), tmp_path, layers=2)
    tree.start_layer()
    read_tar(tar_bytes([
        (member("l/b/.wh..wh..opq"), None), (member("dangling/.wh.x"), None), (member("l/b/y"), None),
    ]), tmp_path, layers=2, tree=tree)
    assert paths(tree) == ["a", "a/b", "a/b/y", "dangling", "l"]


def test_a_directory_member_replaces_a_symlink_of_its_own_name(tmp_path: Path) -> None:
    tree = read_tar(tar_bytes([
        (member("a/x", size=1), b"x"), (member("l", type=tarfile.SYMTYPE, linkname="a"), None),
        (member("l", type=tarfile.DIRTYPE), None), (member("l/y", size=1), b"y"),
    ]), tmp_path)
    assert paths(tree) == ["a", "a/x", "l", "l/y"]


@pytest.mark.parametrize("name", [b".wh.", b".wh..", b".wh..."])
def test_a_whiteout_of_no_name_is_refused_or_ignored_never_followed(name: bytes) -> None:
    tree = Tree(Limits())
    tree.put((b"keep",), Node(Kind.FILE))
    tree.start_layer()
    with pytest.raises(InvalidSpec, match="hides no file"):
        tree.whiteout((), name)
    assert paths(tree) == ["keep"]


# --- what is refused ---------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[tuple[tarfile.TarInfo, bytes | None]], str]] = {
    "dots": ([(member("a/../../etc/passwd", size=1), b"x")], "contains '..'"),
    "dots-link": ([(member("a", type=tarfile.LNKTYPE, linkname="../../etc/shadow"), None)], "contains '..'"),
    "absolute-link": ([(member("a", type=tarfile.LNKTYPE, linkname="/etc/shadow"), None)], "not in the image"),
    "directory-link": (
        [(member("d", type=tarfile.DIRTYPE), None), (member("a", type=tarfile.LNKTYPE, linkname="d"), None)],
        "is a directory",
    ),
    "through-symlink": (
        [(member("out", type=tarfile.SYMTYPE, linkname="/etc"), None), (member("out/passwd", size=1), b"x")],
        "lies below 'out', a symlink that leads to no directory in the image",
    ),
    "through-loop": (
        [(member("a", type=tarfile.SYMTYPE, linkname="b"), None),
         (member("b", type=tarfile.SYMTYPE, linkname="a"), None), (member("a/x", size=1), b"x")],
        "more than 40 symlinks",
    ),
    "through-symlink-to-file": (
        [(member("f", size=1), b"x"), (member("l", type=tarfile.SYMTYPE, linkname="f"), None), (member("l/x"), None)],
        "lies below 'l', a symlink that leads to no directory",
    ),
    "linked-past-the-limit": (
        [(member("/".join(["n" * 200] * 19), type=tarfile.DIRTYPE), None),
         (member("l", type=tarfile.SYMTYPE, linkname="/".join(["n" * 200] * 19)), None),
         (member("l/" + "x" * 200 + "/" + "y" * 200), None)],
        "when the symlinks on the way are followed",
    ),
    "disk-through-symlink": (
        [(member("other", type=tarfile.DIRTYPE), None), (member("dev", type=tarfile.SYMTYPE, linkname="other"), None),
         (member("dev/sda", type=tarfile.BLKTYPE, devmajor=8), None)],
        "block device 8:0",
    ),
    "through-file": ([(member("f", size=1), b"x"), (member("f/a", size=1), b"x")], "lies below 'f', which is a file"),
    "long-name": ([(member("n" * 256, size=1), b"x")], "256 bytes long"),
    "long-path": ([(member("/".join(["n" * 200] * 21), size=1), b"x")], "at most 4095"),
    "root-file": ([(member("/", size=1), b"x")], "root of an image must be a directory"),
    "uid": ([(member("a", size=1, uid=65536), b"x")], "uid is 65536"),
    "gid": ([(member("a", size=1, gid=100000), b"x")], "gid is 100000"),
    "whiteout": ([(member("a", type=tarfile.CHRTYPE, devmajor=0, devminor=0), None)], "mark of a deleted file"),
    "disk": ([(member("sda", type=tarfile.BLKTYPE, devmajor=8, devminor=0), None)], "block device 8:0"),
    "memory": ([(member("mem", type=tarfile.CHRTYPE, devmajor=1, devminor=1), None)], "character device 1:1"),
    "type": ([(member("a", type=b"M"), None)], "not supported"),
    "empty-symlink": ([(member("a", type=tarfile.SYMTYPE, linkname=""), None)], "link target"),
    **{
        f"xattr-{name}": (
            [(member("a", size=1, pax_headers={f"SCHILY.xattr.{name}": "x"}), b"x")], f"attribute '{name}'"
        )
        for name in (
            "trusted.overlay.redirect", "trusted.overlay.metacopy", "trusted.overlay.opaque", "trusted.anything",
            "user.overlay.redirect", "security.selinux", "security.ima", "system.other", "weird",
        )
    },
    "acl-text": ([(member("a", size=1, pax_headers={"SCHILY.acl.access": "user::rwx"}), b"x")], "SCHILY.acl.access"),
    "xattr-size": (
        [(member("a", size=1, pax_headers={"SCHILY.xattr.user.big": "x" * 70000}), b"x")], "at most 65536"
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_hostile_member_is_refused_by_name(case: str, tmp_path: Path) -> None:
    members, message = REFUSED[case]
    with pytest.raises(InvalidSpec) as caught:
        read_tar(tar_bytes(members), tmp_path)
    assert message in str(caught.value)


def test_devices_below_dev_are_left_out(tmp_path: Path) -> None:
    tree = read_tar(tar_bytes([
        (member("dev", type=tarfile.DIRTYPE), None), (member("dev/sda", type=tarfile.BLKTYPE, devmajor=8), None),
        (member("other/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3), None),
    ]), tmp_path)
    assert paths(tree) == ["dev", "other", "other/null"]


def test_too_many_members_and_too_much_content_are_refused(tmp_path: Path) -> None:
    archive = tar_bytes([(member(str(number), size=10), b"0123456789") for number in range(5)])
    with pytest.raises(InvalidSpec, match="more than 4 members"):
        read_tar(archive, tmp_path / "a", limits=Limits(max_entries=4))
    with pytest.raises(InvalidSpec, match="exceed 49 bytes"):
        read_tar(archive, tmp_path / "b", limits=Limits(max_bytes=49))
    assert len(paths(read_tar(archive, tmp_path / "c", limits=Limits(max_entries=5, max_bytes=50)))) == 5


def test_a_claimed_size_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    huge = member("huge", size=1 << 60).tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(InvalidSpec, match="exceed"):
        read_tar(huge + bytes(1024), tmp_path)


def test_an_archive_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tar_bytes([
        (member("etc", type=tarfile.DIRTYPE), None), (member("etc/a" + "b" * 120, size=700), b"x" * 700),
        (member("s", type=tarfile.SYMTYPE, linkname="t" * 150), None), (member("last", size=512), b"y" * 512),
    ])
    end = len(whole.rstrip(b"\0"))
    end += -end % 512
    for length in [*range(1, end, 100), end - 512, end - 1, end]:
        with pytest.raises(InvalidSpec, match="ends|damaged|offset"):
            read_tar(whole[:length], tmp_path / str(length))
    assert len(paths(read_tar(whole[: end + 1024], tmp_path / "whole"))) == 4


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    whole = bytearray(tar_bytes([(member("a", size=1), b"x"), (member("b", size=1), b"y")]))
    whole[1024 + 10] ^= 0xFF
    with pytest.raises(InvalidSpec, match="damaged header"):
        read_tar(bytes(whole), tmp_path)


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 5119), value=st.integers(0, 255))
def test_any_flipped_byte_gives_a_tree_or_a_clear_error(
    position: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = bytearray(tar_bytes([
        (member("p" * 120, size=3, mtime=1.25, pax_headers={"SCHILY.xattr.user.a": "b"}), b"abc"),
        (member("l", type=tarfile.LNKTYPE, linkname="p" * 120), None),
    ]))
    whole[position] = value
    try:
        read_tar(bytes(whole), tmp_path_factory.mktemp("flip"))
    except DsecError:
        pass


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_a_cut_or_damaged_compressed_stream_is_refused(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    packed = compress(tar_bytes([(member("a", size=300_000), bytes(range(250)) * 1200)]))
    assert paths(read_tar(packed, tmp_path / "whole")) == ["a"]
    assert paths(read_tar(packed + bytes(100), tmp_path / "padded")) == ["a"]
    with pytest.raises(Truncated):
        read_tar(packed[:-20], tmp_path / "cut")
    middle = bytearray(packed)
    middle[len(packed) // 2] ^= 0xFF
    with pytest.raises(InvalidSpec):
        read_tar(bytes(middle), tmp_path / "damaged")


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-qc"], input=data, capture_output=True, check=True).stdout


@pytest.mark.parametrize("harm", ["cut", "damaged"])
def test_a_cut_or_damaged_zstd_stream_is_the_sources_fault(harm: str, tmp_path: Path) -> None:
    packed = bytearray(zstd(tar_bytes([(member("a", size=300_000), os.urandom(300_000))])))
    if harm == "cut":
        del packed[-20:]
    else:
        packed[len(packed) // 2] ^= 0xFF
        packed[-1] ^= 0xFF
    with pytest.raises(InvalidSpec, match="damaged compressed data: \\w"):
        read_tar(bytes(packed), tmp_path)


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_nothing_reads_the_source_when_a_stream_is_left_early(compress: Callable[[bytes], bytes]) -> None:
    """The source's descriptor is closed next; who still read from its number would rob the next file that gets it."""
    feed = io.BytesIO(compress(os.urandom(4 << 20)))
    with ExitStack() as stack:
        open_stream(feed.read, "test", stack).read(512)
    before = feed.tell()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("import-")]
    assert feed.tell() == before


def test_structure_may_not_claim_memory(tmp_path: Path) -> None:
    bomb = member("pax", type=tarfile.XHDTYPE, size=1 << 33).tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(InvalidSpec, match="claims to be"):
        read_tar(bomb + bytes(10240), tmp_path)


def test_the_reader_goes_forward_only() -> None:
    reader = ForwardReader(io.BytesIO(b"0123456789").read, "test")
    assert reader.read(3) == b"012"
    assert reader.seek(5) == 5
    with pytest.raises(InvalidSpec, match="backwards"):
        reader.seek(4)
    assert reader.read(100) == b"56789"


# --- headers -----------------------------------------------------------------------------------------------------


def headers(tree: Tree) -> bytes:
    return b"".join(tar_of(tree, b"c" * 64))


def test_headers_say_where_contents_are(tmp_path: Path) -> None:
    """Golden: what mkfs.erofs is given for one file, one empty file, one hard link and one time before 1970."""
    tree = Tree(Limits())
    node = Node(Kind.FILE, mode=0o4755, uid=1, gid=2, size=3, mtime_ns=-1, digest=bytes.fromhex("ab" * 32))
    tree.put((b"f",), node)
    tree.link((b"g",), (b"f",))
    tree.put((b"e",), Node(Kind.FILE, mtime_ns=7_000_000_000))
    with tarfile.open(fileobj=io.BytesIO(headers(tree)), mode="r:", tarinfo=NoContent) as archive:
        found = {info.name: (info.type, info.mode, info.linkname, dict(info.pax_headers)) for info in archive}
    assert found == {
        ".": (b"5", 0o755, "", {"path": ".", "SCHILY.xattr.trusted.dsec.config": "c" * 64}),
        "e": (b"0", 0o755, "", {"path": "e"}),
        "f": (b"0", 0o4755, "", {
            "path": "f", "mtime": "-1.999999999", "SCHILY.xattr.trusted.overlay.metacopy": "",
            "SCHILY.xattr.trusted.overlay.redirect": f"/ab/{'ab' * 31}",
        }),
        "g": (b"1", 0o4755, "f", {"path": "g", "linkpath": "f", "mtime": "-1.999999999"}),
    }


class NoContent(tarfile.TarInfo):
    """A member whose contents are not in the archive although it has a size."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "NoContent":
        info = super().frombuf(buf, encoding, errors)
        if info.type == tarfile.REGTYPE:
            info.size = 0
        return info

    # What Python 3.13 calls instead.
    @classmethod
    def _frombuf(cls, buf: bytes, encoding: str, errors: str, *, dircheck: bool = True) -> "NoContent":
        info: NoContent = super()._frombuf(buf, encoding, errors, dircheck=dircheck)  # type: ignore[misc]
        if info.type == tarfile.REGTYPE:
            info.size = 0
        return info


def test_the_same_tree_gives_the_same_headers_whatever_the_order(tmp_path: Path) -> None:
    entries = [(member(name, size=1, mtime=5), name[-1:].encode()) for name in ("b/x", "a", "b/a", "c")]
    one = read_tar(tar_bytes(entries), tmp_path / "one")
    two = read_tar(tar_bytes(entries[::-1]), tmp_path / "two")
    assert headers(one) == headers(two)
    changed = read_tar(tar_bytes([(member("c", size=1, mtime=5), b"!"), *entries[:-1]]), tmp_path / "three")
    assert headers(changed) != headers(one)


name_bytes = st.binary(min_size=1, max_size=12).filter(lambda name: b"/" not in name and b"\0" not in name)
names = name_bytes.filter(lambda name: name not in (b".", b".."))
files = st.builds(
    lambda data, mode, uid, mtime, xattr: (data, mode, uid, mtime, xattr),
    st.binary(max_size=40), st.integers(0, 0o7777), st.integers(0, 65535),
    st.integers(-(10**18), 4 * 10**18), st.one_of(st.none(), st.binary(max_size=20)),
)
trees = st.dictionaries(st.lists(names, min_size=1, max_size=4).map(tuple), files, max_size=12)


@settings(max_examples=60, deadline=None)
@given(wanted=trees)
def test_any_tree_survives_the_way_through_tar_objects_and_headers(
    wanted: dict[tuple[bytes, ...], tuple[bytes, int, int, int, bytes | None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # No name may be a directory of another's.
    wanted = {path: value for path, value in wanted.items()
              if not any(path[:depth] in wanted for depth in range(1, len(path)))}
    place = tmp_path_factory.mktemp("tree")
    tree = read_tar(tar_bytes([_entry(path, *value) for path, value in wanted.items()]), place)
    with tarfile.open(
        fileobj=io.BytesIO(headers(tree)), mode="r:", tarinfo=NoContent, errors="surrogateescape"
    ) as archive:
        found = {}
        for info in archive:
            if not info.isreg():
                continue
            records = {key: value.encode("utf-8", "surrogateescape") for key, value in info.pax_headers.items()}
            redirect = records.get("SCHILY.xattr.trusted.overlay.redirect")
            data = b"" if redirect is None else (place / "staging" / redirect.decode().replace("/", "")).read_bytes()
            found[tuple(info.name.encode("utf-8", "surrogateescape").split(b"/"))] = (
                data, info.mode, info.uid, _nanoseconds(info), records.get("SCHILY.xattr.user.x"),
            )
    assert found == wanted


def _entry(
    path: tuple[bytes, ...], data: bytes, mode: int, uid: int, mtime_ns: int, xattr: bytes | None
) -> tuple[tarfile.TarInfo, bytes]:
    sign, (seconds, fraction) = "-" if mtime_ns < 0 else "", divmod(abs(mtime_ns), 10**9)
    pax = {"mtime": f"{sign}{seconds}.{fraction:09d}"}
    if xattr is not None:
        pax["SCHILY.xattr.user.x"] = xattr.decode("utf-8", "surrogateescape")
    info = member(
        b"/".join(path).decode("utf-8", "surrogateescape"), size=len(data), mode=mode, uid=uid, pax_headers=pax
    )
    return info, data


def _nanoseconds(info: tarfile.TarInfo) -> int:
    """A time as mkfs.erofs reads it: whole seconds, then nanoseconds counted upwards from there."""
    text = info.pax_headers.get("mtime")
    if text is None:
        return int(info.mtime) * 10**9
    seconds, fraction = text.split(".")
    assert len(fraction) == 9
    return int(seconds) * 10**9 + int(fraction)


def test_a_manifest_reads_back(tmp_path: Path) -> None:
    sizes = {bytes([number] * 32): number << 30 for number in range(10)}
    write_manifest(tmp_path / "manifest", sizes)
    assert read_manifest(tmp_path / "manifest") == sorted(sizes.items())
    assert object_path(b"\xab" * 32) == "ab/" + "ab" * 31
