# SPDX-License-Identifier: Apache-2.0
"""The test host's disk: a Debian 13 with all that dsec depends on, but not dsec.

Here: building it from Debian's archive, its small initramfs, and keeping it in the build cache under a name that
changes with what it is made of. Not here: booting it (``host.py``), which kernels there are (``kernels.py``).
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsecd.linux import cpio
from tests.support.rootfs import clean_environment

CHECKOUT = Path(__file__).resolve().parents[2]
SUITE = "trixie"
_SIZE = "8G"  # a sparse file
_UNUSED_S = 24 * 3600.0

#: What a test host is, besides what debian/control says that dsec runs on.
_PACKAGES = (
    "apparmor", "busybox-static", "curl", "dbus", "kmod", "libpam-systemd", "linux-image-amd64", "procps",
    "psmisc", "python3-libapparmor", "python3-pytest", "python3-pytest-timeout", "strace", "systemd-resolved",
    "systemd-sysv", "udev", "zram-tools",
)  # fmt: skip

#: Modules without which the root file system cannot be mounted; those that they need are found.
_MODULES = ("virtio_pci", "virtio_blk", "ext4", "crc32c_generic", "crc32c_intel")

#: Units that do nothing for a test but take seconds of an emulated processor's time at boot or later; a test that is
#: about one of them unmasks it.
_MASKED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
    "fstrim.timer", "getty@tty1.service", "ldconfig.service", "serial-getty@ttyS0.service",
    "systemd-firstboot.service", "systemd-hwdb-update.service", "systemd-resolved.service",
    "systemd-timesyncd.service", "zramswap.service",
)  # fmt: skip

_AGENT_UNIT = """\
[Unit]
Description=Commands from the tests outside
After=basic.target

[Service]
Type=exec
Environment=PYTHONPATH=/usr/local/lib/testhost
ExecStart=/usr/bin/python3 -P -m tests.vm.guest_agent
Restart=always
RestartSec=0.1
TasksMax=infinity
LimitNOFILE=1048576

