#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A hostile program in the agent's place. Which of its vices it shows, the sandbox's host name says.

Runs inside a sandbox with Python; the interpreter opens it through the descriptor it was started by. Shares nothing
with the daemon's or the tests' codecs.
"""

import os
import socket
import struct
import threading

VICE = os.uname().nodename
LISTENER = 3
HELLO, START, OUTPUT, EXIT, INFO, HELLO_OK, STARTED, OK = 0x01, 0x02, 0x10, 0x12, 0x13, 0x14, 0x15, 0x1E


def frame(kind: int, channel: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IBBHI", len(payload), kind, 0, 0, channel) + payload


def field(tag: int, value: int | bytes) -> bytes:
    data = struct.pack("<Q", value) if isinstance(value, int) else value
    return struct.pack("<HI", tag, len(data)) + data


def output(channel: int, offset: int, data: bytes) -> bytes:
    return frame(OUTPUT, channel, struct.pack("<BQ", 1, offset) + data)


def exit_frame(channel: int, exec_id: bytes, number: int) -> bytes:
    tags = (34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45)
    return frame(EXIT, channel, field(5, exec_id) + b"".join(field(tag, number) for tag in tags))


class Peer:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""

    def exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self.buffer += data
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def receive(self) -> tuple[int, int, dict[int, bytes]]:
        size, kind, _flags, _zero, channel = struct.unpack("<IBBHI", self.exactly(12))
        payload, found = self.exactly(size), dict[int, bytes]()
        while payload:
            tag, length = struct.unpack("<HI", payload[:6])
            found[tag] = payload[6 : 6 + length]
            payload = payload[6 + length :]
        return kind, channel, found

    def for_ever(self, data: bytes) -> None:
        while True:
            self.sock.sendall(data)

    def greet(self, asked: dict[int, bytes]) -> None:
        (generation,) = struct.unpack("<Q", asked[2])
        answer = frame(HELLO_OK, 0, field(1, 1) + field(4, b"1") + field(2, generation) + field(30, 1))
        if VICE == "half-greeting":
            self.sock.sendall(answer[:20])
            os._exit(1)
        self.sock.sendall(answer)
        if VICE == "garbage":
            self.for_ever(b"\xff" * 65536)
        if VICE == "unasked-output":
            self.for_ever(output(7, 0, b"x" * 60000))

    def answer(self, channel: int, asked: dict[int, bytes]) -> None:
        exec_id, offset = asked.get(5, b"x"), 0
        started = frame(STARTED, channel, field(32, 5) + field(19, 65536))
        if VICE == "endless-listing":
            self.for_ever(frame(INFO, channel, field(5, exec_id)) * 100)
        if VICE == "dies-in-a-frame":
            self.sock.sendall(started + output(channel, 0, b"x" * 60000)[:100])
            os._exit(0)
        if VICE == "exit-before-start":
            self.sock.sendall(exit_frame(channel, exec_id, 0))
        if VICE == "impossible-exit":
            self.sock.sendall(started + exit_frame(channel, exec_id, (1 << 64) - 1))
        if VICE == "output-from-nowhere":
            self.sock.sendall(started + output(channel, 1 << 60, b"x"))
        if VICE == "output-without-credit":
            self.sock.sendall(started)
            while True:
                self.sock.sendall(output(channel, offset, b"x" * 60000))
                offset += 60000

    def serve(self) -> None:
        try:
            while True:
                kind, channel, asked = self.receive()
                if kind == HELLO:
                    self.greet(asked)
                else:
                    self.answer(channel, asked)
        except (EOFError, OSError):
            self.sock.close()


def main() -> None:
    listener = socket.socket(fileno=LISTENER)
    listener.setblocking(True)
    while True:
        peer = Peer(listener.accept()[0])
        threading.Thread(target=peer.serve, daemon=True).start()


if __name__ == "__main__":
    main()
