# SPDX-License-Identifier: Apache-2.0
"""From what a user denies a sandbox to the text of an AppArmor profile.

What belongs here: names of profiles, and which rules a path pattern becomes. What does not: compiling and loading
(``confinement.py``), what every sandbox is denied (``apparmor/abstractions/dsec-sandbox``). Source: apparmor.d(5).

AppArmor compares the name that a file has at the moment it is opened. So a pattern alone protects nothing: whoever
renames a directory above it has the same file under another name. Therefore what leads to it is held in its place, too.
Mounting over it is denied to every sandbox; a hard link is allowed by AppArmor only if the new name has no more rights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from dsecd.vmm import qemu
from dsecd.vmm.firecracker import driver as firecracker
from libdsec.types import AppArmor

#: The profile of sandboxes without rules of their own.
DEFAULT = "dsec-sandbox"
#: The profiles of monitors of virtual machines: QEMU's, Firecracker's and its jailer's.
MONITORS = (qemu.PROFILE, firecracker.PROFILE, firecracker.JAILER_PROFILE)
_OUTSIDE = "/dsec-outside"
_FLAGS = f"attach_disconnected, attach_disconnected.path={_OUTSIDE}, mediate_deleted"

#: Directories that are symbolic links to one another in images with a merged /usr, and apart in others; and two that
#: are links since the Filesystem Hierarchy Standard 3.0.
_SAME = (
    *((f"/{name}", f"/usr/{name}") for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")),
    ("/var/run", "/run"),
    ("/var/lock", "/run/lock"),
)


def digest(policy: AppArmor) -> str:
    """Equal for policies that say the same in whatever order. Fields that a later version adds do not change it."""
    given = policy.model_dump(mode="json", exclude_defaults=True)
    plain = {name: sorted(set(value)) if isinstance(value, list) else value for name, value in given.items()}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def prefix(instance: str) -> str:
    """What the names of a daemon's own profiles begin with; ``instance`` tells daemons of one host apart."""
    return f"dsec-{hashlib.sha256(instance.encode()).hexdigest()[:8]}-"


def spellings(pattern: str) -> tuple[str, ...]:
    """The pattern, and what it is called where directories are merged otherwise."""
    found = [pattern]
    for known in found:  # which grows meanwhile
        for one, other in (*_SAME, *((that, this) for this, that in _SAME)):
            same = other + known[len(one) :]
            if f"{known}/".startswith(f"{one}/") and same not in found:
                found.append(same)
    return tuple(found)


def ancestors(pattern: str) -> Iterator[str]:
    """Patterns for everything whose renaming would give a file that ``pattern`` names another name.

    A literal name is held whatever it is, a directory or the symbolic link that could replace it; where wildcards stand
    for it, directories are, so that files beside them can still be made.
    """
    parts = pattern.split("/")[1:]
    for length in range(1, len(parts)):
        above = "/" + "/".join(parts[:length])
        if "**" in above:
            break
        yield f"{above}/" if "*" in above or "?" in above else f"{above}{{,/}}"
    start, stars, rest = pattern.partition("**")
    if stars and rest.strip("*"):
        # It may stand for several directories.
        yield f"{start}**/"


def rules(policy: AppArmor) -> Iterator[str]:
    """The lines of a profile that add the policy to the default; sorted, and each once."""
    held: set[str] = set()
    for permissions, patterns in (("rmx", policy.deny_read), ("wl", policy.deny_write)):
        names = {name for pattern in patterns for name in spellings(pattern)}
        held.update(above for name in names for above in ancestors(name))
        yield from (f'deny "{name}{{,/,/**}}" {permissions},' for name in sorted(names))
    yield from (f'deny "{above}" wl,' for above in sorted(held))
    yield from (f"deny network {family}," for family in sorted(set(policy.deny_sockets)))
    verb = "" if policy.allow_raw_sockets else "deny "
    yield from (f"{verb}{what}," for what in ("network inet raw", "network inet6 raw", "capability net_raw"))


def profile(name: str, policy: AppArmor) -> str:
    """The text of the profile that confines sandboxes with this policy."""
    body = "".join(f"  {rule}\n" for rule in ("include <abstractions/dsec-sandbox>", *rules(policy)))
    return f"abi <abi/4.0>,\n\nprofile {name} flags=({_FLAGS}) {{\n{body}}}\n"
