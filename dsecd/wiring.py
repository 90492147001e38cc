# SPDX-License-Identifier: Apache-2.0
"""Putting the core together: who is given what.

Here: construction, and taking over what an earlier daemon left, in the order that they need. Not here: the
process (``daemon.py``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsecd import listen
from dsecd.backends import BACKENDS, runtimes
from dsecd.backends.base import Backend, MachineSettings, NetworkSite, Site
from dsecd.backends.dns_link import DnsLink
from dsecd.backends.name_rules import name_rules
from dsecd.backends.name_service import NameService
from dsecd.config import Config, check_ids, endpoint
from dsecd.core import reconcile
from dsecd.core.admission import Admission
from dsecd.core.copies import Copies
from dsecd.core.events import Events
from dsecd.core.execs import Execs
from dsecd.core.expiry import Expiry
from dsecd.core.faults import checkpoint as fault_checkpoint
from dsecd.core.files import Files
from dsecd.core.forks import Forks
from dsecd.core.host import Host, Sources
from dsecd.core.image_jobs import ImageJobs
from dsecd.core.images.store import ImageStore
from dsecd.core.lifecycle import Lifecycle
from dsecd.core.memory import MemoryUse, alive
from dsecd.core.operations import Operations
from dsecd.core.pressure import Gauge, Shortage, Thresholds
from dsecd.core.ranges import Ranges
from dsecd.core.reclaim import Reclaim, ReclaimSettings
from dsecd.core.registry import Registry
from dsecd.core.sandboxes import Sandboxes
from dsecd.core.services import Core
from dsecd.core.snapshots import Snapshots
from dsecd.core.store import Store
from dsecd.core.tasks import Tasks
from dsecd.dns.frames import Endpoint, Settings


@dataclass(frozen=True)
class Place:
    """Where on the host this daemon works, found out at its start."""

    cgroup_dir: Path
    launch_ns: int  # fd of a mount namespace with few mounts
    generation: int


async def build_core(config: Config, place: Place, store: Store, events: Events, tasks: Tasks) -> Core:
    """All services, with every sandbox of an earlier daemon adopted, finished or removed."""
    checkpoint = fault_checkpoint()
    images = ImageStore(store, config.state_dir, config.runtime_dir, checkpoint=checkpoint)
    await images.reconcile()
    names = NameService(_dns_link(config))
    site = Site(
        state_dir=config.state_dir, runtime_dir=config.runtime_dir, cgroup_dir=place.cgroup_dir,
        agent=config.agent_path, objects_dir=images.objects_dir, launch_ns=place.launch_ns,
        cache_dir=config.cache_dir, apparmor=config.apparmor,
        generation=place.generation, core_scheduling=config.core_scheduling,
        network=NetworkSite(
            ipv4_pool=config.network.ipv4_pool, ipv6_pool=config.network.ipv6_pool, uid_base=config.uid_base,
            flows_per_sandbox=config.network.flows_per_sandbox, program=config.egress_path, names=names,
            dns_server=config.network.dns_server,
        ),
        machines=MachineSettings(**config.microvm.model_dump()),
    )  # fmt: skip
    if place.generation > 1:
        await runtimes.ended([config.runtime_dir / name for name in ("crun", "crun-vm")])
    backends: Mapping[str, Backend] = {name: make(site) for name, make in BACKENDS.items()}
    records = reconcile.load(store)
    ranges = Ranges(config.uid_ranges, (record.range_index for record in records))
    registry = Registry(backends, images, ranges, uid_base=config.uid_base)
    deadlines = Expiry()
    lifecycle = Lifecycle(
        store, images, events, tasks, gone=registry.leave, deadline=deadlines.at, checkpoint=checkpoint
    )
    registry.on_link_lost = lifecycle.watch.link_lost
    registry.on_oom = lifecycle.watch.out_of_memory
    registry.on_refused = lifecycle.watch.refused
    admission = _admission(config, place, events, tasks)
    sandboxes = Sandboxes(
        registry, lifecycle, tasks, admission, parallel=_parallel(), wait_s=config.admission.wait_s,
        batch_wait_s=config.admission.batch_wait_s,
    )  # fmt: skip
    copies = Copies(registry, lifecycle, parallel=_parallel())
    snapshots = Snapshots(
        store, registry, images, events, tasks, copies, admission, wait_s=config.admission.wait_s,
        checkpoint=checkpoint,
    )  # fmt: skip
    operations = Operations(store, tasks)
    await operations.recover()
    saves = [backend.saves for backend in backends.values() if backend.saves is not None]
    await snapshots.recover(saves, first_start=place.generation == 1)
    await reconcile.reconcile(
        records, registry, lifecycle, backends, tasks, checkpoint, first_start=place.generation == 1
    )
    await images.unmount_unused()
    tasks.spawn("expiry", deadlines.run(sandboxes.expired))
    group = config.network.dns_user
    listening = listen.bound(config.runtime_dir / "dns.sock", 0o660, group)
    tasks.spawn("dns", names.serve(listening, _late(registry)))
    tasks.spawn("openings", names.sweep())
    reclaim = _reclaim(config, place, registry)
    tasks.spawn("reclaim", reclaim.run())
    host = Host(
        Sources(
            state_dir=config.state_dir, generation=place.generation, backends=backends, counts=sandboxes.counts,
            residue=functools.partial(reconcile.residue, registry, backends),
            id_collisions=functools.partial(check_ids, config), admission=admission,
            dns_pid=lambda: names.link.pid,
        )
    )  # fmt: skip
    return Core(
        sandboxes=sandboxes, forks=Forks(registry, copies, tasks), snapshots=snapshots, execs=Execs(registry),
        files=Files(registry),
        images=ImageJobs(images, registry, operations, events), events=events, operations=operations, host=host,
        memory=MemoryUse(registry, reclaim, place.cgroup_dir),
    )  # fmt: skip


def _admission(config: Config, place: Place, events: Events, tasks: Tasks) -> Admission:
    settings = config.admission

    def tell(shortage: Shortage | None) -> None:
        short: dict[str, Any] = {} if shortage is None else {"resource": shortage.resource, "text": str(shortage)}
        events.emit("host.pressure", short=shortage is not None, **short)

    gauge = Gauge(Thresholds(**settings.model_dump(include=set(Thresholds.__annotations__))), place.cgroup_dir)
    return Admission(gauge, tasks, mode=settings.mode, max_waiting=settings.max_waiting, tell=tell)


def _dns_link(config: Config) -> DnsLink:
    """dsec-dns is believed as the user it has a unit for, and as who runs the daemon by hand."""
    uids = {os.geteuid()}
    with contextlib.suppress(KeyError):
        uids.add(pwd.getpwnam(config.network.dns_user).pw_uid)
    settings = Settings(
        listen=(Endpoint(address=config.network.dns_server),),
        upstreams=tuple(map(endpoint, config.network.dns_upstreams)), grace_s=config.network.dns_grace_s,
    )
    return DnsLink(settings, uids)


def _late(registry: Registry) -> list[str]:
    """Those that may resolve names, and are still being taken over from an earlier daemon."""
    return [
        live.id for live in registry.all()
        if live.takeover is not None and not live.takeover.done() and name_rules(live.record.spec.network)
    ]  # fmt: skip


def _reclaim(config: Config, place: Place, registry: Registry) -> Reclaim:
    def cgroup_of(sandbox_id: str) -> Path | None:
        live = registry.get(sandbox_id)
        return live.backend.cgroup(live.box) if live is not None and alive(live) else None

    return Reclaim(
        ReclaimSettings(**config.memory.model_dump(exclude={"zram_bytes"})), config.runtime_dir, place.cgroup_dir,
        ids=lambda: [live.id for live in registry.all() if alive(live)], cgroup_of=cgroup_of,
    )  # fmt: skip


def _parallel() -> int:
    """Creations of a batch at once: they wait for the kernel and crun about as long as they compute."""
    return max(2, 2 * len(os.sched_getaffinity(0)))
