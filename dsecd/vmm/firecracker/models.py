# SPDX-License-Identifier: Apache-2.0
"""The requests and answers of Firecracker's API that dsec uses, as typed values.

What belongs here: fields, their documented ranges, and the release that brought each.  What does not: sending
them (api).

Firecracker refuses a body with a field that it does not know, so a field is sent only if it differs from its
default, and `check_version` says whether a release knows what is sent.  Facts from Firecracker's
OpenAPI document, src/firecracker/swagger/firecracker.yaml, and its change log.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_type_hints

from dsecd.vmm.firecracker.errors import BadAnswer, InvalidRequest, TooOld

Version = tuple[int, int, int]

#: What dsec needs at least: `network_overrides`, without which clones cannot have a tap of their own.
OLDEST: Version = (1, 12, 0)
#: The first release with virtio-pmem, /serial, memory hotplug and free page reporting.
PMEM: Version = (1, 14, 0)
#: Before this, memory snapshots that hold only changes could be wrong above 3 GiB of guest memory.
DIFF_SNAPSHOTS: Version = (1, 15, 0)

_ID = re.compile(r"[A-Za-z0-9_]{1,64}")
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(?:-[0-9A-Za-z.-]{1,64})?")


def parse_version(text: str) -> Version:
    """The three numbers of "1.12.1" or "v1.17.0-dev".  Raises ValueError."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise ValueError(f"version {text[:80]!r}: not three numbers")
    return int(match[1]), int(match[2]), int(match[3])


def version_text(version: Version) -> str:
    return ".".join(map(str, version))


# ---------------------------------------------------------------------------------------- how fields are told


@dataclass(frozen=True)
class Between:
    """The documented range of a number."""

    low: int
    high: int = (1 << 63) - 1

    def fault(self, value: Any) -> str:
        return "" if self.low <= value <= self.high else f"must be {self.low} to {self.high}, got {value}"


@dataclass(frozen=True)
class Like:
    """The documented form of a text."""

    form: re.Pattern[str]

    def fault(self, value: Any) -> str:
        return "" if self.form.fullmatch(value) else f"must look like {self.form.pattern}, got {value!r}"


@dataclass(frozen=True)
class Since:
    """The release that brought a field."""

    version: Version


Id = Annotated[str, Like(_ID)]
Count = Annotated[int, Between(0)]


@dataclass(frozen=True)
class Part:
    """A value inside a request."""

    def faults(self) -> list[str]:
        """What is wrong beyond the ranges of single fields."""
        return []


@dataclass(frozen=True)
class Request(Part):
    """A call of the API: `METHOD PATH`, the path with fields in braces, and the release that brought it."""

    METHOD: ClassVar[str] = "PUT"
    PATH: ClassVar[str]
    SINCE: ClassVar[Version] = (0, 0, 0)

    def path(self) -> str:
        return self.PATH.format_map({item.name: getattr(self, item.name) for item in fields(self)})

    def what(self) -> str:
        return f"{self.METHOD} {self.path()}"


def body(request: Request) -> dict[str, Any]:
    """The JSON object of a request.  Raises InvalidRequest with all faults."""
    faults = _faults(request)
    if faults:
        raise InvalidRequest(request.what(), faults)
    return _object(request)


def needs(request: Request) -> tuple[Version, str]:
    """The release that a request needs at least, and what of it needs that."""
    gates = [(request.SINCE, request.what()), *_gates(request, request.what())]
    return max(gates, key=lambda gate: gate[0])


def check_version(request: Request, version: Version) -> None:
    """Raise TooOld if that release does not know all of the request."""
    since, what = needs(request)
    if version < since:
        raise TooOld(what, version_text(since), version_text(version))


