# SPDX-License-Identifier: Apache-2.0
"""MicroVMs saved as they run: memory, devices and disk, for others to begin as; see ``base.Saves``.

What belongs here: the files of what is saved, from the moment the machine stands still to their removal. What does
not: how a monitor writes them (``dsecd.vmm``), when and for whom (``dsecd.core``).

A directory of one that has a name holds all that a copy is started with: disk, memory, the devices' state, kernel,
initramfs, and a link to the environment. It is filled elsewhere and renamed once all of it is on the disk. After that
nothing in it is written again: running copies map its memory.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from dsecd.backends import files, machines
from dsecd.backends.base import Box, Saved, translated
from dsecd.backends.microvm_disks import NOTED
from dsecd.backends.microvm_steps import MicrovmSteps
from dsecd.backends.plan import in_thread
from dsecd.backends.trash import Trash
from dsecd.linux import sparse
from dsecd.vmm.base import Snapshot
from libdsec import errors

#: What the files in a directory mean. Another number is another meaning.
FORMAT = "1"
_NEEDS = "needs"
#: Its content is what the images' digests say, and is compared by its size alone.
_ENVIRONMENT = "environment"
#: Links to files that others use too, who touch their times.
_SHARED = frozenset(("environment", "kernel", "initramfs"))
_TRASH_WAIT_S = 5.0


class MicrovmSaves:
    """See ``base.Saves``."""

    def __init__(self, steps: MicrovmSteps, state_dir: Path) -> None:
        self._steps = steps
        self._directory = state_dir / "snapshots"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._trash = Trash(state_dir / "trash-snapshots")
        #: Of those whose contents were compared with their digests, what told their files from others.
        self._compared: dict[str, tuple[tuple[str, int, int, int], ...]] = {}

    async def save(self, box: Box, doing: str, *, paused: bool) -> Path:
        driver, place, disks = self._steps.driver, self._steps.place(box), self._steps.disks
        with translated(f"{doing} '{box.id}'"):
            async with _still(self._steps, box, doing, paused=paused):
                origin = await in_thread(disks.begin_origin, box)
                try:
                    needs = await driver.save(place, Snapshot(origin / "state", origin / "memory"))
                    await in_thread((origin / _NEEDS).write_text, json.dumps({"format": FORMAT, **needs}))
                except BaseException:
                    await disks.discard(origin)
                    raise
        return origin

    async def discard(self, origin: Path) -> None:
        await self._steps.disks.discard(origin)

    async def publish(self, origin: Path, name: str) -> Saved:
        with translated(f"publish snapshot '{name}'"):
            return await in_thread(self._publish, origin, name)

    def _publish(self, origin: Path, name: str) -> Saved:
        """Blocks. Runs in a thread."""
        needs = json.loads((origin / _NEEDS).read_text())
        memory_bytes = json.loads((origin / "machine").read_text())["memory_bytes"]
        digests, used = {}, 0
        for path in sorted(origin.iterdir()):
            with files.closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
                os.fsync(fd)
                status = os.fstat(fd)
                used += status.st_blocks * 512
                digests[path.name] = _identity(path.name, fd, status.st_size)
        _sync_directory(origin)
        target = self._directory / name
        origin.rename(target)
        _sync_directory(self._directory)
        return Saved(needs, digests, memory_bytes, (target / "state").stat().st_size, used)

    async def open(self, name: str, *, needs: Mapping[str, str], digests: Mapping[str, str]) -> Path:
        with translated(f"clone '{name}'"):
            here = await in_thread(self._here, name)
            if differs := _differences(needs, here):
                raise errors.FeatureMissing(
                    f"clone '{name}': it was saved on another kind of host: {'; '.join(differs.values())}",
                    hint="make a new snapshot here", feature="snapshot-host", differs=list(differs),
                )  # fmt: skip
            await in_thread(self._compare, name, digests)
        return self._directory / name

    def _here(self, name: str) -> dict[str, str]:
        """Blocks. Runs in a thread."""
        network = machines.noted_network(self._directory / name / NOTED)
        return {"format": FORMAT, **self._steps.driver.likeness(network=network)}

    def _compare(self, name: str, digests: Mapping[str, str]) -> None:
        """Raise BackendFailed for files that are not those that were published. Blocks. Runs in a thread."""
        folder = self._directory / name
        marks = tuple(_marks(folder, file) for file in sorted(digests))
        if self._compared.get(name) == marks:
            return
        for file, expected in sorted(digests.items()):
            with files.closing(os.open(folder / file, os.O_RDONLY | os.O_CLOEXEC)) as fd:
                found = _identity(file, fd, os.fstat(fd).st_size)
            if found != expected:
                raise errors.BackendFailed(
                    f"clone '{name}': its file '{file}' is not what was saved: {found}, not {expected}",
                    hint=f"'dsecctl snapshot rm {name}' and make it again; look at the disk",
                )
        self._compared[name] = marks

    async def remove(self, name: str) -> None:
        self._compared.pop(name, None)
        with translated(f"remove snapshot '{name}'"):
            await self._trash.take(self._directory / name, _TRASH_WAIT_S)

    def residents(self) -> set[str]:
        return {path.name for path in self._directory.iterdir()}


@contextlib.asynccontextmanager
async def _still(steps: MicrovmSteps, box: Box, doing: str, *, paused: bool) -> AsyncIterator[None]:
    """A machine that does not move. Commands stop first, so that a copy is told who it is before any of them goes on;
    those of a box that is ``paused`` stand already, and still do afterwards. Then its disk settles: what was deleted is
    not to be copied with it."""
    link, place = box.link, steps.place(box)
    if link is None:
        raise errors.SandboxLost(f"{doing} '{box.id}': its agent does not answer", retryable=True)
    with steps.classes.not_starved(steps.cgroup(box)):
        await link.machine.freeze(frozen=True, settle=True)
    try:
        await steps.driver.pause(place)
        try:
            yield
        finally:
            await steps.driver.resume(place)
    finally:
        if not paused:
            await link.machine.freeze(frozen=False)


def _identity(name: str, fd: int, size: int) -> str:
    """What a file is told by. Blocks."""
    return f"{size} bytes" if name == _ENVIRONMENT else f"sha256:{sparse.digest(fd)}"


def _marks(folder: Path, name: str) -> tuple[str, int, int, int]:
    status = (folder / name).stat()
    return name, status.st_ino, status.st_size, 0 if name in _SHARED else status.st_mtime_ns


def _differences(needs: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """What is not the same, each in words that name both sides; of long lists, only what one side lacks."""
    found = {}
    for name in sorted(needs.keys() | here.keys()):
        then, now = needs.get(name, "none"), here.get(name, "none")
        if then == now:
            continue
        lost, new = set(then.split()) - set(now.split()), set(now.split()) - set(then.split())
        if len(then.split()) > 1:
            less, more = (" ".join(sorted(words)) or "none" for words in (lost, new))
            found[name] = f"{name}: {less} are missing here, {more} were missing there"
        else:
            found[name] = f"{name}: {then}, here {now}"
    return found


def _sync_directory(path: Path) -> None:
    with files.closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)
