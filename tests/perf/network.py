# SPDX-License-Identifier: Apache-2.0
"""What a network costs: creation, throughput, and changes of policies.

Here: measuring. Not here: promises and their verdicts (``__main__.py``). The host and the world around it are network
namespaces of their own; see tests/support/netlab.py.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

from dsecd.backends.egress import Egress, Entry
from dsecd.backends.egress_policy import POLICY_BYTES, compiled
from libdsec import Client
from libdsec.network import rules
from libdsec.types import ExecRequest, SandboxSpec
from tests.perf.report import Figure, Side
from tests.support.daemon import Daemon
from tests.support.netlab import NEAR4, Lab
from tests.support.rootfs import debian_tar

IMAGE = "bench:python"
POLICY = ("tcp:203.0.113.0/24:443", "udp:*:53", "[2001:db8::]/32", "tcp:*:8000-9000", "icmp:*")
_STREAM_BYTES = 256 << 20
_PORT = 8443

# A sink that takes what comes and says when it had all.
_SINK = f"""
import socket
server = socket.create_server(("{NEAR4}", 9000))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        buffer = bytearray(1 << 20)
        while connection.recv_into(buffer):
            pass
        connection.sendall(b"x")
"""
_SOURCE = f"""
import socket, time
piece = bytes(1 << 20)
with socket.create_connection(("{NEAR4}", 9000)) as s:
    began = time.perf_counter()
    for _ in range({_STREAM_BYTES >> 20}):
        s.sendall(piece)
    s.shutdown(socket.SHUT_WR)
    s.recv(1)
    print(time.perf_counter() - began)
"""


def figures(rounds: int) -> list[Figure]:
    """All of them, in one daemon."""
    with Lab() as lab, Daemon(netns=lab.host) as daemon, daemon.client() as client:
        tar = str(debian_tar(include=("python3",)))
        client.finish(client.image_import(name=IMAGE, source=tar, kind="rootfs-tar"))
        found = [creation(client, rounds), throughput(lab, client, max(3, rounds // 10)), change(client, rounds)]
    return [*found, many_policies(rounds)]


def creation(client: Client, rounds: int) -> Figure:
    """In turn, so that both meet the same moments."""
    samples: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 2):
        for side, network in zip(samples, (POLICY, "none"), strict=True):
            began = time.perf_counter()
            box = client.create(SandboxSpec(image=IMAGE, network=network)).id
            if number >= 2:
                side.append((time.perf_counter() - began) * 1000)
            client.delete(box)
    return Figure(
        "creation with a network",
        Side("with", f"create --network {','.join(POLICY)}", tuple(samples[0])),
        Side("without", "create", tuple(samples[1])), limit=1.3, wanted_n=50,
    )  # fmt: skip


def throughput(lab: Lab, client: Client, rounds: int) -> Figure:
    """One stream out of a sandbox, and out of one whose device the programs were taken off."""
    watched, bare = (client.create(SandboxSpec(image=IMAGE, network=POLICY)).id for _ in range(2))
    lab.run(lab.host, f"tc qdisc del dev {client.network(bare).device} clsact")
    samples: tuple[list[float], list[float]] = ([], [])
    with _sink(lab):
        for number in range(rounds + 1):
            # Who goes first changes: what one stream leaves behind meets both alike.
            turns = list(zip(samples, (watched, bare), strict=True))
            for side, box in turns if number % 2 else reversed(turns):
                result = client.exec(box, ExecRequest(argv=("python3", "-c", _SOURCE), timeout_s=120))
                assert result.exit_code == 0, result.stderr
                if number:
                    side.append(float(result.text) * 1000)
    for box in (watched, bare):
        client.delete(box)
    return Figure(
        f"{_STREAM_BYTES >> 20} MiB over TCP out of a sandbox",
        Side("with the programs", "a Python stream, translated by the host", tuple(samples[0])),
        Side("without", "the same after 'tc qdisc del … clsact'", tuple(samples[1])), limit=1.05, wanted_n=10,
    )  # fmt: skip


@contextlib.contextmanager
def _sink(lab: Lab) -> Iterator[None]:
    command = ["nsenter", f"--net={lab.world}", sys.executable, "-c", _SINK]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def change(client: Client, rounds: int) -> Figure:
    """From the request until a connection in the sandbox sees the other policy; the peer is the promise."""
    box = client.create(SandboxSpec(image=IMAGE, network=POLICY)).id
    client.exec_start(box, ExecRequest(argv=("python3", "-c", _KNOCK), exec_id="knock"))
    seen = []
    for number in range(rounds):
        _lines(client, box, number + 1)
        began = time.clock_gettime(time.CLOCK_MONOTONIC)
        policy = (*POLICY, f"udp:{NEAR4}:{_PORT}") if number % 2 == 0 else POLICY
        client.update(box, network=policy)
        seen.append((float(_lines(client, box, number + 2)[-1]) - began) * 1000)
    client.delete(box)
    return Figure(
        "a changed policy is felt inside",
        Side("update --network", "from the request to a connect() that ends otherwise, tried each 0.5 ms", tuple(seen)),
        Side("10 ms", "the promise", (10.0,) * len(seen)), limit=1.0, wanted_n=50,
    )  # fmt: skip


_KNOCK = f"""
import socket, time
last = None
while True:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("{NEAR4}", {_PORT}))
            now = True
        except OSError:
            now = False
    if now != last:
        print(time.clock_gettime(time.CLOCK_MONOTONIC), flush=True)
    last = now
    time.sleep(0.0005)
"""


def _lines(client: Client, box: str, count: int) -> list[str]:
    deadline = time.monotonic() + 10
    while len(lines := client.exec_output(box, "knock").data.split()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return [line.decode() for line in lines]


def many_policies(rounds: int) -> Figure:
    """Each another policy for another device, in maps of their own."""
    place = Path(tempfile.mkdtemp(prefix="bench-bpf-", dir="/run"))
    program = Path(__file__).resolve().parents[2] / "build" / "ebpf" / "egress.bpf.o"
    egress = Egress(place / "bpf", program, Path("/sys/fs/cgroup"))
    times = []
    try:
        for number in range(3000):
            policy = compiled(rules((*POLICY, f"tcp:198.51.{number >> 8}.{number & 255}:443")))
            entry = Entry(bytes(POLICY_BYTES), IPv4Address(number), None, bytes(6), bytes(6), number)
            began = time.perf_counter()
            egress.admit(1 << 24 | number, entry, policy)
            times.append((time.perf_counter() - began) * 1000)
    finally:
        egress.close()
        subprocess.run(["umount", place / "bpf"], check=True)
    count = min(rounds, 200)
    return Figure(
        "the 3,000th policy",
        Side("the last ones", f"{count} policies after {3000 - count} others", tuple(times[-count:])),
        Side("the first ones", f"the first {count}", tuple(times[:count])), limit=1.5, wanted_n=50,
    )  # fmt: skip
