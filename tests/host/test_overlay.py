# SPDX-License-Identifier: Apache-2.0
"""Layer stacks as a sandbox gets them, checked through the mount and in the directories behind it."""

import contextlib
import errno
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsecd.linux import erofs, mount, overlay, proc, syscalls, userns
from tests.support import headerball as tar

pytestmark = pytest.mark.usefixtures("own_mounts")

BASE = 700_000


@dataclass(frozen=True)
class Stack:
    """One metadata layer over one object directory, and a writable layer, all idmapped to BASE."""

    lower: Path
    data: Path
    upper: Path
    work: Path
    root: Path
    #: Upper as it is on disk, not idmapped.
    plain_upper: Path

    def mount(self, *, fsuid: int | None = BASE, volatile: bool = False) -> None:
        fd = overlay.mount(
            lower=[self.lower], data=[self.data], upper=self.upper, work=self.work, fsuid=fsuid, volatile=volatile
        )
        attached(fd, self.root)


def attached(fd: int, target: Path) -> None:
    target.mkdir(exist_ok=True)
    mount.attach(fd, target)
    os.close(fd)


@pytest.fixture
def stack(disk: Path) -> Stack:
    objects = disk / "objects"
    (objects / "ab").mkdir(parents=True)
    (objects / "ab" / "cd").write_text("from the object store")
    (objects / "ab" / "cd").chmod(0o444)
    (disk / "headers.tar").write_bytes(
        tar.member(".", tar.DIRECTORY, mode=0o755) + tar.member("etc", tar.DIRECTORY, mode=0o755)
        + tar.stub("etc/file", 21, mode=0o644, uid=0) + tar.stub("etc/user", 21, mode=0o600, uid=1000, gid=1001)
        + tar.END
    )
    erofs.make_index(disk / "headers.tar", disk / "image")
    (disk / "rw" / "upper").mkdir(parents=True)
    (disk / "rw" / "work").mkdir()
    attached(erofs.mount(disk / "image"), disk / "layer")
    namespace = userns.create(BASE)
    for source, name in ((disk / "layer", "idmapped-layer"), (disk / "rw", "idmapped-rw")):
        fd = mount.clone_tree(source)
        mount.idmap(fd, namespace)
        attached(fd, disk / name)
    os.close(namespace)
    rw = disk / "idmapped-rw"
    return Stack(disk / "idmapped-layer", objects, rw / "upper", rw / "work", disk / "root", disk / "rw" / "upper")


def run(*command: str | Path, check: bool = True) -> str:
    return proc.run_blocking(list(command), timeout_s=60, check=check).stdout.decode()


def run_inside(script: str) -> None:
    """Run a shell script as the root user of a namespace with the stack's mapping."""
    fd = userns.create(BASE)
    argv = ["nsenter", "--user=/proc/self/fd/3", "--setuid=0", "--setgid=0", "sh", "-ec", script]
    proc.run_blocking(argv, timeout_s=60, fd_map={3: fd})
    os.close(fd)


def status(field: str) -> str:
    """A line of the calling thread's /proc status."""
    text = Path("/proc/thread-self/status").read_text()
    return next(line for line in text.splitlines() if line.startswith(f"{field}:")).split(":", 1)[1].strip()


def test_data_comes_from_the_object_store_with_mapped_owners(stack: Stack) -> None:
    stack.mount()
    assert run("cat", stack.root / "etc" / "file") == "from the object store"
    assert run("stat", "-c", "%u %g %s", stack.root / "etc" / "user").split() == ["701000", "701001", "21"]


def test_objects_are_not_reachable_by_their_own_names(stack: Stack) -> None:
    stack.mount()
    assert os.listdir(stack.root) == ["etc"]
    assert not (stack.root / "ab").exists()


def test_root_inside_owns_what_it_writes_and_disk_holds_inside_ids(stack: Stack) -> None:
    stack.mount()
    run_inside(f"cd {stack.root}/etc; echo new > new; chown 5:6 new; echo more >> file")
    assert run("stat", "-c", "%u %g", stack.root / "etc" / "new").split() == [str(BASE + 5), str(BASE + 6)]
    assert run("stat", "-c", "%u %g", stack.plain_upper / "etc" / "new").split() == ["5", "6"]
    assert run("cat", stack.plain_upper / "etc" / "file") == "from the object storemore\n"
    assert run("cat", stack.data / "ab" / "cd") == "from the object store"


