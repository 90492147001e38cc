# SPDX-License-Identifier: Apache-2.0
"""The agent's file requests. Each effect is read back from the file system, not through the agent."""

import ctypes
import hashlib
import os
import signal
import stat
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent_client import TYPES, AgentClient, AgentError, Field, Fields, Frame, Value
from tests.support.agent_process import AgentProcess, state_of
from tests.support.waiting import until

MIB = 1 << 20
NOBODY = 65534
PARENTS, EXCLUSIVE, KEEP_PART, MANY = 1, 2, 4, 8
PTRACE_ATTACH = 16  # ptrace(2)


@pytest.fixture
def client(agent: AgentProcess) -> Iterator[AgentClient]:
    with agent.connect() as connection:
        yield connection
        # No request may leave a worker behind.
        until(lambda: not agent.children())


@pytest.fixture
def place(disk: Path) -> Path:
    """A directory anybody may write in."""
    disk.chmod(0o777)
    return disk


def get(
    client: AgentClient, path: Path | str, *, credit: int = 1 << 40, **more: Value
) -> tuple[Fields, list[tuple[int, bytes]]]:
    """The file's record and its pieces; gives credit back as it reads."""
    channel = client.channel()
    fields: list[Field] = [
        ("PATH", str(path)),
        ("CREDIT", credit),
        *((k.upper(), v) for k, v in more.items()),
    ]
    client.send("FILE_GET", fields, channel=channel)
    info = client.expect(channel, "INFO").fields
    pieces = []
    while (frame := client.expect(channel, "DATA", "OK")).type == "DATA":
        data = frame.payload[8:]
        pieces.append((struct.unpack_from("<Q", frame.payload)[0], data))
        client.send("CREDIT", [("STREAM", 0), ("BYTES", len(data))], channel=channel)
    return info, pieces


