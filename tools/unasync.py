#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the synchronous form of the SDK (``libdsec/_sync``) from its asyncio form (``libdsec/_async``).

Word by word, so the two cannot drift apart; ``primitives.py`` is written by hand on both sides. ``--check`` only tells
whether the files are current and exits with 1 when they are not.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "libdsec"
BY_HAND = {"__init__.py", "primitives.py"}
NOTE = "# Made by tools/unasync.py from libdsec/_async; edit that.\n"

WORDS = {
    "async def": "def",
    "async with": "with",
    "async for": "for",
    "await ": "",
    "Awaitable[None]": "None",
    "Awaitable, Callable": "Callable",
    "libdsec._async": "libdsec._sync",
    "AsyncIterator": "Iterator",
    "AsyncIterable": "Iterable",
    "AsyncGenerator": "Generator",
    "AsyncHTTPTransport": "HTTPTransport",
    "asynccontextmanager": "contextmanager",
    "handle_async_request": "handle_request",
    "AsyncExitStack": "ExitStack",
    "StopAsyncIteration": "StopIteration",
    "aclosing": "closing",
    "aread": "read",
    "aiter_raw": "iter_raw",
    "aclose": "close",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
_WORD = re.compile(
    r"(?<!\w)("
    + "|".join(re.escape(w) for w in sorted(WORDS, key=len, reverse=True))
    + r")(?!\w)|(?<!\w)await "
)
#: Our own classes: AsyncClient is Client, and so on.
_OURS = re.compile(r"\bAsync(?=[A-Z]\w)")
#: Imports whose names change their alphabetical place.
_IMPORT = re.compile(r"^(from collections\.abc import )(.*)$", re.MULTILINE)


def transform(text: str) -> str:
    """The synchronous form of one module."""
    head, _, rest = text.partition("\n")
    rest = _WORD.sub(lambda match: WORDS.get(match.group(0), ""), rest)
    rest = _OURS.sub("", rest)
    rest = _IMPORT.sub(lambda match: match.group(1) + ", ".join(sorted(match.group(2).split(", "))), rest)
    return f"{head}\n{NOTE}{rest}"


def main(arguments: list[str]) -> int:
    """Write the files, or check them."""
    stale = []
    for source in sorted((ROOT / "_async").glob("*.py")):
        if source.name in BY_HAND:
            continue
        target = ROOT / "_sync" / source.name
        text = transform(source.read_text())
        if not target.exists() or target.read_text() != text:
            stale.append(target)
            if "--check" not in arguments:
                target.write_text(text)
    for path in stale:
        print(f"{'stale' if '--check' in arguments else 'wrote'} {path.relative_to(ROOT.parent)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
