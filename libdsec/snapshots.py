# SPDX-License-Identifier: Apache-2.0
"""Types of the API about copies of running sandboxes: forks, and snapshots with names.

Here: requests and answers. Not here: what a copy is once it runs, which is a sandbox (``types.py``).
"""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from libdsec.types import Labels, Model, OpenModel, SandboxId, SandboxSpec


class ForkRequest(Model):
    """Copy a running sandbox: its processes, memory and files; each copy goes on by itself."""

    count: int = Field(1, ge=1, le=64, description="how many, when no ids are given")
    ids: tuple[SandboxId, ...] = Field((), max_length=64, description="of the copies; made by the daemon when absent")


class CloneRequest(ForkRequest):
    """Sandboxes that begin as a snapshot is; what a field does not say is as it was in the snapshot."""

    labels: Labels | None = None
    ttl_s: float | None = Field(
        None, gt=0, le=10 * 365 * 86400, description="deleted this long after creation; none when absent"
    )


class SnapshotRequest(Model):
    """Save a sandbox that runs or is paused, with memory and files, under a name; it goes on afterwards."""

    id: SandboxId = Field(description="the snapshot's name; one that is taken is refused")


class Snapshot(OpenModel):
    """A saved sandbox; it never changes."""

    id: str
    source: str = Field(description="the sandbox that it was saved of")
    owner_uid: int
    created_at: datetime
    spec: SandboxSpec = Field(description="the source's")
    layers: tuple[str, ...] = Field((), description="digests, top first; these images stay while it is there")
    needs: dict[str, str] = Field(
        default_factory=dict, description="what must be the same where it is cloned: format, monitor, version, cpu …"
    )
    digests: dict[str, str] = Field(default_factory=dict, description="of its files")
    memory_bytes: int = Field(0, description="of the machine")
    state_bytes: int = Field(0, description="saved beside memory and disk")
    used_bytes: int = Field(0, description="that its files take on the host's disk, what they share with others too")
    used_by: tuple[str, ...] = Field((), description="sandboxes that run from it: while there are any, it stays")


class SnapshotList(OpenModel):
    snapshots: tuple[Snapshot, ...]