class Upload:
    """One FILE_PUT."""

    def __init__(self, client: AgentClient, path: Path | str, **more: Value) -> None:
        self.client = client
        self.channel = client.channel()
        client.send(
            "FILE_PUT",
            [("PATH", str(path)), *((k.upper(), v) for k, v in more.items())],
            channel=self.channel,
        )
        ready = client.expect(self.channel, "READY").fields
        self.offset, self.credit = int(ready["OFFSET"]), int(ready["CREDIT"])

    def data(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            while self.credit == 0:
                self.take(self.client.expect(self.channel, "CREDIT"))
            piece = view[: min(self.credit, 65528)]
            self.client.send_raw(TYPES["DATA"], struct.pack("<Q", offset) + piece, self.channel)
            self.credit -= len(piece)
            offset += len(piece)
            view = view[len(piece) :]

    def take(self, frame: Frame) -> None:
        self.credit += int(frame.fields["BYTES"])

    def commit(self, size: int) -> Fields:
        self.client.send("COMMIT", [("SIZE", size)], channel=self.channel)
        while (frame := self.client.expect(self.channel, "CREDIT", "OK")).type == "CREDIT":
            self.take(frame)
        return frame.fields


def put(client: AgentClient, path: Path | str, data: bytes, **more: Value) -> Fields:
    upload = Upload(client, path, **more)
    upload.data(0, data)
    return upload.commit(len(data))


# ---- get


def test_get_returns_content_and_record(client: AgentClient, place: Path):
    data = os.urandom(3 * MIB + 17)
    (place / "f").write_bytes(data)
    info, pieces = get(client, place / "f", credit=100_000)
    assert b"".join(d for _, d in pieces) == data
    assert [o for o, _ in pieces] == sorted(o for o, _ in pieces)
    st = (place / "f").stat()
    told = {k: info[k] for k in ("MODE", "UID", "GID", "SIZE", "MTIME_NS", "NLINK", "INO")}
    assert told == {
        "MODE": st.st_mode, "UID": 0, "GID": 0, "SIZE": len(data),
        "MTIME_NS": st.st_mtime_ns, "NLINK": 1, "INO": st.st_ino,
    }  # fmt: skip


def test_get_waits_for_credit(client: AgentClient, place: Path):
    (place / "f").write_bytes(b"x" * MIB)
    channel = client.channel()
    client.send("FILE_GET", [("PATH", str(place / "f")), ("CREDIT", 1000)], channel=channel)
    client.expect(channel, "INFO")
    assert len(client.expect(channel, "DATA").payload) == 8 + 1000
    with pytest.raises(TimeoutError):
        client.read_on(channel, 0.2)
    client.send("CREDIT", [("STREAM", 0), ("BYTES", 5)], channel=channel)
    assert len(client.expect(channel, "DATA").payload) == 8 + 5
    client.send("CLOSE", channel=channel)
    client.ping()
    assert not client.aside[channel]


def test_get_of_a_range(client: AgentClient, place: Path):
    (place / "f").write_bytes(bytes(range(256)) * 1000)
    _, pieces = get(client, place / "f", offset=100_001, bytes=70_000)
    assert pieces[0][0] == 100_001
    assert b"".join(d for _, d in pieces) == (bytes(range(256)) * 1000)[100_001:170_001]
    assert get(client, place / "f", offset=10**9)[1] == []


def test_get_skips_holes(client: AgentClient, place: Path):
    with open(place / "sparse", "wb") as f:
        f.seek(64 * MIB)
        f.write(b"middle")
        f.truncate(1 << 30)
    begun = time.monotonic()
    info, pieces = get(client, place / "sparse")
    assert info["SIZE"] == 1 << 30
    assert sum(len(d) for _, d in pieces) < MIB
    assert any(o <= 64 * MIB < o + len(d) and b"middle" in d for o, d in pieces)
    assert time.monotonic() - begun < 60


def test_get_reads_the_kernels_own_files(client: AgentClient):
    _, pieces = get(client, "/proc/version")
    assert b"".join(d for _, d in pieces) == Path("/proc/version").read_bytes()


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (os.mkfifo, "not-regular"),
        (lambda p: os.mknod(p, stat.S_IFCHR | 0o666, os.makedev(1, 5)), "not-regular"),
        (lambda p: p.mkdir(), "is-directory"),
        (lambda p: None, "not-found"),
        (lambda p: p.symlink_to(p), "invalid"),
        (lambda p: p.symlink_to("/dev/zero"), "not-regular"),
    ],
    ids=["fifo", "device", "directory", "missing", "loop", "link-to-device"],
)
def test_get_and_put_of_what_is_no_file_fl16(client: AgentClient, place: Path, make, code: str):
    make(place / "it")
    with pytest.raises(AgentError) as caught:
        get(client, place / "it")
    assert caught.value.code == code
    if code != "not-found":
        before = os.lstat(place / "it")
        with pytest.raises(AgentError) as caught:
            put(client, place / "it", b"data")
        assert caught.value.code == code
        assert os.lstat(place / "it").st_ino == before.st_ino


@pytest.mark.parametrize("path", ["relative", "", "/a\0b", "/" + "x" * 5000])
def test_paths_are_checked(client: AgentClient, path: str):
    with pytest.raises(AgentError, match="^invalid"):
        client.request("FILE_STAT", [("PATH", path)])


# ---- put


def test_put_makes_the_file_at_commit_only(client: AgentClient, place: Path):
    data = os.urandom(2 * MIB)
    (place / "f").write_bytes(b"old")
    upload = Upload(client, place / "f")
    upload.data(0, data)
    assert (place / "f").read_bytes() == b"old"
    told = upload.commit(len(data))
    assert (place / "f").read_bytes() == data
    assert told["SIZE"] == len(data)
    assert os.listdir(place) == ["f"]


def test_put_modes_and_owner(client: AgentClient, place: Path):
    def mode(name: str) -> str:
        return oct((place / name).stat().st_mode & 0o7777)

    put(client, place / "a", b"", umask=0o027)
    put(client, place / "b", b"", mode=0o4755)
    put(client, place / "c", b"", mode=0o600)
    put(client, place / "c", b"new")
    put(client, place / "d", b"", mtime_ns=1_234_567_890_123_456_789, user="nobody")
    assert (mode("a"), mode("b"), mode("c"), mode("d")) == ("0o640", "0o4755", "0o600", "0o644")
    st = (place / "d").stat()
    assert (st.st_uid, st.st_mtime_ns) == (NOBODY, 1_234_567_890_123_456_789)
    put(client, place / "d", b"by root")
    assert (place / "d").stat().st_uid == NOBODY, "replacing a file changed its owner"


