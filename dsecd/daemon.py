# SPDX-License-Identifier: Apache-2.0
"""The process: from the command line to serving, and back to nothing without stopping a sandbox.

Here: the order of starting and stopping, signals, systemd. Not here: what is served (``api``), what it does
(``core``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import logging
import os
import resource
import signal
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import sdnotify

from dsecd import __version__, listen, lock, logs
from dsecd.api.handlers import HANDLERS
from dsecd.api.server import Server
from dsecd.backends.limits import hand_on_controllers
from dsecd.config import Config, ConfigError, check_ids, load
from dsecd.core import host
from dsecd.core.events import Events
from dsecd.core.principal import group_id, of_socket
from dsecd.core.schema import MIGRATIONS
from dsecd.core.services import Core
from dsecd.core.store import Store
from dsecd.core.tasks import Tasks
from dsecd.linux import cgroup, mount, mountns
from dsecd.wiring import Place, build_core
from libdsec.errors import DsecError, FeatureMissing
from libdsec.routes import ROUTES

log = logging.getLogger(__name__)

# sysexits.h: systemd does not restart a unit for this status (RestartPreventExitStatus).
EX_CONFIG = 78
#: How long requests under way may go on when the daemon stops; commands in sandboxes go on anyway.
STOP_GRACE_S = 1.0
#: The writer thread's wake-up would otherwise wait up to 5 ms behind a busy event loop.
_SWITCH_INTERVAL_S = 0.0005
_INIT_NAMESPACE = Path("/proc/1/ns/mnt")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon until SIGTERM or SIGINT; the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        config = load(arguments.config)
    except ConfigError as error:
        print(*(f"dsecd: {fault}" for fault in error.faults), sep="\n", file=sys.stderr)
        return EX_CONFIG
    if arguments.check_config:
        print("the configuration is valid")
        return 0
    logs.set_up(config.log_level)
    try:
        _run(config)
    except DsecError as error:
        log.error("start failed: %s%s", error, f" (hint: {error.hint})" if error.hint else "")
        return error.exit_status
    except OSError as error:
        log.exception("start failed: %s", error)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dsecd", description="Sandbox daemon for one host.")
    parser.add_argument("--config", type=lambda text: Path(text).absolute(), metavar="FILE",
                        help="instead of /etc/dsec/dsecd.toml; FILE.d/*.toml are read after it")  # fmt: skip
    parser.add_argument("--check-config", action="store_true", help="only read and check the configuration")
    parser.add_argument(
        "--foreground", action="store_true", help="what it always does; for scripts that say so"
    )
    parser.add_argument("--version", action="version", version=f"dsecd {__version__}")
    return parser


def _run(config: Config) -> None:
    with contextlib.ExitStack() as stack:
        place = _take_place(config, stack)
        asyncio.run(_serve(config, place))


# --- before the event loop: the process is still single-threaded
# -----------------------------------------------------


class _Taken:
    """What the process got hold of before it became a server."""

    def __init__(self, cgroup_dir: Path, launch_ns: int, listening: socket.socket | None) -> None:
        self.cgroup_dir = cgroup_dir
        self.launch_ns = launch_ns
        self.listening = listening


def _take_place(config: Config, stack: contextlib.ExitStack) -> _Taken:
    """Directories, lock, limits, namespaces.  Blocks."""
    listening = listen.adopted(os.environ)
    for path, mode in ((config.state_dir, 0o700), (config.cache_dir, 0o755), (config.runtime_dir, 0o755)):
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    for path in (config.runtime_dir, config.state_dir):
        stack.callback(os.close, lock.hold(path))
    _raise_open_files()
    if faults := host.missing(config.require):
        raise FeatureMissing(
            "; ".join(faults), hint="provide it, or take it out of 'require' in the configuration"
        )
    for collision in check_ids(config):
        log.warning("id ranges: %s", collision)
    cgroup_top = _cgroup_top()
    cgroup_dir = cgroup_top / config.cgroup_root
    cgroup.create(cgroup_dir)
    hand_on_controllers(cgroup_top, cgroup_dir)
    stack.callback(os.close, lock.hold_cgroup(cgroup_dir))
    _enter_pinned_namespace(config.runtime_dir / "mnt")
    launch_ns = _launch_namespace(config.runtime_dir / "layers")
    stack.callback(os.close, launch_ns)
    return _Taken(cgroup_dir, launch_ns, listening)


def _raise_open_files() -> None:
    """As many as we were given, and no fewer than many sandboxes take: each costs a few descriptors."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard == resource.RLIM_INFINITY else max(hard, host.OPEN_FILES_MIN)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    except (ValueError, OSError):  # more than fs.nr_open, or no CAP_SYS_RESOURCE: setrlimit(2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _under_systemd() -> bool:
    return "NOTIFY_SOCKET" in os.environ


