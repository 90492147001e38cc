# SPDX-License-Identifier: Apache-2.0
"""Sets up compressed memory as swap, as the configuration says, and takes it away again: dsec-zram.service.

Here: the program. Not here: zram itself (``dsecd.linux.swap``). It is none of the daemon's work, which is not even
allowed to load a module or to swap on; the daemon uses whatever swap there is.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from pathlib import Path

from dsecd.config import ConfigError, load
from dsecd.linux import swap
from dsecd.linux.proc import ProcessFailed


def main(argv: Sequence[str] | None = None) -> int:
    """Do it; exit status 0 when it is done or nothing is to be done."""
    parser = argparse.ArgumentParser(
        prog="dsec-zram", description="Set up the zram swap device of dsecd.toml ([memory] zram_bytes), or remove it."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="instead of /etc/dsec/dsecd.toml")
    parser.add_argument("action", choices=("start", "stop"))
    arguments = parser.parse_args(argv)
    try:
        config = load(arguments.config)
        record = config.runtime_dir / "zram"
        if arguments.action == "stop":
            remove(record)
        elif config.memory.zram_bytes:
            set_up(record, config.memory.zram_bytes)
    except (ConfigError, OSError, ProcessFailed) as error:
        print(f"dsec-zram: {error}", file=sys.stderr)
        return 1
    return 0


def set_up(record: Path, size_bytes: int) -> None:
    """Swap to a zram device of our own, unless there is one from before.  Blocks.  Raises OSError, ProcessFailed."""
    if record.exists():
        number = _number(record)
        if swap.is_zram_used(number):
            return
        swap.remove_zram(number)
    number = swap.add_zram()
    record.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    record.write_text(str(number))
    swap.use_zram(number, size_bytes)


def remove(record: Path) -> None:
    """Take away the device that was set up, if any.  Blocks.

    Raises OSError; with ENOMEM the memory is too small for what is on it.
    """
    if record.exists():
        swap.remove_zram(_number(record))
        record.unlink()


def _number(record: Path) -> int:
    text = record.read_text()
    if not (text.isascii() and text.isdecimal()):
        raise OSError(errno.EINVAL, f"holds {text[:40]!r}, which is no number", str(record))
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
