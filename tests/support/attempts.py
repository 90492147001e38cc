# SPDX-License-Identifier: Apache-2.0
"""Attempts to get past a sandbox's network policy, and the judgement of what came of them.

Here: the attacker (escape.py) at work, what has passed by packet rules behind the programs, the controls. Not here:
what is attempted (``escape.py``), and the daemon and world that it is attempted in: a test of the checkout's daemon has
others than one of the installed package.

The attacker acts as root inside a sandbox, and, since that one lacks packet sockets and the right to change devices, as
root of the host inside the sandbox's network namespace. What has passed is counted by nft's ingress hook at the host's
end of the device. The control is another sandbox, with every address allowed and the programs taken off its device.
"""

import functools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from libdsec import Client
from libdsec.types import ExecRequest, SandboxSpec
from tests.support.cgroups import first_process
from tests.support.netlab import FAR4, FAR6, HOST4, NEAR4, NEAR6, Lab

_ESCAPE = Path(__file__).with_name("escape.py")
POLICY = (f"tcp:{NEAR4}:443", f"udp:{NEAR4}:443", f"icmp:{NEAR4}", f"tcp:[{NEAR6}]:443", f"udp:[{NEAR6}]:443")
#: Everything, special addresses as well: what is refused to this one is refused by the programs on its device alone.
EVERYTHING = (
    "all", "10.0.0.0/8", "169.254.169.254", "198.18.0.0/15", "224.0.0.0/4", "255.255.255.255", HOST4, "[fd00::]/8",
    "[fd00:ec2::254]", "[ff00::]/8", "[fe80::]/10",
)  # fmt: skip
#: Some that need no change of devices, to be tried over and over.
ENDLESS = ("raw syn", "raw udp", "raw udp over ipv6", "later fragment", "source of the host", "arp request")
#: A packet that was sent appears at the other end of its device, and is counted there, within this time. Most are at
#: once, but a busy kernel leaves that to a thread of its own, which has to have its turn.
_ARRIVES_S = 60.0


class Target:
    """A sandbox, its namespace and what has passed the host's end of its device."""

    def __init__(self, lab: Lab, client: Client, image: str, groups: Path, *policy: str) -> None:
        """``groups``: the folder of the daemon's cgroups of sandboxes."""
        self.lab, self._client = lab, client
        self.id = client.create(SandboxSpec(image=image, network=policy)).id
        state = client.network(self.id)
        self.device, (self.own4, self.own6) = state.device, state.addresses
        self.pid = first_process(groups / f"sandbox-{self.id}")
        lab.run(lab.host, f"""nft -f - <<'X'
table netdev {self.device} {{
  chain passed {{ type filter hook ingress device "{self.device}" priority 0; policy accept; counter; }}
}}
X""")

    def passed(self) -> int:
        """Packets that the programs let through to the host."""
        listed = self.lab.ask(self.lab.host, "nft", "list", "table", "netdev", self.device)
        found = re.search(r"counter packets (\d+)", listed)
        assert found, listed
        return int(found[1])

    def denied(self) -> int:
        """Attempts that were counted."""
        return self._client.network(self.id).denied

    def unwatch(self) -> None:
        """Take the programs off its device: a control."""
        self.lab.run(self.lab.host, f"tc qdisc del dev {self.device} clsact")


class Attacker:
    """escape.py by root of the host, in the network namespace of a sandbox."""

    def __init__(self, target: Target, other: Target) -> None:
        self._process = subprocess.Popen(
            ["nsenter", f"--net=/proc/{target.pid}/ns/net", sys.executable, _ESCAPE, facts(target, other, frames="1")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.names: list[str] = json.loads(self._line())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def tries(self, name: str) -> str:
        """What the attempt came to: "sent", or the name of the error."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        return self._line().removeprefix(f"{name}: ").strip()


class Endless:
    """An attacker that goes on until the block is left, whatever happens to the daemon."""

    def __init__(self, target: Target, other: Target, *, pause_s: float = 0.0) -> None:
        """``pause_s``: between attempts, for a machine that would do nothing else."""
        self._attacker = Attacker(target, other)
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._attack)
        self.tried = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _attack(self) -> None:
        with self._attacker:
            while not self._stop.is_set():
                for name in ENDLESS:
                    self._attacker.tries(name)
                    self.tried += 1
                    time.sleep(self._pause_s)


@dataclass(frozen=True)
class Judgement:
    """What came of all attempts, by their names."""

    names: tuple[str, ...]
    escaped: tuple[str, ...]
    uncounted: tuple[str, ...]  # sent, and not told as refused
    powerless: tuple[str, ...]  # with what the control was told: it did not get through either, so it proves nothing

    def hold(self) -> None:
        """Fail unless nothing got through, all was counted and next to all of it got through unwatched."""
        print(f"{len(self.names)} attempts; proving nothing, since the control fails, too: {list(self.powerless)}")
        assert len(self.names) >= 60
        assert (self.escaped, self.uncounted) == ((), ()), f"escaped {self.escaped}, not counted {self.uncounted}"
        # A kernel may be built without a type of device; all else has to get through.
        assert [text for text in self.powerless if not re.fullmatch(r"a device of type \w+: ENOTSUP", text)] == []
        assert len(self.names) - len(self.powerless) >= 60


def judge(watched: Target, open_: Target) -> Judgement:
    """Try each, against the one and against the control."""
    escaped, uncounted, powerless = [], [], []
    with Attacker(watched, open_) as attacker, Attacker(open_, watched) as control:
        passed, denied = watched.passed(), watched.denied()
        for name in attacker.names:
            outcome = attacker.tries(name)
            if outcome == "sent" and not _comes(functools.partial(_refused_more, watched, denied), _ARRIVES_S):
                uncounted.append(name)
            denied = watched.denied()
            before, passed = passed, watched.passed()
            if passed > before:
                escaped.append(name)
            before = open_.passed()
            outcome = control.tries(name)
            # What was not even sent is not waited for.
            if not _comes(functools.partial(_more, open_, before), _ARRIVES_S if outcome == "sent" else 0.0):
                powerless.append(f"{name}: {outcome}")
        return Judgement(tuple(attacker.names), tuple(escaped), tuple(uncounted), tuple(powerless))


def from_inside(client: Client, watched: Target, open_: Target) -> dict[str, str]:
    """All attempts by root in the sandbox: by name, "sent" or the name of the error."""
    with Attacker(watched, open_) as attacker:
        names = attacker.names
    result = client.exec(watched.id, ExecRequest(
        argv=("python3", "-c", _ESCAPE.read_text(), facts(watched, open_, frames="")),
        stdin="\n".join(names).encode(), timeout_s=300,
    ))  # fmt: skip
    outcomes = dict(line.rsplit(": ", 1) for line in result.text.splitlines()[1:])
    assert set(outcomes) == set(names), result.stderr
    return outcomes


def facts(target: Target, other: Target, *, frames: str) -> str:
    """What escape.py is told."""
    mac = re.search(r"link/ether (\S+)", target.lab.run(target.lab.host, f"ip link show {target.device}"))
    assert mac
    return json.dumps({
        "own4": target.own4, "own6": target.own6, "allowed4": NEAR4, "denied4": FAR4, "allowed6": NEAR6,
        "denied6": FAR6, "host4": HOST4, "other4": other.own4, "other6": other.own6, "hostmac": mac[1],
        "frames": frames,
    })  # fmt: skip


def _more(target: Target, than: int) -> bool:
    return target.passed() > than


def _refused_more(target: Target, than: int) -> bool:
    return target.denied() > than


def _comes(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
