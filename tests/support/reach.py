#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs inside a sandbox: tries to reach each ``PROTOCOL/ADDRESS/PORT`` given, all at once, and prints what came of it.

A line for each: the target and the address that the other side saw, or the name of the error. ``icmp`` needs a port of
0. ``stream/ADDRESS/PORT`` sends a line every 50 ms for ever and prints a line for each answer, until one is late by
seconds, or as many as REACH_STREAM_S says. REACH_TIMEOUT_S is the time for all else, where no silence is expected.
"""

import errno
import os
import socket
import struct
import sys
import threading
import time

#: Longer on a machine that has much else to do, so that silence is the policy's and not that of a peer that is slow.
TIMEOUT_S = float(os.environ.get("REACH_TIMEOUT_S", max(3.0, min(8.0, os.getloadavg()[0]))))


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def tcp(address: str, port: int) -> str:
    with socket.create_connection((address, port), TIMEOUT_S) as connection:
        return connection.recv(100).decode().strip()


def udp(address: str, port: int) -> str:
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.sendto(b"hello", (address, port))
        return sock.recv(100).decode().partition("\n")[0]


def icmp(address: str, _port: int) -> str:
    """An echo by a raw socket, so as root."""
    v6 = ":" in address
    protocol = socket.IPPROTO_ICMPV6 if v6 else socket.IPPROTO_ICMP
    with socket.socket(family_of(address), socket.SOCK_RAW, protocol) as sock:
        sock.settimeout(TIMEOUT_S)
        message = struct.pack("!BBHHH", 128 if v6 else 8, 0, 0, os.getpid() & 0xFFFF, 1) + b"dsec"
        if not v6:
            total = sum(struct.unpack(f"!{len(message) // 2}H", message))
            total = (total & 0xFFFF) + (total >> 16)
            message = message[:2] + struct.pack("!H", ~total & 0xFFFF) + message[4:]
        sock.sendto(message, (address, 0))
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            answer = sock.recv(200)
            if (answer[0] == 129) if v6 else (answer[20] == 0):
                return "echo"
    raise TimeoutError


def stream(address: str, port: int) -> str:
    with socket.create_connection((address, port), TIMEOUT_S) as connection:
        connection.settimeout(float(os.environ.get("REACH_STREAM_S", TIMEOUT_S)))
        connection.recv(100)
        for number in range(10_000):
            connection.sendall(f"{number}\n".encode())
            connection.recv(100)
            print(number, flush=True)
            time.sleep(0.05)
    return "ended"


def try_one(target: str) -> None:
    protocol, address, port = target.split("/")
    try:
        outcome = {"tcp": tcp, "udp": udp, "icmp": icmp, "stream": stream}[protocol](address, int(port))
    except TimeoutError:
        outcome = "timeout"
    except OSError as error:
        outcome = errno.errorcode.get(error.errno or 0, str(error))
    print(target, outcome, flush=True)


def main() -> None:
    threads = [threading.Thread(target=try_one, args=(target,)) for target in sys.argv[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
