# SPDX-License-Identifier: Apache-2.0
"""Which AppArmor profile confines which box: loaded for its first user, removed with its last.

What belongs here: availability, the cache of compiled profiles, the count of users. What does not: what a profile says
(``policy.py``), the kernel's interface (``dsecd.linux.apparmor``).

Boxes with the same policy share a profile, whose name derives from the policy alone. The count of users is in memory: a
new daemon makes it anew from what has a record and a cgroup, and removes what nobody needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from dsecd.backends import policy
from dsecd.backends.base import Box, translated
from dsecd.backends.plan import in_thread
from dsecd.linux import apparmor
from dsecd.linux.proc import ProcessFailed
from libdsec import errors
from libdsec.types import AppArmor, SandboxSpec

log = logging.getLogger(__name__)

Mode = Literal["auto", "require", "off"]

_SYSTEM = Path("/etc/apparmor.d")
_CHECKOUT = Path(__file__).resolve().parents[2] / "apparmor"
_HINT = "run 'dsecctl doctor' to see what this host lacks"
#: Compiled profiles kept; one takes 10 KB to some 100 KB.
_CACHED_MAX = 256


def why_unconfined(mode: Mode, name: str) -> str:
    """Have one of the package's profiles loaded; why that cannot be had, empty when it is.

    Blocks. Raises FeatureMissing in mode "require" where it cannot.
    """
    missing = "it is off in the configuration" if mode == "off" else _missing(name)
    if mode == "require" and missing:
        raise errors.FeatureMissing(
            f"confine sandboxes by AppArmor: {missing}", feature="apparmor",
            hint="provide it, or set 'apparmor' to \"auto\" in the configuration",
        )  # fmt: skip
    return missing


def _missing(name: str) -> str:
    if reason := apparmor.why_missing():
        return reason
    try:
        if name not in apparmor.loaded():
            place = folder(name)
            apparmor.load(apparmor.compile_profile((place / name).read_text(), _SYSTEM, [place]))
    except (OSError, ProcessFailed) as error:
        log.warning("sandboxes are not confined by AppArmor: %s", error)
        return f"profile {name} cannot be loaded: {error}"
    return ""


def folder(name: str) -> Path:
    """Where the package's profile of that name lies."""
    return _SYSTEM if (_SYSTEM / name).exists() else _CHECKOUT


