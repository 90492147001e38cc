# SPDX-License-Identifier: Apache-2.0
"""Creating, executing and deleting, next to crun and podman on the same tree with the same configuration.

Here: the samples. Not here: verdicts (``report.py``). Peers run the OCI configuration that dsecd itself uses: the same
namespaces, id mapping, seccomp profile, mounts and capabilities, on the same stack of idmapped layers, mounted once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dsecd.backends import files, oci
from dsecd.linux import mount, overlay, userns
from libdsec import Client, Sandbox
from libdsec.types import ExecRequest, SandboxSpec
from tests.perf.report import Figure, Side
from tests.support.daemon import Daemon

IMAGE = "debian:trixie"
_UID_BASE = 0x7000_0000


def spawn(argv: list[str], *, ok: bool = True) -> None:
    """Run a program as cheaply as Python can, with its output thrown away."""
    null = os.open(os.devnull, os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, null, number) for number in range(3)]
    pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(null)
    if ok and status != 0:
        raise RuntimeError(f"{' '.join(argv)}: status {status}")


def captured(argv: list[str]) -> None:
    """Run a program as a Python program does that wants its output."""
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=True)


def timed(fn: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    fn()
    return (time.perf_counter() - start) * 1000


@contextlib.contextmanager
def stacked_root(daemon: Daemon, name: str) -> Iterator[Path]:
    """The image's tree, mounted writable as dsecd would for a sandbox, at a path, for as long as the block lasts."""
    with daemon.client() as client:
        digest = client.image_inspect(IMAGE).digest.removeprefix("sha256:")
    layer = daemon.state_dir / "images" / "layers" / f"{digest}.erofs"
    work = Path("/var/lib/dsec") / name
    for part in ("disk/upper", "disk/work", "layer", "root"):
        (work / part).mkdir(parents=True)
    namespace = userns.create(_UID_BASE)
    from dsecd.linux import erofs

    lower = erofs.mount(layer)
    mount.idmap(lower, namespace)
    mount.attach(lower, work / "layer")
    with files.idmapped_clone(work / "disk", namespace) as disk:
        mount.attach(disk, work / "disk")
    tree = overlay.mount(
        lower=[work / "layer"], data=[daemon.state_dir / "images" / "objects"], upper=work / "disk/upper",
        work=work / "disk/work", fsuid=_UID_BASE,
    )  # fmt: skip
    mount.attach(tree, work / "root")
    for fd in (namespace, lower, tree):
        os.close(fd)
    try:
        yield work / "root"
    finally:
        for part in ("root", "disk", "layer"):
            mount.detach(work / part)
        shutil.rmtree(work)


class Crun:
    """crun by hand, on a bundle with dsecd's own OCI configuration."""

    def __init__(self, root: Path, place: Path) -> None:
        self.place = place
        (place / "bundle").mkdir(parents=True)
        config = oci.configuration(
            "peer", SandboxSpec(image=IMAGE), root=root, cgroups_path="/dsec-peer", uid_base=_UID_BASE
        )
        config["process"]["args"] = ["/usr/bin/sleep", "infinity"]
        # dsecd hands in a user namespace it made; by hand crun makes one of the same mapping.
        config["linux"]["namespaces"][-1] = {"type": "user"}
        (place / "bundle/config.json").write_text(json.dumps(config))
        self.base = ["crun", f"--root={place / 'state'}", "--cgroup-manager=cgroupfs"]

    def run(self) -> None:
        spawn([*self.base, "run", "--detach", f"--bundle={self.place / 'bundle'}", "peer"])

    def exec(self) -> None:
        """With its output captured, since that is what the SDK returns."""
        captured([*self.base, "exec", "peer", "true"])

    def delete(self) -> None:
        spawn([*self.base, "delete", "-f", "peer"])


def life_cycle(daemon: Daemon, crun: Crun, rounds: int) -> Figure:
    """create + first exec + delete, strictly one after the other; ours and the peer's rounds alternate."""
    ours: list[float] = []
    peer: list[float] = []

    def peer_round() -> None:
        crun.run()
        crun.exec()
        crun.delete()

    with daemon.client() as client:

        def our_round() -> None:
            with Sandbox(image=IMAGE, client=client) as sandbox:
                sandbox.exec("true", check=True)

        for _warm_up in range(3):
            our_round()
            peer_round()
        # What the import left unwritten would be charged to our side alone: we write two records through to the disk
        # in each round, crun none. With a writer of 600 MB/s beside it the ratio is 1.7 and not 1.2.
        os.sync()
        for _round in range(rounds):
            ours.append(timed(our_round))
            peer.append(timed(peer_round))
    return Figure(
        "create + first exec + delete",
        Side("libdsec", "Sandbox(image=…) create, exec('true'), delete", tuple(ours)),
        Side("crun", "crun run --detach; crun exec true, captured; crun delete -f", tuple(peer)),
        limit=1.5, by="mean", wanted_n=200,
    )  # fmt: skip


def exec_true(daemon: Daemon, crun: Crun, podman: list[str] | None, rounds: int) -> list[Figure]:
    """exec of ``true`` in a sandbox that runs."""
    with daemon.client() as client:
        sandbox = client.create(SandboxSpec(image=IMAGE))
        crun.run()
        try:
            ours, by_crun = _exec_rounds(client, sandbox.id, crun.exec, rounds)
            figures = [Figure(
                "exec true, against crun exec",
                Side("libdsec", "client.exec(id, ExecRequest(argv=('true',)))", ours),
                Side("crun", "subprocess.run(['crun', 'exec', …, 'true'], capture_output=True)", by_crun),
                limit=0.5, wanted_n=200,
            )]  # fmt: skip
            if podman is not None:
                few = max(20, rounds // 4)
                ours, by_podman = _exec_rounds(client, sandbox.id, lambda: captured(podman), few)
                figures.append(Figure(
                    "exec true, against podman exec",
                    Side("libdsec", "client.exec(id, ExecRequest(argv=('true',)))", ours),
                    Side("podman", f"subprocess.run({podman}, capture_output=True)", by_podman), limit=0.1, wanted_n=50,
                ))  # fmt: skip
        finally:
            crun.delete()
            client.delete(sandbox.id)
    return figures


def _exec_rounds(
    client: Client, sandbox_id: str, peer: Callable[[], None], rounds: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    request = ExecRequest(argv=("true",))
    ours: list[float] = []
    theirs: list[float] = []
    for _warm_up in range(5):
        client.exec(sandbox_id, request)
        peer()
    for _round in range(rounds):
        ours.append(timed(lambda: client.exec(sandbox_id, request)))
        theirs.append(timed(peer))
    return tuple(ours), tuple(theirs)


@contextlib.contextmanager
def podman_container(tar: Path) -> Iterator[list[str] | None]:
    """A running podman container; yields the exec command, or None where podman does not work here.

    On a plain directory: podman writes into the root file system itself, which an idmapped one does not let it.
    """
    name = f"dsec-peer-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="bench-podman-", dir="/var/lib/dsec") as root:
        subprocess.run(["tar", "--extract", f"--file={tar}", f"--directory={root}"], check=True)
        start = [
            "podman", "run", "--detach", "--name", name, "--network=none", "--cgroups=disabled", "--rootfs", root,
            "/usr/bin/sleep", "infinity",
        ]  # fmt: skip
        done = subprocess.run(start, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"podman does not work here: {done.stderr.strip().splitlines()[-1:]}")
            yield None
            return
        try:
            yield ["podman", "exec", name, "true"]
        finally:
            subprocess.run(["podman", "rm", "--force", "--time=0", name], capture_output=True, check=False)
