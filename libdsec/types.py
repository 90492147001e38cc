# SPDX-License-Identifier: Apache-2.0
"""The wire types: what requests and responses hold, with their limits.

Here: pydantic models that client and daemon share; unknown fields are refused by name and all errors come at once.
Not here: routes (``routes.py``), errors (``errors.py``), behaviour.

Units are in the names. Bytes in JSON (``stdout``, ``data``) are base64. Times are UTC.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails

from libdsec import apparmor, network
from libdsec.apparmor import AppArmor as AppArmor
from libdsec.execve import Arg, Env
from libdsec.filetypes import FileInfo as FileInfo
from libdsec.filetypes import FileList as FileList
from libdsec.filetypes import GetFilesRequest as GetFilesRequest
from libdsec.filetypes import MkdirRequest as MkdirRequest
from libdsec.filetypes import RenameRequest as RenameRequest
from libdsec.model import Bytes as Bytes
from libdsec.model import GuestPath as GuestPath
from libdsec.model import Model as Model
from libdsec.model import OpenModel as OpenModel
from libdsec.model import User as User
from libdsec.network import Policy as Policy
from libdsec.ports import Publish as Publish

MIB = 1 << 20
INT64_MAX = (1 << 63) - 1

ID_PATTERN = r"^[a-z0-9][a-z0-9.-]{0,62}$"
EXEC_ID_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
#: name[:tag], name@sha256:digest, sha256:digest or a digest prefix of at least 12 hex digits
IMAGE_REF_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,254}$"

SandboxId = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
ExecId = Annotated[str, StringConstraints(pattern=EXEC_ID_PATTERN)]
ImageRef = Annotated[str, StringConstraints(pattern=IMAGE_REF_PATTERN)]
Key = Annotated[str, StringConstraints(min_length=1, max_length=128)]
HOSTNAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$"
LABEL_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
LabelName = Annotated[str, StringConstraints(pattern=LABEL_NAME_PATTERN, max_length=128)]
Label = Annotated[str, StringConstraints(max_length=128)]
Labels = Annotated[dict[LabelName, Label], Field(max_length=64)]

#: What the patterns mean, for messages.
_WORDS = {
    ID_PATTERN: "must be 1 to 63 of a-z, 0-9, '.' and '-', the first a letter or digit",
    EXEC_ID_PATTERN: "must be 1 to 64 of A-Z, a-z, 0-9, '_' and '-'",
    IMAGE_REF_PATTERN: "must be name[:tag] or a digest",
    HOSTNAME_PATTERN: "must be 1 to 63 of A-Z, a-z, 0-9 and '-', which neither begins nor ends it",
    LABEL_NAME_PATTERN: "must be a name of A-Z, a-z, 0-9, '.', '_', '/' and '-', the first a letter or digit",
    apparmor.PATH_GLOB_PATTERN: apparmor.PATH_GLOB_WORDS,
    r"^/[^\x00]*$": "must be an absolute path",
    r"^[^\x00]*$": "must not contain a NUL byte",
    r"^[^=\x00]{1,4096}$": "must be a name of 1 to 4096 bytes without '=' and NUL",
}


def in_words(pattern: str) -> str:
    """What a pattern means, for messages."""
    return _WORDS.get(pattern, f"must match {pattern}")


def explain(error: ErrorDetails) -> str:
    """One of pydantic's findings in our words; needs its context."""
    if error["type"] == "extra_forbidden":
        return "unknown field"
    words = _WORDS.get(str(error.get("ctx", {}).get("pattern")))
    text = words or error["msg"].removeprefix("Value error, ")
    return text[:1].lower() + text[1:4000]


# --- sandboxes ---------------------------------------------------------------------------------------------------


