# SPDX-License-Identifier: Apache-2.0
"""Container sandboxes: an OverlayFS of idmapped EROFS layers, run by crun in namespaces of its own.

What belongs here: the steps that make and remove one, and what can be done to a running one. What does not:
the OCI configuration (``oci.py``), the agent's protocol (``agentlink``), when and for whom
(``dsecd.core``).

Nothing of a container is mounted in the daemon's own mount namespace. A throw-away thread enters a copy of
a small one, attaches idmapped clones of the layers, stacks them, and starts crun there; afterwards only the
container's namespace holds the stack, so it goes with the container's last process, whatever happens to the
daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dsecd.backends import files, oci
from dsecd.backends.agentlink.link import LinkLost, connect
from dsecd.backends.base import Box, Site, translated
from dsecd.backends.limits import LimitWriter
from dsecd.backends.plan import Step
from dsecd.backends.userns_pool import UsernsPool
from dsecd.linux import cgroup, mechanisms, mount, mountns, overlay, pidfd, proc
from libdsec import errors
from libdsec.types import BackendState, Limits, SandboxSpec

_CGROUP_PREFIX = "sandbox-"
_CRUN_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 15.0
_KILL_TIMEOUT_S = 10.0
_LOG_TAIL_BYTES = 1000

#: Mechanisms without which there is no container at all.
_NEEDED = frozenset((
    "user-namespaces", "mount-namespaces", "idmapped-mounts", "overlay-data-only", "erofs-file", "cgroup-v2",
    "cgroup-freeze", "cgroup-kill", "pidfd", "clone-into-cgroup", "seccomp", "crun",
))  # fmt: skip


class ContainerBackend:
    """See ``base.Backend``."""

    name = "container"

    def __init__(self, site: Site) -> None:
        self._site = site
        self._usernses = UsernsPool()
        self._limits = LimitWriter(site.cgroup_dir)
        # Starting a container is mostly work of the kernel and of crun: more at once than this only queue there.
        self._launchers = ThreadPoolExecutor(max_workers=2 * (os.cpu_count() or 1), thread_name_prefix="launch")
        self._disks = site.state_dir / "sandboxes"
        self._trash = site.state_dir / "trash"
        self._runs = site.runtime_dir / "sandboxes"
        self._sockets = site.runtime_dir / "agents"
        self._crun_root = site.runtime_dir / "crun"
        self._launch_dir = site.runtime_dir / "launch"
        for path in (self._disks, self._trash, self._runs, self._sockets, self._crun_root, self._launch_dir):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Reached through a descriptor, a socket's path is short whatever the directory (sun_path holds 108 bytes).
        self._sockets_fd = os.open(self._sockets, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        cgroup.create(site.cgroup_dir)

    def probe(self) -> BackendState:
        missing = [s for s in mechanisms.report() if s.name in _NEEDED and s.works is False]
        detail = "; ".join(f"{status.name}: {status.reason}" for status in missing)
        return BackendState(name=self.name, works=not missing, detail=detail)

    def check(self, spec: SandboxSpec) -> list[str]:
        return self._limits.check(spec.limits)

    # --- steps ---------------------------------------------------------------------------------------------------

    def disk_steps(self, box: Box) -> Sequence[Step]:
        on = self._on
        return (Step("disk", "directories for what it writes", on(self._make_disk, box), on(self._trash_disk, box)),)

    def run_steps(self, box: Box) -> Sequence[Step]:
        on = self._on
        return (
            Step("rundir", "bundle and log directory", on(self._make_rundir, box), on(self._remove_rundir, box)),
            Step("cgroup", "cgroup with agent/ and run/", on(self._make_cgroup, box), on(self._remove_cgroup, box)),
            Step("launch", "stack the layers and start the agent", on(self._launch, box), on(self._end, box)),
            Step("connect", "connection to the agent", on(self._identify_and_connect, box), on(self._disconnect, box)),
            Step("limits", "limits of the cgroup", on(self._apply_limits, box)),
        )

    _on = staticmethod(functools.partial)

    def _cgroup(self, box: Box) -> Path:
        return self._site.cgroup_dir / f"{_CGROUP_PREFIX}{box.id}"

    def _socket_path(self, box: Box) -> str:
        return f"/proc/self/fd/{self._sockets_fd}/{box.id}"

    async def _make_disk(self, box: Box) -> None:
        with translated(f"create '{box.id}'"):
            disk = self._disks / box.id
            disk.mkdir(mode=0o700)
            for name in ("upper", "work"):
                (disk / name).mkdir()
                # Not by mkdir's mode: the daemon's umask must not decide what the sandbox's root looks like.
                (disk / name).chmod(0o755)

    async def _trash_disk(self, box: Box) -> None:
        disk = self._disks / box.id
        doomed = self._trash / f"{box.id}.{time.monotonic_ns()}"
        with contextlib.suppress(FileNotFoundError):
            disk.rename(doomed)
            # A tree that takes long to remove goes on in its thread; the next start of the daemon empties the trash.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asyncio.to_thread(files.remove_tree, doomed)), _KILL_TIMEOUT_S)

    async def _make_rundir(self, box: Box) -> None:
        with translated(f"create '{box.id}'"):
            (self._runs / box.id).mkdir(mode=0o700)

    async def _remove_rundir(self, box: Box) -> None:
        shutil.rmtree(self._runs / box.id, ignore_errors=True)

    async def _make_cgroup(self, box: Box) -> None:
        with translated(f"create '{box.id}'"):
            await asyncio.to_thread(self._make_cgroup_blocking, box)

    def _make_cgroup_blocking(self, box: Box) -> None:
        top = self._cgroup(box)
        top.mkdir(mode=0o755)
        for path in (top, top / "agent", top / "run"):
            path.mkdir(mode=0o755, exist_ok=True)
            cgroup.delegate(path, box.uid_base)

    async def _remove_cgroup(self, box: Box) -> None:
        await asyncio.to_thread(cgroup.remove, self._cgroup(box), _KILL_TIMEOUT_S)

    async def _launch(self, box: Box) -> None:
        with translated(f"start '{box.id}'"):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._launchers, self._launch_blocking, box)

    def _launch_blocking(self, box: Box) -> None:
        """Blocks. Runs in a thread. Bind the agent's socket, then stack and start in a namespace of its own."""
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
            listener.bind(self._socket_path(box))
            listener.listen(8)
            userns_fd = stack.enter_context(self._usernses.borrow(box.uid_base))
            clones = [stack.enter_context(files.idmapped_clone(layer, userns_fd)) for layer in box.layers]
            disk = stack.enter_context(files.idmapped_clone(self._disks / box.id, userns_fd))
            fds = {
                oci.LISTEN_FD: listener.fileno(),
                oci.PROGRAM_FD: stack.enter_context(files.opened(self._site.agent)),
                oci.CGROUP_FD: stack.enter_context(files.opened(self._cgroup(box), os.O_DIRECTORY)),
            }
            mountns.run_in_copy(self._site.launch_ns, lambda: self._stack_and_start(box, clones, disk, fds))

    def _stack_and_start(self, box: Box, clones: Sequence[int], disk: int, fds: dict[int, int]) -> None:
        """Blocks. Runs on a thread whose mount namespace ends with it."""
        stage = self._launch_dir
        tmpfs = mount.new_mount("tmpfs", source="dsec", options=[("mode", "0711")])
        with files.closing(tmpfs):
            mount.attach(tmpfs, stage)
        lower = [stage / f"layer{number}" for number in range(len(clones))]
        for path in (*lower, stage / "disk", stage / "root"):
            path.mkdir()
        for clone, path in zip((*clones, disk), (*lower, stage / "disk"), strict=True):
            mount.attach(clone, path)
        upper, work = stage / "disk" / "upper", stage / "disk" / "work"
        with files.closing(overlay.mount(
            lower=lower, data=[self._site.objects_dir], upper=upper, work=work, fsuid=box.uid_base,
        )) as tree:  # fmt: skip
            mount.attach(tree, stage / "root")
        files.add_hosts_file(stage / "root", oci.hostname(box.id, box.spec), box.uid_base)
        self._run_crun(box, stage / "root", fds)

    def _run_crun(self, box: Box, root: Path, fds: dict[int, int]) -> None:
        rundir = self._runs / box.id
        relative = self._cgroup(box).relative_to(cgroup.root())
        config = oci.configuration(box.id, box.spec, root=root, cgroups_path=f"/{relative}", uid_base=box.uid_base)
        (rundir / "config.json").write_text(json.dumps(config))
        log_path = rundir / "agent.log"
        with files.opened(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as log:
            argv = [
                *self._crun(), "run", "--detach", f"--bundle={rundir}", f"--pid-file={rundir / 'pid'}",
                f"--preserve-fds={len(fds)}", box.id,
            ]  # fmt: skip
            done = proc.run_blocking(argv, timeout_s=_CRUN_TIMEOUT_S, fd_map=fds, stdio_to=log, check=False)
        if done.returncode != 0:
            raise proc.ProcessFailed(done.argv, done.returncode, self._log_tail(box))

    def _crun(self) -> list[str]:
        return ["crun", f"--root={self._crun_root}", "--cgroup-manager=cgroupfs"]

    def _log_tail(self, box: Box) -> str:
        try:
            text = (self._runs / box.id / "agent.log").read_bytes()[-_LOG_TAIL_BYTES:]
        except FileNotFoundError:
            return ""
        return text.decode("utf-8", "replace")

    async def _end(self, box: Box) -> None:
        """Kill everything in it and let crun forget it, wherever its start got to."""
        await asyncio.to_thread(cgroup.kill, self._cgroup(box))
        if not await cgroup.wait_empty(self._cgroup(box), _KILL_TIMEOUT_S):
            raise errors.TimedOut(
                f"end '{box.id}': processes still there {_KILL_TIMEOUT_S:g} s after SIGKILL (stuck in the kernel?)",
                hint="delete it again later; its resources stay reserved until then",
            )
        if (self._crun_root / box.id).exists():
            await proc.run([*self._crun(), "delete", "--force", box.id], timeout_s=_CRUN_TIMEOUT_S, check=False)
            # What a crun that was killed half-way left is no container: its own delete refuses to read it.
            shutil.rmtree(self._crun_root / box.id, ignore_errors=True)
        (self._sockets / box.id).unlink(missing_ok=True)
        box.process = None

    async def _identify_and_connect(self, box: Box) -> None:
        pid = int((self._runs / box.id / "pid").read_text())
        box.process = pidfd.identify(pid)
        try:
            await self.reconnect(box)
        except errors.SandboxLost as error:
            said = self._log_tail(box)
            raise errors.BackendFailed(f"start '{box.id}': {error.message}; last words: {said!r}") from error

    async def _disconnect(self, box: Box) -> None:
        if box.link is not None:
            link, box.link = box.link, None
            await link.close()

    async def _apply_limits(self, box: Box) -> None:
        with translated(f"limit '{box.id}'"):
            self._limits.apply(self._cgroup(box), box.spec.limits)

    # --- a running box -------------------------------------------------------------------------------------------

    async def reconnect(self, box: Box) -> None:
        with translated(f"connect to the agent of '{box.id}'"):
            box.link = await connect(
                self._socket_path(box), generation=self._site.generation, timeout_s=_CONNECT_TIMEOUT_S,
                on_lost=box.on_link_lost,
            )

    async def pause(self, box: Box) -> None:
        with translated(f"pause '{box.id}'"):
            if not await cgroup.freeze(self._cgroup(box) / "run", _KILL_TIMEOUT_S):
                await cgroup.thaw(self._cgroup(box) / "run")
                raise errors.TimedOut(f"pause '{box.id}': not all processes stood still after {_KILL_TIMEOUT_S:g} s")

    async def resume(self, box: Box) -> None:
        with translated(f"resume '{box.id}'"):
            if not await cgroup.thaw(self._cgroup(box) / "run"):
                raise errors.TimedOut(f"resume '{box.id}': still frozen (is a cgroup above it frozen?)")

    def kill(self, box: Box) -> None:
        cgroup.kill(self._cgroup(box))

    async def shut_down(self, box: Box, grace_s: float) -> None:
        await cgroup.thaw(self._cgroup(box) / "run")
        if box.link is None or box.process is None:
            return
        with contextlib.suppress(LinkLost, TimeoutError, ProcessLookupError):
            fd = pidfd.open(box.process)
            with files.closing(fd):
                await asyncio.wait_for(box.link.shutdown(int(grace_s * 1000)), grace_s + 2)
                await pidfd.wait_exit(fd, grace_s + 2)

    async def set_limits(self, box: Box, limits: Limits) -> None:
        with translated(f"limit '{box.id}'"):
            self._limits.apply(self._cgroup(box), limits)

    def death(self, box: Box) -> str:
        events = cgroup.read_keyed(self._cgroup(box), "memory.events")
        return "oom" if events.get("oom_kill") else "crash"

    def residents(self) -> set[str]:
        places = (self._disks, self._runs, self._sockets, self._crun_root)
        # Names that no id has are not ours: crun keeps compiled filters in `.cache`.
        found = {path.name for place in places for path in place.iterdir() if not path.name.startswith(".")}
        groups = {path.name for path in cgroup.children(self._site.cgroup_dir)}
        return found | {name.removeprefix(_CGROUP_PREFIX) for name in groups if name.startswith(_CGROUP_PREFIX)}

