# SPDX-License-Identifier: Apache-2.0
"""What a guest boots: a kernel, and an initramfs that is the agent and the modules this kernel needs.

What belongs here: finding the kernel and making the initramfs. What does not: the kernel's command line and devices (a
monitor's driver), building a kernel (``kernel/``).

A kernel of our own has all drivers built in, so that the agent alone is enough. Debian's cloud kernel has them in
modules; they are put in with what they need, each after what it needs.
"""

from __future__ import annotations

import functools
import hashlib
import io
import lzma
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsecd.linux import cpio

#: Our own kernel, where packages put it; then Debian's.
_OWN = Path("/usr/lib/dsec/guest-kernel/vmlinux")
_DEBIAN = "vmlinuz-*-cloud-amd64"
#: Drivers that a guest of ours uses; those that a kernel has built in are left out.
MODULES = (
    "virtio_pci", "virtio_console", "virtio_blk", "virtio_balloon", "virtio_pmem", "nd_pmem", "ext4",
    "erofs", "overlay", "zram", "virtio_net", "vmw_vsock_virtio_transport",
)  # fmt: skip
_DEPENDS = re.compile(rb"(?:^|\0)depends=([^\0]*)\0")
_KEPT = 4  # of each, for kernels and agents that are updated


@dataclass(frozen=True)
class Boot:
    """Files that a guest boots from; they are never changed, so that a snapshot can hold links to them."""

    kernel: Path
    initramfs: Path


class KernelMissing(FileNotFoundError):
    """There is no kernel for guests on this host."""


def find_kernel(configured: str) -> Path:
    """The kernel that guests boot, for "auto" the best there is. Raises KernelMissing. Blocks."""
    if configured != "auto":
        if not Path(configured).is_file():
            raise KernelMissing(2, "no such kernel", configured)
        return Path(configured)
    if _OWN.is_file():
        return _OWN
    found = sorted(Path("/boot").glob(_DEBIAN), key=lambda path: _numbers(path.name))
    if not found:
        raise KernelMissing(2, f"no kernel for guests: install dsec-guest-kernel ({_OWN}) or linux-image-cloud-amd64")
    return found[-1]


def prepare(kernel: Path, agent: Path, directory: Path) -> Boot:
    """Copies of the kernel and an initramfs for it in ``directory``, made unless they are there. Blocks.

    Raises OSError; a kernel that lacks modules it was built with is not noticed before it boots.
    """
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    program = agent.read_bytes()
    status = kernel.stat()
    # Every start of a machine asks.
    sum_of_kernel = _sum(kernel, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    modules = _modules_of(kernel)
    sum_of_both = hashlib.sha256(sum_of_kernel + hashlib.sha256(program).digest() + str(modules).encode())
    boot = Boot(
        kernel=directory / f"kernel-{sum_of_kernel.hex()[:16]}",
        initramfs=directory / f"initramfs-{sum_of_both.hexdigest()[:16]}",
    )
    if not boot.kernel.exists():
        _publish(boot.kernel, lambda partial: shutil.copyfile(kernel, partial))
    if not boot.initramfs.exists():
        _publish(boot.initramfs, lambda partial: partial.write_bytes(_initramfs(program, modules)))
    for kind, current in (("kernel", boot.kernel), ("initramfs", boot.initramfs)):
        os.utime(current)
        _drop_old(directory, kind)
    return boot


@functools.lru_cache(maxsize=_KEPT)
def _sum(path: Path, mark: tuple[int, ...]) -> bytes:
    """SHA-256 of a file, read again when ``mark``, taken from its status, is another. Blocks."""
    del mark
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _publish(path: Path, write: Callable[[Path], object]) -> None:
    partial = path.with_name(f"{path.name}.tmp")
    write(partial)
    partial.chmod(0o444)
    partial.rename(path)


def _drop_old(directory: Path, kind: str) -> None:
    """Remove all but the newest few; whoever boots one, or holds a snapshot of it, has a link of his own."""
    found = sorted(directory.glob(f"{kind}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found[_KEPT:]:
        path.unlink(missing_ok=True)


def _initramfs(program: bytes, modules: Path | None) -> bytes:
    output = io.BytesIO()
    archive = cpio.Writer(output)
    for name in ("dev", "proc", "sys", "disk", "root"):
        archive.directory(name)
    archive.file("init", program, mode=0o755)
    if modules is not None:
        archive.directory("modules")
        for number, (name, content) in enumerate(with_dependencies(modules, MODULES).items()):
            archive.file(f"modules/{number:03}-{name}.ko", content)
    archive.end()
    return output.getvalue()


def _modules_of(kernel: Path) -> Path | None:
    """The modules of a kernel called vmlinuz-VERSION in a /boot: beside it, where the package put both."""
    version = kernel.name.removeprefix("vmlinuz-")
    folder = kernel.parent.parent / "usr/lib/modules" / version
    return folder if version != kernel.name and folder.is_dir() else None


def with_dependencies(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Modules and what they need, by name, each after what it needs. One without a file is taken to be built in.

    What a module needs is written in itself (modinfo(8), "depends"), so that no index of depmod's has to be there.
    """
    paths = {path.name.split(".")[0].replace("-", "_"): path for path in (folder / "kernel").rglob("*.ko*")}
    found: dict[str, bytes] = {}

    def add(name: str) -> None:
        path = paths.pop(name, None)
        if path is None:  # built in, or found already
            return
        content = _plain(path)
        needs = _DEPENDS.search(content)
        for other in needs[1].decode().split(",") if needs else ():
            add(other.replace("-", "_"))
        found[name] = content

    for name in names:
        add(name)
    return found


def _plain(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
