# SPDX-License-Identifier: Apache-2.0
"""What every backend is to the core: one small interface, and the box it works on.

What belongs here: ``Backend``, ``Box``, ``Site`` and the translation of kernel errors into the user's. What
does not: any one kind of sandbox (a file each beside this one), states and policy (``dsecd.core``).
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from pathlib import Path
from typing import Literal, Protocol

from dsecd.backends.agentlink.link import AgentError, AgentLink, LinkLost
from dsecd.backends.name_service import NameService
from dsecd.backends.plan import Step
from dsecd.backends.refusals import Refused
from dsecd.linux.feature import FeatureMissing as KernelFeatureMissing
from dsecd.linux.pidfd import Process
from dsecd.linux.proc import ProcessFailed
from dsecd.vmm.base import VmmError
from libdsec import errors
from libdsec.memory import MachineMemory
from libdsec.network import Policy
from libdsec.types import BackendState, Limits, NetworkState, SandboxSpec


@dataclass(frozen=True)
class NetworkSite:
    """What sandboxes' networks are made of."""

    ipv4_pool: IPv4Network
    ipv6_pool: IPv6Network
    uid_base: int  # of the box that has the first address
    flows_per_sandbox: int
    program: Path  # the compiled ebpf/egress.bpf.c
    names: NameService
    dns_server: IPv4Address  # where dsec-dns answers; an address of the host
    made: dict[str, object] = field(default_factory=dict, compare=False)  # what all backends share of it


@dataclass(frozen=True)
class MachineSettings:
    """How virtual machines are made on this host; ``config.py`` says what each means."""

    monitor: Literal["auto", "qemu", "firecracker"] = "auto"
    firecracker: str = "auto"
    kernel: str = "auto"
    accelerator: str = "auto"
    vcpus: int = 1
    memory_bytes: int = 512 << 20
    disk_bytes: int = 8 << 30
    boot_timeout_s: float = 60.0
    share_layers: bool = True
    reclaim_age_s: int = 60
    reclaim_bytes_per_s: int = 64 << 20
    reclaim_sample_us: int = 50_000
    report_order: int = 2
    zram_percent: int = 0
    kept_environments_bytes: int = 20 << 30


@dataclass(frozen=True)
class Site:
    """The places of this host that backends work in."""

    state_dir: Path  # survives a reboot
    runtime_dir: Path  # does not
    cgroup_dir: Path  # the cgroup that holds all sandboxes
    agent: Path  # the agent's program
    objects_dir: Path  # file contents of all images
    cache_dir: Path  # may be lost
    apparmor: Literal["auto", "require", "off"]  # of the configuration
    launch_ns: int  # fd of a mount namespace with few mounts, to start runtimes from
    generation: int  # counts the daemon's starts
    network: NetworkSite
    core_scheduling: Literal["off", "class", "sandbox"] = "off"  # as far as the kernel can
    machines: MachineSettings = MachineSettings()
    made: dict[str, object] = field(default_factory=dict, compare=False)  # what all backends share


@dataclass
class Box:
    """One sandbox as its backend sees it: what it is made of, and what of it runs."""

    id: str
    spec: SandboxSpec
    uid_base: int  # first host id of its range
    layers: tuple[Path, ...]  # mounted metadata images, top first
    profile: str = ""  # the AppArmor profile that confines it; none when empty
    origin: Path | None = None  # what `saved` gave of the box that this one begins as a copy of
    process: Process | None = None  # its init, as the host sees it
    link: AgentLink | None = None
    on_link_lost: Callable[[LinkLost], None] = field(default=lambda _lost: None)
    #: Called with the number of its processes that have ended for want of memory, whenever that rises.
    on_oom: Callable[[int], None] = field(default=lambda _kills: None)
    #: Called now and then with what its network policy has refused since the last time.
    on_refused: Callable[[Refused], None] = field(default=lambda _refused: None)


@dataclass(frozen=True)
class Saved:
    """What was saved under a name."""

    needs: Mapping[str, str]  # what must be the same where it is opened
    digests: Mapping[str, str]  # of its files, by their names
    memory_bytes: int  # of the machine
    state_bytes: int  # beside memory and disk
    used_bytes: int  # on the host's disk


class Saves(Protocol):
    """Boxes saved as they run, with memory and files, by a kind of sandbox that can do that.

    What ``save`` and ``open`` give is the ``origin`` of boxes that begin as a copy.
    """

    async def save(self, box: Box, doing: str, *, paused: bool) -> Path:
        """What a box that runs is, in a directory that ``discard`` removes, a new daemon, or ``publish`` moves; the
        box goes on, or stays as it was when it is ``paused``."""
        ...

    async def discard(self, origin: Path) -> None:
        """Remove what ``save`` gave; boxes that began as it go on. Absent is fine."""
        ...

    async def publish(self, origin: Path, name: str) -> Saved:
        """Make it last, by a name: all of it is on the disk when it has that."""
        ...

    async def open(self, name: str, *, needs: Mapping[str, str], digests: Mapping[str, str]) -> Path:
        """Raises FeatureMissing with what differs when this host is not as it ``needs``, BackendFailed when it is not
        what was published."""
        ...

    async def remove(self, name: str) -> None:
        """Absent, and half there, is fine."""
        ...

    def residents(self) -> set[str]:
        """The names of all that is there."""
        ...


