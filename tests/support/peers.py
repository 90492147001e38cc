#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Servers around a host: they answer everything that reaches them, and write down what that was.

Run as ``peers.py LOG ADDRESSES PORTS``, lists with commas. A TCP connection gets a line with the address it came from,
then its own bytes back; a datagram gets the same in one. What arrives at the devices, in whatever form, is written to
LOG by a packet socket: one line for each packet with protocol, addresses, port and a piece of its content.
"""

import socket
import struct
import sys
import threading

_ETH_P_ALL = 3


def serve_tcp(listener: socket.socket) -> None:
    while True:
        connection, address = listener.accept()
        threading.Thread(target=answer_tcp, args=(connection, address[0]), daemon=True).start()


def answer_tcp(connection: socket.socket, source: str) -> None:
    with connection:
        try:
            connection.sendall(f"{source}\n".encode())
            while data := connection.recv(65536):
                connection.sendall(data)
        except OSError:
            pass


def serve_udp(sock: socket.socket) -> None:
    while True:
        data, address = sock.recvfrom(65536)
        try:
            sock.sendto(f"{address[0]}\n".encode() + data, address)
        except OSError:
            pass


def watch(log: str) -> None:
    sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    with open(log, "a", buffering=1) as file:
        while True:
            frame, address = sniffer.recvfrom(65536)
            if address[2] != socket.PACKET_OUTGOING:
                file.write(describe(frame) + "\n")


def describe(frame: bytes) -> str:
    kind = struct.unpack_from("!H", frame, 12)[0]
    body = frame[14:]
    if kind == 0x0800 and len(body) >= 20:
        header, protocol = (body[0] & 15) * 4, body[9]
        source, target = (socket.inet_ntop(socket.AF_INET, body[at : at + 4]) for at in (12, 16))
    elif kind == 0x86DD and len(body) >= 40:
        header, protocol = 40, body[6]
        source, target = (socket.inet_ntop(socket.AF_INET6, body[at : at + 16]) for at in (8, 24))
    else:
        return f"frame {kind:04x} {frame[:6].hex()} {body[:64]!r}"
    rest = body[header:]
    port = struct.unpack_from("!H", rest, 2)[0] if len(rest) >= 4 else 0
    return f"{protocol} {source} {target} {port} {rest[:64]!r}"


def main() -> None:
    log, addresses, ports = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
    threads = [threading.Thread(target=watch, args=(log,))]
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for port in map(int, ports):
            listener = socket.create_server((address, port), family=family, backlog=256)
            threads.append(threading.Thread(target=serve_tcp, args=(listener,)))
            datagrams = socket.socket(family, socket.SOCK_DGRAM)
            datagrams.bind((address, port))
            threads.append(threading.Thread(target=serve_udp, args=(datagrams,)))
    for thread in threads:
        thread.start()
    print("ready", flush=True)


if __name__ == "__main__":
    main()
