# SPDX-License-Identifier: Apache-2.0
"""eBPF through libbpf: load an object file compiled ahead, pin what is in it, read and write maps.

What belongs here: the calls, with descriptors in and out.  What does not: which programs there are and what
their maps mean.  libbpf 1.x returns negative errno; https://libbpf.readthedocs.io/en/latest/api.html

Pins live in a BPF file system, of which each mount is one of its own.  A descriptor keeps a map or program
alive, a pin does so beyond the process, and so does whatever a program is attached to.
"""

import ctypes
import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from dsecd.linux import mount, syscalls

# include/uapi/linux/bpf.h
BPF_ANY, BPF_NOEXIST, BPF_EXIST = 0, 1, 2
BPF_PROG_TYPE_SCHED_CLS = 3
BPF_MAP_TYPE_LPM_TRIE = 11
BPF_F_NO_PREALLOC = 1
# include/uapi/linux/magic.h
_BPF_FS_MAGIC = 0xCAFE4A11

# libbpf would print to stderr.
_silent = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_arguments: 0)


@functools.cache
def _libbpf() -> ctypes.CDLL:
    """The library.  Raises OSError where it is not installed."""
    library = ctypes.CDLL("libbpf.so.1", use_errno=True)
    library.libbpf_set_print(_silent)
    for name in (
        "bpf_object__open_file", "bpf_object__next_map", "bpf_object__next_program", "bpf_program__attach_cgroup",
        "ring_buffer__new",
    ):  # fmt: skip
        getattr(library, name).restype = ctypes.c_void_p
    library.ring_buffer__free.restype = None
    for name in ("bpf_map__name", "bpf_program__name"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


def _check(result: int, doing: str, path: syscalls.StrPath | None = None) -> int:
    if result >= 0:
        return result
    text = f"{doing}: {os.strerror(-result)}"
    raise OSError(-result, text, os.fspath(path)) if path is not None else OSError(-result, text)


class Object:
    """The programs and maps of one object file, loaded into the kernel.  Closes with `close`, what is pinned stays."""

    def __init__(self, file: Path) -> None:
        """Load it; the kernel's verifier may refuse.  Blocks for some milliseconds.  Raises OSError."""
        os.stat(file)
        library = _libbpf()
        opened = library.bpf_object__open_file(os.fsencode(file), None)
        if not opened:
            number = ctypes.get_errno()
            raise OSError(number, f"open BPF object: {os.strerror(number)}", os.fspath(file))
        self._object = ctypes.c_void_p(opened)
        try:
            _check(library.bpf_object__load(self._object), "load BPF object", file)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        _libbpf().bpf_object__close(self._object)

    def pin(self, directory: Path) -> None:
        """Pin each map and each program under its name in a directory of a BPF file system."""
        library = _libbpf()
        for next_one, name_of, fd_of in (
            (library.bpf_object__next_map, library.bpf_map__name, library.bpf_map__fd),
            (library.bpf_object__next_program, library.bpf_program__name, library.bpf_program__fd),
        ):
            item = next_one(self._object, None)
            while item:
                pointer = ctypes.c_void_p(item)
                name = os.fsdecode(name_of(pointer))
                # The compiler's own maps (egress.rodata) belong to the programs; a file system of pins has no dots.
                if "." not in name:
                    pin(fd_of(pointer), directory / name)
                item = next_one(self._object, pointer)


def pin(fd: int, path: Path) -> None:
    """Give a map, program or link a name in a BPF file system."""
    _check(_libbpf().bpf_obj_pin(fd, os.fsencode(path)), "pin", path)


def get(path: Path) -> int:
    """fd of what is pinned there."""
    return _check(_libbpf().bpf_obj_get(os.fsencode(path)), "open pinned object", path)


def sizes(fd: int) -> tuple[int, int]:
    """Bytes of a key and of a value of a map."""
    info = (ctypes.c_uint32 * 4)()  # the beginning of struct bpf_map_info: type, id, key_size, value_size
    length = ctypes.c_uint32(ctypes.sizeof(info))
    _check(_libbpf().bpf_obj_get_info_by_fd(fd, info, ctypes.byref(length)), "look at a BPF map")
    return info[2], info[3]


def attach_cgroup(program: int, cgroup: Path, kind: int) -> int:
    """fd of a link from a program to a cgroup, and so to all below it; pin it, or it ends with its descriptor."""
    fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _check(_libbpf().bpf_link_create(program, fd, kind, None), "attach to cgroup", cgroup)
    finally:
        os.close(fd)


def replace_program(link: int, program: int) -> None:
    """Let a link lead to another program of the same kind from now on."""
    _check(_libbpf().bpf_link_update(link, program, None), "replace the program of a link")


def link_cgroup(link: int) -> int:
    """The id of the cgroup that a link is attached to, its inode's number; no living one's when that has gone."""
    # The beginning of struct bpf_link_info: type, id, prog_id, and, aligned to 8 bytes, cgroup.cgroup_id.
    info = (ctypes.c_uint64 * 3)()
    length = ctypes.c_uint32(ctypes.sizeof(info))
    _check(_libbpf().bpf_obj_get_info_by_fd(link, info, ctypes.byref(length)), "look at a BPF link")
    return info[2]


def mount_fs(directory: Path) -> None:
    """Make the directory a BPF file system of its own, if it is none yet."""
    directory.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if syscalls.fstatfs_type(fd) == _BPF_FS_MAGIC:
            return
    finally:
        os.close(fd)
    filesystem = mount.new_mount("bpf", source="dsec", options=[("mode", "0700")])
    try:
        mount.attach(filesystem, directory)
    finally:
        os.close(filesystem)


class Map:
    """A map by its descriptor, with keys and values as bytes of fixed sizes."""

    def __init__(self, fd: int, key_bytes: int, value_bytes: int) -> None:
        self.fd = fd
        self._key_bytes = key_bytes
        self._value_bytes = value_bytes

    def set(self, key: bytes, value: bytes, flags: int = BPF_ANY) -> None:
        """Readers see the whole old value or the whole new one."""
        assert len(key) == self._key_bytes
        assert len(value) == self._value_bytes
        _check(_libbpf().bpf_map_update_elem(self.fd, key, value, ctypes.c_uint64(flags)), "write to a BPF map")

    def get(self, key: bytes) -> bytes | None:
        assert len(key) == self._key_bytes
        value = ctypes.create_string_buffer(self._value_bytes)
        result = _libbpf().bpf_map_lookup_elem(self.fd, key, value)
        return None if result == -errno.ENOENT else (_check(result, "read a BPF map"), value.raw)[1]

    def delete(self, key: bytes) -> None:
        """One that is not there is fine."""
        assert len(key) == self._key_bytes
        result = _libbpf().bpf_map_delete_elem(self.fd, key)
        if result != -errno.ENOENT:
            _check(result, "delete from a BPF map")

    def keys(self) -> Iterator[bytes]:
        """All keys, one call each; while others change the map, some may be missing or come twice."""
        key: bytes | None = None
        following = ctypes.create_string_buffer(self._key_bytes)
        while (result := _libbpf().bpf_map_get_next_key(self.fd, key, following)) != -errno.ENOENT:
            _check(result, "list a BPF map")
            key = following.raw
            yield key

    def close(self) -> None:
        os.close(self.fd)


class Ring:
    """A ring buffer that programs write to and one process reads."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over. Raises OSError."""
        self._fd = fd
        self._records: list[bytes] = []
        library = _libbpf()
        # Kept here: the library holds no reference to what it calls.
        self._callback = _Sample(self._take)
        made = library.ring_buffer__new(fd, self._callback, None, None)
        if not made:
            number = ctypes.get_errno()
            os.close(fd)
            raise OSError(number, f"map a BPF ring: {os.strerror(number)}")
        self._ring = ctypes.c_void_p(made)

    def fileno(self) -> int:
        """Readable whenever a program has written."""
        return _check(_libbpf().ring_buffer__epoll_fd(self._ring), "wait for a BPF ring")

    def read(self) -> list[bytes]:
        """What has been written since the last call; another process's reading counts."""
        _check(_libbpf().ring_buffer__consume(self._ring), "read a BPF ring")
        records, self._records = self._records, []
        return records

    def close(self) -> None:
        _libbpf().ring_buffer__free(self._ring)
        os.close(self._fd)

    def _take(self, _context: int | None, data: int, size: int) -> int:
        self._records.append(ctypes.string_at(data, size))
        return 0


_Sample = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def probe() -> None:
    """Make an empty map of the kind that policies need, and let it go.  Raises OSError."""
    options = _MapOptions(size=ctypes.sizeof(_MapOptions), map_flags=BPF_F_NO_PREALLOC)
    fd = _libbpf().bpf_map_create(BPF_MAP_TYPE_LPM_TRIE, b"dsec_probe", 8, 4, 1, ctypes.byref(options))
    os.close(_check(fd, "make a BPF map"))


class _MapOptions(ctypes.Structure):
    """struct bpf_map_create_opts, as far as we set it; bpf/bpf.h"""

    _fields_ = (
        ("size", ctypes.c_size_t), ("btf_fd", ctypes.c_uint32), ("btf_key", ctypes.c_uint32),
        ("btf_value", ctypes.c_uint32), ("btf_vmlinux", ctypes.c_uint32), ("inner_fd", ctypes.c_uint32),
        ("map_flags", ctypes.c_uint32),
    )  # fmt: skip