[Install]
WantedBy=multi-user.target
"""

#: The initramfs: no udev, no search, only the disk that is there.
_INIT = """\
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in /modules/*.ko; do /bin/busybox insmod "$module"; done
tries=0
until [ -b /dev/vda ] || [ $tries -gt 200 ]; do /bin/busybox usleep 50000; tries=$((tries + 1)); done
/bin/busybox mount -t ext4 -o rw /dev/vda /root || { echo "testhost: no root file system"; /bin/busybox poweroff -f; }
/bin/busybox mount --move /dev /root/dev
exec /bin/busybox switch_root /root /sbin/init "$@"
"""

#: Runs in the unpacked tree. The stock profiles cost ten to twenty seconds of each boot and confine nothing here.
_FINISH = """\
set -eu
find "$1/etc/apparmor.d" -maxdepth 1 -type f -delete
rm -f "$1"/boot/initrd* "$1"/etc/resolv.conf
rm -rf "$1"/var/cache/apt/*.bin "$1"/var/lib/apt/lists/*
"""


class ImageError(Exception):
    """The image cannot be built."""


@dataclass(frozen=True)
class Image:
    """A finished image in the cache."""

    folder: Path

    @property
    def disk(self) -> Path:
        """An ext4 file system, raw. Never written to: machines use overlays."""
        return self.folder / "disk.raw"

    @property
    def kernel(self) -> Path:
        """Debian's kernel."""
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """What Debian's kernel, which has its drivers in modules, needs to find the disk."""
        return self.folder / "initrd"


def cache() -> Path:
    """Where images and saved machines are kept."""
    path = Path(os.environ.get("DSEC_BUILD_CACHE", "/var/cache/dsec-build")) / "vm"
    path.mkdir(parents=True, exist_ok=True)
    return path


def get() -> Image:
    """The image for this checkout; builds it when the cache has none.  Hold the machine's lock.

    Blocks, up to some minutes.  Raises ImageError with the end of mmdebstrap's report.
    """
    folder = cache() / f"image-{digest()}"
    if not folder.is_dir():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _build(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    (folder / "used").touch()
    _drop_others(folder)
    return Image(folder)


def packages() -> list[str]:
    """All packages that the image gets by name, sorted."""
    return sorted({*_PACKAGES, *run_time_packages((CHECKOUT / "packaging/debian/control").read_text())})


def run_time_packages(control: str) -> set[str]:
    """What the binary packages of a debian/control depend on: first alternatives, none of its own packages."""
    own = set(re.findall(r"^Package:\s*(\S+)", control, re.MULTILINE))
    found: set[str] = set()
    for field in re.findall(r"^(?:Pre-)?Depends:((?:.*\n)(?:[ \t].*\n?)*)", control, re.MULTILINE):
        for relation in field.split(","):
            name = re.sub(r"\(.*?\)|\[.*?\]|<.*?>|:any", "", relation.split("|")[0]).strip()
            if name and not name.startswith("${"):
                found.add(name)
    return found - own


def digest() -> str:
    """Names an image by what it is made of here. The archive moves below it: remove the cache for newer packages."""
    total = hashlib.sha256("\n".join([SUITE, *packages()]).encode())
    for path in (__file__, cpio.__file__, *(str(path) for path in _agent_files())):
        total.update(Path(path).read_bytes())
    return total.hexdigest()[:16]


def _agent_files() -> list[Path]:
    here = Path(__file__).parent
    return [here / "frames.py", here / "guest_agent.py"]


def _build(folder: Path) -> None:
    tree = folder / "tree"
    _bootstrap(tree, folder / "log")
    _configure(tree)
    (version,) = (path.name for path in (tree / "usr/lib/modules").iterdir())
    shutil.copyfile(tree / "boot" / f"vmlinuz-{version}", folder / "vmlinuz")
    write_initrd(tree, version, folder / "initrd")
    # No journal and no sums: a machine's disk is thrown away, and is never read again after a crash of ours.
    _run(
        ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal,^metadata_csum", "-E", "lazy_itable_init=1",
         "-d", str(tree), str(folder / "disk.raw"), _SIZE]
    )  # fmt: skip
    shutil.rmtree(tree)


def _bootstrap(tree: Path, log: Path) -> None:
    """Unpack Debian. From the mirrors, and with the transport settings, of the system that we are on."""
    sources, options = Path("/etc/apt/sources.list"), Path("/etc/apt/apt.conf.d/90host")
    own = sources.is_file() and f" {SUITE} " in sources.read_text()
    command = [
        "mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory", "--skip=check/empty",
        *([f"--aptopt={options}"] if options.is_file() else []),
        "--aptopt=APT::Install-Recommends false", "--dpkgopt=force-unsafe-io", "--dpkgopt=force-confold",
        # The manual pages and documents of what is under test come in later, and are to be purged.
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        # An initramfs of Debian's takes a minute to build and 20 s to boot from.
        '--essential-hook=mkdir -p "$1/etc/kernel/postinst.d"; '
        'ln -s /bin/true "$1/etc/kernel/postinst.d/initramfs-tools"',
        f"--include={','.join(packages())}", f"--customize-hook={_FINISH}",
        SUITE, str(tree), *([str(sources)] if own else []),
    ]  # fmt: skip
    with log.open("wb") as output:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False, env=clean_environment()
        )
    if done.returncode != 0:
        raise ImageError(f"mmdebstrap ended with status {done.returncode}: {log.read_text(errors='replace')[-3000:]}")


def _configure(tree: Path) -> None:
    units = tree / "etc/systemd/system"
    (tree / "etc/hostname").write_text("testhost\n")
    (tree / "etc/hosts").write_text("127.0.0.1 localhost testhost\n::1 localhost\n")
    (tree / "etc/machine-id").write_text("")
    (tree / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 0\n")
    for name in _MASKED:
        (units / name).unlink(missing_ok=True)
        (units / name).symlink_to("/dev/null")
    (units / "testhost-agent.service").write_text(_AGENT_UNIT)
    wants = units / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "testhost-agent.service").symlink_to("../testhost-agent.service")
    modules = tree / "usr/local/lib/testhost/tests/vm"
    modules.mkdir(parents=True)
    for path in _agent_files():
        shutil.copyfile(path, modules / path.name)
    # A journal on the disk, with no rate limit: it is evidence, and a machine reboots within a test.
    settings = tree / "etc/systemd/journald.conf.d/testhost.conf"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("[Journal]\nStorage=persistent\nRateLimitBurst=0\nSystemMaxUse=64M\n")


def write_initrd(tree: Path, version: str, target: Path) -> None:
    """Write an initramfs that mounts /dev/vda and starts its init."""
    with gzip.open(target, "wb", compresslevel=1) as output:
        archive = cpio.Writer(output)
        for name in ("bin", "dev", "modules", "root"):
            archive.directory(name)
        archive.file("bin/busybox", (tree / "usr/bin/busybox").read_bytes(), mode=0o755)
        archive.file("init", _INIT.encode(), mode=0o755)
        for number, path in enumerate(_modules_in_order(tree / "usr/lib/modules" / version)):
            archive.file(f"modules/{number:02}-{path.name.split('.')[0]}.ko", _plain(path))
        archive.end()


def _modules_in_order(folder: Path) -> Iterator[Path]:
    """The files of _MODULES and of what they need, each after what it needs."""
    needs: dict[str, list[str]] = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[path] = others.split()
    by_name = {Path(path).name.split(".")[0].replace("-", "_"): path for path in needs}
    given: set[str] = set()
    for name in _MODULES:
        wanted = by_name.get(name)
        if wanted is None:
            continue  # it is built in
        # modules.dep names all that are needed, in the order of removal.
        for one in [*reversed(needs[wanted]), wanted]:
            if one not in given:
                given.add(one)
                yield folder / one


def _plain(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def _drop_others(current: Path) -> None:
    """Remove images that no run has used for a day."""
    for path in cache().glob("image-*"):
        used = path / "used"
        if path != current and (not used.exists() or time.time() - used.stat().st_mtime > _UNUSED_S):
            shutil.rmtree(path, ignore_errors=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ImageError(f"{command[0]} ended with status {done.returncode}: {done.stderr[-3000:]}")
