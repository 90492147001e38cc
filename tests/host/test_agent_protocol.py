# SPDX-License-Identifier: Apache-2.0
"""The agent against peers and commands that mean harm, and what `--container` takes from execs."""

import contextlib
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent_client import (
    ATTACH,
    EOF,
    MORE,
    PTY,
    STDIN,
    TAGS,
    TYPES,
    AgentClient,
    AgentError,
    Closed,
    ExecChannel,
    Field,
    encode,
)
from tests.support.agent_process import AgentProcess, build, running
from tests.support.waiting import until

U64_MAX = 2**64 - 1


@pytest.fixture
def client(agent: AgentProcess) -> Iterator[AgentClient]:
    with agent.connect() as connection:
        yield connection


@pytest.fixture
def fresh() -> Iterator[AgentProcess]:
    """An agent that may be left with any generation."""
    build()
    with running("asan") as process:
        yield process


def closes(client: AgentClient) -> bool:
    try:
        while True:
            client.read_frame(60)
    except Closed:
        return True
    except TimeoutError:
        return False


# ---- HELLO


def test_generations(fresh: AgentProcess):
    with AgentClient(fresh.socket, generation=5) as first:
        first.ping()
        with (
            AgentClient(fresh.socket, hello=False) as old,
            pytest.raises(AgentError, match="^stale-generation"),
        ):
            old.say_hello(4)
        first.ping()
        with AgentClient(fresh.socket, generation=5) as second:
            assert second.hello_ok["GENERATION"] == 5
            assert closes(first)
            second.ping()
        with AgentClient(fresh.socket, generation=9) as third:
            third.ping()
        with (
            AgentClient(fresh.socket, hello=False) as old,
            pytest.raises(AgentError, match="^stale-generation"),
        ):
            old.say_hello(8)


def test_another_protocol_is_refused(fresh: AgentProcess):
    with AgentClient(fresh.socket, hello=False) as client:
        client.send("HELLO", [("PROTOCOL", 2), ("GENERATION", 1)], channel=0)
        with pytest.raises(AgentError, match="^invalid"):
            client.expect(0, "HELLO_OK")
        assert closes(client)


def test_nothing_before_hello(agent: AgentProcess):
    with AgentClient(agent.socket, hello=False) as client:
        client.send("PING", channel=1)
        assert closes(client)
    with AgentClient(agent.socket, hello=False) as client:
        client.sock.sendall(struct.pack("<IBBHI", 5000, TYPES["HELLO"], 0, 0, 0))
        assert closes(client)


def test_strangers_are_few_and_short_lived(fresh: AgentProcess):
    begun = time.monotonic()
    strangers = [AgentClient(fresh.socket, hello=False) for _ in range(4)]
    with AgentClient(fresh.socket, hello=False) as fifth:
        assert closes(fifth)
    for stranger in strangers:
        with pytest.raises(Closed):
            stranger.read_frame(60)
        stranger.close()
    assert 3 < time.monotonic() - begun < 40
    with fresh.connect() as client:
        client.ping()


# ---- frames


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<IBBHI", 65537, TYPES["PING"], 0, 0, 1),
        struct.pack("<IBBHI", 0, TYPES["PING"], 0, 7, 1),
        struct.pack("<IBBHI", 0, TYPES["PING"], 4, 0, 1),
        struct.pack("<IBBHI", 0, TYPES["PING"], EOF, 0, 1),
        struct.pack("<IBBHI", 0, TYPES["PING"], 0, 0, 1 << 31),
        struct.pack("<IBBHI", 0, TYPES["LIST"], 0, 0, 0),
        struct.pack("<IBBHI", 0, 0x7F, 0, 0, 1),
        struct.pack("<IBBHI", 0, TYPES["HELLO"], 0, 0, 1),
        struct.pack("<IBBHI", 0, TYPES["OUTPUT"], 0, 0, 1),
        struct.pack("<IBBHI", 5, TYPES["LIST"], 0, 0, 1) + b"12345",
        struct.pack("<IBBHIHI", 6, TYPES["LIST"], 0, 0, 1, TAGS["ID"], 100),
        struct.pack("<IBBHIHI4s", 10, TYPES["SHUTDOWN"], 0, 0, 1, TAGS["GRACE_MS"], 4, b"1234"),
        struct.pack("<IBBHI", 14, TYPES["LIST"], 0, 0, 1) + encode([("ID", "a"), ("ID", "b")]),
    ],
    ids=range(13),
)
def test_a_malformed_frame_ends_the_connection(agent: AgentProcess, client: AgentClient, frame: bytes):
    client.sock.sendall(frame)
    assert closes(client)
    with agent.connect() as again:
        again.ping()


