# SPDX-License-Identifier: Apache-2.0
"""``python3 -m dsecctl``, and what the ``dsecctl`` program starts."""

from dsecctl.interrupts import end_at_once


def main() -> None:
    """Entry point."""
    end_at_once()
    # Half a second of imports: a ctrl-C meanwhile is to find the handler set.
    from dsecctl.cli import main as run

    run()


if __name__ == "__main__":
    main()
