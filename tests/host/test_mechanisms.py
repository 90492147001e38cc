# SPDX-License-Identifier: Apache-2.0
"""Probes on the host they run on: what they find, what they must not claim, and that they leave no trace."""

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from dsecd.linux import mechanisms, proc
from tests.support.processes import children
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


def trace() -> dict[str, object]:
    """All that a careless probe might leave."""
    return {
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "cgroups": sorted(str(path) for path in Path("/sys/fs/cgroup").rglob("dsec-probe*")),
        "fds": sorted(os.listdir("/proc/self/fd")),
        "temporary": sorted(name for name in os.listdir("/tmp") if name.startswith("dsec-probe")),
        "children": children(),
        "ids": [line for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith(("Uid", "Gid", "Cap", "NoNewPrivs", "Seccomp:"))],
        "namespaces": [os.readlink(path) for path in sorted(Path("/proc/self/ns").iterdir())],
        "damon": sorted(str(path) for path in Path("/sys/kernel/mm/damon").rglob("*"))
        if Path("/sys/kernel/mm/damon").exists() else [],
    }


def test_report_leaves_no_trace() -> None:
    mechanisms.report(again=True)  # Warm up: imports and caches open files once.
    before = trace()
    report = mechanisms.report(again=True)
    # What others on this host do meanwhile, a unit of systemd's say, goes by itself.
    with contextlib.suppress(AssertionError):
        until(lambda: trace() == before)
    assert trace() == before
    assert (before["cgroups"], before["temporary"]) == ([], [])
    assert [row.name for row in report] == [feature.name for feature in mechanisms.MECHANISMS]


def test_what_sandboxes_need_works_here() -> None:
    """On a kernel that is new enough these may not be missing: a skip here would hide a broken probe."""
    needed = (
        "user-namespaces", "mount-namespaces", "idmapped-mounts", "overlay-data-only", "erofs-file", "mkfs-erofs",
        "cgroup-v2", "cgroup-freeze", "cgroup-kill", "pidfd", "clone-into-cgroup", "seccomp", "crun",
    )
    for name in needed:
        feature = mechanisms.by_name(name)
        if not feature.expected_here():
            pytest.skip(f"{name} needs Linux {feature.since}")
        assert feature.check(again=True).works is True, feature.status()


def test_controllers_agree_with_the_kernel() -> None:
    offered = Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    for name in ("memory", "cpu", "pids", "io"):
        assert mechanisms.by_name(f"cgroup-{name}").check(again=True).works is (name in offered)


def test_core_scheduling_agrees_with_the_kernel() -> None:
    symbols = Path("/proc/kallsyms").read_text()
    works = mechanisms.by_name("core-scheduling").check(again=True).works
    if "sched_core_share_pid" not in symbols:
        assert works is False
    else:
        assert works is True or "SMT" in mechanisms.by_name("core-scheduling").check().reason


def test_missing_programs_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(proc, "MINIMAL_ENV", {"PATH": str(tmp_path), "LANG": "C.UTF-8"})
    for name in ("crun", "mkfs-erofs", "skopeo", "debian-bootstrap"):
        status = mechanisms.by_name(name).status(again=True)
        assert status.works is False
        assert "not installed" in status.reason
        assert "apt install" in status.hint
        monkeypatch.setattr(mechanisms.by_name(name), "_known", None)


def test_programs_of_use_only_together_are_both_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(proc, "MINIMAL_ENV", {"PATH": str(tmp_path)})
    firecracker = mechanisms.by_name("firecracker")
    assert firecracker.status(again=True).reason == "firecracker and jailer are not installed"
    for name, reason in (("firecracker", "jailer is not installed"), ("jailer", "")):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert firecracker.status(again=True).reason == reason
    monkeypatch.setattr(firecracker, "_known", None)


def test_program_that_fails_is_not_taken_for_working(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, script in (("crun", "echo crun version 1.5; echo +CAP +SECCOMP"), ("mkfs.erofs", "echo no >&2; exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(proc, "MINIMAL_ENV", {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    crun, mkfs = mechanisms.by_name("crun"), mechanisms.by_name("mkfs-erofs")
    assert crun.check(again=True).reason == "crun is 1.5, 1.8 is needed"
    assert mkfs.check(again=True).works is False
    (tmp_path / "crun").write_text("#!/bin/sh\necho crun version 1.21; echo +CAP\n")
    assert crun.check(again=True).reason == "crun 1.21 is built without SECCOMP"
    for feature in (crun, mkfs):
        monkeypatch.setattr(feature, "_known", None)


@pytest.mark.usefixtures("own_mounts")
def test_unmounted_cgroups_are_missing() -> None:
    subprocess.run(["umount", "/sys/fs/cgroup"], check=True)
    try:
        for name in ("cgroup-v2", "cgroup-freeze", "cgroup-memory"):
            assert mechanisms.by_name(name).check(again=True).works is False
    finally:
        for name in ("cgroup-v2", "cgroup-freeze", "cgroup-memory"):
            mechanisms.by_name(name)._known = None


def test_without_privileges_it_claims_neither_yes_nor_no() -> None:
    """What an ordinary user cannot try is unknown, not absent."""
    program = (
        "from dsecd.linux import mechanisms\n"
        "for row in mechanisms.report(): print(row.name, row.works)\n"
    )
    done = proc.run_blocking(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--", "python3", "-c", program],
        timeout_s=300, env={**proc.MINIMAL_ENV, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    found = dict(line.split() for line in done.stdout.decode().splitlines())
    for name in ("idmapped-mounts", "mount-namespaces", "overlay-data-only", "erofs-file", "cgroup-freeze"):
        assert found[name] == "None", name
    assert found["seccomp"] == "True"