def test_an_unknown_tag_is_skipped(client: AgentClient):
    channel = client.channel()
    client.send_raw(TYPES["PING"], struct.pack("<HI3s", 999, 3, b"abc"), channel)
    client.expect(channel, "OK")


def test_a_channel_in_use_cannot_be_opened_again(agent: AgentProcess, client: AgentClient):
    exec_ = client.start(["sleep", "60"], id="twice")
    exec_.started()
    client.send("PING", channel=exec_.channel)
    assert closes(client)
    with agent.connect() as again:
        again.request("SIGNAL", [("ID", exec_.id), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])


def test_input_beyond_the_credit_ends_the_connection(agent: AgentProcess, client: AgentClient):
    exec_ = client.start(["sleep", "60"], id="beyond", flags=ATTACH | STDIN)
    credit = int(exec_.started()["CREDIT"])
    with contextlib.suppress(ConnectionError):  # it may close before we have sent all
        for _ in range(credit // 65536 + 3):  # the pipe takes some
            client.send_raw(TYPES["INPUT"], bytes(65536), exec_.channel)
    assert closes(client)
    with agent.connect() as again:
        again.request("SIGNAL", [("ID", exec_.id), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])


def test_frames_of_channels_that_ended_are_ignored(client: AgentClient):
    exec_ = client.run(["true"], id=f"late-{time.monotonic_ns()}")
    exec_.credit(1, 10)
    client.send_raw(TYPES["INPUT"], b"x", exec_.channel)
    exec_.close()
    client.ping()


def test_a_long_start_comes_in_parts(client: AgentClient):
    argument = os.urandom(50_000).hex()
    channel, name = client.channel(), f"long-{time.monotonic_ns()}"
    client.send("START", [("ID", name), ("FLAGS", ATTACH), ("CREDIT", 1 << 20)], channel=channel, flags=MORE)
    client.ping()
    client.send(
        "START", [("ARGV", "sh"), ("ARGV", "-c"), ("ARGV", 'printf %s "$@"')], channel=channel, flags=MORE
    )
    for piece in [b"name", *[argument[i : i + 50_000].encode() for i in range(0, 100_000, 50_000)]]:
        client.send("START", [("ARGV", piece)], channel=channel, flags=MORE)
    client.send("START", [], channel=channel)
    exec_ = ExecChannel(client, channel, name)
    exec_.wait()
    assert exec_.out == argument.encode()


def test_a_start_over_four_mib_is_refused(client: AgentClient):
    channel = client.channel()
    try:
        for _ in range(70):
            client.send("START", [("ENV", b"A=" + bytes([65]) * 65_000)], channel=channel, flags=MORE)
    except (BrokenPipeError, ConnectionResetError):
        return
    assert closes(client)


def test_a_peer_that_never_reads_is_waited_for_not_buffered(agent: AgentProcess, client: AgentClient):
    before = agent.rss_kib()
    client.sock.settimeout(1)
    ping = struct.pack("<IBBHI", 0, TYPES["PING"], 0, 0, 1) * 1000
    sent = 0
    with pytest.raises(TimeoutError):
        while sent < 64 << 20:
            sent += client.sock.send(ping)
    assert agent.rss_kib() - before < 8192
    with agent.connect() as again:
        again.ping()


def test_a_peer_that_never_reads_output_stops_it(agent: AgentProcess, client: AgentClient):
    before = agent.rss_kib()
    execs = [client.start(["yes"], id=f"flood-{i}-{time.monotonic_ns()}", credit=U64_MAX) for i in range(8)]
    time.sleep(0.5)
    assert agent.rss_kib() - before < 8 * 1024 + 4096
    for _ in range(200):  # it was patient, it did not give up
        assert client.read_frame().type in ("STARTED", "OUTPUT")
    with agent.connect() as again:
        for exec_ in execs:
            again.request("SIGNAL", [("ID", exec_.id), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])
        until(lambda: not any(fields["RUNNING"] for fields in again.list().values()))
        for exec_ in execs:
            again.request("FORGET", [("ID", exec_.id)])


def test_listing_thousands_of_execs(client: AgentClient):
    """More than fits the queue at once; the oldest ended ones make room, and none of the running ones does."""
    stamp = time.monotonic_ns()
    runner = client.start(["sleep", "60"], id=f"runner-{stamp}")
    for i in range(1100):
        client.start(["true"], id=f"{stamp}-{i}", credit=0)
        if i % 50 == 49:
            client.ping()
    until(lambda: client.request("USAGE")[0][0].fields["EXECS_RUNNING"] == 1)
    listed = client.list()
    assert len(listed) == 1024 + 1
    assert runner.id in listed
    assert f"{stamp}-1099" in listed
    assert f"{stamp}-0" not in listed
    client.request("SIGNAL", [("ID", runner.id), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])


# ---- commands that mean harm


def test_a_fork_bomb_does_not_reach_the_agent(agent: AgentProcess, client: AgentClient):
    limit = struct.pack("<IQQ", 6, 300, 300)  # RLIMIT_NPROC counts per user
    fields: list[Field] = [("USER", "12321"), ("RLIMIT", limit), ("TIMEOUT_MS", 1500)]
    bomb = client.start(
        ["sh", "-c", "f() { f | f & }; f; sleep 60"], id=f"bomb-{time.monotonic_ns()}", fields=fields
    )
    bomb.started()
    for i in range(10):
        assert client.ping() < 20
        assert client.run(["echo", "ok"], id=f"beside-{i}-{time.monotonic_ns()}").out == b"ok\n"
    bomb.wait()
    until(lambda: not agent.processes_of(bomb.id))
    until(lambda: not agent.zombies())


def test_no_more_descriptors_is_an_error_not_an_end(fresh: AgentProcess, tmp_path: Path):
    resource.prlimit(fresh.pid, resource.RLIMIT_NOFILE, (64, 64))
    with fresh.connect() as client:
        execs, failures = [], []
        for i in range(40):
            exec_ = client.start(["sleep", "60"], id=f"e{i}")
            try:
                exec_.started()
                execs.append(exec_)
            except AgentError as error:
                failures.append((error.code, error.errno))
        assert set(failures) == {("spawn-failed", 24)}
        assert execs
        # Transfers take one descriptor each, down to the last.
        for i in range(40):
            channel = client.channel()
            client.send("FILE_PUT", [("PATH", str(tmp_path / f"{i}"))], channel=channel)
            if client.expect(channel, "READY", "ERROR").type == "ERROR":
                break
        # There is always room for a new daemon, even beside strangers.
        with AgentClient(fresh.socket, hello=False), AgentClient(fresh.socket, hello=False):
            with fresh.connect(timeout_s=60) as second:
                second.ping()
    with fresh.connect() as client:
        for exec_ in execs:
            client.request("SIGNAL", [("ID", exec_.id), ("SIGNAL", signal.SIGKILL), ("SCOPE", 1)])
        until(lambda: not any(fields["RUNNING"] for fields in client.list().values()))
        assert client.run(["echo", "again"], id="again").out == b"again\n"


def test_hostile_user_tables(fresh: AgentProcess, tmp_path: Path):
    """/etc/passwd and /etc/group are the sandbox's: any type, any size, any content."""

    def answer(table: Path) -> str:
        for target in ("/etc/passwd", "/etc/group"):
            subprocess.run(["mount", "--bind", str(table), target], check=True)
        try:
            with fresh.connect() as client:
                name = f"t{time.monotonic_ns()}"
                return client.run(
                    ["sh", "-c", "id -u; echo $HOME"], id=name, fields=[("USER", "evil")]
                ).out.decode()
        except AgentError as error:
            return error.code
        finally:
            for target in ("/etc/passwd", "/etc/group"):
                subprocess.run(["umount", target], check=True)

    (tmp_path / "good").write_text("evil:x:77:78::/home/e:/bin/sh\n")
    assert answer(tmp_path / "good") == "77\n/home/e\n"
    os.mkfifo(tmp_path / "fifo")
    assert answer(tmp_path / "fifo") == "no-such-user"
    (tmp_path / "big").write_bytes(b"x" * (1 << 20) + b"\nevil:x:77:78::/:/bin/sh\n")
    assert answer(tmp_path / "big") == "no-such-user"
    for i, line in enumerate(
        [b"evil:x:-1:0::/:/x", b"evil:x:4294967295:0::/:", b"evil:x:99999999999:0::/:", b"evil", b"\0\n:::\n"]
    ):
        (tmp_path / f"bad{i}").write_bytes(line)
        assert answer(tmp_path / f"bad{i}") == "no-such-user"
    (tmp_path / "noise").write_bytes(random.Random(1).randbytes(200_000))
    assert answer(tmp_path / "noise") == "no-such-user"


# ---- fuzzing

# Not these: with the fields of chance they would end the agent or change files of the machine.
HARMFUL = {TYPES[t] for t in ("SHUTDOWN", "FILE_PUT", "FILE_REMOVE", "FILE_MKDIR", "FILE_RENAME")}

FOLLOWING = {TYPES[t] for t in ("CREDIT", "INPUT", "CLOSE", "DATA", "COMMIT")}


def seeds(place: Path) -> list[bytes]:
    """Valid frames to begin with."""

    def frame(type: str, channel: int, payload: bytes = b"", flags: int = 0) -> bytes:
        return struct.pack("<IBBHI", len(payload), TYPES[type], flags, 0, channel) + payload

    start: list[Field] = [
        ("ID", "fuzz"),
        ("ARGV", "true"),
        ("FLAGS", ATTACH | STDIN),
        ("CREDIT", 100),
        ("KEEP_MS", 1),
        ("TIMEOUT_MS", 500),
    ]
    cat: list[Field] = [
        ("ID", "cat"),
        ("ARGV", "cat"),
        ("FLAGS", ATTACH | STDIN | PTY),
        ("CREDIT", 10),
        ("KEEP_MS", 1),
        ("TIMEOUT_MS", 500),
    ]
    limits: list[Field] = [
        ("ID", "lim"),
        ("ARGV", "true"),
        ("ENV", "A=b"),
        ("RLIMIT", struct.pack("<IQQ", 7, 20, 20)),
        ("USER", "nobody:mail"),
    ]
    return [
        frame("START", 1, encode(start)),
        frame("START", 2, encode(cat)),
        frame("START", 3, encode(limits)),
        frame("START", 4, encode(start[:2]), MORE),
        frame("ATTACH", 5, encode([("ID", "cat"), ("OFFSET_OUT", 3), ("CREDIT", 50)])),
        frame("CREDIT", 1, encode([("STREAM", 1), ("BYTES", 50)])),
        frame("CREDIT", 2, encode([("STREAM", 1), ("BYTES", U64_MAX)])),
        frame("INPUT", 2, b"hello\n"),
        frame("INPUT", 1, b"", EOF),
        frame("RESIZE", 6, encode([("ID", "cat"), ("ROWS", 3), ("COLS", 9)])),
        frame("SIGNAL", 7, encode([("ID", "cat"), ("SIGNAL", 15), ("SCOPE", 0)])),
        frame("LIST", 8),
        frame("FORGET", 9, encode([("ID", "fuzz")])),
        frame("USAGE", 10),
        frame("PING", 11),
        frame("CLOSE", 2),
        frame("PEEK", 12, encode([("ID", "cat"), ("STREAM", 1), ("OFFSET", 0), ("BYTES", 100)])),
        frame("FILE_GET", 13, encode([("PATH", "/etc/passwd"), ("CREDIT", 100), ("OFFSET", 5)])),
        frame("FILE_STAT", 14, encode([("PATH", "/etc"), ("USER", "nobody")])),
        frame("FILE_LIST", 15, encode([("PATH", "/etc"), ("LIMIT", 5)])),
        frame("DATA", 20, struct.pack("<Q", 10) + b"data"),
        frame("COMMIT", 20, encode([("SIZE", 14)])),
        frame("CREDIT", 13, encode([("BYTES", 1000)])),
    ]


def mutate(rng: random.Random, frame: bytes | bytearray) -> bytes:
    data = bytearray(frame)
    for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 2, 8))):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 5))
        elif len(data) > 13:
            del data[at]
    if (
        rng.random() < 0.7 and len(data) >= 12
    ):  # most of the time a length that fits, so that fields are reached
        data[0:4] = struct.pack("<I", len(data) - 12)
    return bytes(data)


