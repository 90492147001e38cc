#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""A program with Firecracker's command line and API, but no virtual machine: strict where Firecracker is.

Written from Firecracker's OpenAPI document, its change log and what a real 1.12.1 answers; it shares nothing with the
code under test. Unknown fields, fields of a later release, calls in the wrong phase and files that cannot be opened
are refused in Firecracker's words. It runs alone, as the jailer copies and starts it; a scenario (which release it
is, what goes wrong) takes the place of the next line that begins with SCENARIO.

`faults` maps "METHOD /path" to what that call does: die, die-late (after its effect), half (of an answer), or one of
`misbehave`. `start` is what happens instead of serving: exit, no-socket, mute, or a path that the API's socket leads
to. `guest` is what the guest's port does: echo, nobody, hang, garbage; `boot_s` how long it takes until then.
`snapshot` is what a snapshot writes instead of its state: a link, a fifo, a second-name, or nothing.
"""

import argparse
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SCENARIO: dict[str, Any] = {}

VERSION = SCENARIO.get("version", "1.16.1")
RELEASE = tuple(int(number) for number in VERSION.split(".")[:3])
BODY_LIMIT = 51_200
ID = re.compile(r"[A-Za-z0-9_]+")
AGENT_PORT = 5005

Found = dict[str, Any]
Check = Callable[[Any, str], None]
#: How a field is checked, whether it must be there, and the release that brought it.
Rule = tuple[Check, bool, tuple[int, ...]]
Schema = dict[str, Rule]


class Refused(Exception):
    """A call that is answered with status 400."""


class Fatal(Refused):
    """As above, and the process ends after the answer."""


# -------------------------------------------------------------------------------------------------- the schema


def integer(low: int, high: int) -> Check:
    def check(value: Any, name: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Refused(bad_json(f"invalid type: `{value}` for `{name}`, expected an integer"))
        if not low <= value <= high:
            raise Refused(bad_json(f"invalid value: `{value}` for `{name}`, expected {low} to {high}"))

    return check


def a(kind: type) -> Check:
    def check(value: Any, name: str) -> None:
        if not isinstance(value, kind):
            raise Refused(bad_json(f"invalid type: `{value}` for `{name}`, expected {kind.__name__}"))

    return check


def one_of(*variants: str) -> Check:
    def check(value: Any, name: str) -> None:
        if value not in variants:
            raise Refused(bad_json(f"unknown variant `{value}` for `{name}`, expected one of {variants}"))

    return check


def many(schema: Schema) -> Check:
    def check(value: Any, name: str) -> None:
        a(list)(value, name)
        for item in value:
            validate(item, schema)

    return check


def part(schema: Schema) -> Check:
    return lambda value, _name: validate(value, schema)


def bad_json(text: str) -> str:
    return f"An error occurred when deserializing the json body of a request: {text}."


U63, U32 = integer(0, (1 << 63) - 1), integer(0, (1 << 32) - 1)
ANY, V1_13, V1_14, V1_16 = (0,), (1, 13, 0), (1, 14, 0), (1, 16, 0)
BUCKET: Schema = {"size": (U63, True, ANY), "refill_time": (U63, True, ANY), "one_time_burst": (U63, False, ANY)}
LIMITER: Schema = {"bandwidth": (part(BUCKET), False, ANY), "ops": (part(BUCKET), False, ANY)}
LIMITED: Rule = (part(LIMITER), False, ANY)
MACHINE: Schema = {
    "vcpu_count": (integer(0, 255), True, ANY), "mem_size_mib": (integer(0, 1 << 40), True, ANY),
    "smt": (a(bool), False, ANY), "track_dirty_pages": (a(bool), False, ANY),
    "huge_pages": (one_of("None", "2M"), False, ANY), "cpu_template": (a(str), False, ANY),
}  # fmt: skip
BACKEND: Schema = {"backend_type": (one_of("File", "Uffd"), True, ANY), "backend_path": (a(str), True, ANY)}
NETWORK_OVERRIDE: Schema = {"iface_id": (a(str), True, ANY), "host_dev_name": (a(str), True, ANY)}

#: (method, path) -> (schema, phase: pre, post or both, first release)
CALLS: dict[tuple[str, str], tuple[Schema | None, str, tuple[int, ...]]] = {
    ("PUT", "/machine-config"): (MACHINE, "pre", ANY),
    ("PATCH", "/machine-config"): ({name: (rule[0], False, rule[2]) for name, rule in MACHINE.items()}, "pre", ANY),
    ("PUT", "/boot-source"): ({
        "kernel_image_path": (a(str), True, ANY), "initrd_path": (a(str), False, ANY),
        "boot_args": (a(str), False, ANY),
    }, "pre", ANY),
    ("PUT", "/drives/ID"): ({
        "drive_id": (a(str), True, ANY), "path_on_host": (a(str), True, ANY), "is_root_device": (a(bool), True, ANY),
        "is_read_only": (a(bool), False, ANY), "partuuid": (a(str), False, ANY), "rate_limiter": LIMITED,
        "cache_type": (one_of("Unsafe", "Writeback"), False, ANY), "io_engine": (one_of("Sync", "Async"), False, ANY),
    }, "pre", ANY),
    ("PATCH", "/drives/ID"): ({
        "drive_id": (a(str), True, ANY), "path_on_host": (a(str), False, ANY), "rate_limiter": LIMITED,
    }, "post", ANY),
    ("PUT", "/pmem/ID"): ({
        "id": (a(str), True, ANY), "path_on_host": (a(str), True, ANY), "root_device": (a(bool), False, ANY),
        "read_only": (a(bool), False, ANY), "rate_limiter": (part(LIMITER), False, V1_16),
    }, "pre", V1_14),
    ("PUT", "/network-interfaces/ID"): ({
        "iface_id": (a(str), True, ANY), "host_dev_name": (a(str), True, ANY), "guest_mac": (a(str), False, ANY),
        "mtu": (integer(68, 65535), False, V1_16), "rx_rate_limiter": LIMITED, "tx_rate_limiter": LIMITED,
    }, "pre", ANY),
    ("PUT", "/vsock"): ({
        "guest_cid": (integer(3, 0xFFFFFFFE), True, ANY), "uds_path": (a(str), True, ANY),
        "vsock_id": (a(str), False, ANY),
    }, "pre", ANY),
    ("PUT", "/balloon"): ({
        "amount_mib": (U32, True, ANY), "deflate_on_oom": (a(bool), True, ANY),
        "stats_polling_interval_s": (integer(0, 65535), False, ANY),
        "free_page_hinting": (a(bool), False, V1_14), "free_page_reporting": (a(bool), False, V1_14),
    }, "pre", ANY),
    ("PATCH", "/balloon"): ({"amount_mib": (U32, True, ANY)}, "post", ANY),
    ("PUT", "/entropy"): ({"rate_limiter": LIMITED}, "pre", ANY),
    ("PUT", "/serial"): ({
        "serial_out_path": (a(str), False, ANY), "rate_limiter": (part(BUCKET), False, V1_16),
    }, "pre", V1_14),
    ("PUT", "/actions"): ({
        "action_type": (one_of("FlushMetrics", "InstanceStart", "SendCtrlAltDel"), True, ANY),
    }, "both", ANY),
    ("PATCH", "/vm"): ({"state": (one_of("Paused", "Resumed"), True, ANY)}, "post", ANY),
    ("PUT", "/snapshot/create"): ({
        "snapshot_path": (a(str), True, ANY), "mem_file_path": (a(str), True, ANY),
        "snapshot_type": (one_of("Full", "Diff"), False, ANY),
    }, "post", ANY),
    ("PUT", "/snapshot/load"): ({
        "snapshot_path": (a(str), True, ANY), "mem_backend": (part(BACKEND), True, ANY),
        "resume_vm": (a(bool), False, ANY), "enable_diff_snapshots": (a(bool), False, ANY),
        "track_dirty_pages": (a(bool), False, V1_13), "network_overrides": (many(NETWORK_OVERRIDE), False, ANY),
        "vsock_override": (part({"uds_path": (a(str), True, ANY)}), False, V1_16),
        "clock_realtime": (a(bool), False, V1_16),
    }, "pre", ANY),
    ("GET", "/"): (None, "both", ANY), ("GET", "/version"): (None, "both", ANY),
    ("GET", "/machine-config"): (None, "both", ANY), ("GET", "/balloon"): (None, "both", ANY),
    ("GET", "/balloon/statistics"): (None, "post", ANY), ("GET", "/vm/config"): (None, "both", ANY),
}  # fmt: skip


def validate(found: Any, schema: Schema) -> None:
    a(dict)(found, "body")
    known = {name: rule for name, rule in schema.items() if rule[2] <= RELEASE}
    for name in found:
        if name not in known:
            expected = ", ".join(f"`{other}`" for other in known)
            raise Refused(bad_json(f"unknown field `{name}`, expected one of {expected} at line 1 column 1"))
    for name, (check, required, _) in known.items():
        if name in found:
            check(found[name], name)
        elif required:
            raise Refused(bad_json(f"missing field `{name}` at line 1 column 1"))


# --------------------------------------------------------------------------------------------------- the machine


def openable(path: str, flags: int, words: str) -> None:
    try:
        os.close(os.open(path, flags))
    except OSError as error:
        raise Refused(f"{words}: {error.strerror} (os error {error.errno}) {path}".rstrip()) from None


class Machine:
    """What the calls have made so far."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.state = "Not started"
        self.machine: Found = {
            "vcpu_count": 1, "mem_size_mib": 128, "smt": False, "track_dirty_pages": False, "huge_pages": "None",
        }  # fmt: skip
        self.drives: dict[str, Found] = {}
        self.pmem: dict[str, Found] = {}
        self.nics: dict[str, Found] = {}
        self.boot: Found | None = None
        self.vsock: Found | None = None
        self.balloon: Found | None = None
        self.touched = False
        self.listener: socket.socket | None = None

    def put_machine_config(self, _id: str, found: Found) -> None:
        self.patch_machine_config(_id, found)

    def patch_machine_config(self, _id: str, found: Found) -> None:
        new = self.machine | found
        if not 1 <= new["vcpu_count"] <= 32 or (new["smt"] and new["vcpu_count"] % 2 and new["vcpu_count"] > 1):
            raise Refused(
                "Machine config error: The number of vCPUs must be greater than 0, less than 32 and must be 1 or an "
                "even number if SMT is enabled."
            )
        if new["mem_size_mib"] == 0 or (new["huge_pages"] == "2M" and new["mem_size_mib"] % 2):
            raise Refused(
                "Machine config error: The memory size (MiB) is either 0, or not a multiple of the configured page "
                "size."
            )
        self.machine = new

    def put_boot_source(self, _id: str, found: Found) -> None:
        openable(found["kernel_image_path"], os.O_RDONLY, "Boot source error: The kernel file cannot be opened")
        if "initrd_path" in found:
            openable(found["initrd_path"], os.O_RDONLY, "Boot source error: The initrd file cannot be opened")
        self.boot = found

    def put_drives(self, name: str, found: Found) -> None:
        same_id(name, found["drive_id"])
        if found["is_root_device"] and any(d["is_root_device"] for n, d in self.drives.items() if n != name):
            raise Refused("Drive config error: A root block device already exists!")
        flags = os.O_RDONLY if found.get("is_read_only") else os.O_RDWR
        words = "Drive config error: Unable to create the virtio block device: Virtio backend error: Error manipulating"
        openable(found["path_on_host"], flags, f"{words} the backing file")
        self.drives[name] = found

    def patch_drives(self, name: str, found: Found) -> None:
        same_id(name, found["drive_id"])
        if name not in self.drives:
            raise Refused("Drive config error: Unable to patch the block device: Device manager error: not found")
        if "path_on_host" in found:
            openable(found["path_on_host"], os.O_RDWR, "Drive config error: Error manipulating the backing file")
            self.drives[name]["path_on_host"] = found["path_on_host"]

    def put_pmem(self, name: str, found: Found) -> None:
        same_id(name, found["id"])
        flags = os.O_RDONLY if found.get("read_only") else os.O_RDWR
        openable(found["path_on_host"], flags, "Pmem config error: Unable to open the backing file")
        if os.stat(found["path_on_host"]).st_size == 0:
            raise Refused("Pmem config error: The backing file is empty")
        self.pmem[name] = found

    def put_network_interfaces(self, name: str, found: Found) -> None:
        same_id(name, found["iface_id"])
        if not os.path.exists(f"/sys/class/net/{found['host_dev_name']}"):
            raise Refused("Network config error: Could not create the network device: Open tap device failed")
        if found.get("guest_mac") in [nic.get("guest_mac", "") for other, nic in self.nics.items() if other != name]:
            raise Refused("Network config error: The MAC address is already in use")
        self.nics[name] = found

    def put_vsock(self, _id: str, found: Found) -> None:
        """The socket is made by this call, and answers once the machine runs."""
        self.listener = socket.socket(socket.AF_UNIX)
        if self.vsock is not None:
            os.unlink(self.vsock["uds_path"])
        try:
            self.listener.bind(found["uds_path"])
        except OSError as error:
            raise Refused(f"Vsock config error: Cannot create vsock device: {error.strerror}") from None
        self.listener.listen(16)
        self.vsock = found

    def put_balloon(self, _id: str, found: Found) -> None:
        if found["amount_mib"] > self.machine["mem_size_mib"]:
            raise Refused("Balloon config error: Amount of pages requested is too large.")
        self.balloon = found

    def patch_balloon(self, _id: str, found: Found) -> None:
        balloon = self.need_balloon()
        if found["amount_mib"] > self.machine["mem_size_mib"]:
            raise Refused("Balloon config error: Amount of pages requested is too large.")
        balloon["amount_mib"] = found["amount_mib"]

    def need_balloon(self) -> Found:
        if self.balloon is None:
            raise Refused("Balloon config error: Error creating the balloon device: No balloon device found.")
        return self.balloon

    def put_entropy(self, _id: str, _found: Found) -> None:
        pass

    def put_serial(self, _id: str, found: Found) -> None:
        if "serial_out_path" in found:
            openable(found["serial_out_path"], os.O_WRONLY, "Serial error: Cannot open the output")

    def put_actions(self, _id: str, found: Found) -> None:
        action = found["action_type"]
        if action == "InstanceStart":
            self.need_phase("pre")
            if self.boot is None:
                raise Refused("Start microvm error: Cannot start microvm without kernel configuration.")
            self.run("Running")
        else:
            self.need_phase("post")

    def patch_vm(self, _id: str, found: Found) -> None:
        self.state = "Running" if found["state"] == "Resumed" else "Paused"

    def put_snapshot(self, kind: str, found: Found) -> None:
        if kind == "load":
            load(self, found)
        else:
            create(self, found)

    def run(self, state: str) -> None:
        self.state = state
        if self.listener is not None:
            threading.Thread(target=serve_guest, args=(self.listener, self), daemon=True).start()

    def need_phase(self, phase: str) -> None:
        if phase == "pre" and self.state != "Not started":
            raise Refused("The requested operation is not supported after starting the microVM.")
        if phase == "post" and self.state == "Not started":
            raise Refused("The requested operation is not supported before starting the microVM.")


