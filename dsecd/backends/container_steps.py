# SPDX-License-Identifier: Apache-2.0
"""What the steps of a container's plan do and undo.

What belongs here: one method for each step and one for its undo, which works from the box's id alone. What
does not: their order (``container.py``), crun (``launch.py``).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from dsecd.backends import classes, network
from dsecd.backends.agentlink.link import connect
from dsecd.backends.base import Box, Site, translated
from dsecd.backends.confinement import Confinement
from dsecd.backends.launch import Launcher
from dsecd.backends.network_steps import NetworkSteps
from dsecd.backends.oomwatch import OomWatch
from dsecd.backends.plan import in_thread
from dsecd.backends.trash import Trash
from dsecd.linux import cgroup, mountns, pidfd
from libdsec import errors
from libdsec.types import Limits

_CGROUP_PREFIX = "sandbox-"
#: An agent that is given up costs somebody a sandbox that runs, and thousands may be taken over at once.
_RECONNECT_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0
#: What the kernel may take to let go of a cgroup whose processes have been waited for already.
_GONE_TIMEOUT_S = 1.0
#: How long a deletion waits for files to go; a tree that takes longer goes on by itself.
_TRASH_WAIT_S = 5.0


class ContainerSteps:
    """Everything a container has on this host, made and removed by the id of its box."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._disks = site.state_dir / "sandboxes"
        self._disks.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.classes = classes.shared(site)
        self.cookies, self.limits = self.classes.cookies, self.classes.limits
        self._launcher = Launcher(site, self._disks, self.cookies)
        self.network = NetworkSteps(network.shared(site), self._launcher.pid)
        self._kills = OomWatch()
        self.confinement = Confinement(
            site.apparmor, lambda box: self.cgroup(box).exists(), state_dir=site.state_dir, cache_dir=site.cache_dir
        )
        # Starting a container is mostly work of the kernel and of crun: more at once than this only queue there.
        self._launches = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._threads = mountns.FreshThreads()
        self._trash = Trash(site.state_dir / "trash")

    def residents(self) -> set[str]:
        launcher = self._launcher
        places = (self._disks, launcher.runs, launcher.sockets, launcher.crun_root)
        # Names that no id has are not ours: crun keeps compiled filters in `.cache`.
        found = {path.name for place in places for path in place.iterdir() if not path.name.startswith(".")}
        groups = self.classes.groups()
        found |= {name.removeprefix(_CGROUP_PREFIX) for name in groups if name.startswith(_CGROUP_PREFIX)}
        return found | self.network.names()

    def cgroup(self, box: Box) -> Path:
        """The cgroup of everything in the box; of a box that is only known by its id, where it is."""
        return self.classes.group(box, f"{_CGROUP_PREFIX}{box.id}")

    async def make_disk(self, box: Box) -> None:
        with translated(f"create '{box.id}'"):
            disk = self._disks / box.id
            disk.mkdir(mode=0o700)
            for name in ("upper", "work"):
                (disk / name).mkdir()
                # Not by mkdir's mode: the daemon's umask must not decide what the sandbox's root looks like.
                (disk / name).chmod(0o755)

    async def trash_disk(self, box: Box) -> None:
        with translated(f"remove the files of '{box.id}'"):
            await self._trash.take(self._disks / box.id, _TRASH_WAIT_S)

    async def make_rundir(self, box: Box) -> None:
        with translated(f"create '{box.id}'"):
            (self._launcher.runs / box.id).mkdir(mode=0o700)

    async def remove_rundir(self, box: Box) -> None:
        shutil.rmtree(self._launcher.runs / box.id, ignore_errors=True)

    async def make_cgroup(self, box: Box) -> None:
        with translated(f"create '{box.id}'"):
            self.classes.prepare(box)
            await in_thread(_make_cgroups, self.cgroup(box), box.uid_base)

    async def remove_cgroup(self, box: Box) -> None:
        with translated(f"remove the cgroup of '{box.id}'"):
            # Waiting is the loop's: a thread that waits for processes stuck in the kernel is one that others lack.
            await cgroup.wait_empty(self.cgroup(box), _GONE_TIMEOUT_S)
            self._kills.remove(self.cgroup(box) / "run")
            await in_thread(cgroup.remove, self.cgroup(box), _GONE_TIMEOUT_S)

    async def launch(self, box: Box) -> None:
        with translated(f"start '{box.id}'"):
            async with self._launches:
                with self.classes.not_starved(self.cgroup(box)):
                    await in_thread(self._launcher.start, box, self.cgroup(box), executor=self._threads)

    async def end(self, box: Box) -> None:
        """Kill everything in it, wherever its start got to."""
        with translated(f"end '{box.id}'"):
            # Who deletes has killed it already, while the record was written.
            if cgroup.populated(self.cgroup(box)):
                await in_thread(cgroup.kill, self.cgroup(box))
        with self.classes.not_starved(self.cgroup(box)):
            ended = await cgroup.wait_empty(self.cgroup(box), KILL_TIMEOUT_S)
        if not ended:
            raise errors.TimedOut(
                f"end '{box.id}': processes still there {KILL_TIMEOUT_S:g} s after SIGKILL (stuck in the kernel?)",
                hint="delete it again later; its resources stay reserved until then",
            )
        self._launcher.forget(box)
        self.cookies.forget(box)
        box.process = None

    async def identify_and_connect(self, box: Box) -> None:
        with translated(f"start '{box.id}'"):
            box.process = pidfd.identify(self._launcher.pid(box))
        try:
            await self.reconnect(box)
        except (errors.SandboxLost, errors.Refused, errors.TimedOut) as error:
            said = self._launcher.last_words(box)
            raise errors.BackendFailed(f"start '{box.id}': {error.message}; last words: {said!r}") from error

    async def disconnect(self, box: Box) -> None:
        if box.link is not None:
            link, box.link = box.link, None
            await link.close()

    async def apply_limits(self, box: Box) -> None:
        with translated(f"limit '{box.id}'"), self.classes.not_starved(self.cgroup(box)):
            await self.limits.apply(self.cgroup(box), box.spec.limits)
        self._watch_kills(box)

    def _watch_kills(self, box: Box) -> None:
        self._kills.add(self.cgroup(box) / "run", box.on_oom)

    async def restore_cgroup(self, box: Box) -> None:
        """Make ``run`` again if it is gone: systemd removes cgroups without processes when it stops the daemon's unit,
        and a sandbox in which no command runs has its only process beside it."""
        if not (self.cgroup(box) / "run").exists():
            with translated(f"restore the cgroup of '{box.id}'"):
                await in_thread(_make_below, self.cgroup(box), box.uid_base)
            await self.apply_limits(box)
        self.classes.restore(self.cgroup(box))
        self._watch_kills(box)

    async def reconnect(self, box: Box) -> None:
        await self.restore_cgroup(box)
        if box.process is not None:
            self.cookies.worn(box, box.process.pid)
        with translated(f"connect to the agent of '{box.id}'"), self.classes.not_starved(self.cgroup(box)):
            box.link = await connect(
                self._launcher.socket_path(box), generation=self._site.generation, timeout_s=_RECONNECT_TIMEOUT_S,
                on_lost=box.on_link_lost,
            )  # fmt: skip

    async def set_limits(self, box: Box, limits: Limits) -> None:
        with translated(f"limit '{box.id}'"):
            await self.limits.change(self.cgroup(box), box.spec.limits, limits)


def _make_cgroups(top: Path, uid: int) -> None:
    """Blocks: other changes of the hierarchy wait for each other in the kernel. Runs in a thread."""
    top.mkdir(mode=0o755)
    _make_below(top, uid)


def _make_below(top: Path, uid: int) -> None:
    """Blocks. Runs in a thread."""
    for path in (top, top / "agent", top / "run"):
        path.mkdir(mode=0o755, exist_ok=True)
        cgroup.delegate(path, uid)
    # Not among what is delegated by default; without it the agent could not end what outlives the grace of a stop.
    os.chown(top / "run" / "cgroup.kill", uid, uid)
