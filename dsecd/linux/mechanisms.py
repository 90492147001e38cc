# SPDX-License-Identifier: Apache-2.0
"""Everything this package can use of a host, as one table of features with their probes.

What belongs here: a row for each feature.  What does not: the mechanisms themselves, and who needs which.
Probes leave no trace on the host and change no setting.
"""

import contextlib
import errno
import io
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dsecd.linux import (
    apparmor,
    bpf,
    cgroup,
    damon,
    erofs,
    kconfig,
    kvm,
    mountns,
    netlink,
    netns,
    overlay,
    pidfd,
    proc,
    swap,
    syscalls,
    tun,
    userns,
)
from dsecd.linux import mount as mounts
from dsecd.linux.feature import YES, Answer, Feature, FeatureStatus, no, unknown

_PROBE_TIMEOUT_S = 30.0
# Any range outside the host's own ids does: the namespace ends with the probe.
_PROBE_ID_BASE = 1 << 30
#: Where idmapping is tried: the file system of the default state directory.
_STATE_PARENT = Path("/var/lib")
#: Far above what an instruction takes on any processor, far below what emulating one takes.
_KVM_NATIVE_NS = 50


def _user_namespaces() -> Answer:
    with contextlib.closing(_Fd(userns.create(_PROBE_ID_BASE))):
        return YES