def test_a_fuzzed_agent_closes_but_never_falls(agent: AgentProcess, disk: Path):
    disk.chmod(0o777)
    rng = random.Random(20)
    frames = seeds(disk)
    upload = struct.pack("<IBBHI", 0, TYPES["FILE_PUT"], 0, 0, 20)
    fields = encode([("PATH", str(disk / "f")), ("USER", "nobody")])
    upload = struct.pack("<I", len(fields)) + upload[4:] + fields
    ends = {"closed": 0, "waiting": 0, "answered": 0}
    for _ in range(300):
        with AgentClient(agent.socket, generation=U64_MAX) as client:
            client.last_channel = 1000
            try:
                client.sock.sendall(upload)
                for number in range(21, 21 + rng.randrange(1, 25)):
                    data = bytearray(rng.choice(frames))
                    # Requests open channels one after the other, the rest goes to any of them.
                    data[8] = rng.randrange(20, number + 1) if data[4] in FOLLOWING else number
                    changed = mutate(rng, data)
                    if changed[4] not in HARMFUL:
                        client.sock.sendall(changed)
                # It may be waiting for the rest of a frame.
                client.timeout_s = 0.05 + 0.01 * os.getloadavg()[0]
                client.ping()
                ends["answered"] += 1
            except (BrokenPipeError, ConnectionResetError, Closed):
                ends["closed"] += 1
            except TimeoutError:
                ends["waiting"] += 1
        assert agent.process.poll() is None, agent.said()
    assert min(ends["closed"], ends["answered"]) > 5, ends
    with AgentClient(agent.socket, generation=U64_MAX) as client:
        until(lambda: client.request("USAGE")[0][0].fields["EXECS_RUNNING"] == 0, 60)
        until(lambda: not agent.children())
        assert client.ping() < 10


