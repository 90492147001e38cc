# SPDX-License-Identifier: Apache-2.0
"""Classes of sandboxes, ``latency`` and ``batch``: in which cgroup those of each lie, and with which cookie they run.

What belongs here: what all backends share of it. What does not: a cgroup's attributes (``limits.py``), whose cookie is
taken (``cookies.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

from dsecd.backends.base import Box, Site
from dsecd.backends.cookies import Cookies, concern
from dsecd.backends.limits import LimitWriter
from dsecd.linux import cgroup, mechanisms
from libdsec.types import SandboxSpec

#: All sandboxes of class batch lie in one idle cgroup: each for itself, many of them would outweigh what is not idle.
_BATCH = "batch"
#: How long a sandbox of batch is left to begin or end by what others leave it.
_PATIENCE_S = 0.5
_making = threading.Lock()


class Classes:
    """One for all backends of a daemon: who hurries, and who has which cookie, is counted in it."""

    def __init__(self, site: Site) -> None:
        asked = site.core_scheduling
        works = asked == "off" or mechanisms.by_name("core-scheduling").check().works is True
        self._lacking = "off" if works else asked
        self._dir = site.cgroup_dir
        cgroup.create(site.cgroup_dir)
        self.limits = LimitWriter(site.cgroup_dir, site.state_dir)
        self.cookies = Cookies(asked if works else "off")

    def check(self, spec: SandboxSpec) -> list[str]:
        """Raise FeatureMissing for a class that cannot be had here; name the default that is off."""
        if spec.cpu_class == "batch":
            self.limits.check_idle()
        return ["core-scheduling"] if concern(self._lacking, spec.cpu_class) else []

    def group(self, box: Box, name: str) -> Path:
        """Where the box's cgroup of that name lies; of a box that is only known by its id, where it is."""
        batch = self._dir / _BATCH / name
        return batch if box.spec.cpu_class == "batch" or batch.exists() else self._dir / name

    def groups(self) -> set[str]:
        """The names of the cgroups of all boxes, and of others beside them."""
        return {path.name for parent in (self._dir, self._dir / _BATCH) for path in cgroup.children(parent)}

    def prepare(self, box: Box) -> None:
        """Have the cgroup that the box's will lie in."""
        if box.spec.cpu_class == "batch":
            self.limits.make_idle(self._dir / _BATCH)

    def restore(self, group: Path) -> None:
        """A daemon that was killed may have been hurrying."""
        if group.parent.name == _BATCH:
            self.limits.make_idle(group.parent)

    @contextlib.contextmanager
    def not_starved(self, group: Path) -> Iterator[None]:
        """Beginning and ending take processor time, of which a busy host leaves an idle cgroup next to none: after a
        moment without success it competes like any other."""
        if group.parent.name != _BATCH:
            yield
            return
        with contextlib.ExitStack() as stack:
            hurry = functools.partial(stack.enter_context, self.limits.hurried(group.parent))
            timer = asyncio.get_running_loop().call_later(_PATIENCE_S, hurry)
            try:
                yield
            finally:
                timer.cancel()


def shared(site: Site) -> Classes:
    """The one of all backends."""
    with _making:
        found = site.made.get("classes")
        if not isinstance(found, Classes):
            found = site.made["classes"] = Classes(site)
        return found