class State(StrEnum):
    """States of a sandbox. ``delete`` is legal in every one of them."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    FAILED = "failed"
    DELETING = "deleting"


#: "none", "all" or rules; ``libdsec.network`` has the language.
Network = Annotated[
    Literal["none", "all"] | tuple[str, ...],
    BeforeValidator(network.normal),
    WithJsonSchema(network.SCHEMA),
]


class Limits(Model):
    """Limits of cgroup v2 (admin-guide/cgroup-v2.rst); one that the host lacks is refused as ``feature-missing``."""

    memory_max_bytes: int | None = Field(None, ge=16 * MIB, le=1 << 46)
    memory_high_bytes: int | None = Field(None, ge=16 * MIB, le=1 << 46)
    swap_max_bytes: int | None = Field(None, ge=0, le=1 << 46)
    memory_oom_group: bool | None = Field(None, description="want of memory ends all processes at once, not one")
    cpu_max_permil: int | None = Field(None, ge=1, le=1_000_000, description="1000 is one CPU")
    cpu_weight: int | None = Field(None, ge=1, le=10000, description="share under contention; others have 100")
    cpu_idle: bool | None = Field(None, description="runs only on CPU time that nobody else wants")
    pids_max: int | None = Field(None, ge=4, le=4_194_304)
    io_weight: int | None = Field(None, ge=1, le=10000, description="share under contention; others have 100")
    io_read_bytes_per_s: int | None = Field(None, ge=4096, le=1 << 46, description="of the state directory's disk")
    io_write_bytes_per_s: int | None = Field(None, ge=4096, le=1 << 46)
    io_reads_per_s: int | None = Field(None, ge=1, le=1 << 31)
    io_writes_per_s: int | None = Field(None, ge=1, le=1 << 31)

    @model_validator(mode="after")
    def _weight_or_idle(self) -> Self:
        if self.cpu_idle and self.cpu_weight is not None:
            raise ValueError("cpu_weight: has no meaning with cpu_idle, which is the smallest weight there is")
        return self

    def merged(self, new: Limits, lifted: Sequence[str] = ()) -> Limits:
        """These limits with those that ``new`` sets, without those that are lifted."""
        given = {name: value for name, value in new if value is not None}
        kept = {name: value for name, value in self if value is not None and name not in lifted}
        return Limits(**{**kept, **given})


LimitName = Literal[
    "memory_max_bytes", "memory_high_bytes", "swap_max_bytes", "memory_oom_group", "cpu_max_permil", "cpu_weight",
    "cpu_idle", "pids_max", "io_weight", "io_read_bytes_per_s", "io_write_bytes_per_s", "io_reads_per_s",
    "io_writes_per_s",
]  # fmt: skip


class SandboxSpec(Model):
    """What a user asks for."""

    backend: str = Field("container", max_length=32, description="one of the backends `dsecctl host` lists")
    image: ImageRef = Field(description="the base image")
    workspace: ImageRef | None = Field(None, description="an image that carries its prefix, /workspace by default")
    toolkits: tuple[ImageRef, ...] = Field((), max_length=12, description="later ones lie on top")
    command: tuple[Arg, ...] | None = Field(None, min_length=1, max_length=4096, description="exec 'main' of a start")
    env: Env = Field(default_factory=dict, description="with the image's at most 1 MiB")
    user: User | None = Field(None, description="default: the image's, else root")
    workdir: GuestPath | None = Field(None, description="default: the image's, else the user's home")
    hostname: str | None = Field(None, pattern=HOSTNAME_PATTERN)
    readonly_root: bool = False
    tmp_size_bytes: int = Field(256 * MIB, ge=MIB, le=1 << 40, description="/tmp, a tmpfs")
    shm_size_bytes: int = Field(64 * MIB, ge=64 * 1024, le=1 << 40, description="/dev/shm")
    network: Network = Field("none", description="what it may reach: none, all or a list of rules; see docs/network.md")
    publish: Publish = Field((), description="ports of the host's loopback: docs/network.md; 0 becomes the one chosen")
    cpu_class: Literal["latency", "batch"] = Field(
        "latency", description="batch gets what CPU time latency leaves, and shares no core with it; fixed at creation"
    )
    limits: Limits = Limits()
    apparmor: AppArmor | None = Field(
        None, description="rules of its own; `feature-missing` where the host has no AppArmor"
    )
    labels: Labels = Field(default_factory=dict)
    ttl_s: float | None = Field(
        None, gt=0, le=10 * 365 * 86400, description="deleted this long after creation; time paused does not count"
    )


class CreateRequest(Model):
    """Create one sandbox. The same key again returns the first sandbox; with another spec it is a conflict."""

    spec: SandboxSpec
    id: SandboxId | None = Field(None, description="made by the daemon when absent")
    idempotency_key: Key | None = None
    wait_s: float | None = Field(
        None, ge=0, le=3600, description="how long it may wait for the host to have room; alone at most 110"
    )


class BatchCreateRequest(Model):
    """Create many; the operation's result is a list of BatchItem in the order of the items."""

    items: tuple[CreateRequest, ...] = Field(min_length=1, max_length=32768)
    parallel: int | None = Field(None, ge=1, le=64, description="default: what the host's CPUs suggest")


