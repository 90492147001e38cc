# SPDX-License-Identifier: Apache-2.0
"""What the test host needs beside the package to run microVMs: QEMU, mke2fs and a kernel for guests.

Here: copying them in, and the daemon's configuration for small guests. Not here: tests.

They are the files of Debian's packages that the package recommends, as they are installed where the tests run, a
Debian 13 too. apt in the guest would take a minute for what is copied in seconds; in the image, every other machine
would carry them, and none would show what a host without them is told.
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dsecd.vmm import guest
from tests.support import machines
from tests.vm.host import VmHost

_PROGRAMS = ("/usr/bin/qemu-system-x86_64", "/usr/sbin/mke2fs")
#: What QEMU looks for in its folders, of all that its packages hold for machines of other kinds.
_FIRMWARE = ("bios-256k.bin", "kvmvapic.bin", "linuxboot_dma.bin", "pvh.bin", "qboot.rom")
_FOLDERS = (Path("/usr/share/qemu"), Path("/usr/share/seabios"))
_OWN_KERNEL = "usr/lib/dsec/guest-kernel/vmlinux"
_CONFIG = b"[microvm]\nmemory_bytes = 268435456\ndisk_bytes = 134217728\nvcpus = 1\nboot_timeout_s = 300\n"


def prepare(vm: VmHost) -> None:
    """Make a host with the installed package one for microVMs.  Skips where there is no kernel for guests."""
    kernel = machines.guest_kernel()
    with tempfile.TemporaryFile(dir=vm.folder) as spool:
        with tarfile.open(fileobj=spool, mode="w", dereference=True) as archive:
            for path in _files():
                # By the name that the loader looks for, below the folder that it is in after links.
                archive.add(path, str(path.parent.resolve() / path.name), filter=_for_root)
            for path, name in _kernel_files(kernel):
                archive.add(path, name, filter=_for_root)
        spool.seek(0)
        vm.run(["tar", "-x", "-C", "/", "--skip-old-files"], stdin=spool, timeout_s=600)
    vm.run("ln -sf mke2fs /usr/sbin/mkfs.ext4; ldconfig")
    vm.write("/etc/dsec/dsecd.toml.d/microvm.toml", _CONFIG)
    vm.run(["systemctl", "restart", "dsecd.service"])


def _files() -> Iterator[Path]:
    seen: set[Path] = set()
    for program in _PROGRAMS:
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        libraries = (Path(word) for word in said.split() if word.startswith("/"))
        seen |= {Path(program), *libraries}
    seen |= {folder / name for folder in _FOLDERS for name in _FIRMWARE}
    yield Path("/etc/mke2fs.conf")
    yield from sorted(path for path in seen if path.exists())


def _kernel_files(kernel: Path) -> Iterator[tuple[Path, str]]:
    """A kernel of our own alone, where its package puts it; Debian's with the modules that guests get of it."""
    if kernel.name == "vmlinux":
        yield kernel, _OWN_KERNEL
        return
    tree = kernel.parent.parent
    yield kernel, str(kernel.relative_to(tree))
    modules = tree / "usr/lib/modules" / kernel.name.removeprefix("vmlinuz-")
    wanted = guest.with_dependencies(modules, guest.MODULES)
    for path in modules.rglob("*.ko*"):
        if path.name.split(".")[0].replace("-", "_") in wanted:
            yield path, str(path.relative_to(tree))


def _for_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