class Backend(Protocol):
    """A kind of sandbox.

    ``disk_steps`` make what survives a stop, ``run_steps`` what does not: create performs both, stop undoes the latter,
    start performs them again, delete undoes both. All of them may be called for a box that an earlier daemon made.
    """

    name: str
    #: Names of features without which there is no such sandbox at all.
    needs: frozenset[str]
    #: How many uids and gids there are in one: 0 to so many less one.
    ids: int
    #: None for a kind that cannot be saved while it runs.
    saves: Saves | None

    def probe(self) -> BackendState: ...
    def check(self, spec: SandboxSpec) -> list[str]:
        """Raise FeatureMissing for what the spec asks for and this host lacks; name the defaults that are off."""
        ...

    async def take_stock(self, boxes: Sequence[Box]) -> None:
        """Before anything is done to ``boxes``, which are all that have a record: find out what of an earlier daemon's
        they share, and remove what none of them uses."""
        ...

    def disk_steps(self, box: Box) -> Sequence[Step]: ...
    def run_steps(self, box: Box) -> Sequence[Step]: ...
    async def reconnect(self, box: Box) -> None:
        """Set ``box.link`` anew to the agent of a box that runs. Raises SandboxLost."""
        ...

    async def pause(self, box: Box) -> None: ...
    async def resume(self, box: Box) -> None: ...
    def kill(self, box: Box) -> None:
        """SIGKILL to everything in it, without waiting; nothing there is fine. Blocks. Runs in a thread."""
        ...

    async def shut_down(self, box: Box, grace_s: float) -> None:
        """Ask it to end and wait; when it does not, kill it. Bounded: ``grace_s`` and a few seconds."""
        ...

    async def set_limits(self, box: Box, limits: Limits) -> None:
        """Bring those of a box that runs from ``box.spec.limits`` to ``limits``."""
        ...

    def exec_limits(self, limits: Limits) -> Mapping[str, str]:
        """Limits of one command as attributes of its cgroup. Raises FeatureMissing for what this host lacks."""
        ...

    async def set_network(self, box: Box, policy: Policy) -> None:
        """Exchange the policy of a box that runs or is paused: in force, and as a whole, when this returns."""
        ...

    async def dial(self, box: Box, port: int) -> socket.socket:
        """A connection to a port on the loopback of a box that runs. Raises Refused when nobody listens."""
        ...

    def network(self, box: Box) -> NetworkState:
        """What it may reach, and what came of its tries. Blocks for microseconds."""
        ...

    def cgroup(self, box: Box) -> Path:
        """The cgroup of everything in the box on this host; it is there while the box runs."""
        ...

    def usage(self, box: Box) -> Mapping[str, int]:
        """What the host itself counts for all of the box, named as in ``linux.cgroup.stat``; what it does not count is
        left out. Blocks. Runs in a thread."""
        ...

    async def machine_memory(self, box: Box) -> MachineMemory | None:
        """What a virtual machine costs and what its guest says; None for another kind, and for one that is gone."""
        ...

    def death(self, box: Box) -> str | None:
        """Why its first process ended or is ending, as far as the kernel can still tell: ``oom`` …; None when nothing
        tells."""
        ...

    def residents(self) -> set[str]:
        """Ids of all boxes of which the kernel or the file system still has anything."""
        ...


@contextlib.contextmanager
def translated(doing: str, *, but: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Turn what lower layers raise into the user's errors, once, with the cause kept; ``but`` comes out as it is."""
    try:
        yield
    except but:
        raise
    except KernelFeatureMissing as error:
        hint = "run 'dsecctl host' to see what this host offers"
        raise errors.FeatureMissing(f"{doing}: {error}", hint=hint) from error
    except ProcessFailed as error:
        raise errors.BackendFailed(f"{doing}: {error}") from error
    except LinkLost as error:
        raise errors.SandboxLost(f"{doing}: {error}") from error
    except AgentError as error:
        raise errors.BackendFailed(f"{doing}: the agent refused: {error.code}") from error
    except VmmError as error:
        # A monitor that says nothing in time is a time-out like any other.
        if isinstance(error, TimeoutError):
            raise from_oserror(doing, error) from error
        raise errors.BackendFailed(f"{doing}: {error}", hint=error.hint) from error
    except OSError as error:
        raise from_oserror(doing, error) from error


_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.ENOMEM))
_NO_DESCRIPTORS = frozenset((errno.EMFILE, errno.ENFILE))


def from_oserror(doing: str, error: OSError) -> errors.DsecError:
    """The user's error for a kernel's: what has run out is a matter of capacity, anything else a refusal."""
    place = f" ({error.filename})" if error.filename else ""
    if isinstance(error, TimeoutError) and error.errno is None:
        return errors.TimedOut(f"{doing}: no answer in time")
    text = f"{doing}: {error.strerror or error}{place}"
    if error.errno in _FULL:
        return errors.NoCapacity(text, hint="free disk space or memory on the host", retryable=True)
    if error.errno in _NO_DESCRIPTORS:
        return errors.NoCapacity(text, hint="raise the daemon's limit of open files", retryable=True)
    return errors.Refused(text, errno=error.errno)