class ErrorBody(OpenModel):
    """The body of every error response."""

    code: str
    message: str
    hint: str | None = None
    retryable: bool = False
    details: dict[str, Any] = Field(default_factory=dict)
    request_id: str | None = None


class Sandbox(OpenModel):
    """One sandbox as the daemon sees it."""

    id: str
    state: State
    reason: str | None = Field(None, description="why it is failed or stopped: oom, crash, killed, ttl, user …")
    spec: SandboxSpec
    layers: tuple[str, ...] = Field((), description="digests, top first")
    owner_uid: int
    created_at: datetime
    started_at: datetime | None = None
    expires_at: datetime | None = None
    off: tuple[str, ...] = Field((), description="default protections this host cannot give, see `dsecctl host`")
    apparmor_profile: str = Field("unconfined", description="what confines it, or did when it last ran")
    snapshot: str | None = Field(None, description="the snapshot whose memory it runs from, until it is stopped")
    unpublished: str | None = Field(None, description="why its published ports lead nowhere at present, and what to do")


class BatchItem(OpenModel):
    """Result of one item of a batch: exactly one of the two is set."""

    sandbox: Sandbox | None = None
    error: ErrorBody | None = None


class SandboxList(OpenModel):
    sandboxes: tuple[Sandbox, ...]
    next: str | None = Field(None, description="pass as `after` for the next page")


class SandboxUsage(OpenModel):
    """What a sandbox that runs or is paused has used since its start. ``cpu_usage_us``, ``memory_current_bytes`` and
    ``pids_current`` are the host's own count, None where it has no such controller; all else is the sandbox's word."""

    id: str
    cgroup: str = Field("", description="where the host counts: a folder of its cgroup file system")
    processes: int = Field(description="now, the agent among them; the sandbox's word")
    execs_running: int = Field(description="the sandbox's word")
    execs_total: int = Field(description="commands started so far; the sandbox's word")
    cpu_user_us: int = Field(description="the sandbox's word")
    cpu_system_us: int = Field(description="the sandbox's word")
    max_rss_kib: int = Field(description="of the largest process that has ended; the sandbox's word")
    cpu_usage_us: int | None = Field(None, description="by the host: cpu.stat, usage_usec")
    memory_current_bytes: int | None = Field(None, description="by the host: memory.current")
    pids_current: int | None = Field(None, description="by the host: pids.current, processes and threads")
    cpu_forced_idle_us: int | None = Field(
        None, description="by the host: time siblings stood idle for it; counted with kernel.sched_schedstats=1"
    )


class NetworkDenial(OpenModel):
    """One packet or connection that the policy refused."""

    at: datetime
    address: str = Field(description="where it was to go; empty for what is not IP")
    port: int
    protocol: str = Field(description="tcp, udp, icmp or a number")
    reason: str = Field(description="policy, host-address, spoofed-source, protocol, fragment, header or frame")


class NameDenial(OpenModel):
    """A name that could not be resolved for want of a rule, or led only where none allows."""

    at: datetime
    name: str


class NetworkState(OpenModel):
    """What a sandbox may reach, and what came of its tries since its start. All figures are the host's own."""

    id: str
    policy: Network
    addresses: tuple[str, ...] = Field((), description="its own; none without a network")
    device: str = Field("", description="the host's end of it")
    sent_packets: int = 0
    sent_bytes: int = 0
    received_packets: int = 0
    received_bytes: int = 0
    denied: int = Field(0, description="packets it sent, and connections it tried, that were refused")
    denied_inbound: int = Field(0, description="packets to it that were refused")
    recent: tuple[NetworkDenial, ...] = Field((), description="the last refusals of what it sent, newest first")
    dns: str = Field("", description="the server that resolves names for it; none when its policy allows no name")
    opened_addresses: int = Field(0, description="that names have opened")
    denied_names: int = Field(0, description="queries for names that its policy does not allow")
    denied_answers: int = Field(0, description="answers that led to special addresses that its policy does not name")
    dropped_queries: int = Field(0, description="above its rate, not to be read, or from a source that is not its own")
    recent_names: tuple[NameDenial, ...] = Field((), description="the last names refused, newest first")


