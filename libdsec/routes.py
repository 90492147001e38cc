# SPDX-License-Identifier: Apache-2.0
"""The one definition of the HTTP API: each route with its request, response, query and errors.

Server, client, OpenAPI document and tests derive from ``ROUTES``. Not here: handlers (``dsecd.api``), transport.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel

from libdsec import snapshots as s
from libdsec import types as t
from libdsec.memory import MemoryReport

#: Media types of streams; docs/api.md has the formats.
PLAIN = "application/octet-stream"
EXTENTS = "application/x-dsec-extents"
RECORDS = "application/x-dsec-files"


class Scope(StrEnum):
    """What a principal must hold to call a route."""

    READ = "read"  # look at one's own sandboxes, at images and the host
    SANDBOX = "sandbox"  # create and drive one's own sandboxes
    IMAGE = "image"  # change the image store
    ADMIN = "admin"  # see and drive everybody's


@dataclass(frozen=True)
class Query:
    """One query parameter. ``kind`` names how its text is read."""

    name: str
    kind: Literal["str", "int", "float", "bool", "list"] = "str"
    required: bool = False
    doc: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""  # of a str; its meaning in words: types.in_words


@dataclass(frozen=True)
class Route:
    """One operation of the API. ``name`` is the handler's and the client method's name."""

    name: str
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE", "WS"]
    path: str
    scope: Scope
    doc: str
    request: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    query: tuple[Query, ...] = ()
    status: int = 200
    body: Literal["json", "stream"] = "json"  # of the request
    answer: Literal["json", "stream"] = "json"  # of the response
    timeout_s: float = 60.0  # server side; streams have none
    body_limit_bytes: int = field(default=16 << 20)
    values_max: int = 100_000  # in the JSON of a request
    forms: tuple[str, ...] = (PLAIN, EXTENTS)  # of a stream, request's or response's


_STATES = tuple(state.value for state in t.State)
_WAIT = Query("wait_s", "float", doc="block this long for a change", minimum=0, maximum=300)
_ROOM = Query("wait_s", "float", doc="how long it may wait for the host to have room", minimum=0, maximum=110)
_PATH = Query("path", required=True, doc="absolute path in the sandbox")
_PART = Query("part", pattern=t.EXEC_ID_PATTERN, doc="name of a resumable upload")
_USER = Query("user", doc="name or uid whose permissions apply; default the sandbox's user")

ROUTES: tuple[Route, ...] = (
    Route("openapi", "GET", "/v1/openapi.json", Scope.READ, "This API as an OpenAPI 3.1 document.", answer="stream"),
    Route("version", "GET", "/v1/version", Scope.READ, "Version of the daemon.", response=t.VersionInfo),
    Route("host", "GET", "/v1/host", Scope.READ, "What this host offers.", response=t.HostReport),
    Route("doctor", "GET", "/v1/doctor", Scope.READ, "Check the host and look for residue.", response=t.DoctorReport),
    Route("memory", "GET", "/v1/memory", Scope.READ, "What memory sandboxes and the host use, and what was reclaimed.",
          response=MemoryReport,
          query=(Query("sandbox", "list", doc="only these; all that run or are paused without it"), Query("after"),
                 Query("limit", "int", doc="default 1000", minimum=1, maximum=10000))),
    # sandboxes
    Route("create", "POST", "/v1/sandboxes", Scope.SANDBOX, "Create a sandbox and start it.",
          t.CreateRequest, t.Sandbox, status=201, timeout_s=120),
    Route("create_batch", "POST", "/v1/sandboxes/batch", Scope.SANDBOX, "Create many; per-item results.",
          t.BatchCreateRequest, t.Operation, status=202, body_limit_bytes=64 << 20, values_max=1_000_000),
    Route("list", "GET", "/v1/sandboxes", Scope.READ, "List sandboxes.", response=t.SandboxList,
          query=(Query("label", "list", doc="NAME=VALUE or NAME; all must match"),
                 Query("state", "list", choices=_STATES), Query("after"),
                 Query("limit", "int", minimum=1, maximum=10000))),
    Route("inspect", "GET", "/v1/sandboxes/{id}", Scope.READ, "One sandbox.", response=t.Sandbox),
    Route("usage", "GET", "/v1/sandboxes/{id}/usage", Scope.READ, "What it uses and has used: CPU, memory, processes.",
          response=t.SandboxUsage),
    Route("network", "GET", "/v1/sandboxes/{id}/network", Scope.READ, "What it may reach, and what was refused.",
          response=t.NetworkState),
    Route("update", "PATCH", "/v1/sandboxes/{id}", Scope.SANDBOX, "Change labels, TTL, limits or network.",
          t.UpdateRequest, t.Sandbox),
    Route("delete", "DELETE", "/v1/sandboxes/{id}", Scope.SANDBOX, "Delete in any state; idempotent.",
          response=t.Empty, timeout_s=120),
    Route("stop", "POST", "/v1/sandboxes/{id}/stop", Scope.SANDBOX, "End its processes, keep its files.",
          t.StopRequest, t.Sandbox, timeout_s=3700),
    Route("start", "POST", "/v1/sandboxes/{id}/start", Scope.SANDBOX, "Run a stopped sandbox again.",
          response=t.Sandbox, query=(_ROOM,), timeout_s=120),
    Route("pause", "POST", "/v1/sandboxes/{id}/pause", Scope.SANDBOX, "Freeze its processes.", response=t.Sandbox),
    Route("resume", "POST", "/v1/sandboxes/{id}/resume", Scope.SANDBOX, "Thaw its processes.", response=t.Sandbox),
    Route("fork", "POST", "/v1/sandboxes/{id}/fork", Scope.SANDBOX, "Copy it with what runs in it, or make no copy.",
          s.ForkRequest, t.SandboxList, status=201, timeout_s=300),
    Route("snapshot_create", "POST", "/v1/sandboxes/{id}/snapshots", Scope.SANDBOX,
          "Save it with what runs in it under a name.", s.SnapshotRequest, s.Snapshot, status=201, timeout_s=300),
    Route("wait", "GET", "/v1/sandboxes/{id}/wait", Scope.READ, "Wait until it is in one of the states.",
          response=t.Sandbox, query=(Query("state", "list", required=True, choices=_STATES), _WAIT), timeout_s=310),
    Route("forward", "WS", "/v1/sandboxes/{id}/forward", Scope.SANDBOX,
          "A connection to a port on its loopback; see docs/api.md for the messages.",
          query=(Query("port", "int", required=True, minimum=1, maximum=65535),)),
    # snapshots
    Route("snapshots", "GET", "/v1/snapshots", Scope.READ, "List snapshots.", response=s.SnapshotList),
    Route("snapshot_inspect", "GET", "/v1/snapshots/{id}", Scope.READ, "One snapshot, and who uses it.",
          response=s.Snapshot),
    Route("snapshot_remove", "DELETE", "/v1/snapshots/{id}", Scope.SANDBOX, "Remove one that no sandbox runs from.",
          response=t.Empty),
    Route("clone", "POST", "/v1/snapshots/{id}/clones", Scope.SANDBOX,
          "Create sandboxes that begin as it is, or create none.", s.CloneRequest, t.SandboxList, status=201,
          timeout_s=300),
    # execs
    Route("exec", "POST", "/v1/sandboxes/{id}/execs", Scope.SANDBOX, "Run a command to its end, output buffered.",
          t.ExecRequest, t.ExecResult, body_limit_bytes=128 << 20, timeout_s=0),
    Route("exec_start", "POST", "/v1/sandboxes/{id}/execs/start", Scope.SANDBOX, "Start a command and return.",
          t.ExecRequest, t.ExecInfo, status=201, body_limit_bytes=128 << 20),
    Route("exec_stream", "WS", "/v1/sandboxes/{id}/execs/stream", Scope.SANDBOX,
          "Start or attach with streams; see docs/api.md for the frames.", t.StreamStart),
    Route("exec_list", "GET", "/v1/sandboxes/{id}/execs", Scope.READ, "Execs the sandbox knows.",
          response=t.ExecList),
    Route("exec_inspect", "GET", "/v1/sandboxes/{id}/execs/{exec_id}", Scope.READ, "One exec.", response=t.ExecInfo),
    Route("exec_wait", "GET", "/v1/sandboxes/{id}/execs/{exec_id}/wait", Scope.READ,
          "Its buffered output and status once it has ended; timed-out when it has not.", response=t.ExecResult,
          query=(_WAIT, Query("max_output_bytes", "int", minimum=0, maximum=64 << 20)), timeout_s=310),
    Route("exec_output", "GET", "/v1/sandboxes/{id}/execs/{exec_id}/output", Scope.READ,
          "Read output without attaching.", response=t.ExecOutput,
          query=(Query("stream", doc="default stdout", choices=("stdout", "stderr")), Query("offset", "int", minimum=0),
                 Query("limit", "int", minimum=1, maximum=1 << 20))),
    Route("exec_signal", "POST", "/v1/sandboxes/{id}/execs/{exec_id}/signal", Scope.SANDBOX, "Send a signal.",
          t.SignalRequest, t.Empty),
    Route("exec_resize", "POST", "/v1/sandboxes/{id}/execs/{exec_id}/resize", Scope.SANDBOX, "Resize its terminal.",
          t.ResizeRequest, t.Empty),
    Route("exec_forget", "DELETE", "/v1/sandboxes/{id}/execs/{exec_id}", Scope.SANDBOX,
          "Drop the record of an ended exec.", response=t.Empty),
    # files
    Route("get_file", "GET", "/v1/sandboxes/{id}/files", Scope.READ, "Download a file.", answer="stream",
          query=(_PATH, _USER, Query("offset", "int", minimum=0),
                 Query("length", "int", minimum=0, doc="0: to the end")), timeout_s=0),
    Route("put_file", "PUT", "/v1/sandboxes/{id}/files", Scope.SANDBOX, "Upload a file; it appears whole or not.",
          body="stream", response=t.FileInfo, body_limit_bytes=0, timeout_s=0,
          query=(_PATH, _USER, Query("mode", "int", minimum=0, maximum=0o7777),
                 Query("umask", "int", minimum=0, maximum=0o777), Query("parents", "bool"),
                 Query("exclusive", "bool"), Query("mtime_ns", "int", minimum=0),
                 _PART, Query("offset", "int", minimum=0),
                 Query("size", "int", minimum=0, doc="final size; the body may end in a hole"))),
    Route("get_files", "POST", "/v1/sandboxes/{id}/files/batch", Scope.READ, "Download many small files.",
          t.GetFilesRequest, answer="stream", timeout_s=0, forms=(RECORDS,)),
    Route("put_files", "PUT", "/v1/sandboxes/{id}/files/batch", Scope.SANDBOX,
          "Upload many files and directories; each file appears whole or not.", body="stream", response=t.Empty,
          body_limit_bytes=0, timeout_s=0, query=(_PATH, _USER), forms=(RECORDS,)),
    Route("put_state", "GET", "/v1/sandboxes/{id}/files/part", Scope.SANDBOX,
          "How much of a resumable upload has arrived.", response=t.FileInfo,
          query=(_PATH, _USER, replace(_PART, required=True))),
    Route("stat", "GET", "/v1/sandboxes/{id}/files/stat", Scope.READ, "stat(2).", response=t.FileInfo,
          query=(_PATH, _USER, Query("follow", "bool"))),
    Route("list_dir", "GET", "/v1/sandboxes/{id}/files/list", Scope.READ, "A page of a directory.",
          response=t.FileList, query=(_PATH, _USER, Query("cursor"), Query("limit", "int", minimum=1, maximum=10000))),
    Route("remove_file", "DELETE", "/v1/sandboxes/{id}/files", Scope.SANDBOX, "Remove a file or tree.",
          response=t.Empty, query=(_PATH, _USER, Query("recursive", "bool")), timeout_s=600),
    Route("mkdir", "POST", "/v1/sandboxes/{id}/files/mkdir", Scope.SANDBOX, "Make a directory.",
          t.MkdirRequest, t.Empty),
    Route("rename", "POST", "/v1/sandboxes/{id}/files/rename", Scope.SANDBOX, "Rename inside the sandbox.",
          t.RenameRequest, t.Empty),
    # images
    Route("images", "GET", "/v1/images", Scope.READ, "List images.", response=t.ImageList),
    Route("image_inspect", "GET", "/v1/images/inspect", Scope.READ, "One image.", response=t.ImageInfo,
          query=(Query("ref", required=True),)),
    Route("image_import", "POST", "/v1/images/import", Scope.IMAGE, "Import an image.",
          t.ImportRequest, t.Operation, status=202),
    Route("image_build_debian", "POST", "/v1/images/build-debian", Scope.IMAGE, "Build a Debian base image.",
          t.BuildDebianRequest, t.Operation, status=202),
    Route("image_tag", "POST", "/v1/images/tag", Scope.IMAGE, "Give an image another name.",
          t.TagRequest, t.ImageInfo),
    Route("image_remove", "DELETE", "/v1/images", Scope.IMAGE, "Remove a name, or an image and what only it holds.",
          response=t.Empty, query=(Query("ref", required=True),), timeout_s=300),
    # operations and events
    Route("operations", "GET", "/v1/operations", Scope.READ, "List operations.", response=t.OperationList),
    Route("operation", "GET", "/v1/operations/{operation_id}", Scope.READ, "One operation.", response=t.Operation,
          query=(_WAIT,), timeout_s=310),
    Route("operation_cancel", "DELETE", "/v1/operations/{operation_id}", Scope.SANDBOX, "Cancel it.",
          response=t.Operation),
    Route("events", "GET", "/v1/events", Scope.READ, "Events after `since`.", response=t.EventList,
          query=(Query("since", "int", minimum=0), Query("limit", "int", minimum=1, maximum=10000), _WAIT),
          timeout_s=310),
    Route("events_stream", "WS", "/v1/events/stream", Scope.READ, "Events as they happen, one JSON text each.",
          query=(Query("since", "int", minimum=0),)),
)  # fmt: skip

BY_NAME = {route.name: route for route in ROUTES}