def create(machine: Machine, found: Found) -> None:
    if machine.state != "Paused":
        raise Refused(
            "Create snapshot error: Cannot save the microVM state: Operation not allowed: save/restore unavailable "
            "while running"
        )
    if found.get("snapshot_type") == "Diff" and not machine.machine["track_dirty_pages"]:
        raise Refused(
            "The requested operation is not supported: Diff snapshots are not allowed on uVMs with dirty page "
            "tracking disabled."
        )
    whole = {name: getattr(machine, name) for name in ("machine", "drives", "pmem", "nics", "vsock", "balloon")}
    with open(found["mem_file_path"], "wb") as file:
        file.truncate(machine.machine["mem_size_mib"] << 20)
    kind = SCENARIO.get("snapshot")
    if kind == "link":
        os.symlink("/etc/passwd", found["snapshot_path"])
    elif kind == "fifo":
        os.mkfifo(found["snapshot_path"])
    elif kind == "second-name":
        os.link(found["mem_file_path"], found["snapshot_path"])
    elif kind != "nothing":
        with open(found["snapshot_path"], "w") as file:
            json.dump({"version": VERSION, **whole}, file)


def load(machine: Machine, found: Found) -> None:
    if machine.touched:
        raise Refused(
            "Load snapshot error: Loading a microVM snapshot not allowed after configuring boot-specific resources."
        )
    words = "Load snapshot error: Failed to restore from snapshot"
    try:
        with open(found["snapshot_path"]) as file:
            whole = json.load(file)
        os.close(os.open(found["mem_backend"]["backend_path"], os.O_RDONLY))
        if whole.pop("version").split(".")[0] != VERSION.split(".")[0]:
            raise ValueError("Invalid snapshot version")
        vsock, opened = whole.pop("vsock"), [*whole["drives"].values(), *whole["pmem"].values()]
        for device in opened:
            writable = not device.get("is_read_only", False) and not device.get("read_only", False)
            os.close(os.open(device["path_on_host"], os.O_RDWR if writable else os.O_RDONLY))
        for name, value in whole.items():
            setattr(machine, name, value)
        if vsock is not None:
            machine.put_vsock("", vsock)
    except (OSError, ValueError, KeyError, TypeError, Refused) as error:
        raise Fatal(f"{words}: {error}") from None
    for override in found.get("network_overrides", []):
        if override["iface_id"] not in machine.nics:
            raise Fatal(f"{words}: unknown network device")
    machine.run("Running" if found.get("resume_vm") else "Paused")


