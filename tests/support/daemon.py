# SPDX-License-Identifier: Apache-2.0
"""A real dsecd for a test: its own process, directories, cgroup and id range.

Here: starting, killing and ending it, and the proof that it left nothing. Not here: what tests ask of it.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from libdsec import Client
from libdsec.errors import ConnectionFailed, DsecError, SandboxLost
from tests.support import cgroups, quick_start
from tests.support.waiting import until

_CHECKOUT = Path(__file__).resolve().parents[2]
_RESIDUE = Path(__file__).with_name("residue.py")
_RANGES = 4096
#: Limits that only a fault reaches, also on a machine that does several times too much at once.
_START_TIMEOUT_S = _END_TIMEOUT_S = 90.0

_numbers = itertools.count()
#: Ranges of ids that daemons which live at the same time have; as many as there are above the default ones.
_SLOTS = 9
_slots_taken: set[int] = set()


class Daemon:
    """One dsecd. Leaving the block deletes its sandboxes, ends it and fails if anything is left over."""

    def __init__(
        self, *, config: str = "", env: Mapping[str, str] | None = None, disk_bytes: int | None = None,
        netns: Path | None = None,
    ) -> None:
        """``disk_bytes``: its state lies on a disk of its own, so small that a test can fill it. ``netns``: the
        network namespace that it takes for the host's, instead of the machine's."""
        number = next(_numbers)
        self.name = f"dsec-test-{os.getpid()}-{number}"
        self.state_dir = Path("/var/lib/dsec") / self.name
        self.runtime_dir = Path("/run") / self.name
        self.cgroup_dir = _cgroup_root() / self.name
        # Ranges of daemons that live at the same time must not meet; they start where the default ones end.
        self._slot = next(slot for slot in range(_SLOTS) if slot not in _slots_taken)
        _slots_taken.add(self._slot)
        self.uid_base = 0x6800_0000 + self._slot * _RANGES * 65536
        self.socket = self.runtime_dir / "dsecd.sock"
        self.log = self.runtime_dir / "dsecd.log"
        self.env = dict(env or {})
        self._config = config
        self._disk_bytes = disk_bytes
        self._netns = netns
        self._prefix = [] if netns is None else ["nsenter", f"--net={netns}", "--"]
        self._process: subprocess.Popen[bytes] | quick_start.Child | None = None

    def __enter__(self) -> Self:
        self.state_dir.mkdir(parents=True)
        if self._disk_bytes is not None:
            self._mount_disk(self._disk_bytes)
        self.runtime_dir.mkdir(mode=0o755)
        (self.state_dir / "dsecd.toml").write_text(
            f'socket = "{self.socket}"\nstate_dir = "{self.state_dir}"\nruntime_dir = "{self.runtime_dir}"\n'
            f'cache_dir = "{self.state_dir}/cache"\ncgroup_root = "{self.name}"\nuid_base = {self.uid_base}\n'
            f"uid_ranges = {_RANGES}\n{self._config}"
        )
        try:
            self.start()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            if not self.running:
                self.env = {}
                self.start()
            self.delete_all()
            self.stop()
            left = self.residue()
        finally:
            self._clean()
        assert not left, f"left over: {left}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self, *, retry_s: float = 30.0) -> Client:
        """A client; ``retry_s=0`` for one that reports a lost connection at once."""
        return Client(socket=self.socket, retry_s=retry_s)

    def start(self, *, wait: bool = True, settle: bool = True) -> None:
        """Start it, and wait until it answers: by its command line, and again by what needs no second interpreter.

        ``settle``: when it is started again, also until it has taken over all that there was.
        """
        again = self._process is not None
        config, env = self.state_dir / "dsecd.toml", {**os.environ, **self.env}
        if again:
            self._process = quick_start.server().start(config, log=self.log, env=env, netns=self._netns)
        else:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*self._prefix, sys.executable, "-m", "dsecd", "--config", str(config)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=_CHECKOUT, env=env,
                )
        if wait:
            self.wait_ready(settle=again and settle)

    def wait_ready(self, *, settle: bool = False) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            if not self.running:
                status = self._process and self._process.returncode
                raise AssertionError(f"dsecd ended with status {status}: {self.tail()}")
            try:
                with self.client() as client:
                    client.version()
                    if settle:
                        until(lambda: _settled(client), _START_TIMEOUT_S)
                return
            except ConnectionFailed:
                if time.monotonic() > deadline:
                    raise AssertionError(f"dsecd does not answer: {self.tail()}") from None
                time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def wait_dead(self, timeout_s: float = _END_TIMEOUT_S) -> int:
        """Its status, once it has ended by itself."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def restart(self) -> None:
        """SIGKILL and a new one."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """SIGTERM, and wait."""
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(_END_TIMEOUT_S) == 0, self.tail()

    def delete_all(self) -> None:
        with self.client() as client:
            for sandbox in client.list(limit=10000).sandboxes:
                client.delete(sandbox.id)

    def residue(self) -> list[str]:
        """What is left over, by an independent program. Trees in the trash have a moment: they go by themselves."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        while (found := self._found()) and all(f"file {self.state_dir}/trash" in line for line in found):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return found

    def _found(self) -> list[str]:
        done = subprocess.run(
            [*self._prefix, sys.executable, str(_RESIDUE), str(self.state_dir), str(self.runtime_dir),
             str(self.cgroup_dir), str(self.uid_base), str(_RANGES * 65536)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode in (0, 1), done.stderr
        return done.stdout.splitlines()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def events(self) -> list[dict[str, object]]:
        with self.client() as client:
            return [json.loads(event.model_dump_json()) for event in client.events(limit=10000).events]

    def _mount_disk(self, size_bytes: int) -> None:
        """A tmpfs, but for the images: EROFS reads its files with help of their file system, which tmpfs lacks."""
        images = self.state_dir.with_suffix(".images")
        images.mkdir()
        size = f"size={size_bytes},mode=0700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "dsec-test", str(self.state_dir)], check=True)
        (self.state_dir / "images").mkdir()
        subprocess.run(["mount", "--bind", str(images), str(self.state_dir / "images")], check=True)

    def _clean(self) -> None:
        _slots_taken.discard(self._slot)
        if self.running:
            self.kill()
        cgroups.remove_tree(self.cgroup_dir)
        for mount in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            target = mount.split()[4]
            if target.startswith(f"{self.runtime_dir}"):
                subprocess.run(["umount", "--lazy", "--", target], check=False, capture_output=True)
        if self._disk_bytes is not None:
            subprocess.run(["umount", "-R", "--lazy", "--", str(self.state_dir)], check=False, capture_output=True)
            shutil.rmtree(self.state_dir.with_suffix(".images"), ignore_errors=True)
        shutil.rmtree(self.runtime_dir, ignore_errors=True)
        shutil.rmtree(self.state_dir, ignore_errors=True)


def _settled(client: Client) -> bool:
    """Whether all that an earlier daemon left is taken over: what runs answers, what was half made or deleted is gone.

    A daemon that is started again serves after some seconds, whatever it could take over by then.
    """
    for sandbox in client.list_all():
        try:
            if sandbox.state in ("creating", "deleting"):
                return False
            if sandbox.state in ("running", "paused"):
                client.usage(sandbox.id)
        except SandboxLost:
            return False
        except DsecError:
            continue  # it has ended or gone meanwhile
    return True


def _cgroup_root() -> Path:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup2 " in line:
            return Path(line.split()[4])
    raise AssertionError("no cgroup v2")
