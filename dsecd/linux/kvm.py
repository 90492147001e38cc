# SPDX-License-Identifier: Apache-2.0
"""Whether /dev/kvm runs a guest, found out by running one: a few instructions in a page of memory.

What belongs here: the ioctls that this takes.  What does not: virtual machines that are for anything (vmm).

A device that opens proves little: it may have no hardware behind it.  Where KVM is built on page tables alone
(kvm_pvm), virtual machines can be made, but instructions of a guest that is no such kernel are emulated one by
one, a thousand times slower than the processor, and no ordinary kernel gets through its boot.
Documentation/virt/kvm/api.rst; include/uapi/linux/kvm.h; arch/x86/include/uapi/asm/kvm.h.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import time

from dsecd.linux.fd import closing

_DEVICE = "/dev/kvm"
_API_VERSION = 12
_GET_API_VERSION, _CREATE_VM, _GET_VCPU_MMAP_SIZE, _CREATE_VCPU, _RUN = 0xAE00, 0xAE01, 0xAE04, 0xAE41, 0xAE80
_SET_TSS_ADDR, _SET_USER_MEMORY_REGION = 0xAE47, 0x4020AE46
_SET_REGS, _GET_SREGS, _SET_SREGS = 0x4090AE82, 0x8138AE83, 0x4138AE84
_SREGS_BYTES, _EXIT_REASON_OFFSET, _EXIT_HLT = 312, 8, 5

_ROUNDS, _TRIES = 5_000, 3
#: mov ecx, rounds; again: dec ecx; jnz again; hlt - in 16-bit mode, which a processor starts in.
_CODE = b"\x66\xb9" + struct.pack("<I", _ROUNDS) + b"\x66\x49\x75\xfc\xf4"
_ADDRESS = 0x1000


class Unusable(Exception):
    """KVM is there, but does not run guests."""


def run_guest() -> float:
    """Run a small guest and return how many nanoseconds an instruction took it.  Blocks, some milliseconds.

    Raises OSError when there is no KVM for us, Unusable when its guest does not do as it is told.
    """
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(closing(os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)))
        version = fcntl.ioctl(device, _GET_API_VERSION, 0)
        if version != _API_VERSION:
            raise Unusable(f"KVM API version {version}, expected {_API_VERSION}")
        machine = stack.enter_context(closing(fcntl.ioctl(device, _CREATE_VM, 0)))
        # Intel processors before 2010 need three pages for 16-bit mode, where the guest has none; others ignore it.
        fcntl.ioctl(machine, _SET_TSS_ADDR, 0x7FFBD000)
        page = stack.enter_context(mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        page[: len(_CODE)] = _CODE
        view = ctypes.c_char.from_buffer(page)
        region = struct.pack("<IIQQQ", 0, 0, _ADDRESS, mmap.PAGESIZE, ctypes.addressof(view))
        del view  # or the page could not be closed
        fcntl.ioctl(machine, _SET_USER_MEMORY_REGION, region)
        processor = stack.enter_context(closing(fcntl.ioctl(machine, _CREATE_VCPU, 0)))
        shared = stack.enter_context(mmap.mmap(processor, fcntl.ioctl(device, _GET_VCPU_MMAP_SIZE, 0)))
        # The quickest of a few: a machine may be busy, but not quicker than it is.
        took_s = min(_run_once(processor, shared) for _ in range(_TRIES))
    return took_s / (2 * _ROUNDS) * 1e9


def _run_once(processor: int, shared: mmap.mmap) -> float:
    sregs = bytearray(fcntl.ioctl(processor, _GET_SREGS, bytes(_SREGS_BYTES)))
    # The code segment comes first: base, limit, selector.
    struct.pack_into("<Q", sregs, 0, 0)
    struct.pack_into("<H", sregs, 12, 0)
    fcntl.ioctl(processor, _SET_SREGS, bytes(sregs))
    # 16 general registers, the instruction pointer, the flags (of which one is always set).
    fcntl.ioctl(processor, _SET_REGS, struct.pack("<18Q", *[0] * 16, _ADDRESS, 2))
    began = time.perf_counter()
    fcntl.ioctl(processor, _RUN, 0)
    took_s = time.perf_counter() - began
    (reason,) = struct.unpack_from("<I", shared, _EXIT_REASON_OFFSET)
    if reason != _EXIT_HLT:
        raise Unusable(f"a guest of a few instructions ended with reason {reason}, expected {_EXIT_HLT}")
    return took_s