def _cgroup_top() -> Path:
    """The part of the tree that systemd delegates to our unit, else all of it; sandboxes are somewhere below."""
    base = cgroup.root()
    own = Path(cgroup.own().lstrip("/"))
    # DelegateSubgroup puts the daemon itself into a child of its unit's cgroup, beside which sandboxes can
    # be.
    if _under_systemd() and own.parent.name.endswith(".service"):
        base /= own.parent
    return base


def _enter_pinned_namespace(pin: Path) -> None:
    """Work in the mount namespace that every daemon of this directory works in, so that layers stay mounted once."""
    if _under_systemd() and os.stat(_INIT_NAMESPACE).st_ino != os.stat("/proc/self/ns/mnt").st_ino:
        # The unit's own namespace ends with this process: the pin has to be where the host's processes are.
        mountns.enter_process(_INIT_NAMESPACE)
    namespace = mountns.ensure_pinned(pin)
    try:
        mountns.enter_process(namespace)
    finally:
        os.close(namespace)


def _launch_namespace(layers: Path) -> int:
    """A private copy of our mount namespace without the layers: the fewer mounts, the faster a runtime starts."""
    namespace = mountns.create_private()

    def prune() -> None:
        for mounted in reversed(mount.mountinfo("thread-self")):
            if mounted.target.is_relative_to(layers):
                mount.detach(mounted.target)

    mountns.run_in(namespace, prune)
    return namespace


# --- in the event loop
# ----------------------------------------------------------------------------------------------


async def _serve(config: Config, taken: _Taken) -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    stop = _stop_signals()
    async with _core(config, taken) as core:
        admin_gid = group_id(config.admin_group)
        server = Server(
            core, ROUTES, HANDLERS, functools.partial(of_socket, admin_gid=admin_gid),
            max_request_bytes=config.limits.max_request_bytes,
            max_body_bytes_per_user=config.limits.max_body_bytes_per_user,
            max_connections_per_user=config.limits.max_connections_per_user,
        )  # fmt: skip
        async with _listening(config, taken, server):
            # What exists now is here to stay: the collector need not look at it again.
            gc.collect()
            gc.freeze()
            await _until(stop, core)
            _notify("STOPPING=1")
            log.info("stopping")
            core.events.close()
    log.info("stopped")


@contextlib.asynccontextmanager
async def _core(config: Config, taken: _Taken) -> AsyncIterator[Core]:
    """The services; afterwards everything is closed and the sandboxes are left running."""
    store = Store.open(config.database, MIGRATIONS)
    tasks = Tasks()
    try:
        generation = await store.write(_next_generation, durable=True)
        events = Events(store)
        place = Place(cgroup_dir=taken.cgroup_dir, launch_ns=taken.launch_ns, generation=generation)
        core = await build_core(config, place, store, events, tasks)
        events.emit("daemon.started", version=__version__, generation=generation)
        await events.stored()  # a start that was announced is one that happened
        log.info("started version=%s generation=%d sandboxes=%d pid=%d", __version__, generation,
                 sum(core.sandboxes.counts().values()), os.getpid())  # fmt: skip
        yield core
        core.sandboxes.let_go()
    finally:
        await tasks.close()
        store.close()


@contextlib.asynccontextmanager
async def _listening(config: Config, taken: _Taken, server: Server) -> AsyncIterator[None]:
    listening = taken.listening or listen.bound(config.socket, config.socket_mode, config.socket_group)
    try:
        await server.start(listening)
        log.info("listening on %s", config.socket if taken.listening is None else "systemd's socket")
        _notify("READY=1")
        yield
    finally:
        await server.close(STOP_GRACE_S)
        if taken.listening is None:
            listen.remove(config.socket)


def _next_generation(db: sqlite3.Connection) -> int:
    """Count the daemon's starts on this state. Agents refuse a daemon with a lower number than one they have met."""
    db.execute("INSERT OR IGNORE INTO meta VALUES ('generation', '0')")
    db.execute("UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE name = 'generation'")
    return int(db.execute("SELECT value FROM meta WHERE name = 'generation'").fetchone()[0])


def _stop_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # The configuration is read once, and a terminal that goes away is no reason to end.
    loop.add_signal_handler(
        signal.SIGHUP, lambda: log.info("SIGHUP ignored: restart to read the configuration again")
    )
    return stop


async def _until(stop: asyncio.Event, core: Core) -> None:
    """Wait for the signal, feeding systemd's watchdog meanwhile (sd_watchdog_enabled(3))."""
    interval_s = _watchdog_s()
    while not stop.is_set():
        try:
            async with asyncio.timeout(interval_s):
                await stop.wait()
        except TimeoutError:
            # Fed only if the loop turns and the core answers.
            core.sandboxes.counts()
            _notify("WATCHDOG=1")


def _watchdog_s() -> float | None:
    """How often to feed it: three times within its time, as a late one must not kill us. None: there is none."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    text = os.environ.get("WATCHDOG_USEC", "")
    return int(text) / 3e6 if text.isdecimal() and int(text) > 0 else None


def _notify(state: str) -> None:
    sdnotify.SystemdNotifier().notify(state)