def test_noise_before_hello_closes(agent: AgentProcess):
    rng = random.Random(7)
    for _ in range(100):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(agent.socket)
            try:
                sock.sendall(rng.randbytes(rng.randrange(12, 5000)))
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(60)
                assert sock.recv(100) == b""
            except ConnectionError:
                pass


# ---- --container


@pytest.fixture(scope="module", params=["plain", "asan"])
def confined(request: pytest.FixtureRequest) -> Iterator[AgentProcess]:
    build()
    with running(request.param, prefix=("unshare", "--net"), arguments=("--container",)) as process:
        yield process


PROBE = """
import ctypes, fcntl, socket, struct
for line in open("/proc/self/status"):
    if line.startswith(("CapBnd", "CapEff", "CapInh", "CapAmb", "NoNewPrivs", "Seccomp:")):
        print(line.strip())
libc = ctypes.CDLL(None, use_errno=True)
print("clone3", libc.syscall(435, 0, 0), ctypes.get_errno())
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
flags = fcntl.ioctl(s, 0x8913, struct.pack("16sH14x", b"lo", 0))
print("lo up", struct.unpack_from("16sH", flags)[1] & 1)
"""
# CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE NET_RAW SYS_CHROOT MKNOD AUDIT_WRITE
# SETFCAP
EXEC_CAPS = sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))


