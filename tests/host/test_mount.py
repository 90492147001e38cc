# SPDX-License-Identifier: Apache-2.0
"""Mounts made through fds, read back with findmnt and stat."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dsecd.linux import mount, proc, syscalls, userns

pytestmark = pytest.mark.usefixtures("own_mounts")


def findmnt(path: Path) -> dict[str, Any] | None:
    """What findmnt knows of the mount on `path`, None if nothing is mounted there."""
    columns = "TARGET,FSTYPE,SOURCE,OPTIONS,PROPAGATION"
    done = proc.run_blocking(["findmnt", "-J", "-o", columns, "-M", path], timeout_s=60, check=False)
    if done.returncode:
        return None
    found: dict[str, Any] = json.loads(done.stdout)["filesystems"][0]
    return found


def attached(fd: int, target: Path) -> None:
    mount.attach(fd, target)
    os.close(fd)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.mkdir()
    return path


def test_clone_shows_the_tree_from_the_path_down(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("content")
    attached(mount.clone_tree(source), target)
    assert findmnt(target) is not None
    done = proc.run_blocking(["cat", target / "file"], timeout_s=60)
    assert done.stdout == b"content"


def test_detached_mount_is_invisible_and_goes_with_its_fd() -> None:
    before = proc.run_blocking(["cat", "/proc/self/mountinfo"], timeout_s=60).stdout
    fd = mount.new_mount("tmpfs")
    assert proc.run_blocking(["cat", "/proc/self/mountinfo"], timeout_s=60).stdout == before
    os.close(fd)
    with pytest.raises(OSError) as caught:
        os.fstat(fd)
    assert caught.value.errno == errno.EBADF


def test_mount_fds_are_close_on_exec(tmp_path: Path) -> None:
    for fd in (mount.new_mount("tmpfs"), mount.clone_tree(tmp_path)):
        assert not os.get_inheritable(fd)
        os.close(fd)


def test_idmapped_clone_shifts_owners_both_ways(disk: Path) -> None:
    source, target = disk / "source", disk / "target"
    source.mkdir()
    target.mkdir()
    (source / "root").touch()
    (source / "user").touch()
    os.chown(source / "user", 1000, 1001)
    tree, namespace = mount.clone_tree(source), userns.create(500_000)
    mount.idmap(tree, namespace)
    os.close(namespace)
    attached(tree, target)
    done = proc.run_blocking(["stat", "-c", "%n %u %g", "root", "user"], timeout_s=60, cwd=target)
    assert done.stdout == b"root 500000 500000\nuser 501000 501001\n"
    # And what is given to an outside id there is the inside id on disk.
    os.chown(target / "root", 500_007, 500_008)
    done = proc.run_blocking(["stat", "-c", "%u %g", source / "root"], timeout_s=60)
    assert done.stdout == b"7 8\n"


def test_attached_mount_cannot_be_idmapped_any_more(disk: Path) -> None:
    tree, namespace = mount.clone_tree(disk), userns.create(500_000)
    mount.attach(tree, disk)
    with pytest.raises(OSError) as caught:
        mount.idmap(tree, namespace)
    assert caught.value.errno == errno.EINVAL
    os.close(tree)
    os.close(namespace)


def test_read_only_attribute(target: Path) -> None:
    attached(mount.new_mount("tmpfs", attrs=syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID), target)
    found = findmnt(target)
    assert found is not None
    assert {"ro", "nosuid"} <= set(found["options"].split(","))
    with pytest.raises(OSError) as caught:
        (target / "file").touch()
    assert caught.value.errno == errno.EROFS


def test_set_attrs_of_an_attached_mount(target: Path) -> None:
    fd = mount.new_mount("tmpfs")
    mount.attach(fd, target)
    (target / "file").touch()
    mount.set_attrs(fd, attr_set=syscalls.MOUNT_ATTR_RDONLY)
    found = findmnt(target)
    assert found is not None
    assert "ro" in found["options"].split(",")
    mount.set_attrs(fd, attr_clr=syscalls.MOUNT_ATTR_RDONLY)
    os.close(fd)
    (target / "second").touch()


def test_options_reach_the_file_system(target: Path) -> None:
    attached(mount.new_mount("tmpfs", source="my name", options={"size": "1m", "mode": "0750"}), target)
    found = findmnt(target)
    assert found is not None
    assert (found["fstype"], found["source"]) == ("tmpfs", "my name")
    assert {"size=1024k", "mode=750"} <= set(found["options"].split(","))


def test_refused_option_says_what_the_kernel_said() -> None:
    with pytest.raises(OSError) as caught:
        mount.new_mount("tmpfs", options={"size": "much"})
    assert caught.value.errno == errno.EINVAL
    assert "mount tmpfs: tmpfs: Bad value for 'size'" in str(caught.value)


def test_unknown_option_is_named() -> None:
    with pytest.raises(OSError, match=r"Unknown parameter 'nonsense'"):
        mount.new_mount("tmpfs", options={"nonsense": None})


def test_unknown_file_system_is_enodev() -> None:
    with pytest.raises(OSError, match="nosuchfs") as caught:
        mount.new_mount("nosuchfs")
    assert caught.value.errno == errno.ENODEV


def test_failures_leave_no_fd(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError):
            mount.new_mount("tmpfs", options={"size": "much"})
        with pytest.raises(FileNotFoundError):
            mount.clone_tree(tmp_path / "absent")
    assert set(os.listdir("/proc/self/fd")) <= before


def test_attach_to_a_missing_target_names_it(tmp_path: Path) -> None:
    fd = mount.new_mount("tmpfs")
    with pytest.raises(FileNotFoundError, match="absent") as caught:
        mount.attach(fd, tmp_path / "absent")
    assert caught.value.filename == str(tmp_path / "absent")
    os.close(fd)


def test_detach_works_while_a_file_is_open(target: Path) -> None:
    attached(mount.new_mount("tmpfs"), target)
    with (target / "file").open("w+") as file:
        file.write("still here")
        file.flush()
        mount.detach(target)
        assert findmnt(target) is None
        file.seek(0)
        assert file.read() == "still here"


def test_detach_of_nothing_is_einval_with_the_path(target: Path) -> None:
    with pytest.raises(OSError, match=str(target)) as caught:
        mount.detach(target)
    assert caught.value.errno == errno.EINVAL


def test_detach_does_not_follow_a_symlink(tmp_path: Path, target: Path) -> None:
    attached(mount.new_mount("tmpfs"), target)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(OSError):
        mount.detach(tmp_path / "link")
    assert findmnt(target) is not None


def test_make_private_stops_propagation(target: Path) -> None:
    attached(mount.new_mount("tmpfs"), target)
    syscalls.mount(None, target, None, syscalls.MS_SHARED)
    assert (findmnt(target) or {})["propagation"] == "shared"
    mount.make_private(target)
    assert (findmnt(target) or {})["propagation"] == "private"


def test_mountinfo_agrees_with_the_file_names(tmp_path: Path) -> None:
    """Names that the kernel escapes, and some it does not."""
    names = ["a b", "tab\there", "line\nbreak", "back\\slash", "form\ffeed", "ü", "not\udcffutf8", "#hash", "\\040"]
    for name in names:
        (tmp_path / name).mkdir()
        attached(mount.new_mount("tmpfs", source=name.replace("\udcff", "?"), attrs=8), tmp_path / name)
    found = {m.target: m for m in mount.mountinfo() if m.target.parent == tmp_path}
    assert sorted(map(os.fsencode, found)) == sorted(os.fsencode(tmp_path / name) for name in names)
    assert {m.source for m in found.values()} == {name.replace("\udcff", "?") for name in names}
    for path, m in found.items():
        assert m.fstype == "tmpfs"
        assert "noexec" in m.options
        device = os.stat(path).st_dev
        assert m.device == f"{os.major(device)}:{os.minor(device)}"


def test_mountinfo_of_a_process_that_is_gone_raises() -> None:
    with proc.sleeper(0) as pid:
        assert mount.mountinfo(pid)
    with pytest.raises(ProcessLookupError):
        mount.mountinfo(pid)


@pytest.mark.parametrize("part", ["l" * 120, "back\\slash"])
def test_source_path_makes_awkward_paths_usable(disk: Path, target: Path, part: str) -> None:
    """OverlayFS as the reader: it refuses a long option and unescapes a backslash."""
    lower = disk / part / part / part
    upper, work = lower / "upper", lower / "work"
    for path in (upper, work):
        path.mkdir(parents=True)
    (lower / "file").write_text("content")
    with mount.source_path(lower) as low, mount.source_path(upper) as up, mount.source_path(work) as wk:
        assert len(os.fspath(low)) < 100
        options = [("lowerdir+", str(low)), ("upperdir", str(up)), ("workdir", str(wk))]
        attached(mount.new_mount("overlay", options=options), target)
    assert (target / "file").read_text() == "content"
    (target / "new").touch()
    assert (upper / "new").exists()


def test_source_path_leaves_a_plain_path_alone(tmp_path: Path) -> None:
    with mount.source_path(tmp_path) as path:
        assert path == tmp_path
