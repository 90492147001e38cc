# SPDX-License-Identifier: Apache-2.0
"""The daemon's configuration: what may be set, the defaults, and reading it from TOML files.

Here: values and their checks; all faults of all files are told at once, each with file and key. Not here:
acting on them.

``/etc/dsec/dsecd.toml`` is read first, then ``/etc/dsec/dsecd.toml.d/*.toml`` in the order of their names; a
later file overrides single keys of an earlier one. With ``--config FILE`` it is FILE and ``FILE.d/*.toml``.
Every directory can be set, so that several daemons can run side by side.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dsecd.dns.frames import GRACE_S, Endpoint

DEFAULT_FILE = Path("/etc/dsec/dsecd.toml")

#: Ids of one sandbox: a full 16-bit range, since images use ids up to 65534 ("nobody").
RANGE_IDS = 65_536

# Why here: above what useradd hands out to users (up to 60,000) and, by default, as subordinate ids (100,000
# to 600,100,000, login.defs(5)), above systemd's dynamic users (61,184 to 65,519), inside the range that
# systemd sets aside for containers (524,288 to 1,879,048,191, https://systemd.io/UIDS-GIDS/), and below 2^31,
# since programs exist that read ids as signed numbers. 16,384 ranges end at 1,744,830,464. Hosts that map
# directory users algorithmically (SSSD: 200,000 to 2,000,200,000 by default) have to choose another base;
# check_ids looks at the files it can read.
UID_BASE = 0x2800_0000
UID_RANGES = 16_384

# unix(7): sun_path holds 108 bytes, one of them the final zero.
_SUN_PATH_MAX = 107


class ConfigError(Exception):
    """The configuration cannot be used; ``faults`` holds one line for each thing that is wrong."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RequestLimits(_Section):
    """What one client can make the daemon hold at a time. Root is not counted."""

    max_request_bytes: int = Field(
        256 << 20, ge=1 << 16, le=1 << 32, description="of one JSON body; routes may allow less"
    )
    max_body_bytes_per_user: int = Field(
        512 << 20, ge=1 << 16, le=1 << 40, description="of all JSON bodies under way, for each uid but 0"
    )
    max_connections_per_user: int = Field(
        4096, ge=16, le=1 << 20, description="open at a time, for each uid but 0"
    )


class Admission(_Section):
    """When a new sandbox has to wait, by what the host suffers from; 100 percent of time is never too much."""

    mode: Literal["on", "observe", "off"] = Field("on", description="observe only tells what it would have done")
    memory_available_min_percent: float = Field(5.0, ge=0, le=90, description="of the host's memory, kept free")
    memory_some_percent: float = Field(40.0, ge=0, le=100, description="time in which a task waited for memory")
    memory_full_percent: float = Field(15.0, ge=0, le=100, description="time in which nothing else happened")
    io_full_percent: float = Field(80.0, ge=0, le=100, description="the same of the disks")
    cpu_some_percent: float = Field(100.0, ge=0, le=100, description="time in which a task waited for a CPU")
    max_waiting: int = Field(4096, ge=0, le=1 << 20, description="creations and starts that may wait for room")
    wait_s: float = Field(30.0, ge=0, le=110, description="how long, for those that do not say")
    batch_wait_s: float = Field(600.0, ge=0, le=86400, description="the same for each of a batch")


def endpoint(text: str) -> Endpoint:
    """A server from ADDRESS or ADDRESS:PORT. Raises ValueError."""
    found = re.fullmatch(r"(?:\[(?P<v6>[^\]]+)\]|(?P<v4>[0-9.]+))(?::(?P<port>[0-9]{1,5}))?", text)
    try:
        address = ip_address(text) if found is None else ip_address(found["v6"] or found["v4"])
        return Endpoint(address=address, port=int((found and found["port"]) or 53))
    except ValueError:
        raise ValueError(f"must be ADDRESS or ADDRESS:PORT, with [] around IPv6, got {text!r}") from None