def same_id(path: str, body: str) -> None:
    if path != body:
        raise Refused("The id from the path does not match the id from the body!")


def tell(machine: Machine, path: str) -> Found:
    if path == "/":
        return {"id": machine.instance, "state": machine.state, "vmm_version": VERSION, "app_name": "Firecracker"}
    if path == "/version":
        return {"firecracker_version": VERSION}
    if path == "/machine-config":
        return machine.machine
    if path == "/balloon/statistics":
        return statistics(machine)
    if path == "/balloon":
        if machine.balloon is None:
            raise Refused("Balloon config error: No balloon device found.")
        return machine.balloon
    return {
        "balloon": machine.balloon, "drives": list(machine.drives.values()), "boot-source": machine.boot,
        "machine-config": machine.machine, "network-interfaces": list(machine.nics.values()), "vsock": machine.vsock,
        "pmem": list(machine.pmem.values()),
    }  # fmt: skip


def statistics(machine: Machine) -> Found:
    balloon = machine.need_balloon()
    if not balloon.get("stats_polling_interval_s"):
        raise Refused("Balloon config error: Statistics for the balloon device are not enabled")
    amount, total = balloon["amount_mib"], machine.machine["mem_size_mib"] << 20
    pages = {"target_pages": amount * 256, "actual_pages": amount * 256, "target_mib": amount, "actual_mib": amount}
    if SCENARIO.get("guest", "echo") != "echo":
        return pages  # what a guest that has not booted tells
    memory = {"free_memory": total // 2, "total_memory": total, "available_memory": total // 2, "disk_caches": 0}
    return {**pages, **memory}


# ----------------------------------------------------------------------------------------------------- the guest


def serve_guest(listener: socket.socket, machine: Machine) -> None:
    booted = time.monotonic() + SCENARIO.get("boot_s", 0)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=guest_port, args=(sock, machine, booted), daemon=True).start()


