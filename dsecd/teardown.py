# SPDX-License-Identifier: Apache-2.0
"""Ends all that a stopped daemon left running, and gives its mounts back: what removing the package takes.

Here: everything that lives in the kernel or below the runtime directory and outlives the daemon on purpose. Not here:
files that sandboxes wrote and the database, which stay; a daemon started later finds its sandboxes stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address
from pathlib import Path

from dsecd import lock, zram
from dsecd.backends import network_host, policy
from dsecd.config import Config, ConfigError, load
from dsecd.core import turns
from dsecd.linux import apparmor, cgroup, mount, mountns, pidfd, proc
from libdsec.errors import DsecError

#: systemd may hold the unit in a slice of its own choice, or of the operator's.
_UNITS = ("dsecd.service", "*.slice/dsecd.service", "*.slice/*.slice/dsecd.service")
_PROFILES = (policy.DEFAULT, *policy.MONITORS, "dsecd")
#: How long killed processes may take to go: one may be writing to a slow disk.
_GONE_TIMEOUT_S = 20.0


def main(argv: Sequence[str] | None = None) -> int:
    """Do it, as far as it goes; exit status 0 when nothing is left, 5 when a daemon still runs."""
    parser = argparse.ArgumentParser(
        prog="dsec-teardown", description="End all sandboxes of a stopped dsecd and unmount what it mounted."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="instead of /etc/dsec/dsecd.toml")
    try:
        config = load(parser.parse_args(argv).config)
    except ConfigError as error:
        # A daemon with this configuration would not have started: what there is was made with an older one.
        print(*(f"dsec-teardown: {fault}" for fault in error.faults), sep="\n", file=sys.stderr)
        config = Config()
    try:
        faults = tear_down(config)
    except DsecError as error:
        print(f"dsec-teardown: {error}", file=sys.stderr)
        return error.exit_status
    print(*(f"dsec-teardown: {fault}" for fault in faults), sep="\n", end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


def tear_down(config: Config) -> list[str]:
    """End the sandboxes, unpin the namespace, clear the runtime directory, unload profiles; what failed, a line each.

    Blocks.  Raises Conflict while a daemon runs there. Without a runtime directory nothing has run since boot, and but
    for profiles that confine nothing, nothing is touched: a package removed inside a chroot must not end the sandboxes
    of the host around it.
    """
    runtime, profiles = config.runtime_dir, policy.prefix(str(config.state_dir))
    if not (runtime / "dsecd.lock").exists():
        return _unload(profiles)
    faults: list[str] = []
    held = lock.hold(runtime)
    try:
        for directory, removable in _cgroups(config.cgroup_root):
            faults += _end(directory, removable)
        faults += _rules(runtime, config.network.dns_server)
        faults += _reclaimed(runtime)
        faults += _unmount(runtime)
        faults += _unload(profiles)
        faults += _clear(runtime, config.socket)
    finally:
        os.close(held)
    return faults


def _cgroups(relative: str) -> Iterator[tuple[Path, Path]]:
    """Cgroups to kill, each with the part of it that is ours to remove: a unit's own is systemd's."""
    try:
        root = cgroup.root()
    except FileNotFoundError:
        return
    yield root / relative, root / relative
    for pattern in _UNITS:
        for unit in root.glob(pattern):
            yield unit, unit / relative


def _end(directory: Path, removable: Path) -> list[str]:
    try:
        cgroup.kill(directory)
        cgroup.remove(removable, _GONE_TIMEOUT_S)
    except OSError as error:
        return [str(error)]
    return []


def _unload(prefix: str) -> list[str]:
    """Remove the AppArmor profiles that the daemon made for sandboxes, and the package's, unless they confine something
    that still runs: of another daemon, or stuck."""
    if apparmor.why_missing():
        return []
    used = set()
    for path in Path("/proc").iterdir():
        process = pidfd.identify(int(path.name)) if path.name.isdecimal() else None
        # What was killed keeps its label until it is reaped, which is somebody else's business.
        if process is not None and not pidfd.is_ending(process):
            # It may have ended since.
            with contextlib.suppress(OSError):
                used.add(apparmor.label(process.pid))
    try:
        for name in apparmor.loaded():
            if name not in used and (name in _PROFILES or name.startswith(prefix)):
                apparmor.remove(name)
    except OSError as error:
        return [str(error)]
    return []


def _reclaimed(runtime: Path) -> list[str]:
    """Give DAMON back and take away our zram device, with the sandboxes' memory that was in it."""
    faults = []
    for undo, record in ((turns.give_back, "damon"), (zram.remove, "zram")):
        try:
            undo(runtime / record)
        except OSError as error:
            faults.append(str(error))
    return faults


def _unmount(runtime: Path) -> list[str]:
    """Give up the pinned namespace, with it every mount in it, and the mount of the directory that held the pin."""
    try:
        mountns.unpin(runtime / "mnt")
        for mounted in reversed(mount.mountinfo("thread-self")):
            # A mount of a whole file system on the directory itself is the operator's.
            ours = mounted.target == runtime and mounted.root != "/"
            if ours or runtime in mounted.target.parents:
                mount.detach(mounted.target)
    except OSError as error:
        return [str(error)]
    return []


def _rules(runtime: Path, dns_server: IPv4Address) -> list[str]:
    """Take back packet rules and address, if a sandbox ever had a network; devices went with their sandboxes."""
    if not (runtime / "bpf").is_dir():
        return []
    try:
        network_host.remove(dns_server)
    except (OSError, proc.ProcessFailed) as error:
        return [str(error)]
    return []


def _clear(runtime: Path, socket: Path) -> list[str]:
    """Remove what is in the directory, but for the socket, which may be systemd's, and so in use."""
    faults = []
    for entry in runtime.iterdir():
        try:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != socket:
                entry.unlink()
        except OSError as error:
            faults.append(str(error))
    return faults


if __name__ == "__main__":
    sys.exit(main())