class StopRequest(Model):
    grace_s: float = Field(5.0, ge=0, le=3600, description="SIGTERM, then this long until SIGKILL")


class UpdateRequest(Model):
    """Change what may change on a live sandbox; absent fields stay."""

    labels: Labels | None = None
    ttl_s: float | None = Field(None, gt=0, le=10 * 365 * 86400, description="from now on")
    limits: Limits | None = Field(None, description="those that it sets; the others stay")
    lift: tuple[LimitName, ...] = Field((), max_length=32, description="limits that are to be none again")
    network: Network | None = Field(None, description="in force, as a whole, when the answer comes")


# --- execs -------------------------------------------------------------------------------------------------------


class Rlimit(Model):
    """One resource limit, see prlimit(2); -1 is unlimited."""

    soft: int = Field(ge=-1, le=INT64_MAX)
    hard: int = Field(ge=-1, le=INT64_MAX)


RlimitName = Literal[
    "as", "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue",
    "nice", "nofile", "nproc", "rss", "rtprio", "rttime", "sigpending", "stack",
]  # fmt: skip


class ExecRequest(Model):
    """Run one command: argv, no shell."""

    argv: tuple[Arg, ...] = Field(min_length=1, max_length=65536)
    exec_id: ExecId | None = Field(None, description="made by the client or the daemon; unique in the sandbox")
    env: Env = Field(default_factory=dict)
    cwd: GuestPath | None = None
    user: User | None = Field(None, description="name or uid, optionally :group")
    stdin: Bytes | None = Field(None, description="whole input of a buffered exec")
    pty: bool = False
    rows: int = Field(24, ge=1, le=65535)
    cols: int = Field(80, ge=1, le=65535)
    umask: int = Field(0o022, ge=0, le=0o777)
    rlimits: dict[RlimitName, Rlimit] = Field(default_factory=dict)
    timeout_s: float | None = Field(None, gt=0, le=10 * 365 * 86400)
    idle_timeout_s: float | None = Field(None, gt=0, le=10 * 365 * 86400, description="killed after silence")
    max_output_bytes: int = Field(8 * MIB, ge=0, le=64 * MIB, description="per stream of a buffered exec")
    buffer_bytes: int = Field(MIB, ge=4096, le=64 * MIB, description="kept inside for re-attaching, per stream")
    keep_s: float = Field(600, ge=0, le=30 * 86400, description="output and status kept after the end")
    limits: Limits | None = Field(None, description="of this command alone, within the sandbox's")


class ExecReason(StrEnum):
    """Why an exec ended."""

    EXITED = "exited"
    TIMEOUT = "timeout"
    IDLE_TIMEOUT = "idle-timeout"
    KILLED = "killed"
    SHUTDOWN = "shutdown"
    OOM = "oom"


class ExecInfo(OpenModel):
    """One exec; the fields after ``running`` are final once it is false."""

    exec_id: str
    pid: int = Field(description="inside the sandbox")
    running: bool
    exit_code: int | None = Field(None, description="None while running or when a signal ended it")
    signal: int | None = None
    reason: ExecReason | None = None
    stdout_bytes: int = Field(0, description="produced so far")
    stderr_bytes: int = 0
    stdout_dropped_bytes: int = Field(0, description="left the ring before anybody read them")
    stderr_dropped_bytes: int = 0
    cpu_user_us: int = 0
    cpu_system_us: int = 0
    max_rss_kib: int = 0
    oom_kills: int = Field(0, description="of its processes, those that ended for want of memory; needs a memory limit")
    started_at: datetime | None = None
    finished_at: datetime | None = None


