# SPDX-License-Identifier: Apache-2.0
"""``dsecctl image …``: what sandboxes are made from.

Here: the commands. Not here: importing (the daemon).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any, get_args

import click

from dsecctl import output
from dsecctl.app import App, command
from dsecctl.params import IMAGE, PAIR, VARIABLE, options
from libdsec import types as t
from libdsec.connection import build


@click.group("image", epilog="Example: dsecctl image build-debian trixie")
def image() -> None:
    """List, import, build and remove images."""


@command("ls", example="dsecctl image ls --json")
def ls(app: App) -> None:
    """List images."""
    found = app.client.images().images
    if app.json:
        output.document([item.model_dump(mode="json") for item in found])
    elif app.quiet:
        for item in found:
            click.echo(item.digest)
    else:
        output.table(
            ("NAME", "DIGEST", "PREFIX", "SIZE", "ENTRIES", "AGE", "USED BY"), [_row(item) for item in found]
        )


def _row(item: t.ImageInfo) -> tuple[str, ...]:
    return (
        ",".join(item.names) or "-",
        item.digest.removeprefix("sha256:")[:12],
        item.prefix,
        output.size(item.size_bytes),
        str(item.entries),
        output.ago(item.created_at),
        str(len(item.held_by)),
    )


@command("inspect", example="dsecctl image inspect debian:trixie")
@click.argument("ref", type=IMAGE)
def inspect(app: App, *, ref: str) -> None:
    """Print all that is known of an image, as JSON."""
    output.document(app.client.image_inspect(ref))


#: What skopeo(1) reads from, as far as the daemon takes it.
_TRANSPORTS = ("docker://", "oci:", "oci-archive:", "docker-archive:", "dir:")

_PREFIX = click.option(
    "--prefix",
    default="/",
    show_default=True,
    metavar="PATH",
    help="Where its tree lies: /workspace, /opt/NAME.",
)


_CONFIG = options(
    click.option(
        "-e", "--env", type=VARIABLE, multiple=True, help="A variable for its commands; NAME alone takes ours."
    ),
    click.option("-u", "--user", metavar="USER[:GROUP]", help="Who its commands run as."),
    click.option("-w", "--workdir", metavar="PATH", help="Where its commands start."),
    click.option(
        "--entrypoint", metavar="WORDS", help="What 'run' runs, in front of --cmd; words as a shell splits them."
    ),
    click.option("--cmd", metavar="WORDS", help="What 'run' runs when it is given no command."),
    click.option("-l", "--label", "labels", type=PAIR, multiple=True, help="A label of the image."),
)


def _change(config: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of an image's configuration among parsed options."""
    change = {name: config[name] for name in ("user", "workdir") if config[name] is not None}
    for name in ("entrypoint", "cmd"):
        if config[name] is not None:
            try:
                change[name] = shlex.split(config[name])
            except ValueError as error:
                raise click.BadParameter(f"{config[name]!r}: {error}", param_hint=f"--{name}") from error
    return change | {"env": [f"{name}={value}" for name, value in config["env"]], "labels": dict(config["labels"])}


@command("import", example="dsecctl image import rootfs.tar base:1")
@click.option(
    "--kind",
    type=click.Choice(get_args(t.SourceKind)),
    default="auto",
    show_default=True,
    help="What SOURCE is.",
)
@click.option("--reference", metavar="NAME", help="Which image, when an archive holds several.")
@_PREFIX
@_CONFIG
@click.argument("source", type=click.Path())
@click.argument("name")
def import_(
    app: App, *, source: str, name: str, kind: t.SourceKind, reference: str | None, prefix: str, **config: Any
) -> None:
    """Import an image from a directory, a tar, a docker-archive or an OCI layout or archive on this host.

    SOURCE is a path, NAME is name[:tag]. With --prefix it becomes a workspace or a toolkit. What --env, --user and
    the like say is added to what SOURCE says about running it, or said in its place.
    """
    where = source if kind == "registry" or "://" in source else os.path.abspath(source)
    operation = app.client.image_import(
        name, where, kind=kind, reference=reference, prefix=prefix, config=_change(config)
    )
    _finish(app, operation, f"import {name}")


@command("pull", example="dsecctl image pull docker.io/library/python:3.12-slim python:3.12")
@_PREFIX
@_CONFIG
@click.argument("reference")
@click.argument("name", required=False)
def pull(app: App, *, reference: str, name: str | None, prefix: str, **config: Any) -> None:
    """Pull an image from a registry through skopeo.

    REFERENCE is as skopeo takes it, docker:// when it says nothing else; NAME is its last part by default.
    """
    where = reference if reference.startswith(_TRANSPORTS) else f"docker://{reference}"
    name = name or reference.rpartition("/")[2]
    operation = app.client.image_import(name, where, kind="registry", prefix=prefix, config=_change(config))
    _finish(app, operation, f"pull {reference}")


@command("build-debian", example="dsecctl image build-debian trixie --include python3,git")
@click.option("--name", help="Default: debian:SUITE.")
@click.option("--include", multiple=True, metavar="PACKAGE[,PACKAGE]", help="More packages.")
@click.option(
    "--variant", type=click.Choice(["minbase", "apt", "essential", "standard"]), default="minbase", show_default=True,
    help="How much of Debian, see mmdebstrap(1).",
)  # fmt: skip
@click.option("--mirror", metavar="URL", help="Default: the one this host's Debian comes from.")
@click.argument("suite")
def build_debian(app: App, *, suite: str, include: tuple[str, ...], **given: Any) -> None:
    """Build a base image from Debian's archive with mmdebstrap."""
    packages = tuple(name for text in include for name in text.replace(",", " ").split())
    request = build(t.BuildDebianRequest, "", suite=suite, include=packages, **given)
    _finish(app, app.client.image_build_debian(request), f"build debian {suite}")


def _finish(app: App, operation: t.Operation, what: str) -> None:
    done = output.finish(app, operation, what)
    info = build(t.ImageInfo, "image", **done.result)
    if app.json:
        output.document(info)
    else:
        click.echo(info.names[0] if info.names and not app.quiet else info.digest)
        output.note(
            app,
            f"{info.entries} entries, {output.size(info.size_bytes)}; {output.size(info.bytes_new)} new in the store",
        )


@command("tag", example="dsecctl image tag debian:trixie base:1")
@click.argument("ref", type=IMAGE)
@click.argument("name")
def tag(app: App, *, ref: str, name: str) -> None:
    """Give an image another name."""
    info = app.client.image_tag(ref, name)
    if app.json:
        output.document(info)
    else:
        click.echo(name)


@command("rm", example="dsecctl image rm base:1")
@click.argument("refs", type=IMAGE, nargs=-1, required=True)
def rm(app: App, *, refs: tuple[str, ...]) -> None:
    """Remove names of images; an image goes with its last name, when no sandbox uses it."""
    output.each(app, refs, app.client.image_remove)


for _command in (ls, inspect, import_, pull, build_debian, tag, rm):
    image.add_command(_command)
