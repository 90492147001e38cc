# SPDX-License-Identifier: Apache-2.0
"""Many files in one request: FILE_GET with names, FILE_PUT of records.

Here: the two requests. Not here: transfers (`files`), what records look like inside (docs/agent-protocol.md): they are
bytes between a client and the agent, and the daemon only counts them.
"""

from collections.abc import Sequence
from typing import Final

from dsecd.backends.agentlink.connection import Connection
from dsecd.backends.agentlink.files import FILE_WINDOW, FileReader, FileWriter, at_path
from dsecd.backends.agentlink.frames import Tag, as_bytes, raw, u64

#: What the agent has before a file's contents, and how long names may be together, each with the zero byte that ends
#: it: one frame holds them.
RECORD_HEADER_BYTES: Final = 20
MAX_NAMES_BYTES: Final = 57_344
_PUT_MANY: Final = 8


class ManyFiles:
    """Files below one directory. Both raise AgentError, LinkLost, ValueError."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    def get(self, path: str | bytes, names: Sequence[str], max_bytes: int, user: str = "") -> FileReader:
        """The records of `names` below `path`, in their order; a file of more than `max_bytes` comes without contents.

        However the agent answers, the reader gives no more bytes than these files can have.
        """
        listed = b"".join(as_bytes(name) + b"\0" for name in names)
        if not listed or len(listed) > MAX_NAMES_BYTES:
            raise ValueError(f"names have 1 to {MAX_NAMES_BYTES} bytes together")
        payload = at_path(path, user) + raw(Tag.NAME, listed) + u64(Tag.BYTES, max_bytes)
        length = len(names) * (RECORD_HEADER_BYTES + max_bytes)
        return FileReader(self._conn, payload, 0, length, FILE_WINDOW)

    async def put(self, path: str | bytes, user: str = "") -> FileWriter:
        """Begins an upload below `path`: what is written to it are records, each with the mode it says."""
        payload = at_path(path, user) + u64(Tag.UMASK, 0) + u64(Tag.FLAGS, _PUT_MANY)
        return await FileWriter(self._conn).open(payload)