class ExecResult(ExecInfo):
    """A finished exec with its output."""

    stdout: Bytes = b""
    stderr: Bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def returncode(self) -> int:
        """As Python's subprocess: the exit code, or minus the signal's number."""
        if self.exit_code is not None:
            return self.exit_code
        return -(self.signal or 0)

    @property
    def text(self) -> str:
        """stdout as UTF-8, undecodable bytes replaced."""
        return self.stdout.decode("utf-8", "replace")


class ExecList(OpenModel):
    execs: tuple[ExecInfo, ...]


class ExecOutput(OpenModel):
    """A piece of an exec's output, read without attaching."""

    data: Bytes
    offset: int = Field(description="of the first byte of data; later than asked when older bytes are gone")
    end: int = Field(description="offset after the newest byte the sandbox holds")
    running: bool


class SignalRequest(Model):
    signal: int = Field(ge=1, le=64)
    tree: bool = Field(False, description="every process of the exec; only SIGKILL")


class ResizeRequest(Model):
    rows: int = Field(ge=1, le=65535)
    cols: int = Field(ge=1, le=65535)


class StreamStart(Model):
    """First message of an exec WebSocket: start a command, or attach to one."""

    start: ExecRequest | None = None
    stdin: bool = Field(False, description="the client will send stdin")
    attach: ExecId | None = None
    stdout_offset: int = Field(0, ge=0, le=INT64_MAX, description="with attach")
    stderr_offset: int = Field(0, ge=0, le=INT64_MAX, description="with attach")

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.start is None) == (self.attach is None):
            raise ValueError("exactly one of 'start' and 'attach' is needed")
        if self.start is not None and self.start.stdin is not None:
            raise ValueError("start.stdin: is not for a stream; say \"stdin\": true beside 'start' and send it")
        if self.start is not None and (self.stdout_offset or self.stderr_offset):
            raise ValueError("stdout_offset, stderr_offset: go with 'attach'; a command that starts begins at 0")
        return self


# --- images ------------------------------------------------------------------------------------------------------


class ImageConfig(OpenModel):
    """What an image says about running it (OCI image configuration)."""

    env: tuple[str, ...] = ()
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)


class ImageInfo(OpenModel):
    digest: str = Field(description="sha256:… of the metadata image: our identity")
    names: tuple[str, ...] = Field((), description="name:tag")
    source: str = Field("", description="what it was made from")
    manifest_digest: str | None = Field(None, description="of the OCI manifest it came from")
    prefix: str = Field("/", description="where its tree lies")
    config: ImageConfig = ImageConfig()
    created_at: datetime
    entries: int = Field(description="files, directories, links …")
    size_bytes: int = Field(description="apparent size of all files")
    metadata_bytes: int = Field(description="size of the EROFS image")
    objects: int = Field(0, description="distinct contents")
    objects_new: int = Field(0, description="contents this import added to the store")
    bytes_new: int = Field(0, description="bytes this import added to the store")
    held_by: tuple[str, ...] = Field((), description="sandboxes that use it")


class ImageList(OpenModel):
    images: tuple[ImageInfo, ...]


SourceKind = Literal["auto", "directory", "rootfs-tar", "docker-archive", "oci-layout", "oci-archive", "registry"]


class ImageConfigChange(Model):
    """What to change of the configuration that an image's source has; absent fields stay as they are there."""

    env: tuple[Annotated[str, StringConstraints(pattern=r"^[^=\x00]+=[^\x00]*$", max_length=131072)], ...] = Field(
        (), max_length=4096, description="NAME=VALUE, added to the source's or in the place of the same name's"
    )
    user: User | None = None
    workdir: GuestPath | None = None
    entrypoint: tuple[Arg, ...] | None = Field(None, max_length=4096)
    cmd: tuple[Arg, ...] | None = Field(None, max_length=4096)
    labels: dict[str, str] = Field(default_factory=dict, max_length=4096, description="added to the source's")