class _Fd:
    """An fd that closes like a file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


def _idmapped_mounts() -> Answer:
    with (
        contextlib.closing(_Fd(userns.create(_PROBE_ID_BASE))) as namespace,
        contextlib.closing(_Fd(mounts.clone_tree(_STATE_PARENT))) as tree,
    ):
        try:
            mounts.idmap(tree.fd, namespace.fd)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return no(f"the file system of {_STATE_PARENT} cannot be idmapped")
    return YES


def _private_mount_namespace() -> Answer:
    with contextlib.closing(_Fd(mountns.create_private())):
        return YES


def _overlay_data_only() -> Answer:
    """Mount one for real on a tmpfs that only a throw-away thread sees, and read through it."""
    with contextlib.closing(_Fd(mountns.open_namespace("/proc/thread-self/ns/mnt"))) as namespace:
        return mountns.run_in_copy(namespace.fd, _try_overlay)


def _try_overlay() -> Answer:
    base = Path(tempfile.gettempdir())
    with contextlib.closing(_Fd(mounts.new_mount("tmpfs"))) as scratch:
        mounts.attach(scratch.fd, base)
    for name in ("lower", "data", "upper", "work", "root"):
        (base / name).mkdir()
    stub = base / "lower" / "file"
    (base / "data" / "object").write_text("content")
    stub.touch()
    os.truncate(stub, len("content"))
    os.setxattr(stub, "trusted.overlay.metacopy", b"")
    os.setxattr(stub, "trusted.overlay.redirect", b"/object")
    with contextlib.closing(_Fd(overlay.mount(
        lower=[base / "lower"], data=[base / "data"], upper=base / "upper", work=base / "work", fsuid=None,
    ))) as mount:
        mounts.attach(mount.fd, base / "root")
    found = (base / "root" / "file").read_text()
    return YES if found == "content" else no(f"a file of a data-only layer reads as {found!r}")


def _erofs_file_backed() -> Answer:
    """Mount a file that is no EROFS image: the kernel refuses the content only if it takes files at all."""
    try:
        with contextlib.closing(_Fd(erofs.mount(Path(sys.executable).resolve()))):
            return unknown(f"{sys.executable} could be mounted as an EROFS image")
    except OSError as error:
        if error.errno == errno.EINVAL:
            return YES
        if error.errno == errno.ENODEV:
            return no("the kernel has no EROFS")
        raise


def _mkfs_erofs() -> Answer:
    """Make a real image: versions before 1.8 know no headerball."""
    if shutil.which("mkfs.erofs", path=proc.MINIMAL_ENV["PATH"]) is None:
        return no("mkfs.erofs is not installed")
    with tempfile.TemporaryDirectory(prefix="dsec-probe-") as name:
        headers, image = Path(name, "headers.tar"), Path(name, "image")
        with tarfile.open(headers, "w", format=tarfile.PAX_FORMAT) as tar:
            directory = tarfile.TarInfo("dir")
            directory.type = tarfile.DIRTYPE
            tar.addfile(directory, io.BytesIO())
        try:
            erofs.make_index(headers, image, timeout_s=_PROBE_TIMEOUT_S)
        except proc.ProcessFailed as error:
            return no(str(error))
    return YES


def _cgroup_v2() -> Answer:
    try:
        return Answer(True, f"mounted at {cgroup.root()}")
    except FileNotFoundError:
        return no("cgroup v2 is not mounted")


@contextlib.contextmanager
def _scratch_cgroup() -> Iterator[Path]:
    path = cgroup.root() / cgroup.own().lstrip("/") / f"dsec-probe-{os.getpid()}"
    cgroup.create(path)
    try:
        yield path
    finally:
        cgroup.try_remove(path)


def _cgroup_file(name: str) -> Callable[[], Answer]:
    """A probe for a file of every cgroup but the root one; an empty cgroup is made to look into."""
    def probe() -> Answer:
        with _scratch_cgroup() as path:
            return YES if (path / name).exists() else no(f"cgroups have no {name} file")

    return probe


def _controller(name: str) -> Callable[[], Answer]:
    def probe() -> Answer:
        try:
            root = cgroup.root()
        except FileNotFoundError:
            return no("cgroup v2 is not mounted")
        if name in cgroup.controllers(root):
            return YES
        return no(f"{root}/cgroup.controllers does not list {name}")

    return probe


def _pidfd() -> Answer:
    me = pidfd.identify(os.getpid())
    if me is None:
        return unknown("/proc does not show this process")
    with contextlib.closing(_Fd(pidfd.open(me))) as process:
        return YES if pidfd.send_signal(process.fd, 0) else no("a pidfd cannot be signalled")


def _clone_into_cgroup() -> Answer:
    number = syscalls.clone3_errno_with_bad_cgroup()
    return YES if number == errno.EBADF else no(f"clone3: {os.strerror(number)}")


def _seccomp() -> Answer:
    path = Path("/proc/sys/kernel/seccomp/actions_avail")
    try:
        actions = path.read_text().split()
    except FileNotFoundError:
        return no("the kernel is built without CONFIG_SECCOMP_FILTER")
    return YES if {"errno", "kill_process"} <= set(actions) else no(f"{path} offers only {' '.join(actions)}")


def _core_scheduling() -> Answer:
    try:
        syscalls.sched_core_get()
    except OSError as error:
        if error.errno == errno.EINVAL:
            return no("the kernel is built without CONFIG_SCHED_CORE")
        if error.errno == errno.ENODEV:
            return no("the processor has no SMT siblings, or they are off: nothing to separate")
        raise
    return YES


def _damon() -> Answer:
    try:
        there = damon.count()
    except FileNotFoundError:
        return no("the kernel has no DAMON sysfs interface")
    # Which address spaces can be watched shows only in a kdamond of one's own.
    if (config := kconfig.running()) and config.lacks(("DAMON_VADDR",)):
        return no("DAMON cannot watch processes")
    return Answer(True, f"{there} kdamond(s) are set up" if there else "")


def _memory_reclaim() -> Answer:
    try:
        groups = cgroup.children(cgroup.root())
    except FileNotFoundError:
        return no("cgroup v2 is not mounted")
    # Only where a parent hands the memory controller on is there such a file at all.
    if not any((group / "memory.current").exists() for group in groups):
        return no("no cgroup has the memory controller")
    return YES if any((group / "memory.reclaim").exists() for group in groups) else no("no memory.reclaim file")


def _swap() -> Answer:
    found = swap.areas()
    return Answer(True, ", ".join(area.path for area in found)) if found else no("there is no swap area")


def _apparmor() -> Answer:
    if missing := apparmor.why_missing():
        return no(missing)
    mode = apparmor.loaded().get("dsec-sandbox", "not loaded yet")
    answer = _program("apparmor_parser")()
    return Answer(True, f"profile dsec-sandbox: {mode}") if answer.works else answer


def _kvm() -> Answer:
    """Run a guest: a device that opens may still emulate each instruction, which no kernel gets through."""
    try:
        took_ns = kvm.run_guest()
    except kvm.Unusable as error:
        return no(str(error))
    except OSError as error:
        return no(f"/dev/kvm: {error.strerror}")
    if took_ns > _KVM_NATIVE_NS:
        return no(f"KVM emulates guests: {took_ns:.0f} ns an instruction, a processor takes below {_KVM_NATIVE_NS}")
    return Answer(True, "a guest ran on the processor")


def _fuse() -> Answer:
    if not Path("/dev/fuse").exists():
        return no("/dev/fuse is missing")
    with contextlib.closing(_Fd(syscalls.fsopen("fuse"))):
        return YES


def _bpf() -> Answer:
    bpf.probe()
    return YES


def _veth() -> Answer:
    """A pair of devices with places for programs, in a namespace that goes with its thread."""

    def make() -> None:
        netns.enter_new()
        with netlink.Netlink() as sock, contextlib.closing(_Fd(netns.open_process(os.getpid()))) as outside:
            sock.add_veth(
                "dsec-probe", index=1 << 20, mac=b"\x02dsec\x01", peer="dsec-probe-peer", peer_ns_fd=outside.fd,
                peer_mac=b"\x02dsec\x02", mtu=1500,
            )  # fmt: skip
            try:
                sock.add_clsact(1 << 20)
            finally:
                sock.delete_link(1 << 20)

    mountns.FreshThreads().submit(make).result()
    return YES


def _tap() -> Answer:
    """A tap, in a namespace that goes with its thread."""

    def make() -> None:
        netns.enter_new()
        os.close(tun.open_tap("dsec-probe", 1 << 20))

    mountns.FreshThreads().submit(make).result()
    return YES


def _nftables() -> Answer:
    """Rules of the kinds that we use, checked against the kernel and not applied."""
    if shutil.which("nft", path=proc.MINIMAL_ENV["PATH"]) is None:
        return no("nft is not installed")
    rules = (
        "table inet dsec-probe { set s { type ipv4_addr; size 16; flags dynamic; }; "
        "chain f { type filter hook forward priority 0; ct state new add @s { ip saddr ct count over 1 } drop; }; "
        "chain p { type nat hook postrouting priority 100; ip saddr 198.18.0.0/16 masquerade; }; }"
    )
    try:
        proc.run_blocking(["nft", "-c", "-f", "-"], input=rules.encode(), timeout_s=_PROBE_TIMEOUT_S)
    except proc.ProcessFailed as error:
        return no(str(error))
    return YES


def _path_exists(path: str, otherwise: str) -> Callable[[], Answer]:
    return lambda: YES if Path(path).exists() else no(otherwise)


def _program(*names: str) -> Callable[[], Answer]:
    """A probe for a program by any of several names."""
    def probe() -> Answer:
        found = [path for name in names if (path := shutil.which(name, path=proc.MINIMAL_ENV["PATH"]))]
        return Answer(True, found[0]) if found else no(f"{' or '.join(names)} is not installed")

    return probe


def _all_programs(*names: str) -> Callable[[], Answer]:
    """A probe for several programs that are of use only together."""
    def probe() -> Answer:
        lacks = [name for name in names if shutil.which(name, path=proc.MINIMAL_ENV["PATH"]) is None]
        return no(f"{' and '.join(lacks)} {'is' if len(lacks) == 1 else 'are'} not installed") if lacks else YES

    return probe


def crun_version(text: str) -> tuple[tuple[int, ...], frozenset[str]]:
    """Version numbers and build features ("+SECCOMP") out of `crun --version`; else ValueError."""
    match = re.search(r"^crun version (\d+(?:\.\d+)*)", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"crun --version: no version in {text[:80]!r}")
    version = tuple(int(number) for number in match[1].split("."))
    return version, frozenset(re.findall(r"(?<=\+)[A-Z]+", text))


def _crun() -> Answer:
    if shutil.which("crun", path=proc.MINIMAL_ENV["PATH"]) is None:
        return no("crun is not installed")
    try:
        output = proc.run_blocking(["crun", "--version"], timeout_s=_PROBE_TIMEOUT_S).stdout
        version, built_with = crun_version(output.decode("utf-8", "replace"))
    except (proc.ProcessFailed, ValueError) as error:
        return unknown(str(error))
    number = ".".join(map(str, version))
    lacks = sorted({"CAP", "SECCOMP"} - built_with)
    if lacks:
        return no(f"crun {number} is built without {' and '.join(lacks)}")
    if version < (1, 8):
        return no(f"crun is {number}, 1.8 is needed")
    return Answer(True, f"version {number}")


_NEWER_KERNEL = "Boot a newer kernel: Debian 13's has it."
_NO_CONTROLLER = (
    "Boot with cgroup_no_v1=all systemd.unified_cgroup_hierarchy=1; in a container, delegate {} to it."
)

MECHANISMS: tuple[Feature, ...] = (
    Feature("user-namespaces", "3.8", "running root inside as nobody outside", _user_namespaces,
            "Set user.max_user_namespaces above 0 with sysctl.",
            options=("NAMESPACES", "USER_NS", "PID_NS", "NET_NS", "UTS_NS", "IPC_NS")),
    Feature("mount-namespaces", "5.2", "keeping layers mounted across restarts", _private_mount_namespace,
            "Run the daemon as root with CAP_SYS_ADMIN.", options=("NAMESPACES",)),
    Feature("idmapped-mounts", "5.12", "layers shared by sandboxes with different ids", _idmapped_mounts,
            "Put the state directory on ext4, XFS or Btrfs."),
    Feature("overlay-data-only", "6.8", "stacking deduplicated layers", _overlay_data_only, _NEWER_KERNEL,
            options=("OVERLAY_FS",)),
    Feature("erofs-file", "6.12", "mounting layers without loop devices", _erofs_file_backed,
            "Boot a kernel with CONFIG_EROFS_FS_BACKED_BY_FILE: Debian 13's has it.",
            options=("EROFS_FS", "EROFS_FS_XATTR", "EROFS_FS_BACKED_BY_FILE")),
    Feature("mkfs-erofs", "", "importing images", _mkfs_erofs,
            "Run 'apt install erofs-utils' (1.8 or newer)."),
    Feature("cgroup-v2", "4.5", "grouping a sandbox's processes", _cgroup_v2,
            "Mount it: 'mount -t cgroup2 cgroup2 /sys/fs/cgroup'.", options=("CGROUPS",)),
    Feature("cgroup-freeze", "5.2", "pausing a sandbox", _cgroup_file("cgroup.freeze"), _NEWER_KERNEL),
    Feature("cgroup-kill", "5.14", "ending a whole process tree at once", _cgroup_file("cgroup.kill"),
            _NEWER_KERNEL),
    Feature("cgroup-memory", "4.5", "memory limits", _controller("memory"), _NO_CONTROLLER.format("memory"),
            options=("MEMCG",)),
    Feature("cgroup-cpu", "4.15", "CPU shares and limits", _controller("cpu"), _NO_CONTROLLER.format("cpu"),
            options=("CGROUP_SCHED", "FAIR_GROUP_SCHED", "CFS_BANDWIDTH")),
    Feature("cgroup-pids", "4.5", "process count limits", _controller("pids"), _NO_CONTROLLER.format("pids"),
            options=("CGROUP_PIDS",)),
    Feature("cgroup-io", "4.5", "disk bandwidth limits", _controller("io"), _NO_CONTROLLER.format("io"),
            options=("BLK_CGROUP", "BLK_DEV_THROTTLING")),
    Feature("psi", "4.20", "admission by pressure", _path_exists(
        "/proc/pressure/memory", "the kernel keeps no pressure figures"), "Boot with psi=1.",
            options=("PSI",)),
    Feature("pidfd", "5.3", "never signalling a reused pid", _pidfd, _NEWER_KERNEL),
    Feature("clone-into-cgroup", "5.7", "starting each command in its own cgroup", _clone_into_cgroup,
            _NEWER_KERNEL),
    Feature("seccomp", "4.14", "system call filters", _seccomp, "Boot a kernel with CONFIG_SECCOMP_FILTER.",
            options=("SECCOMP_FILTER",)),
    Feature("apparmor", "2.6.36", "confinement by profile", _apparmor,
            "Run 'apt install apparmor' and boot with lsm=...,apparmor.",
            options=("SECURITY_APPARMOR", "SECURITYFS")),
    Feature("core-scheduling", "5.14", "keeping sandboxes off each other's SMT siblings", _core_scheduling,
            "Boot a kernel with CONFIG_SCHED_CORE on a processor with SMT.",
            options=("SCHED_CORE", "SCHED_SMT")),
    Feature("damon-sysfs", "5.18", "finding and reclaiming idle memory", _damon,
            "Boot a kernel with CONFIG_DAMON_SYSFS.", options=("DAMON_SYSFS", "DAMON_VADDR")),
    Feature("memory-reclaim", "5.19", "reclaiming idle memory without DAMON", _memory_reclaim,
            _NO_CONTROLLER.format("memory"), options=("MEMCG",)),
    Feature("swap", "", "reclaiming anonymous memory, most of an idle sandbox's", _swap,
            "Set 'zram_bytes' in dsecd.toml, or add a swap area.", options=("SWAP", "ZRAM")),
    Feature("kvm", "2.6.20", "hardware virtual machines", _kvm,
            "Turn on virtualization in the firmware, or nested virtualization in the host above.",
            options=("KVM",)),
    Feature("firecracker", "", "microVMs in a smaller monitor than QEMU", _all_programs("firecracker", "jailer"),
            "Put both programs, of one release from 1.14.0 on, into /usr/local/bin; QEMU does without."),
    Feature("fuse", "2.6.14", "loading image data on demand", _fuse, "Run 'modprobe fuse'.",
            options=("FUSE_FS",)),
    Feature("crun", "", "starting containers", _crun, "Run 'apt install crun' (1.8 or newer)."),
    Feature("bpf", "4.11", "watching over what sandboxes send", _bpf,
            "Run 'apt install libbpf1'; in a container, grant it CAP_BPF and CAP_NET_ADMIN.",
            options=("BPF_SYSCALL", "CGROUP_BPF", "NET_CLS_BPF", "BPF_JIT")),
    Feature("veth", "4.5", "network devices of sandboxes", _veth, "Run 'modprobe veth' and 'modprobe sch_ingress'.",
            options=("VETH", "NET_SCH_INGRESS")),
    Feature("tap", "3.8", "network devices of microVMs", _tap, "Run 'modprobe tun' and 'modprobe sch_ingress'.",
            options=("TUN", "NET_SCH_INGRESS")),
    Feature("nftables", "5.6", "translating sandboxes' addresses", _nftables,
            "Run 'apt install nftables', and 'modprobe nft_masq nft_connlimit'.",
            options=("NF_TABLES", "NF_TABLES_INET", "NFT_CT", "NFT_MASQ", "NFT_NAT", "NFT_CONNLIMIT")),
    Feature("qemu", "", "running virtual machines", _program("qemu-system-x86_64"),
            "Run 'apt install qemu-system-x86'."),
    Feature("mkfs-ext4", "", "making disks of virtual machines", _program("mkfs.ext4"), "Run 'apt install e2fsprogs'."),
    Feature("skopeo", "", "pulling images from registries", _program("skopeo"), "Run 'apt install skopeo'."),
    Feature("debian-bootstrap", "", "building Debian base images", _program("mmdebstrap", "debootstrap"),
            "Run 'apt install mmdebstrap'."),
)


def by_name(name: str) -> Feature:
    """The feature with this name.  Raises KeyError."""
    return {feature.name: feature for feature in MECHANISMS}[name]


def report(*, again: bool = False) -> list[FeatureStatus]:
    """The state of every feature, in the table's order.

    Blocks; `again` repeats also what is known already.
    """
    return [feature.status(again=again) for feature in MECHANISMS]
