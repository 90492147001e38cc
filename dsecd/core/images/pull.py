# SPDX-License-Identifier: Apache-2.0
"""Sources that another program brings: registries through skopeo, Debian through mmdebstrap.

What belongs here: their command lines.  What does not: reading what they bring.  Both run in the import's process
(worker), whose end is theirs.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from dsecd.core.images.reader import Program, Read
from dsecd.linux import proc
from libdsec.errors import BackendFailed, DsecError, InvalidSpec

_PULL_TIMEOUT_S = 6 * 3600.0
_BOOTSTRAP_TIMEOUT_S = 2 * 3600.0
#: What skopeo may read from: nothing that starts a program or talks to a daemon with root's rights.
TRANSPORTS = ("docker://", "oci:", "oci-archive:", "docker-archive:", "dir:")
_PROXY = re.compile(r'^Acquire::(https?)::Proxy "([^"]+)";$', re.MULTILINE)
#: What apt-get(8) says, in the order it says it, and what is said around it.
_NO_SUITE = re.compile(r"does not have a Release file")
_NO_PACKAGE = re.compile(r"^E: (?:Unable to locate package (\S+)|Package '?(\S+?)'? has no installation)", re.MULTILINE)
_COMPLAINT = re.compile(r"^E: (.+)$", re.MULTILINE)
_WRAPPER = re.compile(r"^(?:setup failed: E: )?apt-get .* failed: |^mmdebstrap failed to run")
#: Of the daemon's environment these reach programs that use the network.
PASSED_ENV = (
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HOME", "REGISTRY_AUTH_FILE",
)


def _network_env(scratch: Path) -> dict[str, str]:
    passed = {name: os.environ[name] for name in PASSED_ENV if name in os.environ}
    return {**proc.MINIMAL_ENV, **passed, "TMPDIR": os.fspath(scratch)}


def registry(source: str, scratch: Path) -> Path:
    """Fetch an image into an OCI layout below `scratch`.  Blocks.  Raises InvalidSpec, BackendFailed.

    A bare name after docker:// means what skopeo makes of it.  The copy is checked by digest again when it is read.
    """
    if not source.startswith(TRANSPORTS):
        raise InvalidSpec(
            f"pull {source[:200]!r}: expected one of {', '.join(TRANSPORTS)}", hint="write docker://registry/name:tag"
        )
    layout = scratch / "pulled"
    try:
        proc.run_blocking(
            ["skopeo", "copy", "--quiet", "--retry-times=2", "--", source, f"oci:{layout}:pulled"],
            timeout_s=_PULL_TIMEOUT_S, env=_network_env(scratch),
        )
    except proc.ProcessFailed as error:
        raise BackendFailed(f"pull {source!r}: {error.stderr[-400:] or error}") from error
    return layout


def debian(
    suite: str, variant: str, include: tuple[str, ...], mirror: str | None, scratch: Path
) -> tuple[Read, Callable[[], None]]:
    """Start building a Debian root file system: a reader of its tar, and what closes it.

    apt's proxy on this host is used; nothing of the host's apt settings gets into the image.
    """
    argv = [
        "mmdebstrap", "--mode=root", f"--variant={variant}", "--format=tar", "--skip=output/mknod",
        # Copied from this host for the time of the building.
        '--customize-hook=rm -f "$1"/etc/hostname "$1"/etc/resolv.conf',
    ]
    if include:
        argv.append(f"--include={','.join(include)}")
    # It resolves its target's name, so that of a file descriptor will not do.
    fifo = scratch / "debian.tar"
    argv += ["--", suite, os.fspath(fifo)]
    if mirror is not None:
        argv.append(mirror)
    env = _network_env(scratch) | _apt_proxies()
    program = Program(
        argv, f"Debian {suite}", timeout_s=_BOOTSTRAP_TIMEOUT_S, env=env, fifo=fifo,
        explain=lambda failed: _why(failed, suite, mirror),
    )
    return program.read, program.close


def _why(failed: proc.ProcessFailed, suite: str, mirror: str | None) -> DsecError:
    """What mmdebstrap's words mean.  Only what was asked for is the request's fault."""
    what, archive = f"build Debian {suite!r}", mirror or "Debian's archive"
    if _NO_SUITE.search(failed.stderr):
        return InvalidSpec(
            f"{what}: {archive} has no such suite",
            hint="name one that it has, such as trixie or bookworm; --mirror names another archive",
        )
    if missing := sorted({one or other for one, other in _NO_PACKAGE.findall(failed.stderr)}):
        return InvalidSpec(
            f"{what}: {archive} has no package {', '.join(missing)} for it",
            hint=f"leave it out of the included packages, or see what https://packages.debian.org/{suite}/ has",
        )
    words = [line for line in _COMPLAINT.findall(failed.stderr) if not _WRAPPER.search(line)]
    if not words:
        return BackendFailed(f"{what}: {failed}")
    unreached = "Failed to fetch" in failed.stderr
    hint = f"see that this host reaches {archive}, through a proxy if it needs one" if unreached else None
    return BackendFailed(f"{what}: {words[0][:400]}", hint=hint, retryable=unreached)


def _apt_proxies() -> dict[str, str]:
    done = proc.run_blocking(["apt-config", "dump"], timeout_s=30, check=False)
    found = _PROXY.findall(done.stdout.decode("utf-8", "replace"))
    return {f"{scheme}_proxy": url for scheme, url in found if url != "DIRECT"}
