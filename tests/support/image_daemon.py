# SPDX-License-Identifier: Apache-2.0
"""A little daemon that does one thing to an image store and may be killed at a named point of it.

Run: python -m tests.support.image_daemon ROOT ACTION ARGUMENT POINT.  ACTION is import (ARGUMENT a source, the name is
"second") or remove (ARGUMENT a name).  POINT is a checkpoint, "phase/NAME" for a phase of an import's progress, or
"record" to be killed nowhere and print all of them.  A point of an undo is reached by failing the import at its last
step.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from libdsec.types import ImportProgress, ImportRequest
from tests.support import images


class Killer:
    """Kills this process at its point, and notes the others."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.passed: list[str] = []

    def checkpoint(self, name: str) -> None:
        self.passed.append(name)
        if name == self.point:
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "import/publish/do/before" and ("/undo/" in self.point or self.point == "record-undo"):
            raise RuntimeError("the last step fails, so that all are undone")

    def progress(self, progress: ImportProgress) -> None:
        name = f"phase/{progress.phase}"
        if name not in self.passed:
            self.checkpoint(name)


async def act(root: Path, action: str, argument: str, killer: Killer) -> None:
    with images.opened(root, checkpoint=killer.checkpoint) as (store, _):
        await store.reconcile()
        if action == "import":
            request = ImportRequest(name="second", source=argument)
            await store.import_image(request, progress=killer.progress)
        elif action == "remove":
            await store.remove(argument)


def main() -> None:
    root, action, argument, point = sys.argv[1:]
    killer = Killer(point)
    try:
        asyncio.run(act(Path(root), action, argument, killer))
    except RuntimeError:
        if not killer.point.startswith(("record-undo", "import/")):
            raise
    print("\n".join(killer.passed))


if __name__ == "__main__":
    main()