def test_parents_belong_to_the_user_fl17(client: AgentClient, place: Path):
    put(client, place / "x/y/z/f", b"1", user="nobody", flags=PARENTS, umask=0o077)
    for part in ("x", "x/y", "x/y/z"):
        st = (place / part).stat()
        assert (st.st_uid, st.st_mode & 0o777) == (NOBODY, 0o700)
    with pytest.raises(AgentError, match="^not-found"):
        put(client, place / "no/such/f", b"")


def test_the_kernel_checks_permissions(client: AgentClient, place: Path):
    (place / "root-only").mkdir(mode=0o700)
    (place / "root-only/f").write_text("secret")
    (place / "mine").write_text("mine")
    (place / "mine").chmod(0o644)
    for action in (
        lambda: get(client, place / "root-only/f", user="nobody"),
        lambda: put(client, place / "root-only/f", b"", user="nobody"),
        lambda: put(client, place / "mine", b"", user="nobody"),
        lambda: client.request("FILE_LIST", [("PATH", str(place / "root-only")), ("USER", "nobody")]),
        lambda: client.request("FILE_REMOVE", [("PATH", str(place / "root-only/f")), ("USER", "nobody")]),
        lambda: client.request("FILE_MKDIR", [("PATH", str(place / "root-only/d")), ("USER", "nobody")]),
    ):
        with pytest.raises(AgentError, match="^denied"):
            action()
    with pytest.raises(AgentError, match="^no-such-user"):
        get(client, place / "mine", user="who")
    assert (place / "root-only/f").read_text() == "secret"


def test_put_writes_through_a_link(client: AgentClient, place: Path):
    (place / "d").mkdir()
    (place / "d/real").write_text("old")
    (place / "link").symlink_to("d/middle")
    (place / "d/middle").symlink_to(place / "d/real")
    put(client, place / "link", b"new")
    assert (place / "d/real").read_text() == "new"
    assert (place / "link").is_symlink()
    with pytest.raises(AgentError, match="^exists"):
        put(client, place / "link", b"", flags=EXCLUSIVE)
    put(client, place / "fresh", b"1", flags=EXCLUSIVE)
    assert (place / "fresh").read_text() == "1"


def test_exclusive_put_loses_a_race(client: AgentClient, place: Path):
    upload = Upload(client, place / "f", flags=EXCLUSIVE)
    (place / "f").write_text("first")
    with pytest.raises(AgentError, match="^exists"):
        upload.commit(0)
    assert (place / "f").read_text() == "first"
    assert os.listdir(place) == ["f"]


def test_put_keeps_holes(client: AgentClient, place: Path):
    upload = Upload(client, place / "sparse")
    upload.data(512 * MIB, b"x")
    upload.commit(1 << 30)
    st = (place / "sparse").stat()
    assert (st.st_size, st.st_blocks * 512 < MIB) == (1 << 30, True)


@pytest.mark.parametrize(
    ("how", "flags", "kept"), [("cut", KEEP_PART, True), ("cut", 0, False), ("close", KEEP_PART, False)]
)
def test_an_interrupted_upload_goes_on_where_it_was(
    agent: AgentProcess, client: AgentClient, place: Path, how, flags, kept
):
    data = os.urandom(MIB)
    upload = Upload(client, place / "f", part="p1", flags=flags)
    upload.data(0, data[:600_000])
    part = place / ".dsec-p1.part"
    until(lambda: part.stat().st_size == 600_000)
    with pytest.raises(AgentError, match="^busy"):
        Upload(client, place / "f", part="p1")
    if how == "cut":
        client.close()
    else:
        client.send("CLOSE", channel=upload.channel)
    until(lambda: not agent.children())
    assert part.exists() == kept
    with agent.connect() as again:
        upload = Upload(again, place / "f", part="p1", flags=flags)
        assert upload.offset == (600_000 if kept else 0)
        upload.data(upload.offset, data[upload.offset :])
        upload.commit(len(data))
    assert hashlib.sha256((place / "f").read_bytes()).digest() == hashlib.sha256(data).digest()
    assert os.listdir(place) == ["f"]