class NetworkPools(_Section):
    """Where the addresses of sandboxes come from; the host translates them, so that nobody else has to know them."""

    ipv4_pool: IPv4Network = Field(
        IPv4Network("198.18.0.0/16"), description="one address for each id range; not in use where the host is"
    )
    ipv6_pool: IPv6Network = Field(IPv6Network("fd64:7365:6300::/64"), description="the same for IPv6")
    flows_per_sandbox: int = Field(4096, ge=16, le=1 << 20, description="connections of one sandbox at a time")
    dns_upstreams: tuple[str, ...] = Field(
        (), max_length=8, description="servers that dsec-dns asks, as ADDRESS or ADDRESS:PORT ([...] around IPv6); "
        "none: those of the host's resolv.conf"
    )  # fmt: skip
    dns_grace_s: int = Field(
        GRACE_S, ge=1, le=3600, description="addresses of a name stay open for so long after its time: clients remember"
    )
    dns_user: str = Field("dsec-dns", description="whom dsec-dns runs as; root is believed as well")

    @field_validator("dns_upstreams")
    @classmethod
    def _upstreams_are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            endpoint(text)
        return value

    @property
    def dns_server(self) -> IPv4Address:
        """Where dsec-dns answers: the last address of the pool that can be one, which no sandbox gets."""
        return self.ipv4_pool[-2]


class Microvm(_Section):
    """How microVMs are made."""

    monitor: Literal["auto", "qemu", "firecracker"] = Field(
        "auto", description="auto is Firecracker where it works, else QEMU; machines that run stay with theirs"
    )
    firecracker: str = Field(
        "auto", description="path of its program, with jailer beside it; auto: in the usual places"
    )
    kernel: str = Field(
        "auto", description="path of what guests boot; auto: dsec-guest-kernel's, else Debian's cloud kernel in /boot"
    )
    accelerator: Literal["auto", "kvm", "tcg"] = Field(
        "auto", description="auto is kvm where it runs guests, see `dsecctl host`, else tcg, which emulates"
    )
    vcpus: int = Field(1, ge=1, le=32, description="of a sandbox without a CPU limit; with one, as many as it needs")
    memory_bytes: int = Field(512 << 20, ge=128 << 20, le=1 << 40, description="of a sandbox without a memory limit")
    disk_bytes: int = Field(8 << 30, ge=64 << 20, le=1 << 43, description="what a sandbox can write; a sparse file")
    boot_timeout_s: float = Field(60.0, ge=1, le=3600, description="a guest whose agent is silent so long is given up")
    share_layers: bool = Field(
        True, description="one copy in memory for all sandboxes of an environment, which can tell what others read"
    )
    reclaim_age_s: int = Field(
        60, ge=0, le=86400, description="memory that a guest has not touched for so long is paged out; 0: never"
    )
    reclaim_bytes_per_s: int = Field(64 << 20, ge=1 << 20, le=1 << 40, description="at most, in each guest")
    reclaim_sample_us: int = Field(
        50_000, ge=1000, le=10_000_000, description="how often memory is looked at: rarer is cheaper and less exact"
    )
    report_order: int = Field(
        2, ge=0, le=9, description="blocks of 2 to this power free pages are given back to the host, not smaller ones"
    )
    zram_percent: int = Field(
        0, ge=0, le=200, description="compressed swap in the guest, of its memory's size; 0: none"
    )
    kept_environments_bytes: int = Field(
        20 << 30, ge=0, description="of environments that no sandbox uses, kept on disk for the next that would"
    )

    @field_validator("kernel", "firecracker")
    @classmethod
    def _path_is_auto_or_absolute(cls, value: str) -> str:
        if value != "auto" and not value.startswith("/"):
            raise ValueError(f"must be an absolute path or 'auto', got {value!r}")
        return value


class Memory(_Section):
    """Reclaiming memory that sandboxes do not touch: it is compressed in zram, or written to another swap area."""

    reclaim: Literal["auto", "damon", "memory.reclaim", "off"] = Field(
        "auto", description="how: auto takes DAMON where nobody else uses it, else memory.reclaim"
    )
    age_s: float = Field(60.0, ge=1, le=86_400, description="untouched for so long is cold; without work, idle")
    sweep_s: float = Field(5.0, ge=0.5, le=3600, description="between looks at (some of) the sandboxes")
    min_bytes: int = Field(16 << 20, ge=0, le=1 << 50, description="sandboxes that use less are left alone")
    quota_bytes_per_s: int = Field(64 << 20, ge=1 << 20, le=1 << 40, description="reclaimed by each kdamond")
    kdamonds: int = Field(8, ge=1, le=64, description="sandboxes looked at by DAMON at a time, a thread each")
    start_below_permil: int = Field(
        700, ge=1, le=1001, description="only while less of the host's memory is available; 1001 is always"
    )
    stop_below_permil: int = Field(
        20, ge=0, le=1000, description="when less is available, reclaiming is left to the kernel"
    )
    pressure_max_percent: float = Field(
        10.0, gt=0, le=100, description="pause while tasks lose more time than this waiting for memory (PSI, avg10)"
    )
    zram_bytes: int = Field(
        0, ge=0, le=1 << 50, description="size of the swap of dsec-zram.service, before compression; 0 is none"
    )

    @model_validator(mode="after")
    def _marks_are_ordered(self) -> Memory:
        if self.stop_below_permil >= self.start_below_permil:
            raise ValueError(
                f"stop_below_permil: must be less than start_below_permil ({self.start_below_permil}), "
                f"got {self.stop_below_permil}"
            )
        return self


