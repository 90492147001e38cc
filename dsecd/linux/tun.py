# SPDX-License-Identifier: Apache-2.0
"""Network devices whose other end is a file descriptor: taps.

What belongs here: making one. What does not: addresses and programs on it (``netlink.py``), who holds the descriptor.
Documentation/networking/tuntap.rst, include/uapi/linux/if_tun.h.
"""

import fcntl
import os
import struct

_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETIFINDEX = 0x400454CA, 0x400454DA
_IFF_TAP, _IFF_NO_PI, _IFF_TUN_EXCL = 0x0002, 0x1000, 0x8000
# struct ifreq: a name of 16 bytes, and a union of 24.
_IFREQ = struct.Struct("=16sH22x")


def open_tap(name: str, index: int) -> int:
    """A new device in the calling thread's network namespace, down, under a name and an index of our choice.

    It is there as long as a copy of the descriptor is open, in whatever process. Each read and write is one Ethernet
    frame and nothing else: no header in which its other end could ask the kernel to write a checksum into the frame at
    a place it chooses, or to cut it in pieces, after it was judged. Raises OSError.
    """
    fd = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, _TUNSETIFINDEX, struct.pack("=i", index))
        fcntl.ioctl(fd, _TUNSETIFF, _IFREQ.pack(name.encode("ascii"), _IFF_TAP | _IFF_NO_PI | _IFF_TUN_EXCL))
    except OSError as error:
        os.close(fd)
        raise OSError(error.errno, error.strerror, name) from error
    return fd