def guest_port(sock: socket.socket, machine: Machine, booted: float) -> None:
    with sock:
        line = b""
        while not line.endswith(b"\n") and len(line) < 40:
            line += sock.recv(1) or b"\n"
        found = re.fullmatch(rb"CONNECT (\d+)\n", line)
        kind = SCENARIO.get("guest", "echo")
        if not found or kind == "nobody" or int(found[1]) != AGENT_PORT or time.monotonic() < booted:
            return
        if kind == "hang":
            time.sleep(3600)
        if kind == "garbage":
            sock.sendall(b"HTTP/1.1 200 what is this\r\n\r\n")
            return
        sock.sendall(b"OK 1073741824\nthe guest speaks first\n")
        while data := sock.recv(65536):
            while machine.state != "Running":
                time.sleep(0.01)
            sock.sendall(data)


# ------------------------------------------------------------------------------------------------------ the API


def handle(machine: Machine, method: str, target: str, content: bytes) -> tuple[int, Found | None]:
    """Status and body of the answer to one request."""
    tokens = [token for token in target.split("/") if token]
    path, name = "/" + "/".join(tokens), ""
    if tokens and tokens[0] in ("drives", "pmem", "network-interfaces") and len(tokens) > 1:
        path, name = f"/{tokens[0]}/ID", tokens[1]
    schema, phase, since = CALLS.get((method, path), (None, "", (1 << 30,)))
    try:
        if since > RELEASE:
            raise Refused(f"Invalid request method and/or path: {method} {tokens[0] if tokens else ''}.")
        if schema is None:
            machine.need_phase(phase)
            return 200, tell(machine, path)
        if not content:
            raise Refused(f"Empty {method} request.")
        if name and not ID.fullmatch(name):
            raise Refused("API Resource IDs can only contain alphanumeric characters and underscores.")
        try:
            found = json.loads(content)
        except ValueError as error:
            raise Refused(bad_json(str(error))) from None
        validate(found, schema)
        machine.need_phase(phase)
        call = f"{method.lower()}_{tokens[0].replace('-', '_')}"
        getattr(machine, call)(name or (tokens[1] if len(tokens) > 1 else ""), found)
        if phase == "pre" and tokens[0] not in ("serial", "snapshot"):
            machine.touched = True
    except Fatal as error:
        return -400, {"fault_message": str(error)}
    except Refused as error:
        return 400, {"fault_message": str(error)}
    return 204, None