class Config(_Section):
    """All settings. Paths are absolute; nothing here is created or checked on disk."""

    socket: Path = Path("/run/dsec/dsecd.sock")
    socket_group: str = Field(
        "dsec", description="group of the socket, when it exists; ignored for systemd's socket"
    )
    socket_mode: int = Field(0o660, ge=0o600, le=0o777, description='as a number (0o660) or a text ("0660")')
    admin_group: str = Field(
        "dsec-admin", description="its members may change images and see everybody's sandboxes"
    )
    state_dir: Path = Path("/var/lib/dsec")
    cache_dir: Path = Path("/var/cache/dsec")
    runtime_dir: Path = Path("/run/dsec")
    cgroup_root: str = Field("dsec", description="cgroup of all sandboxes, relative to the cgroup2 mount")
    uid_base: int = Field(UID_BASE, ge=RANGE_IDS, lt=1 << 32, description="first host id of the sandboxes")
    uid_ranges: int = Field(UID_RANGES, ge=1, le=65_000, description="how many ranges of 65,536 ids")
    agent: Path | None = Field(None, description="the agent's program; found by itself when not set")
    require: tuple[str, ...] = Field(
        (), description="features whose absence is fatal at start, see `dsecctl host`"
    )
    core_scheduling: Literal["off", "class", "sandbox"] = Field(
        "class", description="who shares no core's siblings with whom: batch with anybody else, or each with each"
    )
    apparmor: Literal["auto", "require", "off"] = Field(
        "auto", description="confine sandboxes by AppArmor where there is some, refuse to start without, or never"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    limits: RequestLimits = RequestLimits()
    admission: Admission = Admission()
    network: NetworkPools = NetworkPools()
    microvm: Microvm = Microvm()
    memory: Memory = Memory()

    @field_validator("socket_mode", mode="before")
    @classmethod
    def _mode_is_octal(cls, value: object) -> object:
        if isinstance(value, str):
            try:
                return int(value, 8)
            except ValueError:
                raise ValueError(f'must be an octal mode such as "0660", got {value!r}') from None
        return value

    @field_validator("socket", "state_dir", "cache_dir", "runtime_dir", "agent")
    @classmethod
    def _path_is_absolute(cls, value: Path | None) -> Path | None:
        if value is not None and (not value.is_absolute() or ".." in value.parts):
            raise ValueError(f"must be an absolute path without '..', got {str(value)!r}")
        return value

    @field_validator("socket")
    @classmethod
    def _socket_path_fits(cls, value: Path) -> Path:
        if len(os.fsencode(value)) > _SUN_PATH_MAX:
            raise ValueError(
                f"must be at most {_SUN_PATH_MAX} bytes long (unix(7)), has {len(os.fsencode(value))}"
            )
        return value

    @field_validator("cgroup_root")
    @classmethod
    def _cgroup_is_relative(cls, value: str) -> str:
        if not value or value.startswith("/") or any(part in ("", ".", "..") for part in value.split("/")):
            raise ValueError(f"must be a relative path without empty, '.' and '..' parts, got {value!r}")
        return value

    @field_validator("uid_base")
    @classmethod
    def _ranges_are_aligned(cls, value: int) -> int:
        if value % RANGE_IDS:
            raise ValueError(f"must be a multiple of {RANGE_IDS}, got {value}")
        return value

    @model_validator(mode="after")
    def _ids_fit(self) -> Config:
        # The last range of 32 bits holds the ids that mean "none" (4294967295, and 65535 for old calls).
        if self.uid_base + self.uid_ranges * RANGE_IDS > (1 << 32) - RANGE_IDS:
            raise ValueError(
                f"uid_ranges: {self.uid_ranges} ranges from {self.uid_base} go beyond 32-bit ids"
            )
        return self

    @model_validator(mode="after")
    def _pools_suffice(self) -> Config:
        for name, pool in (("ipv4_pool", self.network.ipv4_pool), ("ipv6_pool", self.network.ipv6_pool)):
            if pool.num_addresses < self.uid_ranges + 3:
                raise ValueError(f"network.{name}: {pool} has too few addresses for {self.uid_ranges} id ranges")
        return self

    @property
    def agent_path(self) -> Path:
        """The agent's program: as set, else the installed one, else the one built in this checkout."""
        return self.agent if self.agent is not None else _built_or_installed("agent", "dsec-agent")

    @property
    def egress_path(self) -> Path:
        """The compiled programs for egress rules, found like the agent."""
        return _built_or_installed("ebpf", "egress.bpf.o")

    @property
    def database(self) -> Path:
        return self.state_dir / "state.db"


def _built_or_installed(folder: str, name: str) -> Path:
    installed = Path("/usr/lib/dsec") / name
    built = Path(__file__).resolve().parent.parent / "build" / folder / name
    return built if built.exists() and not installed.exists() else installed


# --- reading
# -----------------------------------------------------------------------------------------------------


def load(file: Path | None = None) -> Config:
    """Read and check the configuration. Raises ConfigError with every fault. A missing default file is fine."""
    faults: list[str] = []
    merged: dict[str, Any] = {}
    origin: dict[tuple[str, ...], Path] = {}
    if file is not None and not file.exists():
        faults.append(f"{file}: no such file")
    for part in _files(file or DEFAULT_FILE):
        try:
            _merge(merged, tomllib.loads(part.read_text(encoding="utf-8")), part, origin)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            faults.append(f"{part}: {error}")
        except OSError as error:
            faults.append(f"{part}: {error.strerror}")
    config = Config()
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        faults += [_fault(item, origin) for item in error.errors(include_url=False, include_input=False)]
    if faults:
        raise ConfigError(faults)
    return config


def _files(file: Path) -> Iterator[Path]:
    if file.exists():
        yield file
    directory = file.with_name(file.name + ".d")
    if directory.is_dir():
        yield from sorted(directory.glob("*.toml"))


def _merge(
    into: dict[str, Any], new: Mapping[str, Any], file: Path, origin: dict[tuple[str, ...], Path], *above: str
) -> None:
    for name, value in new.items():
        path = (*above, name)
        origin[path] = file
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value, file, origin, *path)
        elif isinstance(value, dict):
            into[name] = {}
            _merge(into[name], value, file, origin, *path)
        else:
            into[name] = value


