# SPDX-License-Identifier: Apache-2.0
"""Starting a container with crun, and making crun forget it.

What belongs here: the stack of idmapped layers, the agent's listening socket, the call of crun. What does
not: what is made before and after (``container.py``), the OCI configuration (``oci.py``).

Nothing of a container is mounted in the daemon's own mount namespace. A throw-away thread enters a copy of
a small one, attaches idmapped clones of the layers, stacks them, and starts crun there; afterwards only the
container's namespace holds the stack, so it goes with the container's last process, whatever happens to the
daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from dsecd.backends import files, oci
from dsecd.backends.base import Box, Site
from dsecd.backends.cookies import Cookies
from dsecd.backends.userns_pool import UsernsPool
from dsecd.linux import cgroup, mount, mountns, overlay, proc, syscalls

_CRUN_TIMEOUT_S = 60.0
_LOG_TAIL_BYTES = 1000


class Launcher:
    """Directories of running containers and what is done in them; safe to use from several threads."""

    def __init__(self, site: Site, disks: Path, cookies: Cookies) -> None:
        self._site = site
        self._cookies = cookies
        self._disks = disks
        self._usernses = UsernsPool()
        self.runs = site.runtime_dir / "sandboxes"
        self.sockets = site.runtime_dir / "agents"
        self.crun_root = site.runtime_dir / "crun"
        self._stage = site.runtime_dir / "launch"
        for path in (self.runs, self.sockets, self.crun_root, self._stage):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Reached through a descriptor, a socket's path is short whatever the directory (sun_path holds 108 bytes).
        self._sockets_fd = os.open(self.sockets, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def socket_path(self, box: Box) -> str:
        """Where the agent of a box is connected to."""
        return f"/proc/self/fd/{self._sockets_fd}/{box.id}"

    def start(self, box: Box, cgroup_path: Path) -> None:
        """Start the agent of a box in its tree. Blocks. Runs in one of mountns.FreshThreads, which it changes.

        Raises OSError, proc.ProcessFailed.
        """
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
            listener.bind(self.socket_path(box))
            listener.listen(8)
            userns_fd = stack.enter_context(self._usernses.borrow(box.uid_base))
            clones = [stack.enter_context(files.idmapped_clone(layer, userns_fd)) for layer in box.layers]
            disk = stack.enter_context(files.idmapped_clone(self._disks / box.id, userns_fd))
            fds = {
                oci.LISTEN_FD: listener.fileno(),
                oci.PROGRAM_FD: stack.enter_context(files.opened(self._site.agent)),
                oci.CGROUP_FD: stack.enter_context(files.opened(cgroup_path, os.O_DIRECTORY)),
                oci.USERNS_FD: userns_fd,
            }

            mountns.enter_copy(self._site.launch_ns)
            self._spare_the_tree()
            root = self._stack(box, clones, disk)
            self._cookies.put_on(box)
            self._run_crun(box, root, cgroup_path, fds)
            self._cookies.worn(box, self.pid(box))

    def _stack(self, box: Box, clones: Sequence[int], disk: int) -> Path:
        """Mount the box's tree. Runs on a thread whose mount namespace ends with it; nobody else sees these mounts."""
        stage = self._stage
        # Not 0700: the runtime walks here with the rights of the sandbox's root.
        with files.closing(mount.new_mount("tmpfs", source="dsec", options=[("mode", "0711")])) as tmpfs:
            mount.attach(tmpfs, stage)
        lower = [stage / f"layer{number}" for number in range(len(clones))]
        for path in (*lower, stage / "disk", stage / "root"):
            path.mkdir()
        for clone, path in zip((*clones, disk), (*lower, stage / "disk"), strict=True):
            mount.attach(clone, path)
        tree = overlay.mount(
            lower=lower, data=[self._site.objects_dir], upper=stage / "disk" / "upper",
            work=stage / "disk" / "work", fsuid=box.uid_base,
        )  # fmt: skip
        with files.closing(tree):
            # The stack belongs to the host's user namespace, so a device node that got into it would be a device.
            mount.set_attrs(tree, attr_set=syscalls.MOUNT_ATTR_NODEV)
            mount.attach(tree, stage / "root")
        files.add_hosts_file(stage / "root", oci.hostname(box.id, box.spec), box.uid_base)
        upper = stage / "disk" / "upper"
        files.add_resolv_conf(stage / "root", upper, str(self._site.network.dns_server), box.uid_base)
        return stage / "root"

    def _spare_the_tree(self) -> None:
        """Let crun write elsewhere what it writes to cgroup.subtree_control of all cgroups above the box's.

        It hands on all controllers there are, each time, and with each such write the kernel walks all cgroups below,
        thousands when there are thousands of sandboxes (cgroup_lock_and_drain_offline in kernel/cgroup/cgroup.c). Where
        all have been handed on already, as after the first box, that changes nothing.
        """
        top = self._site.cgroup_dir
        for above in (top, *top.parents):
            if not above.is_relative_to(cgroup.root()):
                break
            handed_on = (cgroup.read(above, "cgroup.subtree_control") or "").split()
            if cgroup.controllers(above) <= frozenset(handed_on):
                with files.closing(mount.clone_tree(Path("/dev/null"))) as nothing:
                    mount.attach(nothing, above / "cgroup.subtree_control")

    def _run_crun(self, box: Box, root: Path, cgroup_path: Path, fds: dict[int, int]) -> None:
        rundir = self.runs / box.id
        group = f"/{cgroup_path.relative_to(cgroup.root())}"
        config = oci.configuration(
            box.id, box.spec, root=root, cgroups_path=group, uid_base=box.uid_base, profile=box.profile
        )
        (rundir / "config.json").write_text(json.dumps(config))
        argv = [
            "crun", f"--root={self.crun_root}", "--cgroup-manager=cgroupfs", "run", "--detach",
            f"--bundle={rundir}", f"--pid-file={self._pid_file(box)}", f"--preserve-fds={len(oci.AGENT_FDS)}", box.id,
        ]  # fmt: skip
        with files.opened(self._log(box), os.O_WRONLY | os.O_CREAT | os.O_APPEND) as log:
            # With an input of its own: crun gives what it has as standard streams to the sandbox's root, and of
            # /dev/null that is the host's, whose mode that root could then change for everybody.
            done = proc.run_blocking(
                argv, input=b"", timeout_s=_CRUN_TIMEOUT_S, fd_map=fds, stdio_to=log, check=False
            )
        if done.returncode != 0:
            raise proc.ProcessFailed(done.argv, done.returncode, self.last_words(box))

    def _pid_file(self, box: Box) -> Path:
        return self.runs / box.id / "pid"

    def _log(self, box: Box) -> Path:
        return self.runs / box.id / "agent.log"

    def pid(self, box: Box) -> int:
        """Its init process, as crun noted it down."""
        return int(self._pid_file(box).read_text())

    def last_words(self, box: Box) -> str:
        """The end of what crun and the agent printed."""
        try:
            return self._log(box).read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def forget(self, box: Box) -> None:
        """Remove crun's record and the socket of a container whose processes are gone.

        `crun delete` kills, removes the cgroup and then its record, at the price of a process; the first two are done
        already, and the record is the directory of that name under the root we gave it (crun(1), "--root").
        """
        shutil.rmtree(self.crun_root / box.id, ignore_errors=True)
        (self.sockets / box.id).unlink(missing_ok=True)
