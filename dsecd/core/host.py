# SPDX-License-Identifier: Apache-2.0
"""What this host is and offers, and what is wrong with it.

Here: the reports behind `dsecctl host` and `dsecctl doctor`, put together from what others find out. Not
here: probing (``dsecd.linux.mechanisms``, backends), looking for left-overs (``reconcile.py``).
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from dsecd import __version__
from dsecd.backends.base import Backend
from dsecd.core.admission import Admission
from dsecd.linux import mechanisms
from dsecd.linux.feature import FeatureStatus
from libdsec.types import (
    BackendState,
    DoctorReport,
    FeatureState,
    Finding,
    HostReport,
    PressureReport,
    SandboxSpec,
    VersionInfo,
)

#: Below these the daemon will soon have to refuse work.
DISK_FREE_MIN_BYTES = 2 << 30
OPEN_FILES_MIN = 65_536

#: Features that dsec cannot work without whatever the backend; backends name their own.
_NEEDED = frozenset(("mkfs-erofs",))
#: What sandboxes run on when nothing else is asked for. A host that lacks another backend is as it should be.
_DEFAULT_BACKEND = SandboxSpec.model_fields["backend"].default


@dataclass(frozen=True)
class Sources:
    """What the reports are made of, besides what this module looks up by itself."""

    state_dir: Path
    generation: int
    backends: Mapping[str, Backend]
    counts: Callable[[], dict[str, int]]  # sandboxes by state
    residue: Callable[[], Sequence[Finding]]  # left-overs
    id_collisions: Callable[[], Sequence[str]]  # who else uses the sandboxes' ids; blocks
    admission: Admission
    dns_pid: Callable[[], int | None]  # of the dsec-dns that is connected


class Host:
    """Reports on this host."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._started_at = datetime.now(UTC)

    def version(self) -> VersionInfo:
        """Cheap: also what a client asks to see whether the daemon answers."""
        return VersionInfo(
            version=__version__, started_at=self._started_at, generation=self._sources.generation
        )

    async def report(self) -> HostReport:
        """What the host is and offers."""
        features, backends = await asyncio.to_thread(self._probe)
        memory = psutil.virtual_memory()
        uname = os.uname()
        return HostReport(
            hostname=uname.nodename,
            kernel=uname.release,
            machine=uname.machine,
            dsec_version=__version__,
            cpus=len(os.sched_getaffinity(0)),
            memory_bytes=memory.total,
            memory_available_bytes=memory.available,
            state_dir=str(self._sources.state_dir),
            disk_free_bytes=_disk_free(self._sources.state_dir),
            sandboxes=self._sources.counts(),
            backends=tuple(backends),
            features=tuple(_feature(status) for status in features),
            pressure=_pressure(self._sources.admission),
        )

    async def doctor(self) -> DoctorReport:
        """Everything that can be checked, one line each; what is wrong comes with what to do."""
        features, backends = await asyncio.to_thread(self._probe, again=True)
        collisions = await asyncio.to_thread(self._sources.id_collisions)
        needed = _NEEDED | frozenset(self._sources.backends[_DEFAULT_BACKEND].needs)
        findings = [
            Finding(
                check=f"feature {status.name}",
                ok=status.works,
                needed=status.name in needed,
                detail=status.reason or status.why,
                hint=status.hint,
            )
            for status in features
        ]
        findings += [
            Finding(check=f"backend {b.name}", ok=b.works, needed=b.name == _DEFAULT_BACKEND, detail=b.detail)
            for b in backends
        ]
        findings += [_disk(self._sources.state_dir), _open_files(), _ids(collisions), _dns(self._sources.dns_pid())]
        findings.append(_room(_pressure(self._sources.admission)))
        findings += self._sources.residue()
        return DoctorReport(findings=tuple(findings))

    def _probe(self, *, again: bool = False) -> tuple[list[FeatureStatus], list[BackendState]]:
        """Blocks.  Runs in a thread."""
        features = mechanisms.report(again=again)
        return features, [backend.probe() for backend in self._sources.backends.values()]


def missing(required: Sequence[str]) -> list[str]:
    """Why each of ``required`` (names of features) cannot be had; nothing for those that work.  Blocks."""
    known = {feature.name: feature for feature in mechanisms.MECHANISMS}
    faults = []
    for name in required:
        if name not in known:
            faults.append(f"require {name!r}: no such feature; there are {', '.join(sorted(known))}")
            continue
        status = known[name].status()
        if status.works is not True:
            faults.append(f"require {name!r}: {status.reason}" + (f" (hint: {status.hint})" if status.hint else ""))
    return faults


def _pressure(admission: Admission) -> PressureReport:
    reading = admission.look()
    figures = {f"{name}_percent": round(percent, 1) for name, percent in reading.figures.items()}
    return PressureReport(
        admission=admission.mode, short_of=str(reading.shortage or ""), waiting=admission.waiting,
        refused=admission.refused,
        **{name: value for name, value in figures.items() if name in PressureReport.model_fields},
    )  # fmt: skip


def _room(pressure: PressureReport) -> Finding:
    hint = ""
    if pressure.memory_some_percent is None:
        hint = "boot with psi=1; until then new sandboxes are admitted by available memory alone"
    elif pressure.short_of:
        hint = "stop or delete sandboxes, give the host more memory, or change 'admission' in dsecd.toml"
    state = pressure.short_of or "the host has room for new sandboxes"
    return Finding(
        check="pressure", ok=not hint, needed=False, hint=hint,
        detail=f"admission is {pressure.admission}; {state}; {pressure.waiting} wait, {pressure.refused} refused",
    )  # fmt: skip


def _feature(status: FeatureStatus) -> FeatureState:
    return FeatureState(
        name=status.name,
        works=status.works,
        why=status.why,
        since=status.since,
        detail=status.reason,
        hint=status.hint,
    )


def _disk_free(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _disk(path: Path) -> Finding:
    free = _disk_free(path)
    ok = free >= DISK_FREE_MIN_BYTES
    return Finding(
        check="disk space",
        ok=ok,
        detail=f"{free >> 20} MiB free in {path}",
        hint="" if ok else "remove images that nothing uses, or make the file system larger",
    )


def _open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    ok = limit == resource.RLIM_INFINITY or limit >= OPEN_FILES_MIN
    return Finding(
        check="open files",
        ok=ok,
        needed=False,
        detail=f"the daemon may have {limit} files open",
        hint="" if ok else f"raise LimitNOFILE of dsecd.service to {OPEN_FILES_MIN} or more",
    )


def _dns(pid: int | None) -> Finding:
    if pid is not None:
        return Finding(check="dsec-dns", ok=True, needed=False, detail=f"names resolve in sandboxes; pid {pid}")
    return Finding(
        check="dsec-dns", ok=False, needed=False, detail="it is not connected: no name resolves in any sandbox",
        hint="systemctl start dsec-dns, or see 'journalctl -u dsec-dns' why it does not run",
    )  # fmt: skip


def _ids(collisions: Sequence[str]) -> Finding:
    return Finding(
        check="id ranges",
        ok=not collisions,
        detail="; ".join(collisions) or "nobody else uses the ids of the sandboxes",
        hint="choose another 'uid_base' in dsecd.toml while there are no sandboxes" if collisions else "",
    )
