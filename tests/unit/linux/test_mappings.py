# SPDX-License-Identifier: Apache-2.0
"""What is mapped: the kernel's text read right, whatever paths a process chose, and what of it is worth watching."""

import mmap
import subprocess
import sys

from dsecd.core import turns
from dsecd.linux import mappings

MIB = 1 << 20
#: 8 MiB that are full, and one of 1,024; unlike in what may be done there, since the kernel joins equal neighbours.
_PROGRAM = """
import ctypes, mmap, time
def made(size, written, prot):
    space = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE, prot)
    for at in range(0, written, mmap.PAGESIZE):
        space[at] = 1
    return space
usual = mmap.PROT_READ | mmap.PROT_WRITE
spaces = made(8 << 20, 8 << 20, usual), made(1 << 30, 1 << 20, usual | mmap.PROT_EXEC)
print(*(ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in spaces), flush=True)
time.sleep(600)
"""
_TEXT = """\
55fc25453000-55fc25601000 r-xp 00044000 00:2c 1928                       /usr/bin/perl
Size:               1720 kB
KernelPageSize:        4 kB
Rss:                1244 kB
VmFlags: rd ex mr mw me
7f9d140a3000-7f9d1a4a6000 rw-p 00000000 00:00 0 \x0cRss: 999999 kB\x1d7f9d140a3000-7f9d1a4a7000 rw-p 0 0 0
Size:             102412 kB
Rss:              102400 kB
7f9d1a4a6000-7f9d1a4a8000 rw-p 00000000 00:00 0
Size:                  8 kB
Rss:              1"""


def test_the_kernels_text_is_read_whatever_paths_say_and_wherever_it_is_cut() -> None:
    assert mappings.parse(_TEXT) == [
        mappings.Mapping(0x55FC25453000, 0x55FC25601000, 1244 << 10),
        mappings.Mapping(0x7F9D140A3000, 0x7F9D1A4A6000, 102400 << 10),
    ]


def test_what_holds_memory_is_watched_and_what_is_mostly_empty_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        full, sparse = (int(word) for word in process.stdout.readline().split())
        targets = turns.worth_watching([process.pid, 1 << 30])
        process.kill()
    (target,) = targets
    assert target.pid == process.pid
    assert any(begin <= full and full + 8 * MIB <= end for begin, end in target.ranges)
    assert not any(begin < sparse + MIB and sparse < end for begin, end in target.ranges)
    # Apart, in order, of whole pages: the kernel takes no others.
    bounds = [bound for range_ in target.ranges for bound in range_]
    assert bounds == sorted(set(bounds))
    assert not any(bound % mmap.PAGESIZE for bound in bounds)
