# SPDX-License-Identifier: Apache-2.0
"""The table of all sandboxes: who is there, who may touch it, and who may come in.

What belongs here: finding, admission of new ones (ids, keys, id ranges, layers), and what they inherit from
their images. What does not: calls of the API (``sandboxes.py``), transitions (``lifecycle.py``).
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from dsecd.backends.agentlink.link import LinkLost
from dsecd.backends.base import Backend, Box, Saves
from dsecd.backends.refusals import Refused
from dsecd.core.bounds import check_env, check_user
from dsecd.core.images.compose import compose
from dsecd.core.images.store import ImageStore
from dsecd.core.live import Defaults, Live
from dsecd.core.principal import Principal
from dsecd.core.ranges import Ranges
from dsecd.core.records import Record
from dsecd.linux.userns import SIZE as RANGE_SIZE
from libdsec import errors
from libdsec.types import CreateRequest, SandboxSpec, State

_ID_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"


class Registry:
    """All sandboxes of this host, by id and by idempotency key."""

    def __init__(
        self, backends: Mapping[str, Backend], images: ImageStore, ranges: Ranges, *, uid_base: int
    ) -> None:
        self._backends = backends
        self._images = images
        self._ranges = ranges
        self._uid_base = uid_base
        self._lives: dict[str, Live] = {}
        self._by_key: dict[tuple[int, str], Live] = {}
        #: Set once, when who watches over sandboxes is there.
        self.on_link_lost: Callable[[Live, LinkLost], None] = lambda _live, _lost: None
        self.on_oom: Callable[[Live, int], None] = lambda _live, _kills: None
        self.on_refused: Callable[[Live, Refused], None] = lambda _live, _refused: None

    def __len__(self) -> int:
        return len(self._lives)

    def all(self) -> list[Live]:
        return list(self._lives.values())

    def get(self, sandbox_id: str) -> Live | None:
        return self._lives.get(sandbox_id)

    def find(self, principal: Principal, sandbox_id: str, doing: str) -> Live:
        """Raises NotFound; Denied for another owner's. Both say what was being done."""
        live = self._lives.get(sandbox_id)
        if live is None:
            raise errors.NotFound(f"{doing} '{sandbox_id}': no such sandbox")
        principal.may_touch(live.record.owner_uid, f"{doing} '{sandbox_id}'")
        return live

    def counts(self) -> dict[str, int]:
        """How many sandboxes are in each state."""
        counts = {str(state): 0 for state in State}
        for live in self._lives.values():
            counts[str(live.record.state)] += 1
        return counts

    def enter(self, record: Record) -> Live:
        """Make the live form of a record and find it from now on."""
        spec = record.spec
        uid_base = self._uid_base + record.range_index * RANGE_SIZE
        box = Box(id=record.id, spec=spec, uid_base=uid_base, layers=(), profile=record.profile)
        live = Live(record, box, self._backends[spec.backend], self._defaults(spec, record.layers))
        box.on_link_lost = lambda lost: self.on_link_lost(live, lost)
        box.on_oom = lambda kills: self.on_oom(live, kills)
        box.on_refused = lambda refused: self.on_refused(live, refused)
        self._lives[record.id] = live
        if record.idempotency_key is not None:
            self._by_key[record.owner_uid, record.idempotency_key] = live
        return live

    def leave(self, live: Live) -> None:
        """Nothing of it is left."""
        self._lives.pop(live.id, None)
        if live.record.idempotency_key is not None:
            self._by_key.pop((live.record.owner_uid, live.record.idempotency_key), None)
        self._ranges.give(live.record.range_index)

    def of_key(self, principal: Principal, request: CreateRequest) -> Live | None:
        """The sandbox that an equal request made before. Raises Conflict for another request with the same key."""
        live = self._by_key.get((principal.uid, request.idempotency_key or ""))
        if live is not None and live.record.request_digest != _digest(request):
            raise errors.Conflict(
                f"create with key '{request.idempotency_key}': the key was used with another request", sandbox=live.id
            )
        return live

    def examine(self, request: CreateRequest) -> None:
        """Raise what keeps it from ever being made."""
        self._check(request)
        self._fits(request, self._compose(request.spec))

    def saves(self, doing: str, live: Live) -> Saves:
        """What can save a sandbox as it runs. Raises FeatureMissing where its kind cannot be saved."""
        if live.backend.saves is None:
            able = sorted(name for name, backend in self._backends.items() if backend.saves is not None)
            raise errors.FeatureMissing(
                f"{doing} '{live.id}': a sandbox of backend '{live.record.spec.backend}' cannot be saved while it runs",
                hint=f"use backend {' or '.join(able)}", feature=f"{live.record.spec.backend}-snapshot",
            )  # fmt: skip
        return live.backend.saves

    def saves_of(self, backend: str) -> Saves | None:
        """The same for a kind by its name; None when this daemon has none that can."""
        return self._backends[backend].saves if backend in self._backends else None

    def _check(self, request: CreateRequest) -> list[str]:
        """Raise what keeps it from being made on this host; else default protections that will be off."""
        spec = request.spec
        backend = self._backends.get(spec.backend)
        if backend is None:
            raise errors.FeatureMissing(
                f"create with backend '{spec.backend}': this daemon has {', '.join(sorted(self._backends))}",
                hint="run 'dsecctl host' to see what this host offers", feature=f"backend-{spec.backend}",
            )  # fmt: skip
        if (existing := self._lives.get(request.id or "")) is not None:
            since = existing.record.to_wire().created_at
            raise errors.AlreadyExists(
                f"create '{request.id}': sandbox exists since {since:%Y-%m-%d %H:%M}",
                hint=f"choose another id or 'dsecctl rm {request.id}'",
            )
        return backend.check(spec)

    def admit(
        self, principal: Principal, request: CreateRequest, *, layers: tuple[str, ...] | None = None, snapshot: str = ""
    ) -> Live:
        """Reserve id, key and id range; no waiting in here, so equal requests at the same time meet the first one.

        ``layers`` are those of what it is a copy of, whatever the names of its images lead to by now.
        """
        spec = request.spec
        off = self._check(request)
        if layers is None:
            layers = self._compose(spec)
        self._fits(request, layers)
        sandbox_id = request.id or self._new_id()
        now = time.time()
        record = Record(
            id=sandbox_id, owner_uid=principal.uid, spec=spec, layers=layers, range_index=self._ranges.take(),
            created_at=now, intent="create", idempotency_key=request.idempotency_key, request_digest=_digest(request),
            expires_at=None if spec.ttl_s is None else now + spec.ttl_s, off=tuple(off), snapshot=snapshot,
        )  # fmt: skip
        return self.enter(record)

    def _new_id(self) -> str:
        while True:
            sandbox_id = "sb-" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(10))
            if sandbox_id not in self._lives:
                return sandbox_id

    def _compose(self, spec: SandboxSpec) -> tuple[str, ...]:
        resolve = self._images.resolve
        workspace = None if spec.workspace is None else resolve(spec.workspace)
        return compose(resolve(spec.image), workspace, [resolve(toolkit) for toolkit in spec.toolkits])

    def _fits(self, request: CreateRequest, layers: Sequence[str]) -> None:
        """Raise InvalidSpec when no command could run with what it has from its images and its spec."""
        doing = f"create '{request.id or request.spec.image}'"
        defaults = self._defaults(request.spec, layers)
        check_user(defaults.user, self._backends[request.spec.backend].ids, doing)
        check_env(defaults.env, doing)

    def _defaults(self, spec: SandboxSpec, layers: Sequence[str]) -> Defaults:
        images = [self._images.get(digest) for digest in reversed(layers)]
        # An image given twice lies in the stack once: then there may be no second one.
        workspace = images[1] if spec.workspace is not None and len(images) > 1 else None
        return Defaults.of(spec, images, workspace)


def _digest(request: CreateRequest) -> str:
    return hashlib.sha256(request.model_dump_json(exclude={"idempotency_key", "wait_s"}).encode()).hexdigest()