class ImportRequest(Model):
    """Import an image from a path on the host, or pull one with skopeo (kind ``registry``)."""

    name: ImageRef = Field(description="name[:tag] to give it")
    source: str = Field(
        min_length=1, max_length=4096, pattern=r"^[^\x00]*$", description="absolute path, or docker://… and the like"
    )
    kind: SourceKind = "auto"
    reference: str | None = Field(
        None, max_length=255, pattern=r"^[^\x00]*$", description="which image of an archive that holds several"
    )
    prefix: GuestPath = Field("/", description="where the tree lies: /workspace, /opt/NAME …")
    config: ImageConfigChange = ImageConfigChange()


class BuildDebianRequest(Model):
    """Build a base image from Debian's archive with mmdebstrap."""

    suite: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$")
    name: ImageRef | None = Field(None, description="default debian:SUITE")
    include: tuple[Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.+:~-]*$", max_length=128)], ...] = Field(
        (), max_length=1024
    )
    variant: Literal["minbase", "apt", "essential", "standard"] = "minbase"
    mirror: str | None = Field(None, max_length=1024, pattern=r"^(https?|file|copy)://[^\s]+$")


class TagRequest(Model):
    ref: ImageRef
    name: ImageRef


class ImportProgress(OpenModel):
    phase: str
    bytes_done: int = 0
    bytes_total: int | None = None
    entries: int = 0
    objects_new: int = 0
    bytes_new: int = 0


# --- operations, events, host ------------------------------------------------------------------------------------


class OperationState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Operation(OpenModel):
    """A job that may take longer than a second; poll it with ``wait_s``."""

    id: str
    kind: str
    state: OperationState
    owner_uid: int
    created_at: datetime
    finished_at: datetime | None = None
    progress: dict[str, Any] = Field(default_factory=dict)
    result: Any = Field(None, description="by kind: ImageInfo, or a list of BatchItem")
    error: ErrorBody | None = None


class OperationList(OpenModel):
    operations: tuple[Operation, ...]


class Event(OpenModel):
    """Something that happened; ``seq`` rises by one per event and survives restarts."""

    seq: int
    at: datetime
    kind: str = Field(description="sandbox.created, sandbox.running, sandbox.failed, image.imported, daemon.started …")
    subject: str = Field("", description="sandbox or image it is about")
    details: dict[str, Any] = Field(default_factory=dict)


class EventList(OpenModel):
    events: tuple[Event, ...]
    last: int = Field(description="newest sequence number; pass as `since` next time")


class FeatureState(OpenModel):
    name: str
    works: bool | None = Field(description="None: could not be told")
    why: str = Field("", description="what dsec uses it for")
    since: str = Field("", description="first Linux or tool version")
    detail: str = Field("", description="what is missing, or what was found")
    hint: str = Field("", description="what to do")


class BackendState(OpenModel):
    name: str
    works: bool
    detail: str = ""


class PressureReport(OpenModel):
    """What new sandboxes are admitted by, in percent; None where the kernel does not tell."""

    admission: str = Field(description="on, observe or off")
    memory_available_percent: float | None = None
    memory_some_percent: float | None = Field(None, description="time in which a task waited for memory")
    memory_full_percent: float | None = Field(None, description="time in which nothing else happened")
    io_full_percent: float | None = None
    cpu_some_percent: float | None = None
    short_of: str = Field("", description="what there is too little of now, in words")
    waiting: int = Field(0, description="creations and starts that wait for room")
    refused: int = Field(0, description="since the daemon's start")


class HostReport(OpenModel):
    """What this host is and offers."""

    hostname: str
    kernel: str
    machine: str
    dsec_version: str
    cpus: int
    memory_bytes: int
    memory_available_bytes: int
    state_dir: str
    disk_free_bytes: int
    sandboxes: dict[str, int] = Field(description="count by state")
    backends: tuple[BackendState, ...]
    features: tuple[FeatureState, ...]
    pressure: PressureReport | None = None


class Finding(OpenModel):
    """One line of `dsecctl doctor`."""

    check: str
    ok: bool | None
    needed: bool = Field(True, description="false: dsec works without it, but offers or protects less")
    detail: str = ""
    hint: str = ""


class DoctorReport(OpenModel):
    findings: tuple[Finding, ...]


class VersionInfo(OpenModel):
    version: str
    api: str = "v1"
    started_at: datetime
    generation: int = Field(description="counts the daemon's starts on this state")


class Empty(OpenModel):
    """An empty answer."""