def test_container_execs_have_less(confined: AgentProcess):
    with confined.connect() as client:
        told = client.run(["python3", "-c", PROBE], id=f"root-{time.monotonic_ns()}").out.decode().split()
        values = dict(zip(told[0:12:2], told[1:12:2], strict=True))
        own = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
        caps = {key: int(value, 16) for key, value in values.items() if key.startswith("Cap")}
        assert caps == {"CapInh:": 0, "CapEff:": EXEC_CAPS & own, "CapBnd:": EXEC_CAPS & own, "CapAmb:": 0}
        assert (values["NoNewPrivs:"], values["Seccomp:"]) == ("1", "2")
        assert told[12:] == ["clone3", "-1", "38", "lo", "up", "1"]  # ENOSYS
        told = (
            client.run(
                ["python3", "-c", PROBE], id=f"user-{time.monotonic_ns()}", fields=[("USER", "nobody")]
            )
            .out.decode()
            .split()
        )
        assert int(told[told.index("CapEff:") + 1], 16) == 0
        # Threads, which use clone3 where there is one, still work.
        script = "import threading; t = threading.Thread(target=print, args=('hi',)); t.start(); t.join()"
        assert client.run(["python3", "-c", script], id=f"thread-{time.monotonic_ns()}").out == b"hi\n"