def test_a_planted_part_is_not_written_through_fl16(client: AgentClient, place: Path):
    (place / "victim").write_text("victim")
    os.link(place / "victim", place / ".dsec-p2.part")
    put(client, place / "f", b"data", part="p2")
    (place / ".dsec-p3.part").symlink_to(place / "victim")
    os.mkfifo(place / ".dsec-p4.part")
    for part in ("p3", "p4"):
        put(client, place / "f", part.encode(), part=part)
        assert (place / "f").read_text() == part
    assert (place / "victim").read_text() == "victim"


def test_no_room_is_reported_and_leaves_nothing(agent: AgentProcess, client: AgentClient, tmp_path: Path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        upload = Upload(client, tmp_path / "f")
        with pytest.raises(AgentError, match="^no-space"):
            upload.data(0, bytes(2 * MIB))
        until(lambda: not agent.children())
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# ---- many at once


def record(name: bytes, data: bytes = b"", *, mode: int = stat.S_IFREG | 0o644, mtime_ns: int = 1_000_000_007) -> bytes:
    return struct.pack("<IqII", mode, mtime_ns, len(name), len(data)) + name + data


def put_many(client: AgentClient, top: Path, body: bytes, **more: Value) -> None:
    put(client, top, body, flags=MANY, umask=0, **more)


def get_many(
    client: AgentClient, top: Path, names: list[bytes], *, credit: int = 1 << 40, **more: Value
) -> list[tuple[int, int, bytes]]:
    """Mode, time and contents of each; the pieces must be one stream."""
    _, pieces = get(client, top, credit=credit, name=b"".join(name + b"\0" for name in names), **more)
    body = b""
    for offset, data in pieces:
        assert offset == len(body)
        body += data
    found, at = [], 0
    while at < len(body):
        mode, mtime_ns, name, size = struct.unpack_from("<IqII", body, at)
        assert name == 0
        found.append((mode, mtime_ns, body[at + 20 : at + 20 + size]))
        at += 20 + size
    return found


def test_many_files_are_put_in_one_request(client: AgentClient, place: Path):
    (place / "d").mkdir(mode=0o701)
    (place / "outside").mkdir()
    (place / "outside/real").write_text("old")
    for path in ("d", "outside", "outside/real"):
        os.chown(place / path, NOBODY, NOBODY)
    (place / "d/link").symlink_to("../outside/real")
    contents = {f"d/e/{number}".encode(): os.urandom(number * 7) for number in range(500)}
    body = record(b"d", mode=stat.S_IFDIR | 0o755) + record(b"d/e", mode=stat.S_IFDIR | 0o750)
    body += b"".join(record(name, data) for name, data in contents.items())
    body += record(b"d/e/\xff\n", b"odd", mode=stat.S_IFREG | 0o640, mtime_ns=-1) + record(b"d/link", b"through")
    body += record(b"big", bytes(range(256)) * 2000)
    put_many(client, place, body, user="nobody")
    assert {b"d/e/" + name: (place / "d/e" / os.fsdecode(name)).read_bytes()
            for name in os.listdir(os.fsencode(place / "d/e")) if name != b"\xff\n"} == contents  # fmt: skip
    assert (place / "big").read_bytes() == bytes(range(256)) * 2000
    assert ((place / "d").stat().st_mode & 0o777, (place / "d/e").stat().st_mode & 0o777) == (0o701, 0o750)
    status = (place / "d/e" / os.fsdecode(b"\xff\n")).stat()
    assert (status.st_uid, status.st_mode & 0o777, status.st_mtime_ns) == (NOBODY, 0o640, -1)
    assert ((place / "d/link").is_symlink(), (place / "outside/real").read_text()) == (True, "through")


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (record(b"dir", b"x"), "is-directory"),
        (record(b"none/x", b"x"), "not-found"),
        (record(b"fifo", b"x"), "not-regular"),
        (record(b"old", mode=stat.S_IFDIR | 0o755), "exists"),
        (record(b"made", b"", mode=stat.S_IFIFO | 0o644), "invalid"),
        (record(b"/tmp/absolute", b"x"), "invalid"),
        (record(b"zero\0byte", b"x"), "invalid"),
        (record(b"", b"x"), "invalid"),
        (record(b"x" * 5000, b"x"), "invalid"),
        (record(b"cut", b"xyz")[:-1], "invalid"),
        (record(b"cut", b"xyz")[:5], "invalid"),
    ],
    ids=["directory", "no-parent", "fifo", "no-directory", "kind", "absolute", "zero", "empty", "long", "cut", "head"],
)  # fmt: skip
def test_a_failure_among_many_says_which_and_leaves_no_half_file(
    client: AgentClient, place: Path, wrong: bytes, code: str
):
    (place / "dir").mkdir()
    (place / "old").write_text("old")
    os.mkfifo(place / "fifo")
    body = record(b"first", b"1") + record(b"second", b"2" * 100_000) + wrong
    with pytest.raises(AgentError, match=rf"^{code}.*file 3: ") as caught:
        put_many(client, place, body)
    assert caught.value.code == code
    assert sorted(os.listdir(place)) == ["dir", "fifo", "first", "old", "second"]
    assert ((place / "first").read_text(), (place / "old").read_text()) == ("1", "old")
    assert (place / "second").read_bytes() == b"2" * 100_000


