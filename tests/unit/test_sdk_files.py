# SPDX-License-Identifier: Apache-2.0
"""File transfers of libdsec against a daemon in memory: holes, cuts, links and hostile names."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from libdsec import Client, Sandbox
from libdsec.errors import (
    AlreadyExists,
    ConnectionFailed,
    Denied,
    InfraError,
    InvalidSpec,
    NotFound,
    TooLarge,
)
from libdsec.frames import Cursor, Extents, Lines, Record, Records, extent, record
from libdsec.local import Target, escapes
from tests.support.fake_commands import pattern
from tests.support.fake_daemon import FakeDaemon
from tests.support.fake_state import Box

MIB = 1 << 20


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        yield fake


@pytest.fixture
def sandbox(daemon: FakeDaemon) -> Iterator[Sandbox]:
    with Client(daemon.socket, retry_s=5) as client, Sandbox(image="debian:trixie", client=client) as made:
        yield made


@pytest.fixture
def box(daemon: FakeDaemon, sandbox: Sandbox) -> Box:
    return daemon.boxes[sandbox.id]


# --- pure --------------------------------------------------------------------------------------------------------


def test_extents_come_out_however_the_body_is_cut() -> None:
    body = extent(0, b"abc") + extent(10, b"defg") + extent(20, b"")
    for size in range(1, len(body)):
        decoder, data = Extents(), bytearray(20)
        for begin in range(0, len(body), size):
            for offset, piece in decoder.feed(body[begin : begin + size]):
                data[offset : offset + len(piece)] = piece
        assert bytes(data) == b"abc" + bytes(7) + b"defg" + bytes(6)
        assert decoder.complete
        assert decoder.end == 20
    cut = Extents()
    assert list(cut.feed(body[:14])) == [(0, b"ab")]
    assert not cut.complete


def test_extents_that_go_back_are_refused() -> None:
    with pytest.raises(InfraError):
        list(Extents().feed(extent(10, b"abc") + extent(5, b"x")))


def test_records_come_out_however_the_body_is_cut() -> None:
    files = [Record(0o100644, 5, b"abc"), Record(0, 0, b""), Record(0o100600, -7, b"")]
    body = b"".join(record(mode, mtime_ns, b"", data) for mode, mtime_ns, data in files)
    for size in range(1, len(body)):
        records = Records(3)
        pieces = [body[begin : begin + size] for begin in range(0, len(body), size)]
        assert [found for piece in pieces for found in records.feed(piece)] == files
    for wrong in (record(0o100644, 0, b"", b"abcd"), record(0o100644, 0, b"../x", b"")):
        with pytest.raises(InfraError):
            list(Records(3).feed(wrong[:20]))


def test_a_character_split_anywhere_comes_out_whole() -> None:
    text = "a🐟b\nc\xe9\n"
    raw = text.encode()
    for cut in range(len(raw) + 1):
        lines = Lines()
        found = [*lines.feed(raw[:cut]), *lines.feed(raw[cut:]), *lines.feed(b"", final=True)]
        assert found == ["a🐟b", "c\xe9"]
    assert list(Lines().feed(b"\xff\xfe\n")) == ["��"]


def test_cursor_hands_out_each_byte_once() -> None:
    cursor = Cursor("stdout")
    assert cursor.take(0, b"abc") == b"abc"
    assert cursor.take(1, b"bcde") == b"de"
    assert cursor.take(0, b"ab") == b""
    with pytest.raises(InfraError):
        cursor.take(6, b"x")
    with pytest.raises(InfraError):
        cursor.finish(6)
    cursor.finish(5)


@pytest.mark.parametrize(
    ("directory", "target", "leads_out"),
    [
        ("", "a", False),
        ("", "./a//b/.", False),
        ("a", "../b", False),
        ("a/b", "../../c/d", False),
        ("", "/etc/passwd", True),
        ("", "..", True),
        ("a", "../../b", True),
        ("", "a/../../b", True),
        # Inside when read as text, but "up" may be a link to a place higher in the tree.
        ("", "d/up/..", True),
        ("", "", True),
    ],
)
def test_links_that_may_lead_out_are_known(directory: str, target: str, leads_out: bool) -> None:
    assert escapes(directory, target) is leads_out


# --- single files ------------------------------------------------------------------------------------------------


def test_read_and_write(sandbox: Sandbox, box: Box) -> None:
    data = os.urandom(300_000)
    assert sandbox.write("/a", data, mode=0o600).size_bytes == len(data)
    assert sandbox.read("/a") == data
    assert box.files["/a"]["mode"] == 0o600
    sandbox.write("/a", "Öl")
    assert sandbox.read_text("/a") == "Öl"
    sandbox.write("/empty", b"")
    assert sandbox.read("/empty") == b""
    with pytest.raises(TooLarge):
        sandbox.read("/a", max_bytes=2)
    with pytest.raises(AlreadyExists):
        sandbox.write("/a", b"", exclusive=True)
    with pytest.raises(NotFound):
        sandbox.read("/none")
    with pytest.raises(InvalidSpec):
        sandbox.read("relative")


def test_parents_get_the_usual_mode_whatever_the_files(sandbox: Sandbox, daemon: FakeDaemon, box: Box) -> None:
    sandbox.write("/p/q/f", b"", mode=0o666, parents=True)
    assert box.files["/p/q"]["mode"] == 0o755
    assert box.files["/p/q/f"]["mode"] == 0o666
    sandbox.write("/p/q/g", b"", parents=True)
    (put,) = [arguments for name, arguments in daemon.seen if name == "put_file" and arguments["path"] == "/p/q/g"]
    assert put["parents"] == "true"


def test_other_file_calls(sandbox: Sandbox, box: Box) -> None:
    sandbox.mkdir("/d", mode=0o700, umask=0)
    for name in "abcde":
        sandbox.write(f"/d/{name}", name)
    assert [entry.name for entry in sandbox.list_dir("/d")] == list("abcde")
    sandbox.rename("/d/a", "/d/z")
    assert sandbox.stat("/d/z").size_bytes == 1
    sandbox.remove("/d", recursive=True)
    assert list(box.files) == ["/"]


def test_upload_goes_on_where_it_was_cut(sandbox: Sandbox, daemon: FakeDaemon, box: Box, tmp_path: Path) -> None:
    data = pattern(9 * MIB)
    (tmp_path / "f").write_bytes(data)
    daemon.body_cuts = [3 * MIB, 2 * MIB]
    sandbox.put_file(tmp_path / "f", "/f")
    assert box.files["/f"]["data"] == data
    puts = [arguments for name, arguments in daemon.seen if name == "put_file"]
    assert len({put["part"] for put in puts}) == 1
    offsets = [int(put.get("offset", 0)) for put in puts]
    assert offsets[0] == 0
    assert offsets[1] >= 3 * MIB
    assert offsets[2] >= 5 * MIB


def test_small_upload_is_sent_again(sandbox: Sandbox, daemon: FakeDaemon, box: Box) -> None:
    daemon.faults["put_file"] = ["lose", "cut"]
    sandbox.write("/f", b"x" * 1000)
    assert box.files["/f"]["data"] == b"x" * 1000
    daemon.faults["put_file"] = ["cut"]
    # Whether it was we who made it could not be told afterwards.
    with pytest.raises(ConnectionFailed):
        sandbox.write("/g", b"x", exclusive=True)


def test_download_goes_on_where_it_was_cut(sandbox: Sandbox, daemon: FakeDaemon, box: Box, tmp_path: Path) -> None:
    data = pattern(3 * MIB)
    box.files["/f"] = {"type": "file", "data": data, "mode": 0o4755}
    daemon.body_cuts = [MIB, MIB // 2]
    sandbox.get_file("/f", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == data
    assert (tmp_path / "f").stat().st_mode & 0o7777 == 0o755
    assert len([name for name, _ in daemon.seen if name == "get_file"]) == 3
    assert os.listdir(tmp_path) == ["f"]


def test_download_of_a_file_that_changed_meanwhile(
    sandbox: Sandbox, daemon: FakeDaemon, box: Box, tmp_path: Path
) -> None:
    box.files["/f"] = {"type": "file", "data": pattern(MIB)}
    daemon.body_cuts = [MIB // 2]
    original = daemon.on_get_file

    async def change(request: Any) -> Any:
        answer = await original(request)
        box.files["/f"] = {"type": "file", "data": b"new", "mtime_ns": 5}
        return answer

    daemon.on_get_file = change  # type: ignore[method-assign]
    with pytest.raises(InfraError, match="changed while it was read"):
        sandbox.get_file("/f", tmp_path / "f")
    assert os.listdir(tmp_path) == []


def test_holes_stay_holes_both_ways(sandbox: Sandbox, box: Box, tmp_path: Path) -> None:
    size = 64 * MIB
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(size)
        file.seek(20 * MIB)
        file.write(b"middle")
    sandbox.put_file(tmp_path / "sparse", "/sparse")
    sent = sum(length for _, length in box.files["/sparse"]["extents"])
    assert sent < MIB
    assert hashlib.sha256(box.files["/sparse"]["data"]).digest() == hashlib.sha256(
        (tmp_path / "sparse").read_bytes()
    ).digest()
    sandbox.get_file("/sparse", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "sparse").read_bytes()
    assert (tmp_path / "back").stat().st_blocks * 512 < MIB


def test_upload_from_a_pipe(sandbox: Sandbox, box: Box) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"from a pipe")
    os.close(writing)
    try:
        sandbox.put_file(reading, "/f", mode=0o640)
    finally:
        os.close(reading)
    assert box.files["/f"]["data"] == b"from a pipe"


def test_local_errors_are_local(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sandbox.put_file(tmp_path / "none", "/f")
    with pytest.raises(IsADirectoryError):
        sandbox.put_file(tmp_path, "/f")


# --- trees -------------------------------------------------------------------------------------------------------


def test_upload_of_a_tree_follows_no_link(sandbox: Sandbox, daemon: FakeDaemon, box: Box, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    top = tmp_path / "top"
    (top / "d" / "e").mkdir(parents=True)
    (top / "d" / "f").write_text("f")
    (top / "d" / "f").chmod(0o751)
    (top / "link").symlink_to(secret)
    (top / "dirlink").symlink_to(tmp_path)
    os.mkfifo(top / "fifo")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(top / "sock"))
    listening.close()
    report = sandbox.put_tree(top, "/t")
    assert set(box.files) == {"/", "/t", "/t/d", "/t/d/e", "/t/d/f"}
    assert box.files["/t/d/f"]["mode"] == 0o751
    assert sorted(report.skipped) == [("fifo", "it is a fifo"), ("sock", "it is a socket")]
    assert (report.files, report.directories, report.symlinks) == (1, 2, 2)
    (link,) = [command for command in box.execs.values() if command.request.argv[0] == "xargs"]
    expected = f"{tmp_path}\0/t/dirlink\0{secret}\0/t/link\0"
    assert link.request.stdin == expected.encode()


def test_what_cannot_be_read_here_is_told_and_the_rest_is_uploaded(
    sandbox: Sandbox, box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d" / "closed").mkdir(parents=True)
    for name in ("d/closed/in", "d/f", "gone"):
        (tmp_path / name).write_text(name)
    scan, closed = os.scandir, str(tmp_path / "d/closed")

    def scandir(path: str) -> Any:
        # Root may read everything, so it is refused here as the kernel refuses others.
        if path.rstrip("/") == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        found = scan(path)
        if path == f"{tmp_path}/":
            (tmp_path / "gone").unlink()  # behind the reading of its directory
        return found

    monkeypatch.setattr(os, "scandir", scandir)
    report = sandbox.put_tree(tmp_path, "/t")
    assert [path for path in box.files if path.startswith("/t/")] == ["/t/d", "/t/d/closed", "/t/d/f"]
    assert report.skipped == [("d/closed", "permission denied")]
    with pytest.raises(PermissionError):
        sandbox.put_tree(closed, "/u")


def test_an_upload_of_a_tree_goes_on_when_the_daemon_goes_while_a_directory_is_made(
    sandbox: Sandbox, daemon: FakeDaemon, box: Box, tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("f")
    daemon.faults["mkdir"] = ["cut", None, "lose", None, "cut"]
    report = sandbox.put_tree(tmp_path, "/t")
    assert {"/t", "/t/d", "/t/d/f"} <= set(box.files)
    assert (report.files, report.directories, report.skipped) == (1, 1, [])


def test_put_chooses_by_what_it_is_given(sandbox: Sandbox, box: Box, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("f")
    sandbox.put(tmp_path / "f", "/g")
    sandbox.put(tmp_path / "f", "/dir/")
    assert {"/g", "/dir/f"} <= set(box.files)
    sandbox.put(tmp_path, "/tree")
    assert box.files["/tree/f"]["data"] == b"f"


def _tree(top: Path) -> dict[str, bytes]:
    """Small files, among them an empty one, one with a hole, and one that is not small."""
    found = {f"d{number % 7}/{number}": os.urandom(number) for number in range(600)}
    found |= {"large": os.urandom(MIB // 2), "sparse": bytes(40_000) + b"end", "d1/odd \U0001f41f": b"odd"}
    for name, data in found.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(data)
    with open(top / "sparse", "r+b") as file:
        file.truncate(0)
        file.seek(40_000)
        file.write(b"end")
    (top / "d0/14").chmod(0o750)
    os.utime(top / "d0/14", ns=(5, 1_234_567_890_123_456_789))
    return found


def _asked(daemon: FakeDaemon, route: str) -> int:
    return len([name for name, _ in daemon.seen if name == route])


def _contents(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def test_small_files_of_a_tree_go_together_both_ways(
    sandbox: Sandbox, daemon: FakeDaemon, box: Box, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    expected = _tree(tmp_path / "in")
    report = sandbox.put_tree(tmp_path / "in", "/t")
    assert {path[3:]: entry["data"] for path, entry in box.files.items() if "data" in entry} == expected
    assert (box.files["/t/d0/14"]["mode"], box.files["/t/d0/14"]["mtime_ns"]) == (0o750, 1_234_567_890_123_456_789)
    assert (report.files, report.directories, report.skipped) == (603, 7, [])
    assert report.data_bytes == sum(map(len, expected.values()))
    assert (_asked(daemon, "put_file"), _asked(daemon, "put_files")) == (2, 4)  # one of them: directories
    assert sum(length for _, length in box.files["/t/sparse"]["extents"]) < 40_000
    report = sandbox.get_tree("/t", tmp_path / "out")
    assert _contents(tmp_path / "out") == expected
    status = (tmp_path / "out/d0/14").stat()
    assert (status.st_mode & 0o777, status.st_mtime_ns) == (0o750, 1_234_567_890_123_456_789)
    assert (report.files, report.data_bytes) == (603, sum(map(len, expected.values())))
    assert (_asked(daemon, "get_file"), _asked(daemon, "get_files")) == (1, 3)


@pytest.mark.parametrize("cut", [0, 7, 5000, 100_000])
def test_what_a_batch_does_not_bring_goes_alone(
    sandbox: Sandbox, daemon: FakeDaemon, box: Box, tmp_path: Path, cut: int
) -> None:
    (tmp_path / "in").mkdir()
    expected = _tree(tmp_path / "in")
    daemon.faults["put_files"] = ["lose", "cut", InvalidSpec("an agent of an earlier release")]
    daemon.body_cuts = [cut]
    report = sandbox.put_tree(tmp_path / "in", "/t")
    assert {path[3:]: entry["data"] for path, entry in box.files.items() if "data" in entry} == expected
    assert (report.files, report.directories, report.skipped) == (603, 7, [])
    daemon.faults["get_files"] = [None, InvalidSpec("an agent of an earlier release"), "lose"]
    daemon.body_cuts = [cut]
    report = sandbox.get_tree("/t", tmp_path / "out")
    assert _contents(tmp_path / "out") == expected
    assert (report.files, report.skipped) == (603, [])
    assert report.data_bytes == sum(map(len, expected.values()))


def test_a_file_that_cannot_be_put_is_named(sandbox: Sandbox, daemon: FakeDaemon, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"f{number}").write_text("x")
    daemon.faults["put_files"] = [Denied("put files below '/t': file 7: permission denied")]
    daemon.faults["put_file"] = [None, None, None, Denied("put '/t/f11': permission denied")]
    with pytest.raises(Denied, match="/t/f11"):
        sandbox.put_tree(tmp_path, "/t")


def test_download_of_a_tree(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "in" / "a" / "b").mkdir(parents=True)
    (tmp_path / "in" / "a" / "b" / "f").write_bytes(os.urandom(5000))
    (tmp_path / "in" / "empty").mkdir()
    sandbox.put(tmp_path / "in", "/t")
    report = sandbox.fetch("/t", tmp_path / "out")
    assert (tmp_path / "out/a/b/f").read_bytes() == (tmp_path / "in/a/b/f").read_bytes()
    assert (tmp_path / "out/empty").is_dir()
    assert (report.files, report.directories, report.skipped) == (1, 3, [])
    sandbox.fetch("/t/a/b/f", tmp_path / "out")
    assert (tmp_path / "out/f").exists()


def test_a_hostile_tree_writes_nothing_outside(sandbox: Sandbox, box: Box, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    box.files |= {
        "/t": {"type": "directory"},
        "/t/up": {"type": "file", "data": b"x", "name": "../outside/x"},
        "/t/dots": {"type": "file", "data": b"x", "name": ".."},
        "/t/absolute": {"type": "symlink", "target": str(outside)},
        "/t/relative": {"type": "symlink", "target": "../outside"},
        "/t/inside": {"type": "symlink", "target": "good"},
        "/t/good": {"type": "file", "data": b"good"},
        "/t/pipe": {"type": "fifo"},
        # First a link, then, under the same name, a directory with a file in it.
        "/t/link": {"type": "symlink", "target": "good", "name": "twice"},
        "/t/twice": {"type": "directory"},
        "/t/twice/planted": {"type": "file", "data": b"planted"},
        "/t/gone": {"type": "directory", "name": "vanished"},
    }
    report = sandbox.get_tree("/t", tmp_path / "t")
    assert os.listdir(outside) == []
    assert os.readlink(tmp_path / "t/inside") == "good"
    assert os.listdir(tmp_path / "t/twice") == ["planted"]
    assert {path for path, _ in report.skipped} == {
        *("../outside/x", "..", "absolute", "relative", "pipe", "twice", "vanished")
    }


def test_a_link_already_there_leads_nowhere(sandbox: Sandbox, box: Box, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "d").symlink_to(tmp_path / "outside")
    (tmp_path / "t" / "f").symlink_to(tmp_path / "outside" / "f")
    box.files |= {
        "/t": {"type": "directory"},
        "/t/d": {"type": "directory"},
        "/t/d/x": {"type": "file", "data": b"x"},
        "/t/f": {"type": "file", "data": b"f"},
    }
    with pytest.raises(OSError):
        sandbox.get_tree("/t", tmp_path / "t")
    del box.files["/t/d/x"], box.files["/t/d"]
    sandbox.get_tree("/t", tmp_path / "t")
    assert (tmp_path / "t" / "f").read_text() == "f"
    assert os.listdir(tmp_path / "outside") == []


def test_a_download_puts_no_file_in_the_place_of_a_device_or_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for place in (tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(OSError, match="not a regular file"):
            Target(str(place))
        assert not place.is_file()
