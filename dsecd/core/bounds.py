# SPDX-License-Identifier: Apache-2.0
"""What the kernel lets a command have: ids that its sandbox maps, an environment that execve(2) takes.

Here: refusing the rest by name, before a sandbox is made that could run nothing. Not here: the forms of single values
(``libdsec.types``), limits of resources (``dsecd.backends.limits``).
"""

from __future__ import annotations

from collections.abc import Mapping

from libdsec import errors

#: For a sandbox's environment, its images' with it: half of what execve(2) takes for all strings of a command under the
#: usual limit of the stack (a quarter of 8 MiB), so that its arguments and own variables have as much again.
ENV_MAX_BYTES = 1 << 20
_POINTER_BYTES = 8


def check_user(user: str, ids: int, doing: str) -> None:
    """Raise InvalidSpec for a number that is no id in a sandbox with ids 0 to ``ids`` - 1. Names are the agent's
    business: only the sandbox's own files know what they stand for."""
    for part in user.split(":", 1):
        if part.isascii() and part.isdecimal() and int(part) >= ids:
            raise errors.InvalidSpec(f"{doing}: user '{user[:100]}': uids and gids of this sandbox are 0 to {ids - 1}")


def check_env(env: Mapping[str, str], doing: str) -> None:
    """Raise InvalidSpec for more than ``ENV_MAX_BYTES``, counted as execve(2) does: each string with its end and
    a pointer to it."""
    used = sum(len(name.encode()) + len(value.encode()) + 2 + _POINTER_BYTES for name, value in env.items())
    if used > ENV_MAX_BYTES:
        raise errors.InvalidSpec(
            f"{doing}: env: all variables, the image's too, take {used} bytes, at most {ENV_MAX_BYTES} are possible",
            hint="put what is large into a file",
        )
