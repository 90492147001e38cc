# SPDX-License-Identifier: Apache-2.0
"""What creation costs when thousands of sandboxes with networks are there already (FL-43).

Here: measuring, in minutes. Not here: promises and their verdicts (``__main__.py``). The sandboxes are real ones, each
with its process, mounts, device, addresses and policy; the host and the world around it are network namespaces of
their own.
"""

from __future__ import annotations

import time

from libdsec import Client
from libdsec.types import CreateRequest, SandboxSpec
from tests.perf.network import POLICY
from tests.perf.report import Figure, Side
from tests.support.daemon import Daemon
from tests.support.netlab import Lab
from tests.support.rootfs import debian_tar

IMAGE = "bench:many"
FEW, WANTED = 100, 2000
_KEPT = "kept"
#: With a network and without, each in milliseconds.
Samples = tuple[list[float], list[float]]


def figures(count: int, rounds: int) -> list[Figure]:
    """Creation beside ``count`` live ones, against creation beside 100 before and after that, on the same daemon."""
    # The host has other work: that is not what is measured.
    config = '[admission]\nmode = "off"\n'
    with Lab() as lab, Daemon(netns=lab.host, config=config) as daemon, daemon.client() as client:
        client.finish(client.image_import(name=IMAGE, source=str(debian_tar()), kind="rootfs-tar"))
        few: Samples = ([], [])
        many: Samples = ([], [])
        fill(client, FEW)
        sample(client, few, rounds // 2)
        took_s = fill(client, count)
        sample(client, many, rounds)
        over_s = taken_over(daemon, client, count)
        empty(client, FEW)
        sample(client, few, rounds - rounds // 2)
        empty(client, 0)
    wanted_n = 50 if count >= WANTED else rounds + 1
    note = f"{count - FEW} more were made in {took_s:.0f} s, {(count - FEW) / took_s:.1f} a second;"
    note += f" a daemon started after SIGKILL had taken over all {count} in {over_s:.1f} s"
    return [
        Figure(
            f"creation beside many live sandboxes, {what}", Side(f"{count} live", f"create {how}", tuple(many[which])),
            Side(f"{FEW} live", "the same, before and after", tuple(few[which])),
            limit=1.5, wanted_n=wanted_n, note=note,
        )
        for which, (what, how) in enumerate((("with a network", f"--network {','.join(POLICY)}"), ("without", "")))
    ]  # fmt: skip


def sample(client: Client, into: Samples, rounds: int) -> None:
    """In turn, so that both meet the same moments; the first two are not counted."""
    for number in range(rounds + 2):
        for side, network in zip(into, (POLICY, "none"), strict=True):
            began = time.perf_counter()
            box = client.create(SandboxSpec(image=IMAGE, network=network)).id
            if number >= 2:
                side.append((time.perf_counter() - began) * 1000)
            client.delete(box)


def fill(client: Client, count: int) -> float:
    """Until there are so many; the seconds that it took."""
    began = time.perf_counter()
    have = len(client.list_all())
    spec = SandboxSpec(image=IMAGE, network=POLICY)
    items = [CreateRequest(spec=spec, id=f"{_KEPT}-{number}") for number in range(have, count)]
    job = client.finish(client.create_batch(items))
    assert job.progress["failed"] == 0, job.result
    assert len(client.list_all()) == count
    return time.perf_counter() - began


def taken_over(daemon: Daemon, client: Client, count: int) -> float:
    """Seconds from the start of a daemon, after SIGKILL of the one before, until each sandbox has answered it."""
    daemon.kill()
    began = time.perf_counter()
    daemon.start(settle=False)
    boxes = client.list_all()
    for box in boxes:
        client.usage(box.id)  # waits until it is taken over; fails if it was lost
    took_s = time.perf_counter() - began
    assert (len(boxes), len(client.list_all(state=["running"]))) == (count, count)
    return took_s


def empty(client: Client, count: int) -> None:
    """Until there are so few."""
    for box in client.list_all()[count:]:
        client.delete(box.id)
