# SPDX-License-Identifier: Apache-2.0
"""The programs that watch over what sandboxes send, and the maps that tell them what each one may.

What belongs here: loading and pinning them, and the entries of one sandbox. What does not: devices and addresses
(``network.py``), what a policy means (``egress_policy.py``).

Everything is pinned in a BPF file system below the runtime directory, in a folder named by the digest of the object
file. A daemon that finds its own folder there uses what is in it, with all entries; one with other programs makes a
new folder, and what an earlier daemon attached stays in force on each device until it is replaced there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from dsecd.backends.egress_policy import KEY_BYTES, POLICY_BYTES, VALUE_BYTES, Policy
from dsecd.backends.openings import KEY_BYTES as OPENED_KEY_BYTES
from dsecd.backends.openings import VALUE_BYTES as OPENED_VALUE_BYTES
from dsecd.backends.openings import Openings
from dsecd.linux import bpf
from libdsec import errors

_SANDBOX = struct.Struct("=15sB4s16s6s6sQ")
_TOTALS = struct.Struct("=6Q8x")
_COUNT = struct.Struct("=Q")
_DENIED = struct.Struct("=Q16sHBBB3x")
_RECENT = 8
_COUNTER_BYTES = _TOTALS.size + _RECENT * _DENIED.size
#: enum reason of ebpf/egress.h, in the words that users see.
REASONS = {
    1: "policy", 2: "host-address", 3: "spoofed-source", 4: "protocol", 5: "fragment", 6: "header", 7: "frame",
}  # fmt: skip
_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp"}
# include/uapi/linux/bpf.h, enum bpf_attach_type
_HOOKS = {"connect4": 10, "connect6": 11, "sendmsg4": 14, "sendmsg6": 15}

_PROGRAMS = ("from_sandbox", "to_sandbox", *_HOOKS)
#: Sizes of keys and values; the ring's are nobody's business.
_MAPS: dict[str, tuple[int, int] | None] = {
    "policies": (KEY_BYTES, VALUE_BYTES), "sandboxes": (4, _SANDBOX.size), "counters": (4, _COUNTER_BYTES),
    "namespaces": (8, 4), "told": (4, _COUNT.size), "opened": (OPENED_KEY_BYTES, OPENED_VALUE_BYTES),
    "refusals": None,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """What the programs know of one sandbox."""

    policy_id: bytes
    ipv4: IPv4Address
    ipv6: IPv6Address | None
    mac: bytes
    host_mac: bytes
    cookie: int  # of its network namespace; 0: it has none on this host

    def packed(self) -> bytes:
        ipv6 = self.ipv6.packed if self.ipv6 is not None else bytes(16)
        return _SANDBOX.pack(
            self.policy_id, self.ipv6 is not None, self.ipv4.packed, ipv6, self.mac, self.host_mac, self.cookie
        )

    @classmethod
    def unpacked(cls, data: bytes) -> Entry:
        policy_id, has_ipv6, ipv4, ipv6, mac, host_mac, cookie = _SANDBOX.unpack(data)
        return cls(policy_id, IPv4Address(ipv4), IPv6Address(ipv6) if has_ipv6 else None, mac, host_mac, cookie)


@dataclass(frozen=True)
class Denied:
    """One refusal."""

    at_ns: int  # since the host's boot
    address: str
    port: int
    protocol: int
    reason: str


@dataclass(frozen=True)
class Counts:
    """What one sandbox sent, received and was refused."""

    out_packets: int
    out_bytes: int
    in_packets: int
    in_bytes: int
    denied_out: int
    denied_in: int
    recent: tuple[Denied, ...]  # newest first


def _replaced(pinned: Path, program: int, cgroup: Path) -> bool:
    """Let a pinned link, if there is one, lead to this program. One of a cgroup that has gone is forgotten: systemd
    removes the empty cgroup of a unit that ends, and a moment later the link is severed."""
    try:
        link = bpf.get(pinned)
    except FileNotFoundError:
        return False
    try:
        if bpf.link_cgroup(link) != cgroup.stat().st_ino:
            pinned.unlink()
            return False
        bpf.replace_program(link, program)
    finally:
        os.close(link)
    return True


def protocol_name(number: int) -> str:
    """As users write it, or its number; ICMPv6 counts as ICMP."""
    return _PROTOCOLS.get(number, str(number))


class Egress:
    """The programs. Methods block for microseconds, making it for some hundred milliseconds; any thread may call."""

    def __init__(self, pins: Path, program: Path, cgroup: Path) -> None:
        """Load and pin, or find pinned. Raises OSError; FeatureMissing for programs of another build than this code."""
        bpf.mount_fs(pins)
        digest = hashlib.sha256(program.read_bytes()).hexdigest()[:16]
        self._place = pins / digest
        if not self._place.exists():
            self._load(program)
        self._require_all(program)
        opened = self._map("opened")
        self._counters = self._map("counters")
        self._told = self._map("told")
        for other in pins.iterdir():
            if other.is_dir() and other.name not in (digest, "links"):
                for name, into in (("opened", opened), ("counters", self._counters), ("told", self._told)):
                    _carry_over(other / name, into)
                shutil.rmtree(other)
        self.from_sandbox = bpf.get(self._place / "from_sandbox")
        self.to_sandbox = bpf.get(self._place / "to_sandbox")
        self._policies = self._map("policies")
        self._sandboxes = self._map("sandboxes")
        self._namespaces = self._map("namespaces")
        self._opened = opened
        #: Tells of devices to which something was refused.
        self.ring = bpf.Ring(bpf.get(self._place / "refusals"))
        self.openings = Openings(opened)
        self._lock = threading.Lock()
        self._holders: Counter[bytes] = Counter()  # by the policy's id
        self._keys: dict[bytes, list[bytes]] = {}  # of the policies that have holders
        self._attach_hooks(pins / "links", cgroup)

    def close(self) -> None:
        """Let go of the descriptors; all stays in force."""
        for fd in (self.from_sandbox, self.to_sandbox):
            os.close(fd)
        self.ring.close()
        for item in (self._policies, self._sandboxes, self._counters, self._namespaces, self._told, self._opened):
            item.close()

    def _load(self, program: Path) -> None:
        partial = self._place.with_name("partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        loaded = bpf.Object(program)
        try:
            loaded.pin(partial)
        finally:
            loaded.close()
        partial.rename(self._place)

    def _require_all(self, program: Path) -> None:
        """What is pinned has to have every program and map that this code uses, and no entries too long for it."""
        faults = [f"it has no '{name}'" for name in _PROGRAMS if not (self._place / name).exists()]
        for name, sizes in _MAPS.items():
            try:
                fd = bpf.get(self._place / name)
            except FileNotFoundError:
                faults.append(f"it has no '{name}'")
                continue
            key_bytes, value_bytes = bpf.sizes(fd)
            if sizes and (key_bytes != sizes[0] or value_bytes > sizes[1]):
                faults.append(f"its '{name}' has another form")
            os.close(fd)
        if faults:
            # Nothing is attached to it yet: the next program that is found here is looked at anew.
            shutil.rmtree(self._place)
            raise errors.FeatureMissing(
                f"network: '{program}' is of another build than this daemon: {'; '.join(faults)}",
                hint="reinstall the package dsecd and restart the daemon; in a checkout: make agent", feature="egress",
            )  # fmt: skip

    def _map(self, name: str) -> bpf.Map:
        sizes = _MAPS[name]
        assert sizes is not None
        return bpf.Map(bpf.get(self._place / name), *sizes)

    def _attach_hooks(self, links: Path, cgroup: Path) -> None:
        """Errors at once for whoever is in the cgroup of all sandboxes. It stays attached, like all that is pinned."""
        links.mkdir(mode=0o700, exist_ok=True)
        for name, kind in _HOOKS.items():
            program = bpf.get(self._place / name)
            try:
                if not _replaced(links / name, program, cgroup):
                    link = bpf.attach_cgroup(program, cgroup, kind)
                    bpf.pin(link, links / name)
                    os.close(link)
            finally:
                os.close(program)

    # --- sandboxes ---------------------------------------------------------------------------------------------------

    def sweep(self, devices: Iterable[int]) -> None:
        """Forget sandboxes whose device has gone and policies that nobody has; count who has the others."""
        alive = set(devices)
        self.openings.sweep_devices(alive)
        with self._lock:
            for key in list(self._sandboxes.keys()):
                if struct.unpack("=I", key)[0] not in alive:
                    self._forget(key)
                elif (data := self._sandboxes.get(key)) is not None:
                    self._holders[Entry.unpacked(data).policy_id] += 1
            for key in list(self._counters.keys()):
                if struct.unpack("=I", key)[0] not in alive:
                    self._forget(key)
            for key in list(self._policies.keys()):
                policy_id = key[4 : 4 + POLICY_BYTES]
                if policy_id in self._holders:
                    self._keys.setdefault(policy_id, []).append(key)
                else:
                    self._policies.delete(key)

    def entry(self, device: int) -> Entry | None:
        data = self._sandboxes.get(_u32(device))
        return None if data is None else Entry.unpacked(data)

    def admit(self, device: int, entry: Entry, policy: Policy, *, anew: bool = True) -> None:
        """From now on the device passes what the policy allows; its counters begin at zero.

        Not ``anew``: it was admitted under other programs, and goes on counting if its counters have come along.
        """
        key = _u32(device)
        with self._lock, self._held(policy):
            old = self._sandboxes.get(key)
            if anew or self._counters.get(key) is None:
                self._told.delete(key)
                self._counters.set(key, bytes(_COUNTER_BYTES))
            self._sandboxes.set(key, replace(entry, policy_id=policy.id).packed())
            if old is not None:
                self._drop(Entry.unpacked(old).policy_id)
            if entry.cookie:
                self._namespaces.set(struct.pack("=Q", entry.cookie), key)

    def set_policy(self, device: int, policy: Policy) -> None:
        """Exchange the policy: each packet is judged by all of the old one or all of the new one.

        Raises FileNotFoundError for a device that was not admitted.
        """
        key = _u32(device)
        with self._lock:
            data = self._sandboxes.get(key)
            if data is None:
                raise FileNotFoundError(f"device {device} has no policy")
            old = Entry.unpacked(data)
            if old.policy_id == policy.id:
                return
            with self._held(policy):
                self._sandboxes.set(key, policy.id + data[POLICY_BYTES:])
            self._drop(old.policy_id)

    def remove(self, device: int) -> None:
        """Nothing may pass the device any more; one that was not admitted is fine."""
        key = _u32(device)
        with self._lock:
            data = self._sandboxes.get(key)
            self._forget(key)
            if data is not None:
                self._drop(Entry.unpacked(data).policy_id)

    def counts(self, device: int) -> Counts | None:
        """What passed and what did not; None for a device that was not admitted."""
        data = self._counters.get(_u32(device))
        if data is None:
            return None
        totals = _TOTALS.unpack_from(data)
        denied_out = totals[4]
        recent = []
        for number in range(denied_out - 1, max(-1, denied_out - 1 - _RECENT), -1):
            at_ns, address, port, family, protocol, reason = _DENIED.unpack_from(
                data, _TOTALS.size + number % _RECENT * _DENIED.size
            )
            if at_ns:  # a program may be between counting and noting
                far_end = {4: address[:4], 6: address}.get(family)
                shown = "" if far_end is None else str(ip_address(far_end))
                recent.append(Denied(at_ns, shown, port, protocol, REASONS.get(reason, str(reason))))
        out_packets, out_bytes, in_packets, in_bytes, _denied, denied_in = totals
        return Counts(out_packets, out_bytes, in_packets, in_bytes, denied_out, denied_in, tuple(recent))

    def told(self, device: int) -> int:
        """Of how many refusals an event has told; of an earlier daemon's time, too."""
        data = self._told.get(_u32(device))
        return 0 if data is None else int(_COUNT.unpack(data)[0])

    def note_told(self, device: int, count: int) -> None:
        """Remember it for the daemon that comes after this one."""
        with self._lock:
            if self._counters.get(_u32(device)) is not None:
                self._told.set(_u32(device), _COUNT.pack(count))

    # --- parts -------------------------------------------------------------------------------------------------------

    def _forget(self, key: bytes) -> None:
        data = self._sandboxes.get(key)
        self._sandboxes.delete(key)
        self._counters.delete(key)
        self._told.delete(key)
        self.openings.forget(struct.unpack("=I", key)[0])
        if data is not None and (cookie := Entry.unpacked(data).cookie):
            self._namespaces.delete(struct.pack("=Q", cookie))

    @contextlib.contextmanager
    def _held(self, policy: Policy) -> Iterator[None]:
        """The policy is in the map while the block puts it in force, and stays when that succeeds."""
        new = policy.id not in self._holders
        self._holders[policy.id] += 1
        try:
            if new:
                self._keys[policy.id] = list(policy.entries)
                for key, value in policy.entries.items():
                    self._policies.set(key, value)
            yield
        except BaseException:
            self._drop(policy.id)
            raise

    def _drop(self, policy_id: bytes) -> None:
        """One holder less; what nobody holds leaves the map."""
        self._holders[policy_id] -= 1
        if self._holders[policy_id] > 0:
            return
        del self._holders[policy_id]
        for key in self._keys.pop(policy_id, ()):
            self._policies.delete(key)


def _carry_over(pinned: Path, into: bpf.Map) -> None:
    """What was counted and what names have opened is kept under new programs, if these keep it in the same form."""
    try:
        fd = bpf.get(pinned)
    except FileNotFoundError:
        return
    old = bpf.Map(fd, *bpf.sizes(fd))
    if bpf.sizes(fd) == bpf.sizes(into.fd):
        for key in list(old.keys()):
            if (value := old.get(key)) is not None:
                into.set(key, value)
    old.close()


def _u32(value: int) -> bytes:
    return struct.pack("=I", value)
