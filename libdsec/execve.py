# SPDX-License-Identifier: Apache-2.0
"""Strings that execve(2) is to take: arguments and variables, in their types on the wire.

Here: their limits. Not here: the requests that hold them (``types.py``).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

#: execve(2) takes no longer string, MAX_ARG_STRLEN without the zero byte at its end.
STRING_MAX_BYTES = 131_071


def _env_fits(env: dict[str, str]) -> dict[str, str]:
    """Characters are counted by the schema; the kernel counts bytes, of the name and its '=' too."""
    for name, value in env.items():
        if (size := len(name.encode()) + 1 + len(value.encode())) > STRING_MAX_BYTES:
            raise ValueError(
                f"variable '{name[:100]}' has {size} bytes with its name, execve(2) takes at most {STRING_MAX_BYTES}"
            )
    return env


def _arg_fits(arg: str) -> str:
    if (size := len(arg.encode())) > STRING_MAX_BYTES:
        raise ValueError(f"it has {size} bytes, execve(2) takes at most {STRING_MAX_BYTES} in one argument")
    return arg


EnvName = Annotated[str, StringConstraints(pattern=r"^[^=\x00]{1,4096}$")]
EnvValue = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=STRING_MAX_BYTES)]
Env = Annotated[dict[EnvName, EnvValue], Field(max_length=4096), AfterValidator(_env_fits)]
Arg = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=STRING_MAX_BYTES), AfterValidator(_arg_fits)]