@pytest.mark.parametrize("how", ["cut", "close"])
def test_many_files_given_up_leave_no_half_file(agent: AgentProcess, client: AgentClient, place: Path, how: str):
    upload = Upload(client, place, flags=MANY)
    upload.data(0, record(b"whole", b"1") + record(b"half", b"2" * 100_000)[:-1])
    until(lambda: (place / "whole").exists() and len(os.listdir(place)) == 2)
    if how == "cut":
        client.close()
    else:
        client.send("CLOSE", channel=upload.channel)
    until(lambda: not agent.children())
    assert os.listdir(place) == ["whole"]


def test_many_files_are_got_in_one_request(client: AgentClient, place: Path):
    (place / "d").mkdir()
    wanted = {f"d/{number}".encode(): os.urandom(number * 9) for number in range(400)} | {b"d/\xff\n": b"odd"}
    for name, data in wanted.items():
        (place / os.fsdecode(name)).write_bytes(data)
    (place / "d/3").chmod(0o4755)
    os.utime(place / "d/3", ns=(1, -5))
    (place / "secret").write_text("secret")
    (place / "secret").chmod(0o600)
    with open(place / "sparse", "wb") as file:
        file.truncate(60_000)
    (place / "large").write_bytes(bytes(70_000))
    (place / "link").symlink_to("d/3")
    os.mkfifo(place / "fifo")
    alone = [b"secret", b"sparse", b"large", b"link", b"fifo", b"d", b"missing", b"", b"d/3/x"]
    names = [*wanted, *alone, b"d/1"]
    found = get_many(client, place, names, credit=10_000, bytes=1 << 20, user="nobody")
    assert [data for _, _, data in found] == [*wanted.values(), *[b""] * len(alone), wanted[b"d/1"]]
    assert found[3][:2] == (stat.S_IFREG | 0o4755, -5)
    modes = [mode for mode, _, _ in found]
    assert modes[len(wanted) : -1] == [0] * len(alone)
    assert all(stat.S_ISREG(mode) for mode in [*modes[: len(wanted)], modes[-1]])
    assert get_many(client, Path("/proc"), [b"version"], bytes=65536) == [(0, 0, b"")]
    assert [data for _, _, data in get_many(client, place, [b"d/11", b"d/12"], bytes=99)] == [wanted[b"d/11"], b""]
    for wrong in (b"", b"d/1"):
        with pytest.raises(AgentError, match="^invalid"):
            get(client, place, name=wrong)


# ---- stat, list


def test_stat_follows_links_on_request(client: AgentClient, place: Path):
    (place / "f").write_text("12345")
    (place / "l").symlink_to("f")
    (info,), _ = client.request("FILE_STAT", [("PATH", str(place / "l"))])
    assert stat.S_ISLNK(int(info.fields["MODE"]))
    assert info.fields["TARGET"] == b"f"
    (info,), _ = client.request("FILE_STAT", [("PATH", str(place / "l")), ("FLAGS", 1)])
    assert (info.fields["SIZE"], "TARGET" in info.fields) == (5, False)
    with pytest.raises(AgentError, match="^not-found"):
        client.request("FILE_STAT", [("PATH", str(place / "none"))])
    with pytest.raises(AgentError, match="^not-directory"):
        client.request("FILE_STAT", [("PATH", str(place / "f/x"))])


