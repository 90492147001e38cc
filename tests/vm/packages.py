# SPDX-License-Identifier: Apache-2.0
"""Our packages on the test host: finding the freshly built ones, installing them, and what a host's files were before.

Here: what every module needs that tests an installed dsec. Not here: tests; building packages (`make deb`).
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.rootfs import debian_tar
from tests.vm import host, kernels
from tests.vm.host import Saved, VmHost
from tests.vm.image import CHECKOUT, Image
from tests.vm.kernels import Kernel

#: Folder with the packages to test, other than build/deb.
VARIABLE = "DSEC_TEST_DEBS"
IMAGE = "debian:trixie"
_INSTALL_S = 600.0

#: Files that any package's coming and going changes, or that the host itself writes meanwhile.
_EXPECTED = (
    "/etc/group-", "/etc/gshadow-", "/etc/ld.so.cache", "/etc/passwd-", "/etc/shadow-", "/etc/subgid-", "/etc/subuid-",
    "/root/", "/tmp/", "/usr/local/lib/testhost/", "/usr/share/python3/debpython/__pycache__/", "/var/cache/apt/",
    "/var/cache/debconf/", "/var/cache/ldconfig/", "/var/lib/apt/", "/var/lib/dpkg/", "/var/lib/systemd/", "/var/log/",
    "/var/tmp/",
)  # fmt: skip

_SLIM_FORM = "1"  # changes with _LEFT_OUT
_LEFT_OUT = (
    "usr/lib/x86_64-linux-gnu/gconv/", "usr/share/bash-completion/", "usr/share/doc/", "usr/share/info/",
    "usr/share/lintian/", "usr/share/locale/", "usr/share/man/", "usr/share/zoneinfo/", "var/cache/", "var/lib/apt/",
)  # fmt: skip
#: Folders that crun and py3clean make for themselves; what is in the first would show.
_OF_OTHERS = frozenset(("/run/crun", "/usr/share/python3/debpython/__pycache__"))

_TRACES = """
sort /sys/kernel/security/apparmor/profiles
find /sys/fs/bpf -mindepth 1
ip -oneline link | cut -d: -f2
nft list tables
find /run/netns -mindepth 1 2>/dev/null || true
losetup --all
cat /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds
find /sys/fs/cgroup -type d -name '*dsec*' 2>/dev/null || true
grep -h dsec /proc/[0-9]*/mountinfo | sort -u || true
"""


class PackagesMissing(Exception):
    """There is nothing to install; the text says what to do."""


def built(folder: Path | None = None) -> list[Path]:
    """The files of our packages, of those that `make deb` built or in a folder.  Raises PackagesMissing."""
    folder = folder or Path(os.environ.get(VARIABLE, CHECKOUT / "build/deb"))
    found = []
    for name in ("dsecd", "python3-libdsec"):
        # Of several versions the one built last.
        files = sorted(folder.glob(f"{name}_*.deb"), key=lambda path: path.stat().st_mtime)
        if not files:
            raise PackagesMissing(f"no package {name} in {folder} (run: make deb)")
        found.append(files[-1])
    return found


def install(vm: VmHost, files: Sequence[Path] = ()) -> None:
    """Install our packages, or these files of them; the test host has what they need.  Raises CommandFailed."""
    paths = [vm.put(path, "/root/packages") for path in files or built()]
    vm.run(
        ["apt-get", "--yes", "--no-install-recommends", "install", *paths],
        env={"DEBIAN_FRONTEND": "noninteractive"}, timeout_s=_INSTALL_S,
    )  # fmt: skip


def purge(vm: VmHost) -> None:
    """Take our packages off with all that is theirs.  Raises CommandFailed."""
    names = [path.name.partition("_")[0] for path in built()]
    vm.run(
        ["apt-get", "--yes", "purge", *names], env={"DEBIAN_FRONTEND": "noninteractive"}, timeout_s=_INSTALL_S
    )  # fmt: skip


def installed(kernel: Kernel, base: Image) -> Saved:
    """The saved machine on which our packages are installed and IMAGE is imported.  Hold ``host.only_machine``."""
    before = host.booted(kernel, base)
    digest = host.short_digest([before.folder.name, *(kernels.sha256(path) for path in built()), _SLIM_FORM])
    folder = base.folder / f"dsec-{kernel.name}-{digest}"
    # Each build of the packages has another: only the newest is of use.
    for other in base.folder.glob(f"dsec-{kernel.name}-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)

    def prepare(vm: VmHost) -> None:
        install(vm)
        import_debian(vm)

    return host.prepared(folder, kernel, lambda: VmHost(kernel, before), prepare)


def import_debian(vm: VmHost) -> None:
    """Give the daemon a minimal Debian as an image, IMAGE.  Raises CommandFailed."""
    path = vm.put(_slim_tar(), "/root/images")
    vm.run(["dsecctl", "image", "import", "--kind", "rootfs-tar", path, IMAGE], timeout_s=600)
    vm.run(["rm", path])


def _slim_tar() -> Path:
    """A minimal Debian without what nobody reads in a test: half as many files to put, digest and store."""
    source = debian_tar()
    target = source.with_name(f"{source.stem}-slim-{_SLIM_FORM}.tar")
    if not target.exists():
        partial = target.with_name(f"partial-{os.getpid()}-{target.name}")
        with tarfile.open(source) as old, tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as new:
            for member in old:
                if not member.name.removeprefix("./").startswith(_LEFT_OUT):
                    new.addfile(member, old.extractfile(member) if member.isreg() else None)
        partial.rename(target)
    return target


def files(vm: VmHost) -> frozenset[str]:
    """All files on the host's disk and in /run, without those whose coming and going says nothing."""
    # What goes while it is looked at is nobody's business, and find's status is that it was missed.
    shown = ["-xdev", "-not", "-path", "/run/systemd/*", "-not", "-path", "/run/udev/*"]
    found = vm.run(["find", "/", "/run", *shown], check=False)
    assert found.status in (0, 1) and found.text, found
    paths = (path for path in found.text.splitlines() if not path.startswith(_EXPECTED))
    return frozenset(paths) - _OF_OTHERS


def traces(vm: VmHost) -> str:
    """What our packages could leave in the kernel: profiles, pinned objects, devices, namespaces, mounts, cgroups."""
    return vm.run(_TRACES).text