class Confinement:
    """The AppArmor profiles of one daemon's sandboxes. Its methods are for the event loop's thread, but the maker."""

    def __init__(self, mode: Mode, may_run: Callable[[Box], bool], *, state_dir: Path, cache_dir: Path) -> None:
        """``may_run``: whether something of a box may still run, and so has to stay confined.

        Blocks.  Raises FeatureMissing in mode "require" where sandboxes cannot be confined.
        """
        self._may_run = may_run
        self._prefix = policy.prefix(str(state_dir))
        self._cache = cache_dir / "apparmor"
        self._folder = folder(policy.DEFAULT)
        self._in_kernel = not apparmor.why_missing()
        #: Why sandboxes run unconfined; empty when they do not.
        self.missing = why_unconfined(mode, policy.DEFAULT)
        self._users: dict[str, set[str]] = {}
        self._compiling = asyncio.Lock()
        self._changing = asyncio.Lock()

    def check(self, spec: SandboxSpec) -> list[str]:
        """Raise FeatureMissing for a policy that cannot be had; name the default that is off."""
        if spec.apparmor is not None:
            self._require()
        return ["apparmor"] if self.missing else []

    def _require(self) -> None:
        missing = self.missing
        if not missing:
            try:
                apparmor.compiler()
            except FileNotFoundError as error:
                missing = str(error.strerror)
        if missing:
            raise errors.FeatureMissing(f"confine by AppArmor: {missing}", hint=_HINT, feature="apparmor")

    async def acquire(self, box: Box) -> None:
        """Set ``box.profile``, loaded. Raises FeatureMissing, InvalidSpec for what takes too long to compile."""
        asked = box.spec.apparmor
        if asked is None:
            box.profile = "" if self.missing else policy.DEFAULT
            return
        self._require()
        box.profile = name = self._name(asked)
        with translated(f"confine '{box.id}'"):
            await self._acquire(box, name, asked)

    async def _acquire(self, box: Box, name: str, asked: AppArmor) -> None:
        # A policy that takes long keeps only those waiting that want to compile one.
        async with self._compiling:
            compiled = b"" if self._users.get(name) else await in_thread(self._compiled, name, asked)
        async with self._changing:
            if not self._users.get(name):
                try:
                    await in_thread(self._load, name, asked, compiled)
                except BaseException:
                    # Cancelled, it may be loaded; and nobody would remove it.
                    with contextlib.suppress(OSError):
                        apparmor.remove(name)
                    raise
            self._users.setdefault(name, set()).add(box.id)

    async def release(self, box: Box) -> None:
        """The box needs its profile no more, nor the one of its policy; nobody's is removed."""
        if self._may_run(box):
            # What keeps it there has been told, and is tried again.
            return
        async with self._changing:
            for name in self._names(box):
                users = self._users.get(name)
                if users is None:
                    continue
                users.discard(box.id)
                if not users:
                    with translated(f"remove the profile of '{box.id}'"):
                        await in_thread(apparmor.remove, name)
                    self._users.pop(name)

    async def take_stock(self, boxes: Sequence[Box]) -> None:
        """Count the users of an earlier daemon's profiles, and remove those of its profiles that have none."""
        if not self._in_kernel:
            return
        for box in boxes:
            for name in self._names(box) if self._may_run(box) else ():
                self._users.setdefault(name, set()).add(box.id)
        with translated("remove AppArmor profiles that nobody needs"):
            for name in await in_thread(apparmor.loaded):
                if name.startswith(self._prefix) and name not in self._users:
                    log.info("profile=%s nobody needs it: removed", name)
                    await in_thread(apparmor.remove, name)

    def _name(self, asked: AppArmor) -> str:
        return self._prefix + policy.digest(asked)[:24]

    def _names(self, box: Box) -> set[str]:
        """The box's own profiles, also of a box whose start did not come to be recorded."""
        names = {box.profile} if box.profile.startswith(self._prefix) else set()
        return names | ({self._name(box.spec.apparmor)} if box.spec.apparmor is not None else set())

    # --- compiled profiles -----------------------------------------------------------------------------------------

    def _load(self, name: str, asked: AppArmor, compiled: bytes) -> None:
        """Blocks.  Raises OSError, InvalidSpec."""
        try:
            # Its last user may have gone meanwhile: then nothing has been compiled.
            apparmor.load(compiled or self._compiled(name, asked))
        except OSError as error:
            log.warning("profile=%s the kernel refuses what was compiled earlier: %s", name, error)
            apparmor.load(self._compiled(name, asked, again=True))

    def _compiled(self, name: str, asked: AppArmor, *, again: bool = False) -> bytes:
        """The profile in the kernel's form, compiled now or earlier.  Blocks.  Raises OSError, InvalidSpec."""
        text = policy.profile(name, asked)
        path = self._cache / self._key(text)
        with contextlib.suppress(FileNotFoundError):
            if not again and (found := path.read_bytes()):
                return found
        try:
            compiled = self._compile(text)
        except ProcessFailed as error:
            raise errors.InvalidSpec(
                f"spec.apparmor: {error}", errors=[{"path": "spec.apparmor", "message": "cannot be compiled"}],
                hint="use fewer wildcards",
            ) from error  # fmt: skip
        self._keep(path, compiled)
        return compiled

    def _compile(self, text: str) -> bytes:
        return apparmor.compile_profile(text, _SYSTEM, [self._folder])

    def _key(self, text: str) -> str:
        """Changes with all that decides what is compiled."""
        parts = [text, apparmor.compiler(), os.uname().release]
        for name in (f"abstractions/{policy.DEFAULT}", f"local/{policy.DEFAULT}", "abi/4.0"):
            for folder in (_SYSTEM, self._folder):
                with contextlib.suppress(FileNotFoundError):
                    parts.append((folder / name).read_text())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _keep(self, path: Path, compiled: bytes) -> None:
        """What cannot be kept is compiled again next time."""
        try:
            self._cache.mkdir(mode=0o700, exist_ok=True)
            found = sorted(self._cache.iterdir(), key=lambda file: file.stat().st_mtime)
            for old in found[: max(0, len(found) - _CACHED_MAX + 1)]:
                old.unlink(missing_ok=True)
            partial = path.with_suffix(".new")
            partial.write_bytes(compiled)
            partial.rename(path)
        except OSError as error:
            log.warning("profile %s is not kept: %s", path, error)
