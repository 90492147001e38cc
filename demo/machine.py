# SPDX-License-Identifier: Apache-2.0
"""The demo's microVM, beside a container: the same lines of the SDK with one parameter changed.

Here: a kernel for guests, fetched while the demo does other things, and the step itself. Not here: anything about dsec
itself.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libdsec import Sandbox
from tests.support import machines

CONFIG = Path("/var/lib/dsec/demo.toml")


class Kernel:
    """What guests boot: our own where it was built, else Debian's from the archive."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.why_not = ""
        self._thread = threading.Thread(target=self._fetch, daemon=True)
        self._thread.start()

    def _fetch(self) -> None:
        try:
            self.path = machines.guest_kernel()
        except pytest.skip.Exception as reason:
            self.why_not = str(reason)

    def config(self) -> Path | None:
        """A configuration for dsecd that names it, once it is there; None without one."""
        self._thread.join()
        if self.path is None:
            return None
        CONFIG.write_text(f'[microvm]\nkernel = "{self.path}"\nmemory_bytes = {256 << 20}\n')
        return CONFIG


@contextmanager
def fetching() -> Iterator[Kernel]:
    """In the background of the block."""
    yield Kernel()


def run(
    kernel: Kernel, base: str, say: Callable[[str], None], show: Callable[[str], None],
    check: Callable[[object, str], None],
) -> None:  # fmt: skip
    if kernel.path is None:
        say("No microVM: there is no kernel for guests, and the archive gives none:")
        show(kernel.why_not)
        return
    say("A container and a microVM, by the same lines; backend= is all that changes:")
    script = "echo $(uname -sr), PID $$ on $(hostname): $(cat /root/notes.txt)"
    releases = {}
    for backend in ("container", "microvm"):
        began = time.monotonic()
        with Sandbox(image=base, backend=backend) as sandbox:
            created_s = time.monotonic() - began
            sandbox.write("/root/notes.txt", f"written in a {backend}")
            began = time.monotonic()
            done = sandbox.exec("sh", "-c", script, check=True)
            took_ms = (time.monotonic() - began) * 1000
            releases[backend] = sandbox.exec("uname", "-r", check=True).text
            show(f"{backend}: created in {created_s:.2f} s, exec in {took_ms:.0f} ms\n  {done.text.strip()}")
            if backend == "microvm":
                _copies(sandbox, say, show, check)
    check(len(set(releases.values())) == 2, "the microVM has a kernel of its own")


def _copies(
    sandbox: Sandbox, say: Callable[[str], None], show: Callable[[str], None], check: Callable[[object, str], None]
) -> None:
    look = "hostname; cat /tmp/count; sleep 0.5; cat /tmp/count"
    say("The microVM is copied while a command runs in it; the command goes on in all three:")
    with sandbox.popen("sh", "-c", "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"):
        sandbox.exec("sh", "-c", "until [ -s /tmp/count ]; do sleep 0.05; done", check=True)
        began = time.monotonic()
        copies = sandbox.fork(2)
        show(f"2 copies in {time.monotonic() - began:.2f} s")
        try:
            names = set()
            for one in (sandbox, *copies):
                told = one.exec("sh", "-c", look, check=True).text.split()
                show(f"  {told[0]}: counted to {told[1]}, then to {told[2]}")
                check(int(told[2]) > int(told[1]), "the counter goes on")
                names.add(told[0])
            check(len(names) == 3, "each has a name of its own")
        finally:
            for copy in copies:
                copy.delete()