def test_list_tells_names_and_records(client: AgentClient, place: Path):
    (place / "f").write_text("abc")
    (place / "d").mkdir()
    (place / "l").symlink_to("nowhere")
    os.mkfifo(place / "p")
    (place / os.fsdecode(b"\xff\n")).write_text("")
    frames, end = client.request("FILE_LIST", [("PATH", str(place))])
    found = {f.fields["NAME"]: f.fields for f in frames}
    assert set(found) == {b"f", b"d", b"l", b"p", b"\xff\n"}
    assert end["CURSOR"] == 0
    assert found[b"f"]["SIZE"] == 3
    assert found[b"l"]["TARGET"] == b"nowhere"
    assert stat.S_ISFIFO(int(found[b"p"]["MODE"]))
    with pytest.raises(AgentError, match="^not-directory"):
        client.request("FILE_LIST", [("PATH", str(place / "f"))])


def test_a_huge_directory_is_paged_and_stalls_nothing_fl19(
    client: AgentClient, agent: AgentProcess, place: Path
):
    count = 100_000 if not agent.sanitized else 10_000
    big = place / "big"
    big.mkdir()
    (big / "0").write_text("")
    directory = os.open(big, os.O_RDONLY)
    for i in range(1, count):
        # Links are cheaper than files; ext4 allows 65,000 of one.
        if i % 60_000 == 0:
            os.rename("0", f"n{i}", src_dir_fd=directory, dst_dir_fd=directory)
            (big / "0").write_text("")
        else:
            os.link("0", f"n{i}", src_dir_fd=directory, dst_dir_fd=directory)
    os.close(directory)
    seen: set[bytes] = set()
    cursor, pages = 0, 0
    took = []
    while True:
        channel = client.channel()
        client.send("FILE_LIST", [("PATH", str(big)), ("CURSOR", cursor), ("LIMIT", 10_000)], channel=channel)
        if pages % 4 == 0:
            begun = time.monotonic()
            assert client.run(["true"], id=f"during-{pages}-{count}").exit is not None
            took.append(time.monotonic() - begun)
        while (frame := client.expect(channel, "INFO", "OK")).type == "INFO":
            name = frame.fields["NAME"]
            assert isinstance(name, bytes)
            assert name not in seen
            seen.add(name)
        pages += 1
        cursor = int(frame.fields["CURSOR"])
        if cursor == 0:
            break
    assert len(seen) == count
    assert pages >= count // 10_000
    assert sorted(took)[len(took) // 2] < 1
    client.request("FILE_REMOVE", [("PATH", str(big)), ("FLAGS", 1)])
    assert not big.exists()


# ---- remove, mkdir, rename


def test_remove_never_follows_a_link(client: AgentClient, place: Path):
    (place / "keep").mkdir()
    (place / "keep/f").write_text("")
    tree = place / "tree"
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/f").write_text("")
    (tree / "a/link").symlink_to(place / "keep")
    (tree / "dir-link").symlink_to(place / "keep", target_is_directory=True)
    with pytest.raises(AgentError, match="^exists"):
        client.request("FILE_REMOVE", [("PATH", str(tree))])
    client.request("FILE_REMOVE", [("PATH", str(tree)), ("FLAGS", 1)])
    assert sorted(os.listdir(place)) == ["keep"]
    assert (place / "keep/f").exists()
    (place / "l").symlink_to("keep")
    client.request("FILE_REMOVE", [("PATH", str(place / "l")), ("FLAGS", 1)])
    assert (place / "keep/f").exists()
    with pytest.raises(AgentError, match="^not-found"):
        client.request("FILE_REMOVE", [("PATH", str(place / "l"))])


def test_a_tree_deeper_than_any_path_is_removed(client: AgentClient, place: Path):
    top = os.open(place, os.O_RDONLY)
    at = os.dup(top)
    for i in range(1500):
        os.mkdir("some-directory", dir_fd=at)
        below = os.open("some-directory", os.O_RDONLY, dir_fd=at)
        if i % 100 == 0:
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=below))
        os.close(at)
        at = below
    os.close(at)
    os.close(top)
    client.request("FILE_REMOVE", [("PATH", str(place / "some-directory")), ("FLAGS", 1)])
    assert os.listdir(place) == []