def answer(status: int, found: Found | bytes | None) -> bytes:
    head = f"HTTP/1.1 {abs(status)} \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n"
    if found is None:
        return head.encode() + b"\r\n"
    content = found if isinstance(found, bytes) else json.dumps(found).encode()
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def misbehave(sock: socket.socket, fault: str, method: str, target: str) -> None:
    """Answer as no Firecracker should."""
    if fault == "die":
        os._exit(9)
    if fault == "slow":
        time.sleep(3600)
    if fault == "garbage":
        sock.sendall(b"\x00\xff" * 300 + b"\r\n\r\n")
    if fault == "oversized":
        sock.sendall(b"HTTP/1.1 200 \r\nContent-Length: 99999999\r\n\r\n" + b"x" * 100_000)
    if fault == "head":
        while True:
            sock.sendall(b"X-More: " + b"x" * 4096)
    if fault == "chunked":
        sock.sendall(b"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    if fault == "nested":
        sock.sendall(answer(200, b"[" * 100_000))
    if fault == "text":
        sock.sendall(answer(200, {"firecracker_version": 7, "target_mib": "many", "state": ["x"]}))
    if fault == "empty":
        sock.sendall(answer(200, b""))
    if fault == "refuse":
        sock.sendall(answer(400, {"fault_message": f"{method} {target} is refused\x1b[31m by this test " + "x" * 5000}))


def serve(sock: socket.socket, machine: Machine) -> None:
    stream = sock.makefile("rb")
    while line := stream.readline(4096):
        method, target, _ = line.decode("latin-1").split(" ", 2)
        size = 0
        while (header := stream.readline(4096)) not in (b"\r\n", b""):
            name, _, value = header.decode("latin-1").partition(":")
            size = int(value) if name.lower() == "content-length" else size
        if size > BODY_LIMIT:
            words = f"Request payload with size {size} is larger than the limit of {BODY_LIMIT} allowed by server."
            # The line end in the middle is the real one's, which so makes no JSON here.
            text = f'{{ "error": "{words}\nAll previous unanswered requests will be dropped." }}'
            sock.sendall(answer(400, text.encode()))
            return
        content = stream.read(size)
        fault = SCENARIO.get("faults", {}).get(f"{method} {target}")
        if fault not in (None, "die-late", "half"):
            misbehave(sock, fault, method, target)
            return
        status, found = handle(machine, method, target, content)
        if fault == "die-late":
            os._exit(9)
        sock.sendall(answer(status, found)[: 20 if fault == "half" else None])
        if status < 0:
            os._exit(1)
        if fault == "half":
            return


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--api-sock", default="/run/firecracker.socket")
    for name in ("--id", "--start-time-us", "--start-time-cpu-us", "--parent-cpu-time-us", "--log-path", "--level"):
        parser.add_argument(name, default="")
    parser.add_argument("--version", action="store_true")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.version:
        print(f"Firecracker v{VERSION}\n")
        return
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", given.id):
        sys.exit(f"Error: invalid instance id {given.id!r}")
    log = open(given.log_path, "a") if given.log_path else sys.stderr  # noqa: SIM115  it is open for ever
    print(f"Running Firecracker v{VERSION}", file=log, flush=True)
    start = SCENARIO.get("start")
    if start == "exit":
        print("Error: the kernel has no KVM", file=log, flush=True)
        sys.exit(1)
    if start == "no-socket":
        time.sleep(3600)
    if start is not None and start.startswith("/"):
        os.symlink(start, given.api_sock)
        time.sleep(3600)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(given.api_sock)
    listener.listen(128)
    if start == "mute":
        time.sleep(3600)
    machine = Machine(given.id)
    while True:
        sock, _ = listener.accept()
        with sock:
            try:
                serve(sock, machine)
            except OSError:
                continue


if __name__ == "__main__":
    main()
