# SPDX-License-Identifier: Apache-2.0
"""What a sandbox can be denied by AppArmor, besides the default.

Here: the fields and which paths they take. Not here: what becomes of them (``dsecd.backends.policy``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

# No part is "." or "..", the first is a name without wildcards, and no character means anything to AppArmor's compiler
# but the wildcards.
_NAMED = r"(\.?\.?[A-Za-z0-9_+:=@~% -][A-Za-z0-9_+:=@~% .-]*|\.\.\.[A-Za-z0-9_+:=@~% .-]*)"
_GLOBBED = r"(\.?\.?[A-Za-z0-9_+:=@~% *?-][A-Za-z0-9_+:=@~% *?.-]*|\.\.\.[A-Za-z0-9_+:=@~% *?.-]*)"
PATH_GLOB_PATTERN = f"^/{_NAMED}(/{_GLOBBED})*$"
PATH_GLOB_WORDS = (
    "must be an absolute path of A-Z, a-z, 0-9, blanks and ._+:=@~%-, without empty, '.' and '..' parts; '*', '**' "
    "and '?' may stand for characters of any part but the first"
)
PathGlob = Annotated[str, StringConstraints(pattern=PATH_GLOB_PATTERN, max_length=1024)]


class AppArmor(BaseModel):
    """What a sandbox is denied besides the default, root inside and the daemon's own file requests included.

    A path stands for itself and all below it. It is the path after symbolic links: /bin and /usr/bin, and the like, are
    taken for the same. ``?`` and ``*`` stand for characters of one part, ``**`` for those of several; directories that
    lead to a denied path cannot be renamed or removed, nor made where a wildcard stands for them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    deny_write: tuple[PathGlob, ...] = Field((), max_length=64, description="changing, making, renaming, linking")
    deny_read: tuple[PathGlob, ...] = Field((), max_length=64, description="reading, listing, executing")
    deny_sockets: tuple[Literal["inet", "inet6", "netlink"], ...] = Field((), max_length=3)
    allow_raw_sockets: bool = Field(False, description="what ping and tcpdump may want; not a default right")