def test_change_of_mode_copies_no_data(stack: Stack) -> None:
    """metacopy: a recursive chown of an image must not double it on disk."""
    stack.mount()
    (stack.root / "etc" / "file").chmod(0o600)
    # Size-correct, but a hole.
    assert (stack.plain_upper / "etc" / "file").read_bytes() == bytes(21)
    assert "trusted.overlay.metacopy" in os.listxattr(stack.plain_upper / "etc" / "file")
    assert run("cat", stack.root / "etc" / "file") == "from the object store"


def test_directory_of_a_layer_can_be_renamed(stack: Stack) -> None:
    """redirect_dir=on; without it rename gives EXDEV and mv falls back to copying everything."""
    stack.mount()
    os.rename(stack.root / "etc", stack.root / "moved")
    assert run("cat", stack.root / "moved" / "file") == "from the object store"
    assert os.getxattr(stack.plain_upper / "moved", "trusted.overlay.redirect") == b"etc"


def test_removed_file_is_a_whiteout(stack: Stack) -> None:
    stack.mount()
    (stack.root / "etc" / "file").unlink()
    assert os.listdir(stack.root / "etc") == ["user"]
    assert run("stat", "-c", "%F %t %T", stack.plain_upper / "etc" / "file") == "character special file 0 0\n"


def test_layers_may_be_detached_once_mounted(stack: Stack) -> None:
    stack.mount()
    mount.detach(stack.lower)
    mount.detach(stack.upper.parent)
    run_inside(f"printf x > {stack.root}/new")
    assert run("cat", stack.root / "etc" / "file", stack.root / "new") == "from the object storex"
    assert (stack.plain_upper / "new").exists()


