# SPDX-License-Identifier: Apache-2.0
"""Metadata images: what the kernel shows of a headerball, by lstat and getxattr on the mounted image.

The traps that erofs.make_index documents each have a test here: should a later mkfs.erofs change one, we learn it.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dsecd.linux import erofs, mount, proc
from tests.support import headerball as tar

pytestmark = pytest.mark.usefixtures("own_mounts")

Mounted = Callable[..., Path]


@pytest.fixture
def image_of(disk: Path) -> Callable[..., Path]:
    def make(*members: bytes, name: str = "image") -> Path:
        headers = disk / f"{name}.tar"
        headers.write_bytes(b"".join(members) + tar.END)
        erofs.make_index(headers, disk / name)
        return disk / name

    return make


@pytest.fixture
def mounted(disk: Path, image_of: Callable[..., Path]) -> Mounted:
    """Makes an image of the members and mounts it; returns the mount point."""
    def make(*members: bytes) -> Path:
        fd = erofs.mount(image_of(*members))
        target = disk / "mounted"
        target.mkdir()
        mount.attach(fd, target)
        os.close(fd)
        return target

    return make


def xattrs(path: Path) -> dict[str, bytes]:
    names = os.listxattr(path, follow_symlinks=False)
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in names}


ROOT = tar.member(".", tar.DIRECTORY, mode=0o755)


def test_mount_is_read_only_erofs_without_a_loop_device(mounted: Mounted, disk: Path) -> None:
    root = mounted(ROOT)
    done = proc.run_blocking(["findmnt", "-n", "-r", "-o", "FSTYPE,SOURCE,OPTIONS", "-M", root], timeout_s=60)
    fstype, source, options = done.stdout.decode().split()
    assert (fstype, source) == ("erofs", str(disk / "image"))
    assert "ro" in options.split(",")
    with pytest.raises(OSError) as caught:
        (root / "file").touch()
    assert caught.value.errno == errno.EROFS
    loops = [path for path in Path("/sys/block").glob("loop*/loop/backing_file") if str(disk) in path.read_text()]
    assert loops == []


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 4095, 4096, 4097])
def test_small_file_keeps_size_and_redirect(mounted: Mounted, size: int) -> None:
    file = mounted(ROOT, tar.stub("file", size, redirect="/ef/0123")) / "file"
    assert os.lstat(file).st_size == size
    assert xattrs(file) == {"trusted.overlay.metacopy": b"", "trusted.overlay.redirect": b"/ef/0123"}
    assert file.read_bytes() == b"\0" * size


def test_empty_file_is_plain_and_readable(mounted: Mounted) -> None:
    file = mounted(ROOT, tar.member("file")) / "file"
    assert (file.read_bytes(), xattrs(file)) == (b"", {})


def test_large_sizes_cost_no_space(mounted: Mounted, disk: Path) -> None:
    sizes = {"five-gib": 5 << 30, "nine-gib": (9 << 30) + 1, "four-tib": 1 << 42}
    root = mounted(ROOT, *(tar.stub(name, size) for name, size in sizes.items()))
    assert {name: os.lstat(root / name).st_size for name in sizes} == sizes
    assert (disk / "image").stat().st_size <= 8192


@pytest.mark.parametrize(
    ("written", "nanoseconds"),
    [
        ("1234567.123456789", 1234567_123456789),
        ("7.000000001", 7_000000001),
        ("0.999999999", 999999999),
        ("4294967297.000000002", 4294967297_000000002),
        ("-1.000000000", -1_000000000),
        # -5.25 s: the fraction counts upwards from the second below.
        ("-6.750000000", -5_250000000),
        # Not padded: five nanoseconds, where POSIX says half a second.
        ("7.5", 7_000000005),
    ],
)
def test_mtime_to_the_nanosecond(mounted: Mounted, written: str, nanoseconds: int) -> None:
    root = mounted(ROOT, tar.stub("file", 1, mtime=written), tar.member("dir", tar.DIRECTORY, mtime=written))
    assert os.lstat(root / "file").st_mtime_ns == nanoseconds
    assert os.lstat(root / "dir").st_mtime_ns == nanoseconds


def test_hard_links_are_one_inode(mounted: Mounted) -> None:
    root = mounted(
        ROOT, tar.stub("a", 10), tar.member("dir", tar.DIRECTORY), tar.member("dir/b", tar.HARD_LINK, link="a"),
        tar.member("c", tar.HARD_LINK, link="a"),
    )
    found = [os.lstat(root / name) for name in ("a", "dir/b", "c")]
    assert {s.st_ino for s in found} == {found[0].st_ino}
    assert {(s.st_nlink, s.st_size) for s in found} == {(3, 10)}
    assert xattrs(root / "c")["trusted.overlay.redirect"] == b"/ab/cd"


def test_hard_link_before_its_target_fails(image_of: Callable[..., Path]) -> None:
    with pytest.raises(proc.ProcessFailed, match="No such file or directory"):
        image_of(ROOT, tar.member("b", tar.HARD_LINK, link="a"), tar.stub("a", 10))


def test_devices_and_fifo(mounted: Mounted) -> None:
    root = mounted(
        ROOT, tar.member("null", tar.CHAR, mode=0o666, device=(1, 3)),
        tar.member("disk", tar.BLOCK, mode=0o660, device=(259, 300_000)),
        tar.member("whiteout", tar.CHAR, mode=0), tar.member("fifo", tar.FIFO, mode=0o600),
    )
    found = {path.name: os.lstat(path) for path in root.iterdir()}
    assert {name: stat.filemode(s.st_mode) for name, s in found.items()} == {
        "null": "crw-rw-rw-", "disk": "brw-rw----", "whiteout": "c---------", "fifo": "prw-------",
    }
    numbers = {name: (os.major(s.st_rdev), os.minor(s.st_rdev)) for name, s in found.items()}
    assert numbers == {"null": (1, 3), "disk": (259, 300_000), "whiteout": (0, 0), "fifo": (0, 0)}


@pytest.mark.parametrize("target", ["x", "y" * 101, "z" * 4095, "a b\n", "../up", "/abs"])
def test_symlink_target_is_kept(mounted: Mounted, target: str) -> None:
    assert os.readlink(mounted(ROOT, tar.member("link", tar.SYMLINK, link=target, mode=0o777)) / "link") == target


def test_long_names(mounted: Mounted) -> None:
    deep = "/".join(["d" * 200] * 8)
    parts = deep.split("/")
    parents = [tar.member("/".join(parts[:n]), tar.DIRECTORY, mode=0o755) for n in range(1, len(parts) + 1)]
    root = mounted(ROOT, *parents, tar.stub(f"{deep}/file", 3), tar.stub("n" * 255, 4))
    assert len(deep) > 1500
    assert os.lstat(root / deep / "file").st_size == 3
    assert os.lstat(root / ("n" * 255)).st_size == 4


def test_name_of_256_bytes_fails(image_of: Callable[..., Path]) -> None:
    with pytest.raises(proc.ProcessFailed, match="File name too long"):
        image_of(ROOT, tar.stub("n" * 256, 4))


def test_names_of_any_bytes(mounted: Mounted) -> None:
    names = [b"\xff\xfe", b"line\nbreak", b"a b", b"tab\t", "ü".encode(), b".wh.file", b"a=b", b"-rf"]
    root = mounted(ROOT, *(tar.stub(name, 1) for name in names))
    assert sorted(os.listdir(os.fsencode(root))) == sorted(names)


def test_extended_attributes(mounted: Mounted) -> None:
    capability = bytes.fromhex("0100000200040000000000000000000000000000")
    given = {
        "security.capability": capability, "user.text": b"v", "user.binary": b"\0=\n\xff", "user.empty": b"",
        "user.large": b"L" * 4000, "system.posix_acl_access": bytes.fromhex(
            "0200000001000600ffffffff02000400e803000004000400ffffffff10000400ffffffff20000400ffffffff"),
    }
    root = mounted(
        ROOT, tar.member("file", xattrs=given),
        tar.member("dir", tar.DIRECTORY, xattrs={"trusted.overlay.opaque": b"y"}),
        tar.member("link", tar.SYMLINK, link="x", xattrs={"security.label": b"l"}),
    )
    assert xattrs(root / "file") == given
    assert xattrs(root / "dir") == {"trusted.overlay.opaque": b"y"}
    assert xattrs(root / "link") == {"security.label": b"l"}


def test_attributes_of_unknown_kinds_are_dropped(mounted: Mounted) -> None:
    root = mounted(ROOT, tar.member("file", xattrs={"weird.x": b"1", "system.other": b"1", "user.kept": b"1"}))
    assert os.listxattr(root / "file") == ["user.kept"]


def test_attribute_name_ends_at_the_first_equals_sign(mounted: Mounted) -> None:
    assert xattrs(mounted(ROOT, tar.member("file", xattrs={"user.a=b": b"v"})) / "file") == {"user.a": b"b=v"}


def test_attributes_up_to_32000_bytes_a_file(mounted: Mounted, image_of: Callable[..., Path]) -> None:
    many = {f"user.k{n}": b"v" * 1000 for n in range(31)}
    assert xattrs(mounted(ROOT, tar.member("file", xattrs=many)) / "file") == many
    with pytest.raises(proc.ProcessFailed, match="Input/output error"):
        image_of(ROOT, tar.member("file", xattrs={f"user.k{n}": b"v" * 1000 for n in range(40)}), name="large")


def test_large_ids(mounted: Mounted) -> None:
    ids = {"a": (70_000, 100_000), "b": (2_097_152, 4_294_967_294), "c": (0, 65_535)}
    root = mounted(ROOT, *(tar.stub(name, 1, uid=uid, gid=gid) for name, (uid, gid) in ids.items()))
    assert {name: (os.lstat(root / name).st_uid, os.lstat(root / name).st_gid) for name in ids} == ids


def test_special_mode_bits(mounted: Mounted) -> None:
    root = mounted(ROOT, tar.stub("suid", 1, mode=0o6755), tar.member("tmp", tar.DIRECTORY, mode=0o1777))
    assert stat.S_IMODE(os.lstat(root / "suid").st_mode) == 0o6755
    assert stat.S_IMODE(os.lstat(root / "tmp").st_mode) == 0o1777


def test_root_directory_is_a_member(mounted: Mounted) -> None:
    root = mounted(tar.member(".", tar.DIRECTORY, mode=0o711, uid=3, gid=4, mtime=99, xattrs={"user.r": b"1"}))
    found = os.lstat(root)
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, found.st_mtime) == (0o711, 3, 4, 99)
    assert xattrs(root) == {"user.r": b"1"}


def test_directories_without_a_member_are_open_to_all(mounted: Mounted) -> None:
    """The trap that makes every importer list every directory."""
    root = mounted(tar.stub("dir/file", 1))
    assert stat.S_IMODE(os.lstat(root).st_mode) == 0o777
    assert stat.S_IMODE(os.lstat(root / "dir").st_mode) == 0o777


def test_last_of_two_members_with_one_name_wins(mounted: Mounted) -> None:
    root = mounted(ROOT, tar.stub("a", 1), tar.stub("a", 2, redirect="/zz/zz"))
    assert os.lstat(root / "a").st_size == 2
    assert xattrs(root / "a")["trusted.overlay.redirect"] == b"/zz/zz"


def test_same_headers_make_the_same_bytes(image_of: Callable[..., Path], disk: Path) -> None:
    members = [ROOT] + [
        tar.stub(f"file-{n}", n, redirect=f"/{n:02x}/x", mtime=f"{n}.{n:09d}", xattrs={"user.n": b"%d" % (n % 7)})
        for n in range(1, 500)
    ]
    first = hashlib.sha256(image_of(*members, name="first").read_bytes()).digest()
    os.utime(disk / "first.tar", (1, 1))
    second = hashlib.sha256(image_of(*members, name="second").read_bytes()).digest()
    assert first == second
    assert hashlib.sha256(image_of(*members[:-1], name="third").read_bytes()).digest() != first


def test_failed_image_leaves_no_file(disk: Path) -> None:
    (disk / "bad.tar").write_bytes(b"this is no tar archive" * 100)
    with pytest.raises(proc.ProcessFailed, match=r"mkfs\.erofs"):
        erofs.make_index(disk / "bad.tar", disk / "image")
    assert not (disk / "image").exists()


def test_mount_of_something_else_is_einval_with_the_path(disk: Path) -> None:
    (disk / "not-an-image").write_bytes(b"\0" * 8192)
    with pytest.raises(OSError, match="not-an-image") as caught:
        erofs.mount(disk / "not-an-image")
    assert caught.value.errno == errno.EINVAL


def test_mount_of_nothing_is_enoent_with_the_path(disk: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        erofs.mount(disk / "absent")


def test_mount_of_a_path_longer_than_an_option(disk: Path, image_of: Callable[..., Path]) -> None:
    place = disk / ("x" * 200) / ("y" * 200)
    place.mkdir(parents=True)
    image_of(ROOT, tar.stub("file", 5)).rename(place / "image")
    fd = erofs.mount(place / "image")
    (disk / "target").mkdir()
    mount.attach(fd, disk / "target")
    os.close(fd)
    assert os.listdir(disk / "target") == ["file"]
