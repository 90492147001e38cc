# SPDX-License-Identifier: Apache-2.0
"""What processor this host has, as far as a guest that sees it depends on it.

What belongs here: reading /proc/cpuinfo (proc_cpuinfo(5)). What does not: what is done when two hosts differ.
"""

from __future__ import annotations

from pathlib import Path

_MODEL = ("vendor_id", "cpu family", "model", "stepping")


def likeness() -> dict[str, str]:
    """``cpu``, its maker and model, and ``cpu-features``, its flags in order. Blocks."""
    first = Path("/proc/cpuinfo").read_text("ascii", "replace").partition("\n\n")[0]
    fields = {name.strip(): text.strip() for name, _colon, text in (line.partition(":") for line in first.splitlines())}
    model = "/".join(fields.get(name, "unknown") for name in _MODEL)
    return {"cpu": model, "cpu-features": " ".join(sorted(fields.get("flags", "").split()))}
