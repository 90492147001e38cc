# SPDX-License-Identifier: Apache-2.0
"""Creating sandboxes: the command, and the options that ``run`` shares with it.

Here: from options to a SandboxSpec. Not here: running commands in them (``run.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from dsecctl import output
from dsecctl.app import App, command, passes_rest
from dsecctl.params import (
    CPUS,
    DURATION,
    IMAGE,
    NETWORK_POLICY,
    PAIR,
    PORT,
    SIZE,
    SNAPSHOT,
    VARIABLE,
    options,
    read_env_file,
)
from libdsec import types as t
from libdsec.connection import build

LIMITS = options(
    click.option(
        "--memory",
        "memory_max_bytes",
        type=SIZE,
        metavar="SIZE",
        help="Most memory; above it processes are killed.",
    ),
    click.option(
        "--memory-high",
        "memory_high_bytes",
        type=SIZE,
        metavar="SIZE",
        help="Above it processes are slowed down.",
    ),
    click.option("--swap", "swap_max_bytes", type=SIZE, metavar="SIZE", help="Most swap."),
    click.option(
        "--oom-group/--oom-one", "memory_oom_group", default=None, help="Want of memory ends all processes, or one."
    ),
    click.option("--cpus", "cpu_max_permil", type=CPUS, metavar="NUMBER", help="Most CPU time, in CPUs."),
    click.option(
        "--cpu-weight", type=click.IntRange(1, 10000), help="Share of the CPU under load; others have 100."
    ),
    click.option(
        "--cpu-idle/--cpu-shared", "cpu_idle", default=None, help="Only CPU time that nobody else wants, or a share."
    ),
    click.option("--pids", "pids_max", type=click.IntRange(4), help="Most processes and threads."),
    click.option(
        "--io-weight", type=click.IntRange(1, 10000), help="Share of the disk under load; others have 100."
    ),
    click.option("--read-rate", "io_read_bytes_per_s", type=SIZE, metavar="SIZE", help="Most read a second."),
    click.option("--write-rate", "io_write_bytes_per_s", type=SIZE, metavar="SIZE", help="Most written a second."),
    click.option("--read-ops", "io_reads_per_s", type=click.IntRange(1), help="Most reads a second."),
    click.option("--write-ops", "io_writes_per_s", type=click.IntRange(1), help="Most writes a second."),
)
LIMIT_NAMES = tuple(t.Limits.model_fields)
NETWORK = click.option(
    "--network", type=NETWORK_POLICY, metavar="POLICY",
    help="What it may reach: none, all, or rules like tcp:203.0.113.0/24:443,udp:*:53 (docs/network.md).",
)  # fmt: skip

APPARMOR = options(
    click.option(
        "--deny-write", multiple=True, metavar="GLOB", help="Nobody inside may write or move it or what is below."
    ),
    click.option("--deny-read", multiple=True, metavar="GLOB", help="Nobody inside may read or execute it."),
    click.option(
        "--deny-sockets",
        multiple=True,
        type=click.Choice(["inet", "inet6", "netlink"]),
        help="No sockets of this family.",
    ),
    click.option("--allow-raw-sockets", is_flag=True, help="As ping and tcpdump may need; denied by default."),
)
_APPARMOR_NAMES = tuple(t.AppArmor.model_fields)

SPEC = options(
    click.option("--name", "id", metavar="ID", help="Its id; made up when not given."),
    click.option(
        "--backend", default="container", show_default=True, help="How it runs; see 'dsecctl host'."
    ),
    click.option(
        "--workspace", type=IMAGE, metavar="IMAGE", help="An image that is laid over the base image."
    ),
    click.option(
        "--toolkit",
        "toolkits",
        type=IMAGE,
        multiple=True,
        metavar="IMAGE",
        help="One more; later ones lie on top.",
    ),
    click.option(
        "-e", "--env", "env", type=VARIABLE, multiple=True, help="A variable; NAME alone passes on ours."
    ),
    click.option(
        "--env-file", type=click.File(), multiple=True, callback=read_env_file, help="Lines NAME=VALUE."
    ),
    click.option("-u", "--user", metavar="USER[:GROUP]", help="Default: the image's, else root."),
    click.option("-w", "--workdir", metavar="PATH", help="Default: the image's, else the user's home."),
    click.option("--hostname", metavar="NAME", help="Default: its id."),
    click.option("--read-only", "readonly_root", is_flag=True, help="No writing but to /tmp and /dev/shm."),
    click.option("--tmp-size", "tmp_size_bytes", type=SIZE, metavar="SIZE", help="Size of /tmp (256M)."),
    click.option("--shm-size", "shm_size_bytes", type=SIZE, metavar="SIZE", help="Size of /dev/shm (64M)."),
    click.option("-l", "--label", "labels", type=PAIR, multiple=True, help="A label to find it by."),
    NETWORK,
    click.option(
        "-p", "--publish", type=PORT, multiple=True, metavar="[ADDRESS:]HOST_PORT:PORT",
        help="Lead a port of the host's loopback to one of its; 0: any free one, which 'inspect' tells.",
    ),
    click.option(
        "--ttl",
        "ttl_s",
        type=DURATION,
        help="Delete it this long after creation; time paused does not count.",
    ),
    click.option(
        "--class",
        "cpu_class",
        type=click.Choice(("latency", "batch")),
        help="batch takes what CPU time latency leaves, and shares no core with it (latency).",
    ),
    click.option("--wait", "wait_s", type=DURATION, help="How long it may wait for the host to have room (30s)."),
    LIMITS,
    APPARMOR,
)


def limits_of(values: Mapping[str, Any]) -> t.Limits:
    """The limits among parsed options."""
    return build(t.Limits, "limits", **{name: values.get(name) for name in LIMIT_NAMES})


def asked_limits(values: Mapping[str, Any]) -> t.Limits | None:
    """The limits among parsed options, None when there is none."""
    return limits_of(values) if any(values.get(name) is not None for name in LIMIT_NAMES) else None


def apparmor_of(values: Mapping[str, Any]) -> t.AppArmor | None:
    """The AppArmor rules among parsed options."""
    given = {name: values[name] for name in _APPARMOR_NAMES if values[name]}
    return build(t.AppArmor, "apparmor", **given) if given else None


def spec_of(image: str, given: Mapping[str, Any], argv: tuple[str, ...] | None) -> t.SandboxSpec:
    """The spec that parsed options stand for. Raises InvalidSpec."""
    apart = {*LIMIT_NAMES, *_APPARMOR_NAMES, "id", "env_file", "wait_s"}
    fields = {name: value for name, value in given.items() if name not in apart}
    fields["apparmor"] = apparmor_of(given)
    fields |= {"env": {**given["env_file"], **dict(given["env"])}, "labels": dict(given["labels"])}
    fields = {name: value for name, value in fields.items() if value is not None}
    return build(t.SandboxSpec, "spec", image=image, command=argv, limits=limits_of(given), **fields)


def command_of(argv: tuple[str, ...], behind: str) -> tuple[str, ...]:
    """The command without the ``--`` that may stand before it. Raises UsageError for an option of ours in its place:
    what stands behind ``behind`` is no longer ours, and a command of such a name is not to be guessed."""
    if argv[:1] == ("--",):
        return argv[1:]
    if argv and argv[0].startswith("-"):
        ctx = click.get_current_context()
        ours = {name for option in ctx.command.params for name in (*option.opts, *option.secondary_opts)}
        word = argv[0].partition("=")[0]
        what = f"option '{word}'" if word in ours else f"'{argv[0]}'"
        raise click.UsageError(
            f"{what} stands behind {behind}, where the command begins: put it before {behind}, "
            "or '--' before a command that is called so",
            ctx,
        )
    return argv


@command(
    "create",
    example="dsecctl create --name web --memory 512M debian:trixie -- python3 -m http.server",
    context_settings=passes_rest(),
)
@SPEC
@click.option("--key", "idempotency_key", help="The same key again gives the same sandbox, not a second one.")
@click.option(
    "--snapshot", type=SNAPSHOT, metavar="NAME", help="Begin as this snapshot is, instead of from IMAGE; takes only "
    "--name, --label, --ttl and --count.",
)  # fmt: skip
@click.option("-n", "--count", type=click.IntRange(1, 64), help="How many, with --snapshot: all or none.")
@click.argument("image", type=IMAGE, required=False)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND]...")
def create(
    app: App, *, image: str | None, argv: tuple[str, ...], idempotency_key: str | None,
    snapshot: str | None, count: int | None, **given: Any,
) -> None:
    """Create a sandbox from IMAGE and start it; print its id.

    COMMAND is started in it as exec 'main', now and at each 'dsecctl start'. With --snapshot what ran when it was
    saved goes on.
    """
    if snapshot is not None:
        _clone(app, snapshot, 1 if count is None else count, given)
        return
    if image is None:
        raise click.MissingParameter(param_hint="'IMAGE'", param_type="argument")
    if count is not None:
        raise click.UsageError("--count goes with --snapshot")
    spec = spec_of(image, given, command_of(argv, "IMAGE") or None)
    box = app.client.create(spec, id=given["id"], idempotency_key=idempotency_key, wait_s=given["wait_s"])
    if app.json:
        output.document(box)
    else:
        click.echo(box.id)


_OF_CLONES = {"snapshot", "count", "id", "labels", "ttl_s"}


def _clone(app: App, snapshot: str, count: int, given: Mapping[str, Any]) -> None:
    """Refuses what a clone has from its snapshot, instead of passing over it."""
    ctx = click.get_current_context()
    # An argument without a word counts as given.
    asked = {name for name, value in ctx.params.items() if value not in (None, ())}
    asked = {name for name in asked if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if foreign := sorted(asked - _OF_CLONES):
        options = {option.name: max(option.opts, key=len) for option in ctx.command.params}
        raise click.UsageError(f"{options.get(foreign[0], foreign[0])}: a clone has that from its snapshot")
    if given["id"] and count > 1:
        raise click.UsageError("--name: several clones cannot have one name")
    made = app.client.clone(
        snapshot, count=count, ids=(given["id"],) if given["id"] else (), labels=dict(given["labels"]) or None,
        ttl_s=given["ttl_s"],
    ).sandboxes  # fmt: skip
    if app.json:
        output.document([box.model_dump(mode="json") for box in made])
        return
    for box in made:
        click.echo(box.id)