def _sent(part: Part) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields that are sent."""
    for item in fields(part):
        value = getattr(part, item.name)
        if item.default is MISSING or value != item.default:
            yield item.name, value


def _rules(kind: type[Part]) -> dict[str, tuple[Any, ...]]:
    """What is said about each field beside its type."""
    hints = get_type_hints(kind, include_extras=True)
    return {item.name: _said(hints[item.name]) for item in fields(kind)}


def _said(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ()) or tuple(rule for inner in get_args(hint) for rule in _said(inner))


def _faults(part: Part, above: str = "") -> list[str]:
    found = [above + fault for fault in part.faults()]
    for name, value in _sent(part):
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Part):
                found += _faults(inner, f"{above}{name}.")
            elif inner == "":
                found.append(f"{above}{name}: must not be empty")
            else:
                tried = (rule.fault(inner) for rule in _rules(type(part))[name] if not isinstance(rule, Since))
                found += [f"{above}{name}: {fault}" for fault in tried if fault]
    return found


def _gates(part: Part, what: str) -> Iterator[tuple[Version, str]]:
    for name, value in _sent(part):
        since = [rule.version for rule in _rules(type(part))[name] if isinstance(rule, Since)]
        yield from ((version, f"{what} with {name}") for version in since)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Part):
                yield from _gates(inner, what)


def _object(part: Part) -> dict[str, Any]:
    return {name: _plain(value) for name, value in _sent(part)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return _object(value) if isinstance(value, Part) else value


# -------------------------------------------------------------------------------------------- before the boot


@dataclass(frozen=True)
class TokenBucket(Part):
    """`size` tokens (bytes or operations), filled again over `refill_time` milliseconds."""

    size: Count
    refill_time: Count
    one_time_burst: Count | None = None


@dataclass(frozen=True)
class RateLimiter(Part):
    bandwidth: TokenBucket | None = None
    ops: TokenBucket | None = None


@dataclass(frozen=True)
class BootSource(Request):
    """An uncompressed ELF kernel; paths are as the jailed process sees them, here and everywhere below."""

    PATH: ClassVar[str] = "/boot-source"
    kernel_image_path: str
    initrd_path: str | None = None
    boot_args: str | None = None


@dataclass(frozen=True)
class MachineConfiguration(Request):
    PATH: ClassVar[str] = "/machine-config"
    vcpu_count: Annotated[int, Between(1, 32)]
    mem_size_mib: Annotated[int, Between(1)]
    smt: bool = False
    track_dirty_pages: bool = False
    huge_pages: Literal["None", "2M"] = "None"

    def faults(self) -> list[str]:
        found = []
        if self.smt and self.vcpu_count > 1 and self.vcpu_count % 2:
            found.append(f"vcpu_count: must be 1 or even with smt, got {self.vcpu_count}")
        if self.huge_pages == "2M" and self.mem_size_mib % 2:
            found.append(f"mem_size_mib: must be even with huge_pages, got {self.mem_size_mib}")
        return found


@dataclass(frozen=True)
class Drive(Request):
    PATH: ClassVar[str] = "/drives/{drive_id}"
    drive_id: Id
    path_on_host: str
    is_root_device: bool
    is_read_only: bool = False
    cache_type: Literal["Unsafe", "Writeback"] = "Unsafe"
    rate_limiter: RateLimiter | None = None


@dataclass(frozen=True)
class Pmem(Request):
    """A file mapped into the guest as /dev/pmemN, N counting from 0 in the order of the calls."""

    PATH: ClassVar[str] = "/pmem/{id}"
    SINCE: ClassVar[Version] = PMEM
    id: Id
    path_on_host: str
    root_device: bool = False
    read_only: bool = False
    rate_limiter: Annotated[RateLimiter | None, Since((1, 16, 0))] = None


@dataclass(frozen=True)
class NetworkInterface(Request):
    PATH: ClassVar[str] = "/network-interfaces/{iface_id}"
    iface_id: Id
    host_dev_name: str
    guest_mac: Annotated[str | None, Like(_MAC)] = None
    mtu: Annotated[int | None, Between(68, 65535), Since((1, 16, 0))] = None
    rx_rate_limiter: RateLimiter | None = None
    tx_rate_limiter: RateLimiter | None = None


@dataclass(frozen=True)
class Vsock(Request):
    PATH: ClassVar[str] = "/vsock"
    guest_cid: Annotated[int, Between(3, 0xFFFF_FFFE)]
    uds_path: str


@dataclass(frozen=True)
class Balloon(Request):
    PATH: ClassVar[str] = "/balloon"
    amount_mib: Count
    deflate_on_oom: bool
    stats_polling_interval_s: Annotated[int, Between(0, 65535)] = 0
    free_page_reporting: Annotated[bool, Since(PMEM)] = False


@dataclass(frozen=True)
class Entropy(Request):
    PATH: ClassVar[str] = "/entropy"
    rate_limiter: RateLimiter | None = None


@dataclass(frozen=True)
class Serial(Request):
    """Where the guest's console goes; without this call to the process's stdout."""

    PATH: ClassVar[str] = "/serial"
    SINCE: ClassVar[Version] = PMEM
    serial_out_path: str
    rate_limiter: Annotated[TokenBucket | None, Since((1, 16, 0))] = None


@dataclass(frozen=True)
class Action(Request):
    PATH: ClassVar[str] = "/actions"
    action_type: Literal["InstanceStart", "SendCtrlAltDel", "FlushMetrics"]


# --------------------------------------------------------------------------------------------- after the boot


@dataclass(frozen=True)
class VmState(Request):
    METHOD: ClassVar[str] = "PATCH"
    PATH: ClassVar[str] = "/vm"
    state: Literal["Paused", "Resumed"]


@dataclass(frozen=True)
class DriveUpdate(Request):
    """Opens another backing file, or changes limits, under a guest that runs or stands still."""

    METHOD: ClassVar[str] = "PATCH"
    PATH: ClassVar[str] = "/drives/{drive_id}"
    drive_id: Id
    path_on_host: str | None = None
    rate_limiter: RateLimiter | None = None


@dataclass(frozen=True)
class BalloonUpdate(Request):
    METHOD: ClassVar[str] = "PATCH"
    PATH: ClassVar[str] = "/balloon"
    amount_mib: Count


@dataclass(frozen=True)
class SnapshotCreate(Request):
    PATH: ClassVar[str] = "/snapshot/create"
    snapshot_path: str
    mem_file_path: str
    snapshot_type: Literal["Full", "Diff"] = "Full"


@dataclass(frozen=True)
class MemoryBackend(Part):
    backend_type: Literal["File", "Uffd"]
    backend_path: str


@dataclass(frozen=True)
class NetworkOverride(Part):
    iface_id: Id
    host_dev_name: str


@dataclass(frozen=True)
class SnapshotLoad(Request):
    """Only for a process that has configured nothing yet; when it is refused, the process ends."""

    PATH: ClassVar[str] = "/snapshot/load"
    snapshot_path: str
    mem_backend: MemoryBackend
    resume_vm: bool = False
    track_dirty_pages: Annotated[bool, Since((1, 13, 0))] = False
    network_overrides: Annotated[tuple[NetworkOverride, ...], Since((1, 12, 0))] = ()
    clock_realtime: Annotated[bool, Since((1, 16, 0))] = False


# -------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Answer:
    """What a GET answers.  Fields that we do not know are newer than we, and left out."""

    PATH: ClassVar[str]

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Self:
        """Check each field's type.  Raises BadAnswer."""
        kinds, values = get_type_hints(cls), {}
        for item in fields(cls):
            value = found.get(item.name)
            if value is None and item.default is not MISSING:
                continue
            fits, expected = (_is_text, "a text") if kinds[item.name] is str else (_is_count, "a count")
            if not fits(value):
                raise BadAnswer(f"GET {cls.PATH}", f"{item.name} is {str(value)[:80]!r}, expected {expected}")
            values[item.name] = value
        return cls(**values)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 256 and value.isprintable()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


@dataclass(frozen=True)
class VersionAnswer(Answer):
    PATH: ClassVar[str] = "/version"
    firecracker_version: str


@dataclass(frozen=True)
class InstanceInfo(Answer):
    """`state` is "Not started", "Running" or "Paused"."""

    PATH: ClassVar[str] = "/"
    app_name: str
    id: str
    state: str
    vmm_version: str


@dataclass(frozen=True)
class BalloonStats(Answer):
    """Sizes in bytes unless the name says otherwise; what the guest does not tell is None (all are top level)."""

    PATH: ClassVar[str] = "/balloon/statistics"
    target_mib: int
    actual_mib: int
    free_memory: int | None = None
    available_memory: int | None = None
    total_memory: int | None = None
    disk_caches: int | None = None
    swap_in: int | None = None
    swap_out: int | None = None
    major_faults: int | None = None
    minor_faults: int | None = None