def test_mount_that_came_out_read_only_is_an_error(stack: Stack) -> None:
    """With the mounter's own ids, unknown in the mapping, OverlayFS cannot make its directory in work."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="read-only") as caught:
        stack.mount(fsuid=None)
    assert caught.value.errno == errno.EROFS
    assert caught.value.filename == str(stack.work)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("fail", [False, True])
def test_thread_gets_its_ids_and_capabilities_back(stack: Stack, fail: bool) -> None:
    before = (status("Uid"), status("Gid"), status("CapEff"), syscalls.prctl(syscalls.PR_GET_SECUREBITS))
    with pytest.raises(OSError) if fail else contextlib.nullcontext():
        overlay.mount(
            lower=[stack.lower], data=[stack.data / "absent" if fail else stack.data], upper=stack.upper,
            work=stack.work, fsuid=BASE,
        )
    after = (status("Uid"), status("Gid"), status("CapEff"), syscalls.prctl(syscalls.PR_GET_SECUREBITS))
    assert after == before


def test_only_the_calling_thread_changes_its_ids() -> None:
    inside, done = threading.Event(), threading.Event()
    seen: list[str] = []

    def other() -> None:
        with overlay.acting_as(BASE):
            seen.append(status("Uid").split()[3])
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    assert status("Uid").split()[3] == "0"
    done.set()
    thread.join()
    assert seen == [str(BASE)]


def test_read_only_stack_follows_redirects(stack: Stack, disk: Path) -> None:
    """What a writable layer recorded is readable when that layer becomes a lower one: a snapshot."""
    stack.mount()
    os.rename(stack.root / "etc", stack.root / "moved")
    (stack.root / "moved" / "file").chmod(0o600)
    mount.detach(stack.root)
    fd = overlay.mount(
        lower=[stack.upper, stack.lower], data=[stack.data], upper=None, work=None, fsuid=None
    )
    view = disk / "view"
    attached(fd, view)
    assert os.listdir(view) == ["moved"]
    assert run("stat", "-c", "%a", view / "moved" / "file") == "600\n"
    assert run("cat", view / "moved" / "file") == "from the object store"
    with pytest.raises(OSError) as caught:
        (view / "new").touch()
    assert caught.value.errno == errno.EROFS


def test_first_lower_is_on_top(disk: Path) -> None:
    for name in ("top", "middle", "bottom"):
        (disk / name).mkdir()
        (disk / name / name).touch()
        (disk / name / "who").write_text(name)
    fd = overlay.mount(
        lower=[disk / "top", disk / "middle", disk / "bottom"], data=[], upper=None, work=None, fsuid=None
    )
    attached(fd, disk / "view")
    assert run("cat", disk / "view" / "who") == "top"
    assert sorted(os.listdir(disk / "view")) == ["bottom", "middle", "top", "who"]


def test_second_data_directory_is_asked_after_the_first(stack: Stack, disk: Path) -> None:
    """A local cache before the store: an object that appears in the cache is used without a new mount."""
    cache = disk / "cache"
    (cache / "ab").mkdir(parents=True)
    fd = overlay.mount(
        lower=[stack.lower], data=[cache, stack.data], upper=stack.upper, work=stack.work, fsuid=BASE
    )
    attached(fd, stack.root)
    assert run("cat", stack.root / "etc" / "file") == "from the object store"
    (cache / "ab" / "cd").write_text("from the local cache!")
    assert run("cat", stack.root / "etc" / "user") == "from the local cache!"


def test_missing_layer_is_named(stack: Stack, disk: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        overlay.mount(lower=[disk / "absent"], data=[], upper=stack.upper, work=stack.work, fsuid=None)


def test_upper_and_work_on_two_file_systems_says_so(stack: Stack, disk: Path) -> None:
    attached(mount.new_mount("tmpfs"), disk / "elsewhere")
    (disk / "elsewhere" / "work").mkdir()
    with pytest.raises(OSError, match=str(stack.upper)) as caught:
        overlay.mount(
            lower=[stack.lower], data=[stack.data], upper=stack.upper, work=disk / "elsewhere" / "work", fsuid=BASE
        )
    assert caught.value.errno == errno.EINVAL


def test_upper_without_work_is_refused(stack: Stack) -> None:
    with pytest.raises(ValueError, match="go together"):
        overlay.mount(lower=[stack.lower], data=[], upper=stack.upper, work=None, fsuid=None)


def test_paths_longer_than_an_option(disk: Path) -> None:
    place = disk / ("x" * 200) / ("y" * 200)
    for name in ("lower", "data", "upper", "work"):
        (place / name).mkdir(parents=True)
    (place / "lower" / "file").write_text("content")
    fd = overlay.mount(
        lower=[place / "lower"], data=[place / "data"], upper=place / "upper", work=place / "work", fsuid=None
    )
    attached(fd, disk / "root")
    (disk / "root" / "new").touch()
    assert run("cat", disk / "root" / "file") == "content"
    assert os.listdir(place / "upper") == ["new"]


def test_as_many_layers_as_the_kernel_takes_and_one_more(disk: Path) -> None:
    layers = [disk / "layers" / str(number) for number in range(overlay.MAX_LAYERS + 1)]
    for layer in layers:
        layer.mkdir(parents=True)
        (layer / layer.name).touch()
    fd = overlay.mount(lower=layers[:-1], data=[], upper=None, work=None, fsuid=None)
    attached(fd, disk / "view")
    assert len(os.listdir(disk / "view")) == overlay.MAX_LAYERS
    with pytest.raises(OSError, match="500"):
        overlay.mount(lower=layers, data=[], upper=None, work=None, fsuid=None)


def test_volatile_work_is_refused_until_forgotten(stack: Stack) -> None:
    stack.mount(volatile=True)
    # Newer kernels show it as fsync=volatile.
    assert run("findmnt", "-n", "-o", "OPTIONS", "-M", stack.root).strip().endswith("volatile")
    run_inside(f"printf x > {stack.root}/kept")
    syscalls.umount2(stack.root, 0)
    with pytest.raises(OSError) as caught:
        stack.mount()
    assert caught.value.errno == errno.EINVAL
    for _ in range(2):
        overlay.forget_volatile(stack.work)
    stack.mount()
    assert (stack.root / "kept").read_text() == "x"
