# SPDX-License-Identifier: Apache-2.0
"""The daemon's agent link with the real agent: both read the protocol's document the same way."""

import asyncio
import hashlib
import os
import secrets
import signal
import socket
import stat
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dsecd.backends.agentlink.frames import MAX_OFFSET
from dsecd.backends.agentlink.link import (
    AgentError,
    AgentLink,
    Collected,
    Exit,
    ExitKind,
    ExitReason,
    LinkLost,
    Output,
    StartRequest,
    connect,
)
from tests.support import cgroups

AGENT = Path(__file__).parents[2] / "build/agent/dsec-agent"

pytestmark = pytest.mark.skipif(not AGENT.exists(), reason=f"{AGENT} is not built: make -C agent")

Story = Callable[[AgentLink], Coroutine[Any, Any, None]]


class Agent:
    """A running agent (not as process 1) with a cgroup of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cgroup = Path(f"/sys/fs/cgroup/dsec-test-link-{secrets.token_hex(6)}")
        for folder in (self.cgroup, self.cgroup / "agent", self.cgroup / "run"):
            folder.mkdir()
        directory = os.open(self.cgroup, os.O_RDONLY | os.O_DIRECTORY)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(8)
            fds = (listener.fileno(), directory)
            arguments = [str(AGENT), f"--listen-fd={fds[0]}", f"--cgroup-fd={fds[1]}"]
            self.process = subprocess.Popen(arguments, pass_fds=fds, stdin=subprocess.DEVNULL)
        os.close(directory)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(60)
        cgroups.remove_tree(self.cgroup)

    @asynccontextmanager
    async def link(self, generation: int = 1, lost: list[LinkLost] | None = None) -> AsyncIterator[AgentLink]:
        report = (lost if lost is not None else []).append
        link = await connect(self.path, generation=generation, timeout_s=60, on_lost=report)
        yield link
        await link.close()

    def play(self, story: Story) -> None:
        """Runs a story with a link that nobody may have lost at its end."""

        async def main() -> None:
            lost: list[LinkLost] = []
            async with self.link(lost=lost) as link, asyncio.timeout(60):
                await story(link)
                await link.ping(60)
                channels = link._conn.channels
                assert channels.keys() == {0}, channels
            assert lost == []

        asyncio.run(main())


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "agent.sock")
    yield agent
    agent.stop()


async def run(link: AgentLink, exec_id: str, *argv: str, limit: int = 1 << 20, **more: Any) -> Collected:
    channel = await link.start(StartRequest(exec_id, argv, **more), attach=True)
    return await channel.collect(limit)


def test_output_status_and_totals(agent: Agent) -> None:
    async def story(link: AgentLink) -> None:
        result = await run(link, "a", "sh", "-c", "printf out; printf err >&2; exit 7")
        assert (result.stdout, result.stderr) == (b"out", b"err")
        assert (result.exit.kind, result.exit.status, result.exit.reason) == (
            ExitKind.EXITED, 7, ExitReason.ENDED,
        )  # fmt: skip
        assert (result.stdout_total, result.stdout_truncated) == (3, False)
        assert 0 < result.exit.started_ns <= result.exit.finished_ns
        killed = await run(link, "b", "sh", "-c", "kill -9 $$")
        assert (killed.exit.kind, killed.exit.status) == (ExitKind.SIGNALLED, 9)

    agent.play(story)


def test_request_reaches_the_command(agent: Agent, tmp_path: Path) -> None:
    async def story(link: AgentLink) -> None:
        script = 'printf "%s\\n" "$A" "$(pwd)" "$(umask)" "$(id -u)" "$(ulimit -n)" "$1"'
        result = await run(
            link, "a", "sh", "-c", script, "sh", "x" * 100_000,
            env=["A=b", "PATH=/usr/bin:/bin"], cwd=str(tmp_path), umask=0o027, user="0", rlimits=[(7, 99, 99)],
        )  # fmt: skip
        lines = result.stdout.decode().split()
        assert lines == ["b", str(tmp_path), "0027", "0", "99", "x" * 100_000]

    agent.play(story)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (StartRequest("a", ["/nonexistent"]), "not-found"),
        (StartRequest("a", ["/etc/passwd"]), "not-executable"),
        (StartRequest("a", ["true"], cwd="/nonexistent"), "bad-cwd"),
        (StartRequest("a", ["true"], user="nobody-such"), "no-such-user"),
    ],
)
def test_refusals(agent: Agent, request_: StartRequest, code: str) -> None:
    async def story(link: AgentLink) -> None:
        with pytest.raises(AgentError) as caught:
            await link.start(request_, attach=True)
        assert caught.value.code == code

    agent.play(story)


def test_long_output_is_drained_beyond_the_limit(agent: Agent) -> None:
    async def story(link: AgentLink) -> None:
        result = await run(link, "a", "head", "-c", "50000000", "/dev/zero", limit=1000)
        assert (result.stdout, result.stdout_truncated) == (bytes(1000), True)
        assert result.stdout_total == 50_000_000
        assert result.exit.dropped_out == 0

    agent.play(story)


def test_reader_that_waits_holds_the_producer(agent: Agent) -> None:
    async def story(link: AgentLink) -> None:
        request = StartRequest("a", ["head", "-c", "3000000", "/dev/zero"], buffer_bytes=65536)
        channel = await link.start(request, attach=True, window=10_000)
        await asyncio.sleep(0.2)
        (record,) = await link.list_execs("a")
        assert record.running
        assert record.offset_out < 300_000
        total = 0
        async for event in channel.events():
            if isinstance(event, Output):
                assert event.offset == total
                total += len(event.data)
        assert total == 3_000_000

    agent.play(story)


def test_stdin_of_many_mebibytes(agent: Agent) -> None:
    data = os.urandom(1 << 20) * 20

    async def story(link: AgentLink) -> None:
        channel = await link.start(StartRequest("a", ["sha256sum"], stdin_open=True), attach=True)
        collecting = asyncio.ensure_future(channel.collect(1000))
        await channel.write_stdin(data)
        await channel.close_stdin()
        result = await collecting
        assert result.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
        # What nobody reads is dropped, and does not block.
        channel = await link.start(StartRequest("b", ["true"], stdin_open=True), attach=True)
        await channel.write_stdin(data)
        await channel.close_stdin()
        assert (await channel.collect(10)).exit.status == 0

    agent.play(story)


def test_pty_resize(agent: Agent) -> None:
    async def story(link: AgentLink) -> None:
        script = "stty size; read x; stty size"
        request = StartRequest("a", ["sh", "-c", script], pty=True, rows=10, cols=20, stdin_open=True)
        channel = await link.start(request, attach=True)
        seen = b""
        while b"10 20" not in seen:
            event = await channel.next()
            assert isinstance(event, Output)
            seen += event.data
        await link.resize("a", 33, 44)
        await channel.write_stdin(b"\n")
        assert b"33 44" in (await channel.collect(1000)).stdout

    agent.play(story)


def test_signal_timeout_and_tree(agent: Agent) -> None:
    async def story(link: AgentLink) -> None:
        channel = await link.start(StartRequest("a", ["sleep", "100"]), attach=True)
        await link.signal("a", signal.SIGTERM, tree=False)
        assert (await channel.collect(0)).exit.status == signal.SIGTERM
        channel = await link.start(StartRequest("b", ["sh", "-c", "setsid sleep 100 & wait"]), attach=True)
        await link.signal("b", signal.SIGKILL, tree=True)
        ended = (await channel.collect(0)).exit
        assert (ended.kind, ended.reason) == (ExitKind.SIGNALLED, ExitReason.KILLED)
        late = await run(link, "c", "sh", "-c", "echo partial; sleep 100", timeout_ms=2000)
        assert (late.stdout, late.exit.reason) == (b"partial\n", ExitReason.TIMEOUT)

    agent.play(story)


def test_attach_again_from_the_offset_reached(agent: Agent) -> None:
    async def main() -> None:
        script = "i=0; while [ $i -lt 2000 ]; do echo line$i; i=$((i+1)); done; exit 3"
        expected = b"".join(b"line%d\n" % i for i in range(2000))
        got, offset = b"", 0
        async with agent.link(generation=1) as link:
            channel = await link.start(StartRequest("a", ["sh", "-c", script]), attach=True, window=2000)
            while len(got) < 4000:
                event = await channel.next()
                assert isinstance(event, Output)
                channel.consumed(1, len(event.data))
                got += event.data
            offset, _ = channel.offsets
            assert offset == len(got)
        # The link is gone without a word; another daemon comes with the next generation.
        async with agent.link(generation=2) as link:
            channel = await link.attach("a", offset_out=offset)
            assert channel.offsets == (offset, 0)
            result = await channel.collect(1 << 20)
            assert (got + result.stdout, result.exit.status) == (expected, 3)
            peeked = await link.peek("a", 1, 0, 1 << 20)
            assert peeked.offset == peeked.start
            assert (peeked.data, peeked.end) == (expected[peeked.start :], len(expected))
            with pytest.raises(AgentError, match="invalid"):
                await link.attach("a", offset_out=len(expected) + 1)
            await link.forget("a")
            assert await link.list_execs() == []
            with pytest.raises(AgentError, match="not-found"):
                await link.attach("a")

    asyncio.run(main())


def test_takeovers(agent: Agent) -> None:
    async def main() -> None:
        lost: list[LinkLost] = []
        async with agent.link(generation=5, lost=lost) as link:
            first = await link.start(StartRequest("a", ["sleep", "100"]), attach=True)
            second = await link.attach("a")
            with pytest.raises(AgentError, match="detached"):
                await first.next()
            with pytest.raises((AgentError, LinkLost)) as caught:
                async with agent.link(generation=4):
                    pass
            assert isinstance(caught.value, AgentError)
            assert caught.value.code == "stale-generation"
            async with agent.link(generation=5) as newer:
                with pytest.raises(LinkLost) as gone:
                    await second.next()
                assert gone.value.violation is None
                await newer.signal("a", signal.SIGKILL, tree=True)
        assert [error.violation for error in lost] == [None]

    asyncio.run(main())


def test_detached_commands_go_on(agent: Agent) -> None:
    async def story(link: AgentLink) -> None:
        channel = await link.start(StartRequest("a", ["sh", "-c", "sleep 0.2; echo done"]), attach=False)
        assert channel.pid > 0
        flood = await link.start(StartRequest("b", ["cat", "/dev/zero"]), attach=True)
        await flood.next()
        await flood.detach()
        result = await (await link.attach("a")).collect(100)
        assert result.stdout == b"done\n"
        usage = await link.usage()
        assert (usage.execs_running, usage.execs_total) == (1, 2)
        # Its ring turns over all the time: what is told is in one piece and from one place.
        for _ in range(5):
            peeked = await link.peek("b", 1, 0, 1 << 20)
            assert peeked.data == bytes(len(peeked.data))
            assert peeked.data
        await link.signal("b", signal.SIGKILL, tree=True)
        ended = await (await link.attach("b")).collect(0)
        assert ended.exit.dropped_out > 0

    agent.play(story)


def test_many_at_once_and_many_cancelled(agent: Agent) -> None:
    async def story(link: AgentLink) -> None:
        results = await asyncio.gather(
            *(run(link, f"a{i}", "sh", "-c", f"printf {i}; exit 7") for i in range(60))
        )
        assert [result.stdout for result in results] == [b"%d" % i for i in range(60)]
        assert {result.exit.status for result in results} == {7}
        tasks = [asyncio.ensure_future(run(link, f"b{i}", "cat", "/dev/zero")) for i in range(20)]
        async with asyncio.timeout(60):
            while sum(record.running for record in await link.list_execs()) < 20:
                await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        running = [record for record in await link.list_execs() if record.running]
        for record in running:
            await link.signal(record.exec_id, signal.SIGKILL, tree=True)
        assert len(running) == 20

    agent.play(story)


def test_shutdown_ends_the_agent(agent: Agent) -> None:
    async def main() -> None:
        async with agent.link() as link:
            channel = await link.start(StartRequest("a", ["sleep", "100"]), attach=True)
            await link.shutdown(5000)
            try:
                event: object = await channel.next()
            except LinkLost as error:
                event = error
            assert isinstance(event, Exit | LinkLost)
        assert await asyncio.to_thread(agent.process.wait, 60) == 0

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------- files


def test_upload_and_download(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "a/b/f"
    data = os.urandom(3_000_000)

    async def story(link: AgentLink) -> None:
        async with await link.put_file(str(path), mode=0o640, umask=0, parents=True) as writer:
            await writer.write(0, data)
            assert not path.exists()
            await writer.write(5_000_000, b"tail")
            await writer.commit(6_000_000)
        assert path.read_bytes() == data + bytes(2_000_000) + b"tail" + bytes(1_000_000 - 4)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        content = bytearray(6_000_000)
        async with link.get_file(str(path)) as reader:
            info = await reader.open()
            assert info.size == 6_000_000
            sent = 0
            async for offset, piece in reader:
                content[offset : offset + len(piece)] = piece
                sent += len(piece)
        assert content == path.read_bytes()
        assert reader.end == 6_000_000
        assert sent < 6_000_000  # holes are not sent
        async with link.get_file(str(path), offset=10, length=20) as reader:
            assert b"".join([piece async for _, piece in reader]) == data[10:30]
        # More than any file has, of which offset and length together are no 64-bit number.
        async with link.get_file(str(path), offset=20, length=MAX_OFFSET) as reader:
            assert sum([len(piece) async for _, piece in reader]) == sent - 20
        async with await link.put_file(str(tmp_path / "gone")) as writer:
            await writer.write(0, b"x")
        async with link.get_file("/dev/zero") as reader:
            with pytest.raises(AgentError, match="not-regular"):
                await reader.open()
        with pytest.raises(AgentError, match="exists"):
            async with await link.put_file(str(path), exclusive=True) as writer:
                await writer.commit(0)

    agent.play(story)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(("gone", "."))] == []


def fill(folder: Path, names: set[bytes]) -> None:
    for name in names:
        (folder / os.fsdecode(name)).write_bytes(b"abc")


def test_records_of_files(agent: Agent, tmp_path: Path) -> None:
    async def story(link: AgentLink) -> None:
        await link.mkdir(str(tmp_path / "d/e"), mode=0o700, parents=True)
        names = {b"n%d" % i for i in range(25)} | {b"\xff\xfe"}
        fill(tmp_path / "d/e", names)
        os.symlink("n1", tmp_path / "l")
        info = await link.stat(str(tmp_path / "l"))
        assert (stat.S_ISLNK(info.mode), info.target) == (True, b"n1")
        listed, cursor = set(), 0
        while True:
            entries, cursor = await link.list_dir(str(tmp_path / "d/e"), cursor=cursor, limit=10)
            assert len(entries) <= 10
            listed |= {(entry.name, entry.size) for entry in entries}
            if not cursor:
                break
        assert listed == {(name, 3) for name in names}
        old = tmp_path / "d/e/n1"
        os.utime(old, ns=(0, -5_000_000_000))
        info = await link.stat(str(old))
        found = old.stat()
        assert (info.mode, info.uid, info.mtime_ns, info.ino, info.nlink) == (
            found.st_mode, found.st_uid, found.st_mtime_ns, found.st_ino, 1,
        )  # fmt: skip
        await link.rename(str(old), str(tmp_path / "moved"))
        assert (tmp_path / "moved").read_bytes() == b"abc"
        with pytest.raises(AgentError):
            await link.remove(str(tmp_path / "d"))
        await link.remove(str(tmp_path / "d"), recursive=True)
        assert not (tmp_path / "d").exists()
        with pytest.raises(AgentError, match="not-found"):
            await link.remove(str(tmp_path / "d"))

    agent.play(story)
