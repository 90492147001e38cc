# SPDX-License-Identifier: Apache-2.0
"""A load inside the test host that is as large as reclaim's and of its kind, but takes nothing from anybody.

Here: processes that compress memory of their own into a zram device of their own, as paging out does; and the work of
the neighbour who bears it. Not here: what is compared with it (``tests/vm/inside/bench_memory.py``).

What paging out does beside that is what the comparison is about: finding pages, taking them off lists and out of page
tables, and having other processors forget them.
"""

import contextlib
import errno
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

#: For Perl: work on 16 MiB of its own memory; a line with the beginning, wall time and processor time of each piece.
#: A minimal Debian's Perl has no Time::HiRes, so the clocks are read by clock_gettime(2).
WORK = (
    'sub at { $b = "\\0" x 16; syscall(228, $_[0], $b); ($s, $n) = unpack "qq", $b; $s + $n / 1e9 } '
    '$| = 1; $y = "x" x (16 << 20); while (1) { $t = at(0); $c = at(2); for $r (1 .. 10) { '
    'for ($i = 0; $i < 16 << 20; $i += 512) { substr($y, $i, 1) = "z"; } } '
    'printf("%.4f %.4f %.4f\\n", $t, at(0) - $t, at(2) - $c); }'
)

_CONTROL = Path("/sys/class/zram-control")
#: More than any cache holds, so that what is compressed comes from memory, as what nobody touched does.
_BYTES = 128 << 20
_PIECE = 64 << 10
_REMOVE_S = 30.0


class EqualLoad:
    """Processes that stand still until they are told."""

    def __init__(self, processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
        self._processes = processes

    def go(self) -> None:
        """From now on nothing that is nicer runs on their processors.  Raises ChildProcessError when one has ended."""
        self._send(signal.SIGCONT)

    def halt(self) -> None:
        """They stand still again.  Raises ChildProcessError."""
        self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for one in self._processes:
            if one.pid is None or one.exitcode is not None:
                raise ChildProcessError(f"a process that is to compress has ended, by {one.exitcode}")
            os.kill(one.pid, number)


@contextlib.contextmanager
def equal_load(page: bytes, processors: Sequence[int]) -> Iterator[EqualLoad]:
    """Processes that keep each of these processors busy by compressing memory full of ``page``.

    They are in the root cgroup, as kernel threads are, and not nice: those of DAMON, which are, stand still while these
    run.  Raises OSError.
    """
    with _zram() as device, mmap.mmap(-1, _BYTES) as memory:
        for at in range(0, _BYTES, len(page)):
            memory[at : at + len(page)] = page
        context = multiprocessing.get_context("fork")
        running = [
            context.Process(target=_compress, args=(device, memory, _BYTES // len(processors) * number, processor))
            for number, processor in enumerate(processors)
        ]
        try:
            for one in running:
                one.start()
            load = EqualLoad(running)
            load.halt()
            yield load
        finally:
            for one in running:
                one.kill()
                one.join()


def _compress(device: Path, memory: mmap.mmap, begin: int, processor: int) -> None:
    Path("/sys/fs/cgroup/cgroup.procs").write_text(str(os.getpid()))
    os.sched_setaffinity(0, {processor})
    # Not by way of the page cache, from which others would write it.
    fd = os.open(device, os.O_WRONLY | os.O_DIRECT)
    view, at = memoryview(memory), begin // _PIECE * _PIECE
    while True:
        os.pwrite(fd, view[at : at + _PIECE], at)
        at = (at + _PIECE) % _BYTES


@contextlib.contextmanager
def _zram() -> Iterator[Path]:
    """A device that compresses as swap of dsec's does."""
    number = int((_CONTROL / "hot_add").read_text())
    settings = Path(f"/sys/block/zram{number}")
    try:
        if "zstd" in (settings / "comp_algorithm").read_text().replace("[", "").replace("]", "").split():
            (settings / "comp_algorithm").write_text("zstd")
        (settings / "disksize").write_text(str(_BYTES))
        yield Path(f"/dev/zram{number}")
    finally:
        _remove(number)


def _remove(number: int) -> None:
    deadline = time.monotonic() + _REMOVE_S
    while True:
        try:
            (_CONTROL / "hot_remove").write_text(str(number))
        except OSError as error:
            # udev looks into devices that somebody had open for writing.
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
