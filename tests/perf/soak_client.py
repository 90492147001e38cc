# SPDX-License-Identifier: Apache-2.0
"""One long-lived program that uses the SDK, driven by ``soak.py``.

Run: ``python3 -m tests.perf.soak_client sync|async SOCKET IMAGE``. Each line on its standard input is a number of
rounds; it answers each with a line ``done ROUNDS RETRIED``. Between two lines it holds no sandbox and no stream.

Here: what a round does. Not here: daemons, readings, verdicts.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from libdsec import AsyncClient, AsyncSandbox, Client, Sandbox
from libdsec.errors import DsecError, InfraError, NotFound

#: Sandboxes at once in a round of the asynchronous client.
TOGETHER = 3
_TREE = {"a.txt": b"a\n", "sub/b.bin": bytes(70_000), "sub/deeper/c": b""}


def make_tree(top: Path) -> None:
    for name, data in _TREE.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(data)


def same_tree(top: Path) -> None:
    found = {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}
    assert found == _TREE, sorted(found)


def sync_round(client: Client, image: str, place: Path) -> None:
    """Create, commands (buffered, streamed, with input, one that fails), files both ways, delete."""
    with Sandbox(image=image, client=client) as box:
        assert box.exec("echo", "hello").text == "hello\n"
        assert box.exec("cat", stdin=b"x" * 100_000).stdout == b"x" * 100_000
        with box.popen("sh", "-c", "seq 1 2000; read line; echo $line", stdin=True) as stream:
            stream.write("end\n")
            stream.close_stdin()
            lines = list(stream.stdout)
            assert lines[-1] == "end" and len(lines) == 2001
        with box.popen("sleep", "600") as stream:
            assert stream.info.running  # left: the sandbox goes with it
        try:
            box.stat("/no/such/file")
        except NotFound:
            pass
        box.write("/root/file", b"y" * 50_000)
        assert box.read("/root/file") == b"y" * 50_000
        box.put_tree(place / "out", "/root/tree")
        target = place / "back"
        box.get_tree("/root/tree", target)
        same_tree(target)
        shutil.rmtree(target)


async def async_one(client: AsyncClient, image: str, place: Path, number: int) -> None:
    """The same with the asynchronous client, and a stream given up in the middle."""
    async with AsyncSandbox(image=image, client=client) as box:
        assert (await box.exec("echo", "hello")).text == "hello\n"
        async with await box.popen("sh", "-c", "seq 1 2000") as stream:
            assert [line async for line in stream.stdout][-1] == "2000"
        async with await box.popen("sleep", "600") as stream:
            reading = asyncio.ensure_future(stream.read())
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await box.write("/root/file", b"y" * 50_000)
        assert await box.read("/root/file") == b"y" * 50_000
        await box.put_tree(place / "out", "/root/tree")
        target = place / f"back-{number}"
        await box.get_tree("/root/tree", target)
        await asyncio.to_thread(same_tree, target)
        await asyncio.to_thread(shutil.rmtree, target)


async def async_round(client: AsyncClient, image: str, place: Path) -> None:
    done = await asyncio.gather(
        *(async_one(client, image, place, number) for number in range(TOGETHER)), return_exceptions=True
    )
    for failure in done:  # only when all have ended
        if failure is not None:
            raise failure


def clear(place: Path) -> None:
    for path in place.glob("back*"):
        shutil.rmtree(path)


def report(rounds: int, retried: int) -> None:
    print("done", rounds, retried, flush=True)


def run_sync(socket: str, image: str, place: Path) -> None:
    with Client(socket) as client:
        for line in sys.stdin:
            retried = 0
            for _ in range(int(line)):
                try:
                    sync_round(client, image, place)
                except InfraError as exc:  # the daemon was killed under a call that must not be repeated
                    retried += told(exc)
                    clear(place)
            report(int(line), retried)


async def run_async(socket: str, image: str, place: Path) -> None:
    async with AsyncClient(socket) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            retried = 0
            for _ in range(int(line)):
                try:
                    await async_round(client, image, place)
                except InfraError as exc:
                    retried += told(exc)
                    await asyncio.to_thread(clear, place)
            report(int(line), retried)


def told(exc: DsecError) -> int:
    print(f"a round ended early: {exc.code}: {exc}", file=sys.stderr, flush=True)
    return 1


def main() -> None:
    kind, socket, image = sys.argv[1:]
    place = Path(tempfile.mkdtemp(prefix=f"soak-{kind}-"))
    try:
        make_tree(place / "out")
        if kind == "sync":
            run_sync(socket, image, place)
        else:
            asyncio.run(run_async(socket, image, place))
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