def test_mkdir(client: AgentClient, place: Path):
    client.request(
        "FILE_MKDIR", [("PATH", str(place / "d")), ("MODE", 0o775), ("UMASK", 0o002), ("USER", "nobody")]
    )
    st = (place / "d").stat()
    assert (st.st_uid, st.st_mode & 0o7777) == (NOBODY, 0o775)
    with pytest.raises(AgentError, match="^exists"):
        client.request("FILE_MKDIR", [("PATH", str(place / "d"))])
    client.request("FILE_MKDIR", [("PATH", str(place / "d/")), ("FLAGS", 1)])
    client.request("FILE_MKDIR", [("PATH", str(place / "e/f/g")), ("FLAGS", 1)])
    assert (place / "e/f/g").is_dir()
    with pytest.raises(AgentError, match="^not-found"):
        client.request("FILE_MKDIR", [("PATH", str(place / "x/y"))])


def test_rename(client: AgentClient, place: Path):
    (place / "a").write_text("a")
    (place / "b").write_text("b")
    client.request("FILE_RENAME", [("PATH", str(place / "a")), ("TARGET", str(place / "b"))])
    assert (os.listdir(place), (place / "b").read_text()) == (["b"], "a")
    with pytest.raises(AgentError, match="^not-found"):
        client.request("FILE_RENAME", [("PATH", str(place / "a")), ("TARGET", str(place / "c"))])
    with pytest.raises(AgentError, match="^invalid"):
        client.request("FILE_RENAME", [("PATH", str(place / "b")), ("TARGET", "c")])


# ---- many


def test_many_transfers_at_once(client: AgentClient, place: Path):
    data = {i: os.urandom(200_000) for i in range(40)}
    uploads = {i: Upload(client, place / f"{i}") for i in data}
    for i, upload in uploads.items():
        upload.data(0, data[i])
    for i, upload in uploads.items():
        upload.commit(len(data[i]))
    for i in data:
        assert (place / f"{i}").read_bytes() == data[i]


def test_too_many_requests_are_refused_not_lost(client: AgentClient, place: Path):
    uploads = [Upload(client, place / f"{i}") for i in range(128)]
    with pytest.raises(AgentError, match="^busy"):
        client.request("FILE_STAT", [("PATH", "/")])
    for upload in uploads:
        client.send("CLOSE", channel=upload.channel)

    def served() -> bool:
        try:
            client.request("FILE_STAT", [("PATH", "/")])
        except AgentError as error:
            if error.code != "busy":
                raise
            return False
        return True

    until(served)
    until(lambda: os.listdir(place) == [])


def only_worker(agent: AgentProcess) -> int:
    """The one worker; a new agent has children of another kind for a moment."""
    until(lambda: len(agent.children()) == 1)
    return agent.children()[0]


def test_a_stopped_worker_keeps_its_place_only_while_somebody_waits(
    agent: AgentProcess, client: AgentClient, place: Path
):
    upload = Upload(client, place / "f")
    worker = only_worker(agent)
    os.kill(worker, signal.SIGSTOP)
    until(lambda: state_of(worker) == "T")
    client.ping()
    assert agent.children() == [worker]
    client.send("CLOSE", channel=upload.channel)
    until(lambda: not agent.children())
    assert os.listdir(place) == []  # it was woken, and took back what it had begun


def test_a_worker_that_cannot_be_woken_is_killed(agent: AgentProcess, client: AgentClient, place: Path):
    upload = Upload(client, place / "f")
    worker = only_worker(agent)
    # Whoever traces it takes SIGCONT for it, as somebody who stops it again and again would.
    assert ctypes.CDLL(None, use_errno=True).ptrace(PTRACE_ATTACH, worker, None, None) == 0
    assert os.WIFSTOPPED(os.waitpid(worker, 0)[1])
    client.send("CLOSE", channel=upload.channel)
    client.ping()
    began = time.monotonic()
    _, status = os.waitpid(worker, 0)  # the end, which a tracer sees first
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert 1 < time.monotonic() - began < 45
    until(lambda: not agent.children())
