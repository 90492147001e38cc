# SPDX-License-Identifier: Apache-2.0
"""Taking over from an earlier daemon: every sandbox is adopted, finished or removed, and nothing is left over.

What belongs here: the comparison of the database with what the kernel and the file system have, at start;
the same comparison as findings for ``dsecctl doctor``. What does not: the transitions themselves
(``lifecycle.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from dsecd.backends.base import Backend, Box
from dsecd.backends.plan import Checkpoint, no_checkpoint, undo
from dsecd.core import records
from dsecd.core.lifecycle import Lifecycle
from dsecd.core.live import Live
from dsecd.core.records import Record
from dsecd.core.registry import Registry
from dsecd.core.store import Store
from dsecd.core.tasks import Tasks
from libdsec.errors import DsecError, NoCapacity, Refused
from libdsec.types import Finding, SandboxSpec, State

log = logging.getLogger(__name__)

#: How long the daemon waits with its first answer. An agent that does not answer is given up later than that, and must
#: not keep the others' users waiting. Calls to a sandbox that is not taken over by then wait for that (live.py).
_PATIENCE_S = 3.0


def load(store: Store) -> list[Record]:
    """The records an earlier daemon left."""
    return store.read(records.load)


async def reconcile(
    found: Sequence[Record], registry: Registry, lifecycle: Lifecycle, backends: Mapping[str, Backend],
    tasks: Tasks, checkpoint: Checkpoint = no_checkpoint, *, first_start: bool = False,
) -> None:
    """Bring records and reality together. Call once, before the first request.

    What takes long goes on afterwards, each sandbox under its lock. Raises NoCapacity when this daemon was given
    too few descriptors or too little memory for what runs, which then goes on running; Refused when the database is
    new (``first_start``) and sandboxes are there: then it is the database that was lost, and they are not removed.
    """
    if first_start:
        _refuse_to_forget({record.id for record in found}, backends)
    lives = [registry.enter(record) for record in found if record.spec.backend in backends]
    for record in found:
        if record.spec.backend not in backends:
            log.warning("sandbox=%s backend=%s is not available: left alone", record.id, record.spec.backend)
    await _remove_strangers({record.id for record in found}, backends, checkpoint)
    for name, backend in backends.items():
        await backend.take_stock([live.box for live in lives if live.record.spec.backend == name])
    for live in lives:
        if live.record.intent not in ("create", "delete"):
            lifecycle.ports.bind_again(live)
    shortages: list[NoCapacity] = []

    async def one(live: Live) -> None:
        try:
            shortage = await _take_over(live, lifecycle)
            await lifecycle.ports.serve(live)
            if shortage:
                shortages.append(shortage)
                log.warning("sandbox=%s not taken over: %s", live.id, shortage)
        # Broad: a boundary between sandboxes. Whatever one of them is, the others must be served.
        except Exception as error:
            log.warning("sandbox=%s could not be taken over: %s", live.id, error, exc_info=_bug(error))

    work = []
    for live in lives:
        live.takeover = tasks.spawn(f"take over {live.id}", one(live))
        work.append(live.takeover)
    if work:
        _done, late = await asyncio.wait(work, timeout=_PATIENCE_S)
        if late:
            log.warning("serving while %d sandboxes are still being taken over", len(late))
    if shortages:
        # Ending what runs because this daemon was given too little would be the worse answer.
        raise shortages[0]


def _bug(error: Exception) -> Exception | None:
    return None if isinstance(error, DsecError) else error


async def _take_over(live: Live, lifecycle: Lifecycle) -> NoCapacity | None:
    """What this daemon lacked to take it over, if that is what kept it."""
    record = live.record
    if record.state in (State.CREATING, State.DELETING) or record.intent in ("create", "delete"):
        # Its creation was never acknowledged, or its deletion was asked for.
        await lifecycle.delete(live, record.reason or "interrupted by a restart of the daemon")
        return None
    if record.intent in ("start", "stop"):
        await lifecycle.finish_stop(live)
    elif record.state in (State.RUNNING, State.PAUSED):
        try:
            await lifecycle.adopt(live)
        except NoCapacity as error:
            return error
    if record.expires_at is not None:
        lifecycle.deadline(record.expires_at, record.id)
    return None


async def _remove_strangers(known: set[str], backends: Mapping[str, Backend], checkpoint: Checkpoint) -> None:
    """What bears a sandbox's name but has no record: undo every step as if it had been ours."""
    for backend in backends.values():
        for sandbox_id in sorted(backend.residents() - known):
            log.warning("sandbox=%s has no record: removing what is left of it", sandbox_id)
            box = Box(id=sandbox_id, spec=SandboxSpec(image="none"), uid_base=0, layers=())
            await undo("stranger", (*backend.disk_steps(box), *backend.run_steps(box)), checkpoint)


def _refuse_to_forget(known: set[str], backends: Mapping[str, Backend]) -> None:
    found = sorted(set().union(*(backend.residents() for backend in backends.values())) - known)
    if found:
        raise Refused(
            f"start with a new state database: it knows nothing of {len(found)} sandboxes here, such as '{found[0]}'",
            hint="restore the database, or remove 'sandboxes' in the state and runtime directories to give them up",
        )


def residue(registry: Registry, backends: Mapping[str, Backend]) -> list[Finding]:
    """What `dsecctl doctor` says about left-overs."""
    known = {live.id for live in registry.all()}
    strangers = sorted(set().union(*(backend.residents() for backend in backends.values())) - known)
    return [
        Finding(
            check="residue", ok=not strangers,
            detail=f"left over without a record: {', '.join(strangers)}" if strangers else "nothing left over",
            hint="restart dsecd: it removes what has no record" if strangers else "",
        )
    ]  # fmt: skip
