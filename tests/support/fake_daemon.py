# SPDX-License-Identifier: Apache-2.0
"""A daemon that keeps everything in memory, on a real Unix socket: for tests of the SDK and the command line.

It follows ``ROUTES`` and can be told to break connections at chosen moments. Commands in its sandboxes are a few names
it knows (``echo``, ``cat``, ``exit``, ``emit`` …). It proves nothing about the real daemon.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import WSMsgType, web
from pydantic import BaseModel

from libdsec import memory as m
from libdsec import types as t
from libdsec.errors import (
    AlreadyExists,
    BackendFailed,
    DsecError,
    NotFound,
    Refused,
    TimedOut,
    WrongState,
)
from libdsec.frames import Extents, extent, output_frame
from libdsec.routes import ROUTES, Route
from tests.support.fake_batches import Batches
from tests.support.fake_commands import Exec, run
from tests.support.fake_copies import Copies
from tests.support.fake_state import EXTENTS, IMAGE, NOW, Box, State

_MACHINE = m.MachineMemory(
    guest_bytes=60 << 20, layers_bytes=8 << 20, monitor_bytes=30 << 20, guest_resident_bytes=70 << 20,
    size_bytes=256 << 20, told={"available": 180 << 20},
)  # fmt: skip


class _Host(State):
    """Routes about host, operations, events."""

    async def on_openapi(self, request: web.Request) -> dict[str, Any]:
        return {"openapi": "3.1.0"}

    async def on_version(self, request: web.Request) -> t.VersionInfo:
        return t.VersionInfo(version="0.1.0", started_at=NOW, generation=1)

    async def on_host(self, request: web.Request) -> t.HostReport:
        return t.HostReport(
            hostname="h1", kernel="6.12.1", machine="x86_64", dsec_version="0.1.0", cpus=2,
            memory_bytes=8 << 30, memory_available_bytes=4 << 30, state_dir="/var/lib/dsec",
            disk_free_bytes=100 << 30, sandboxes={"running": len(self.boxes)},
            backends=(t.BackendState(name="container", works=True),),
            features=(
                t.FeatureState(name="overlay", works=True, why="layers"),
                t.FeatureState(name="core-sched", works=False, why="isolation", detail="CONFIG_SCHED_CORE is off",
                               hint="boot the kernel of package dsec-kernel"),
            ),
        )  # fmt: skip

    async def on_doctor(self, request: web.Request) -> t.DoctorReport:
        return t.DoctorReport(findings=(
            t.Finding(check="crun", ok=True, detail="1.21"),
            t.Finding(check="feature kvm", ok=False, needed=False, detail="/dev/kvm is missing"),
            t.Finding(check="residue", ok=False, detail="1 stray mount", hint="restart dsecd"),
        ))  # fmt: skip

    async def on_memory(self, request: web.Request) -> m.MemoryReport:
        named = request.query.getall("sandbox", [])
        # A page holds one sandbox, so that clients have to ask for more.
        ids = sorted(id for id in named or self.boxes if id > request.query.get("after", ""))
        one = {"used_bytes": 3 << 20, "cold_bytes": 1 << 20, "swapped_bytes": 90 << 20, "refaults": 7, "idle_s": 61.5}
        return m.MemoryReport(
            host=m.HostMemory(
                total_bytes=4 << 30, available_bytes=1 << 30, sandboxes_bytes=6 << 20, swap_total_bytes=2 << 30,
                swap_used_bytes=180 << 20, zram_stored_bytes=180 << 20, zram_memory_bytes=40 << 20,
                pressure_some_percent=1.5, pressure_full_percent=0.0, reclaim="memory.reclaim",
                reclaim_detail="1 kdamond(s) of somebody else are set up", reclaimed_bytes=200 << 20,
            ),
            sandboxes=tuple(
                m.SandboxMemory(
                    id=id, reclaimed_bytes=100 << 20, pressure_some_percent=0.25, pressure_full_percent=0.0,
                    **(one if id == "web" else {}), machine=_MACHINE if id == "vm" else None,
                ) for id in ids[:1]
            ),
            next=ids[0] if len(ids) > 1 and not named else None,
        )  # fmt: skip

    async def on_operations(self, request: web.Request) -> t.OperationList:
        return t.OperationList(operations=(self._operation("op1", t.OperationState.DONE),))

    async def on_operation(self, request: web.Request) -> t.Operation:
        id = request.match_info["operation_id"]
        if id == "bad":
            body = t.ErrorBody.model_validate(BackendFailed("import 'x': no such file").to_wire())
            done = self._operation(id, t.OperationState.FAILED)
            return done.model_copy(update={"error": body})
        if id == "batch":
            items = [t.BatchItem(sandbox=box.info).model_dump(mode="json") for box in self.boxes.values()]
            return self._operation(id, t.OperationState.DONE, items)
        return self._operation(id, t.OperationState.DONE, IMAGE.model_dump(mode="json"))

    async def on_operation_cancel(self, request: web.Request) -> t.Operation:
        return self._operation(request.match_info["operation_id"], t.OperationState.CANCELLED)

    async def on_events(self, request: web.Request) -> t.EventList:
        since, limit = int(request.query.get("since", 0)), int(request.query.get("limit", 1000))
        newer = [event for event in self.events if event.seq > since]
        return t.EventList(events=tuple(newer[:limit]), last=len(self.events))

    async def on_events_stream(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for event in self.events:
            if event.seq > int(request.query.get("since", 0)):
                await socket.send_str(event.model_dump_json())
        await socket.close()
        return socket


class _Sandboxes(State):
    """Routes about sandboxes."""

    async def on_create(self, request: web.Request) -> t.Sandbox:
        return self.make(t.CreateRequest.model_validate_json(await request.read()))

    async def on_create_batch(self, request: web.Request) -> t.Operation:
        for item in t.BatchCreateRequest.model_validate_json(await request.read()).items:
            self.make(item)
        return self._operation("batch", t.OperationState.RUNNING)

    async def on_list(self, request: web.Request) -> t.SandboxList:
        found = [box.info for box in self.boxes.values()]
        for label in request.query.getall("label", []):
            name, _, value = label.partition("=")
            found = [info for info in found if info.spec.labels.get(name) == value]
        if states := request.query.getall("state", []):
            found = [info for info in found if info.state in states]
        return t.SandboxList(sandboxes=tuple(found))

    async def on_inspect(self, request: web.Request) -> t.Sandbox:
        return self._box(request).info

    def _move(self, request: web.Request, state: t.State, *allowed: t.State) -> t.Sandbox:
        box = self._box(request)
        if box.info.state not in allowed:
            raise WrongState(
                f"'{box.info.id}' is {box.info.state}, not {allowed[0]}", state=box.info.state, required=allowed[0]
            )
        box.info = box.info.model_copy(update={"state": state})
        return box.info

    async def on_update(self, request: web.Request) -> t.Sandbox:
        box = self._box(request)
        wanted = t.UpdateRequest.model_validate_json(await request.read())
        if wanted.labels is not None:
            spec = box.info.spec.model_copy(update={"labels": wanted.labels})
            box.info = box.info.model_copy(update={"spec": spec})
        return box.info

    async def on_delete(self, request: web.Request) -> dict[str, Any]:
        self.boxes.pop(request.match_info["id"], None)
        return {}

    async def on_usage(self, request: web.Request) -> t.SandboxUsage:
        box = self._box(request)
        if box.info.state not in (t.State.RUNNING, t.State.PAUSED):
            raise WrongState(f"read the usage of '{box.info.id}': it is {box.info.state}", state=box.info.state)
        # A host with all controllers for those that were given a command, one with none for the others.
        counted = {"memory_current_bytes": 3 << 20, "pids_current": 9} if "main" in box.execs else {}
        running = sum(command.running for command in box.execs.values())
        return t.SandboxUsage(
            id=box.info.id, processes=4, execs_running=running, execs_total=len(box.execs), cpu_user_us=1_500_000,
            cpu_system_us=200_000, max_rss_kib=2048, cpu_usage_us=1_750_000, **counted,
        )  # fmt: skip

    async def on_network(self, request: web.Request) -> t.NetworkState:
        box = self._box(request)
        if box.info.spec.network == "none":
            return t.NetworkState(id=box.info.id, policy="none")
        denial = t.NetworkDenial(at=NOW, address="203.0.113.9", port=25, protocol="tcp", reason="policy")
        return t.NetworkState(
            id=box.info.id, policy=box.info.spec.network, addresses=("198.18.0.1",), sent_packets=7, denied=1,
            recent=(denial,), dns="198.18.255.254", opened_addresses=2, denied_names=3,
            recent_names=(t.NameDenial(at=NOW, name="exfil.example"),),
        )  # fmt: skip

    async def on_forward(self, request: web.Request) -> web.WebSocketResponse:
        """An echo on port 80; nobody listens on any other."""
        self._box(request)
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        port = int(request.query["port"])
        if port != 80:
            error = Refused(f"connect to port {port} of 'web': nobody listens there")
            await socket.send_str(json.dumps(error.to_wire()))
            await socket.close()
            return socket
        await socket.send_str(json.dumps({"port": port}))
        while (message := await socket.receive()).type is web.WSMsgType.BINARY and message.data:
            await socket.send_bytes(message.data)
        await socket.send_bytes(b"")
        await socket.close()
        return socket

    async def on_stop(self, request: web.Request) -> t.Sandbox:
        return self._move(request, t.State.STOPPED, t.State.RUNNING, t.State.PAUSED)

    async def on_start(self, request: web.Request) -> t.Sandbox:
        return self._move(request, t.State.RUNNING, t.State.STOPPED)

    async def on_pause(self, request: web.Request) -> t.Sandbox:
        return self._move(request, t.State.PAUSED, t.State.RUNNING)

    async def on_resume(self, request: web.Request) -> t.Sandbox:
        return self._move(request, t.State.RUNNING, t.State.PAUSED)

    async def on_wait(self, request: web.Request) -> t.Sandbox:
        box = self._box(request)
        if box.info.state not in request.query.getall("state"):
            raise TimedOut(f"wait for '{box.info.id}': it is {box.info.state}")
        return box.info


class _Execs(State):
    """Routes about execs."""

    def _exec(self, request: web.Request) -> Exec:
        execs, exec_id = self._box(request).execs, request.match_info["exec_id"]
        if exec_id not in execs:
            raise NotFound(f"look up exec '{exec_id}': no such exec")
        return execs[exec_id]

    def _run(self, box: Box, wanted: t.ExecRequest, stdin: bytes | None) -> Exec:
        if box.info.state is not t.State.RUNNING:
            raise WrongState(f"exec in '{box.info.id}': it is {box.info.state}", hint=f"dsecctl start {box.info.id}")
        if wanted.exec_id in box.execs:
            raise AlreadyExists(f"exec '{wanted.exec_id}': it exists")
        command = run(wanted, stdin)
        self.started += 1
        box.execs[wanted.exec_id or ""] = command
        return command

    async def on_exec(self, request: web.Request) -> t.ExecResult:
        wanted = t.ExecRequest.model_validate_json(await request.read())
        command = self._run(self._box(request), wanted, wanted.stdin)
        while command.running:
            command.changed.clear()
            await command.changed.wait()
        return command.result()

    async def on_exec_start(self, request: web.Request) -> t.ExecInfo:
        wanted = t.ExecRequest.model_validate_json(await request.read())
        return t.ExecInfo(**self._run(self._box(request), wanted, wanted.stdin).info())

    async def on_exec_list(self, request: web.Request) -> t.ExecList:
        execs = self._box(request).execs.values()
        return t.ExecList(execs=tuple(t.ExecInfo(**command.info()) for command in execs))

    async def on_exec_inspect(self, request: web.Request) -> t.ExecInfo:
        return t.ExecInfo(**self._exec(request).info())

    async def on_exec_wait(self, request: web.Request) -> t.ExecResult:
        command = self._exec(request)
        if command.running:
            raise TimedOut("wait: it still runs")
        return command.result()

    async def on_exec_output(self, request: web.Request) -> t.ExecOutput:
        command = self._exec(request)
        data = command.stderr if request.query.get("stream") == "stderr" else command.stdout
        offset = int(request.query.get("offset", 0))
        piece = data[offset : offset + int(request.query.get("limit", 1 << 20))]
        return t.ExecOutput(data=piece, offset=offset, end=len(data), running=command.running)

    async def on_exec_signal(self, request: web.Request) -> dict[str, Any]:
        command = self._exec(request)
        wanted = t.SignalRequest.model_validate_json(await request.read())
        command.signals.append(wanted.signal)
        if command.running and wanted.signal in (9, 15):
            command.end(None, wanted.signal)
        return {}

    async def on_exec_resize(self, request: web.Request) -> dict[str, Any]:
        wanted = t.ResizeRequest.model_validate_json(await request.read())
        self._exec(request).sizes.append((wanted.rows, wanted.cols))
        return {}

    async def on_exec_forget(self, request: web.Request) -> dict[str, Any]:
        del self._box(request).execs[request.match_info["exec_id"]]
        return {}

    async def on_exec_stream(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        self.connections += 1
        try:
            start = t.StreamStart.model_validate_json(await socket.receive_str())
            box = self._box(request)
            if start.start is not None:
                command = self._run(box, start.start, None)
                if start.stdin and command.request.argv[0] == "cat":
                    command.running = True
            else:
                command = box.execs.get(start.attach or "") or _no_exec(start.attach)
            await socket.send_bytes(b"\x10" + t.ExecInfo(**command.info()).model_dump_json().encode())
            reading = asyncio.ensure_future(self._read_input(socket, command))
            try:
                await self._send_output(request, socket, command, start)
            finally:
                reading.cancel()
        except DsecError as exc:
            await socket.send_str(json.dumps(exc.to_wire()))
        finally:
            self.connections -= 1
        await socket.close()
        return socket

    async def _read_input(self, socket: web.WebSocketResponse, command: Exec) -> None:
        while True:
            message = await socket.receive()
            if message.type is not WSMsgType.BINARY:
                command.changed.set()
                return
            kind, body = message.data[0], message.data[1:]
            if kind == 0:
                command.stdin += body
                command.stdout += body
                command.changed.set()
                if self.acknowledge_stdin:
                    await socket.send_bytes(b"\x13" + struct.pack("<Q", len(command.stdin)))
            elif kind == 1:
                command.end()
            elif kind == 2:
                size = t.ResizeRequest.model_validate_json(body)
                command.sizes.append((size.rows, size.cols))

    async def _send_output(
        self, request: web.Request, socket: web.WebSocketResponse, command: Exec, start: t.StreamStart
    ) -> None:
        cut = self.stream_cuts.pop(0) if self.stream_cuts else None
        out, err, sent = max(start.stdout_offset, command.oldest), start.stderr_offset, 0
        while not socket.closed:
            command.changed.clear()
            running = command.running
            while out < len(command.stdout) or err < len(command.stderr):
                if cut is not None and sent >= cut:
                    self._break(request)
                    return
                if out < len(command.stdout):
                    data = command.stdout[out : out + 1000]
                    # Now and then a piece that overlaps what went before, as after a hurried re-attach.
                    back = min(3, out - start.stdout_offset) if sent % 3000 == 0 else 0
                    piece = command.stdout[out - back : out] + data if out - back >= command.oldest else data
                    await socket.send_bytes(output_frame("stdout", out + len(data) - len(piece), piece))
                    out += len(data)
                else:
                    data = command.stderr[err : err + 1000]
                    await socket.send_bytes(output_frame("stderr", err, data))
                    err += len(data)
                sent += len(data)
            if cut is not None and not running and sent >= cut:
                self._break(request)
                return
            if not running:
                await socket.send_bytes(b"\x1f" + t.ExecInfo(**command.info()).model_dump_json().encode())
                return
            await command.changed.wait()


class _Files(State):
    """Routes about files."""

    def _file(self, request: web.Request) -> tuple[str, dict[str, Any]]:
        files, path = self._box(request).files, request.query["path"]
        path = path.rstrip("/") or "/"
        if path not in files:
            raise NotFound(f"look up '{path}': no such file")
        return path, files[path]

    @staticmethod
    def _stat(path: str, entry: dict[str, Any]) -> t.FileInfo:
        return t.FileInfo(
            name=entry.get("name", path.rsplit("/", 1)[1]), type=entry["type"], mode=entry.get("mode", 0o644),
            uid=0, gid=0, size_bytes=entry.get("size", len(entry.get("data", b""))),
            mtime_ns=entry.get("mtime_ns", 1_700_000_000_000_000_000), target=entry.get("target"),
        )  # fmt: skip

    async def on_stat(self, request: web.Request) -> t.FileInfo:
        return self._stat(*self._file(request))

    async def on_list_dir(self, request: web.Request) -> t.FileList:
        path, entry = self._file(request)
        if entry["type"] != "directory":
            raise WrongState(f"list '{path}': it is no directory")
        prefix = path.rstrip("/") + "/"
        files = self._box(request).files
        names = [
            name for name in files if name != "/" and name.startswith(prefix) and "/" not in name[len(prefix) :]
        ]
        begin = int(request.query.get("cursor", 0))
        page = names[begin : begin + 2]
        following = str(begin + 2) if begin + 2 < len(names) else None
        return t.FileList(entries=tuple(self._stat(name, files[name]) for name in page), next=following)

    async def on_remove_file(self, request: web.Request) -> dict[str, Any]:
        path, _ = self._file(request)
        files = self._box(request).files
        for name in [name for name in files if name == path or name.startswith(path + "/")]:
            del files[name]
        return {}

    async def on_mkdir(self, request: web.Request) -> dict[str, Any]:
        wanted = t.MkdirRequest.model_validate_json(await request.read())
        files = self._box(request).files
        if wanted.fs_path in files:
            raise AlreadyExists(f"make '{wanted.fs_path}': it exists")
        files[wanted.fs_path] = {"type": "directory", "mode": wanted.mode & ~wanted.umask}
        return {}

    async def on_rename(self, request: web.Request) -> dict[str, Any]:
        wanted = t.RenameRequest.model_validate_json(await request.read())
        files = self._box(request).files
        files[wanted.fs_target] = files.pop(wanted.fs_path)
        return {}

    async def on_put_state(self, request: web.Request) -> t.FileInfo:
        parts = self._box(request).parts
        if request.query["part"] not in parts:
            raise NotFound("look up a part: no such part")
        return self._stat(request.query["path"], {"type": "file", "data": parts[request.query["part"]]})

    async def on_put_file(self, request: web.Request) -> web.StreamResponse | t.FileInfo:
        box, query = self._box(request), request.query
        path = query["path"]
        if query.get("exclusive") == "true" and path in box.files:
            raise AlreadyExists(f"put '{path}': it exists")
        data = box.parts.setdefault(query["part"], bytearray()) if "part" in query else bytearray()
        decoder = Extents() if request.content_type == EXTENTS else None
        cut = self.body_cuts.pop(0) if self.body_cuts else None
        at, count = int(query.get("offset", 0)), 0
        extents = []
        async for piece in request.content.iter_any():
            found = decoder.feed(piece) if decoder else iter([(at, piece)])
            for offset, chunk in found:
                data.extend(bytes(max(0, offset + len(chunk) - len(data))))
                data[offset : offset + len(chunk)] = chunk
                at = offset + len(chunk)
                count += len(chunk)
                extents.append((offset, len(chunk)))
            if cut is not None and count >= cut:
                return self._break(request)
        size = int(query.get("size", len(data)))
        data.extend(bytes(max(0, size - len(data))))
        entry = {"type": "file", "data": bytes(data), "mode": int(query.get("mode", 0o644)), "extents": extents}
        box.files[path] = entry
        box.parts.pop(query.get("part", ""), None)
        return self._stat(path, entry)

    async def on_get_file(self, request: web.Request) -> web.StreamResponse:
        _, entry = self._file(request)
        begin = int(request.query.get("offset", 0))
        data: bytes = entry["data"]
        sparse = EXTENTS in request.headers.get("Accept", "")
        kind = EXTENTS if sparse else "application/octet-stream"
        response = web.StreamResponse(headers={"Content-Type": kind, "X-Dsec-Size": str(len(data))})
        await response.prepare(request)
        cut, sent = self.body_cuts.pop(0) if self.body_cuts else None, 0
        for offset in range(begin, len(data), 65536):
            piece = data[offset : offset + 65536]
            if cut is not None and sent >= cut:
                self._break(request)
                return response
            if not sparse:
                await response.write(piece)
            elif piece.strip(b"\0"):
                await response.write(extent(offset, piece))
            sent += len(piece)
        if sparse:
            await response.write(extent(len(data), b""))
        await response.write_eof()
        return response


class _Images(State):
    """Routes about images."""

    async def on_images(self, request: web.Request) -> t.ImageList:
        return t.ImageList(images=tuple(self.images))

    async def on_image_inspect(self, request: web.Request) -> t.ImageInfo:
        if request.query["ref"] not in IMAGE.names:
            raise NotFound(f"inspect image '{request.query['ref']}': no such image")
        return IMAGE

    async def on_image_import(self, request: web.Request) -> t.Operation:
        self.imports.append(wanted := t.ImportRequest.model_validate_json(await request.read()))
        return self._operation("bad" if wanted.source == "/nowhere" else "op1", t.OperationState.RUNNING)

    async def on_image_build_debian(self, request: web.Request) -> t.Operation:
        t.BuildDebianRequest.model_validate_json(await request.read())
        return self._operation("op1", t.OperationState.RUNNING)

    async def on_image_tag(self, request: web.Request) -> t.ImageInfo:
        wanted = t.TagRequest.model_validate_json(await request.read())
        return IMAGE.model_copy(update={"names": (*IMAGE.names, wanted.name)})

    async def on_image_remove(self, request: web.Request) -> dict[str, Any]:
        return {}


class FakeDaemon(_Host, _Sandboxes, Copies, _Execs, _Files, Batches, _Images):
    """``with FakeDaemon() as daemon``: listens on ``daemon.socket`` until the block ends.

    ``faults[route]`` is a list of what happens to its next requests: ``"lose"`` drops one unread, ``"cut"`` does it and
    drops the answer, an exception is the answer, None is no fault.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="dsec-fake-"))
        self.socket = str(self.folder / "s")
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()
        asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self.folder)

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """Call something in the daemon's own thread."""

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def up(self) -> None:
        """Listen."""
        asyncio.run_coroutine_threadsafe(self._up(), self._loop).result()

    def down(self) -> None:
        """Stop listening and drop every connection; what it knows stays."""
        asyncio.run_coroutine_threadsafe(self._down(), self._loop).result()

    async def _up(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        for route in ROUTES:
            method = "GET" if route.method == "WS" else route.method
            app.router.add_route(method, route.path, self._handler(route))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.UnixSite(self._runner, self.socket).start()

    async def _down(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
            await asyncio.to_thread(Path(self.socket).unlink, missing_ok=True)

    def _handler(self, route: Route) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            fault = self.faults[route.name].pop(0) if self.faults[route.name] else None
            self.seen.append((route.name, {**request.match_info, **request.query}))
            if fault == "lose":
                return self._break(request)
            try:
                if isinstance(fault, DsecError):
                    raise fault
                answer = await getattr(self, f"on_{route.name}")(request)
            except DsecError as exc:
                return web.json_response(exc.to_wire(), status=exc.http_status)
            if fault == "cut":
                return self._break(request)
            if isinstance(answer, web.StreamResponse):
                return answer
            text = answer.model_dump_json() if isinstance(answer, BaseModel) else json.dumps(answer)
            return web.Response(text=text, status=route.status, content_type="application/json")

        return handle

def _no_exec(exec_id: str | None) -> Exec:
    raise NotFound(f"attach to exec '{exec_id}': no such exec")
