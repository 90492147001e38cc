# SPDX-License-Identifier: Apache-2.0
"""``python3 -m dsecctl``, and what the ``dsecctl`` program starts."""

import os
import sys

from dsecctl.interrupts import end_at_once


def _open_standard_streams() -> None:
    """What was closed when we were started is /dev/null: else a socket of ours gets its number, and is taken for it."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdin, sys.stdout, sys.stderr = (
        stream if stream is not None else os.fdopen(fd, mode)
        for fd, (stream, mode) in enumerate(((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w")))
    )


def main() -> None:
    """Entry point."""
    end_at_once()
    _open_standard_streams()
    # httpx brings a command line of its own, for which it would import rich: a quarter of our start. It can do without.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    # Half a second of imports: a ctrl-C meanwhile is to find the handler set.
    from dsecctl.cli import main as run

    run()


if __name__ == "__main__":
    main()
