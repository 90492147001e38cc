# SPDX-License-Identifier: Apache-2.0
"""What a machine leaves behind when a test on it has failed.

Here: its console, QEMU's messages, its journal, for a report and for a folder. Not here: when they are wanted
(``conftest.py``).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.vm.channel import ChannelError
from tests.vm.host import VmHost

_TAIL_LINES = 80


def last_words(vm: VmHost) -> dict[str, str]:
    """The ends of the console and of the journal, by name."""
    texts = {"console": vm.console(), "journal": _journal(vm, [f"--lines={_TAIL_LINES}"])}
    return {name: "\n".join(text.splitlines()[-_TAIL_LINES:]) for name, text in texts.items()}


def keep(vm: VmHost, folder: Path) -> None:
    """Copy console, QEMU's messages and the whole journal into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("console.log", "qemu.log"):
        if (vm.folder / name).exists():
            shutil.copyfile(vm.folder / name, folder / name)
    (folder / "journal.log").write_text(_journal(vm, ["--output=short-precise"]))


def _journal(vm: VmHost, options: Sequence[str]) -> str:
    """It, or why it is not to be had: the guest may have stopped answering."""
    try:
        return vm.run(["journalctl", "--no-pager", *options], check=False, timeout_s=120).text
    except (ChannelError, OSError) as error:
        return f"not to be had: {error}"