def test_container_workers_have_less_too(confined: AgentProcess, disk: Path):
    with confined.connect() as client:
        channel = client.channel()
        client.send("FILE_PUT", [("PATH", str(disk / "f"))], channel=channel)
        client.expect(channel, "READY")
        until(lambda: len(confined.children()) == 1)  # what the agent began before may not have ended yet
        (worker,) = confined.children()
        status = Path(f"/proc/{worker}/status").read_text()
        assert int(status.partition("CapEff:")[2].split()[0], 16) & ~EXEC_CAPS == 0
        assert int(status.partition("CapBnd:")[2].split()[0], 16) & ~EXEC_CAPS == 0
        files = [os.readlink(f"/proc/{worker}/fd/{fd}") for fd in os.listdir(f"/proc/{worker}/fd")]
        assert sum(name.startswith("socket:") for name in files) == 1
        assert not any("cgroup" in name or name.startswith("anon_inode") for name in files)
        client.send("CLOSE", channel=channel)
        until(lambda: not confined.children())


def test_execs_are_not_as_protected_from_memory_pressure_as_the_agent():
    build()
    protect = "echo -500 > /proc/self/oom_score_adj && "
    if subprocess.run(["sh", "-c", protect + "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("CAP_SYS_RESOURCE is missing")
    with (
        running("plain", prefix=("sh", "-c", protect + 'exec "$@"', "sh")) as process,
        process.connect() as client,
    ):
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "-500\n"
        assert client.run(["cat", "/proc/self/oom_score_adj"], id="a").out == b"0\n"
        assert (
            client.run(["cat", "/proc/self/oom_score_adj"], id="b", fields=[("USER", "nobody")]).out == b"0\n"
        )