def _fault(error: Any, origin: Mapping[tuple[str, ...], Path]) -> str:
    path = tuple(str(part) for part in error["loc"])
    text = (
        "unknown key"
        if error["type"] == "extra_forbidden"
        else str(error["msg"]).removeprefix("Value error, ")
    )
    if not path:  # a check over several keys names its key itself
        path, _, text = (text.partition(": ")[0],), "", text.partition(": ")[2]
    known = next((origin[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origin), "default")
    return f"{known}: {'.'.join(path)}: {text[:1].lower()}{text[1:]}"


def check_ids(config: Config, etc: Path = Path("/etc")) -> list[str]:
    """What on this host uses ids of the sandboxes' ranges: one line each.  Blocks.

    Looks at the files of passwd(5), group(5), subuid(5) and subgid(5); a missing one holds nothing.
    """
    first, beyond = config.uid_base, config.uid_base + config.uid_ranges * RANGE_IDS
    found = []
    for name, start_field, count_field in (
        ("passwd", 2, None),
        ("group", 2, None),
        ("subuid", 1, 2),
        ("subgid", 1, 2),
    ):
        path = etc / name
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            fields = line.split(":")
            try:
                start = int(fields[start_field])
                count = 1 if count_field is None else int(fields[count_field])
            except (IndexError, ValueError):
                continue
            if start < beyond and start + count > first:
                found.append(
                    f"{path}: {fields[0]} has ids {start} to {start + count - 1}, which sandboxes would use"
                )
    return found
