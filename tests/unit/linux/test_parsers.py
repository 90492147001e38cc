# SPDX-License-Identifier: Apache-2.0
"""What the kernel's text files are read as, including lines that are meant to mislead."""

from pathlib import Path

import pytest

from dsecd.linux import mount, pidfd

PLAIN = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"


def test_mountinfo_line_of_the_manual() -> None:
    assert mount.parse_mountinfo(PLAIN) == [
        mount.Mount(
            mount_id=36, parent_id=35, device="98:0", root="/mnt1", target=Path("/mnt2"),
            options=("rw", "noatime"), propagation=("master:1",), fstype="ext3", source="/dev/root",
            super_options=("rw", "errors=continue"),
        )
    ]


@pytest.mark.parametrize(("optional", "expected"), [("", ()), ("shared:2 master:7 unbindable ",
                                                             ("shared:2", "master:7", "unbindable"))])
def test_any_number_of_optional_fields(optional: str, expected: tuple[str, ...]) -> None:
    (found,) = mount.parse_mountinfo(f"1 2 0:5 / /x rw {optional}- tmpfs none rw\n")
    assert found.propagation == expected


@pytest.mark.parametrize(
    ("escaped", "name"),
    [
        (r"/a\040b", "/a b"), (r"/a\011b", "/a\tb"), (r"/a\012b", "/a\nb"), (r"/a\134b", "/a\\b"),
        (r"/a\134040b", r"/a\040b"), ("/a\x0cb", "/a\x0cb"), ("/a\u2028b", "/a\u2028b"), (r"/\043", "/#"),
    ],
)
def test_escapes_are_decoded_once(escaped: str, name: str) -> None:
    (found,) = mount.parse_mountinfo(f"1 2 0:5 {escaped} {escaped} rw - overlay {escaped} lowerdir={escaped}\n")
    assert found.target == Path(name)
    assert (found.root, found.source, found.super_options) == (name, name, (f"lowerdir={name}",))


def test_target_that_looks_like_the_separator() -> None:
    """A directory may be called "-"; only a field after the sixth can be the separator."""
    (found,) = mount.parse_mountinfo("1 2 0:5 - - rw - tmpfs - rw\n")
    assert (found.root, found.target, found.source) == ("-", Path("-"), "-")


def test_empty_source_is_kept() -> None:
    (found,) = mount.parse_mountinfo("1 2 0:5 / /x rw - tmpfs  rw\n")
    assert found.source == ""


@pytest.mark.parametrize("line", ["nonsense", "1 2 0:5 / /x rw tmpfs none rw", "x 2 0:5 / /x rw - tmpfs none rw",
                                  "1 2 0:5 / /x rw - tmpfs"])
def test_line_that_is_no_mount_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="parse mountinfo line"):
        mount.parse_mountinfo(line + "\n")


REST = b"S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1000 200"


@pytest.mark.parametrize("name", [b"sh", b"a b", b") S 1 2", b"((", b"))", b"\n) Z 0 (", b"\xff\xfe", b""])
def test_stat_whatever_the_name(name: bytes) -> None:
    assert pidfd.parse_stat(b"42 (" + name + b") " + REST + b"\n") == ("S", 987654)
