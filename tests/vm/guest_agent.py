# SPDX-License-Identifier: Apache-2.0
"""Runs commands in the test host for tests outside: one at a time, over a virtio-serial port.

Here: the side inside the guest, a systemd service. Not here: the side outside (``channel.py``). It runs as root
and does what it is told, which is its purpose: it is part of the test host's image and of nothing else.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

from tests.vm.frames import PAYLOAD_MAX, PORT, Decoder, Frame, Kind, encode

#: Commands start with this and nothing else of the service's environment.
_ENV = {
    "HOME": "/root", "LANG": "C.UTF-8", "LOGNAME": "root", "SHELL": "/bin/sh", "USER": "root",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}  # fmt: skip
#: How long what a command has written may take to be read after its end, beside what those write that it left behind.
_DRAIN_S = 60.0


class Command:
    """One process with three threads: two read its output, one waits for it or for its time to run out."""

    def __init__(self, agent: Agent, request: int, spec: dict[str, Any]) -> None:
        """Raises OSError when it cannot be started."""
        self._agent, self._request = agent, request
        self._timeout_s = float(spec["timeout_s"])
        self._began = time.monotonic()
        self._writing = threading.Lock()
        self._process = subprocess.Popen(
            spec["argv"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            env=_ENV | spec["env"], cwd=spec["cwd"], start_new_session=True,
        )  # fmt: skip
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._input = process.stdin
        self._outputs = [_Output(process.stdout, Kind.OUTPUT), _Output(process.stderr, Kind.ERRORS)]
        self._readers = [threading.Thread(target=self._read, args=(one,), daemon=True) for one in self._outputs]
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        for thread in (*self._readers, self._waiter):
            thread.start()

    def give(self, data: bytes) -> None:
        """Write to its standard input.  Blocks while it does not read, until it ends; what is too late is lost."""
        try:
            view = memoryview(data)
            with self._writing:
                while view:
                    view = view[os.write(self._input.fileno(), view) :]
        except (OSError, ValueError):
            pass

    def end_input(self) -> None:
        """Close its standard input."""
        with self._writing:
            self._input.close()

    def kill(self) -> None:
        """End its session's first process group by SIGKILL."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def join(self) -> None:
        """Wait until all threads are done, those that read from what it left behind included."""
        for thread in (self._waiter, *self._readers):
            thread.join()

    def _read(self, output: _Output) -> None:
        with output.source:
            while data := output.read():
                # What a daemon that it started still says is read, so that it is not stopped, but nobody's.
                if not output.whole.is_set():
                    self._agent.send(Frame(output.kind, self._request, data))
        output.whole.set()

    def _wait(self) -> None:
        reason = "exit"
        try:
            self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            reason = "timeout"
            self.kill()
            self._process.wait()
        for output in self._outputs:
            os.close(output.over)
        for output in self._outputs:
            output.whole.wait(_DRAIN_S)
            output.whole.set()
        self._agent.ended(self._request, self._process.returncode, reason, time.monotonic() - self._began)
        self.end_input()


class _Output:
    """A pipe that a command writes to, and maybe what it leaves behind; ``over`` is closed when the command is over."""

    def __init__(self, source: IO[bytes], kind: Kind) -> None:
        self.source, self.kind = source, kind
        self.whole = threading.Event()  # all that the command itself has written has been read
        self._is_over, self.over = os.pipe()
        self._watched: list[int] = [source.fileno(), self._is_over]

    def read(self) -> bytes:
        """Some of it; nothing when nobody can write any more. Sets ``whole``."""
        own = self.source.fileno()
        while own not in select.select(self._watched, [], [])[0]:
            # It is over. What it had written before is in the pipe, and was perhaps not yet when we looked.
            if not select.select([own], [], [], 0)[0]:
                self.whole.set()
                self._forget()
        data = os.read(own, PAYLOAD_MAX)
        if not data:
            self._forget()
        return data

    def _forget(self) -> None:
        if len(self._watched) > 1:
            os.close(self._watched.pop())


class Agent:
    """Takes frames from a port and answers on it.

    RUN's payload: ``{"argv": [...], "env": {...}, "cwd": "/...", "timeout_s": seconds}``. A status below zero in
    EXIT is a signal's number; the reason is "exit", "timeout" or "not-started".
    """

    def __init__(self, port: int) -> None:
        """``port``: a file descriptor that is read and written."""
        self._port = port
        self._sending = threading.Lock()
        self._command: Command | None = None

    def serve(self, *, once: bool = False) -> None:
        """Answer for ever.  ``once``: until the stream ends; a serial port's comes back with the next peer."""
        decoder = Decoder()
        while True:
            data = os.read(self._port, PAYLOAD_MAX)
            if not data:
                if once:
                    break
                time.sleep(0.05)
            for frame in decoder.feed(data):
                self._take(frame)
        if self._command is not None:
            self._command.kill()
            self._command.join()

    def send(self, frame: Frame) -> None:
        """Write a frame; frames of several threads do not mix. Without a peer it is lost."""
        view = memoryview(encode(frame))
        try:
            with self._sending:
                while view:
                    view = view[os.write(self._port, view) :]
        except OSError:
            pass

    def ended(self, request: int, status: int, reason: str, seconds: float) -> None:
        """Report how a command ended."""
        text = json.dumps({"status": status, "reason": reason, "seconds": round(seconds, 3)})
        self.send(Frame(Kind.EXIT, request, text.encode()))

    def _take(self, frame: Frame) -> None:
        command = self._command
        if frame.kind is Kind.RUN:
            self._run(frame)
        elif frame.kind is Kind.SYNC:
            if command is not None:
                command.kill()
            self._command = None
            self.send(frame)
        elif command is not None:
            if frame.kind is Kind.INPUT:
                command.give(frame.payload)
            elif frame.kind is Kind.INPUT_END:
                command.end_input()
            elif frame.kind is Kind.KILL:
                command.kill()

    def _run(self, frame: Frame) -> None:
        try:
            self._command = Command(self, frame.request, json.loads(frame.payload))
        except OSError as error:
            self.send(Frame(Kind.ERRORS, frame.request, str(error).encode()))
            self.ended(frame.request, 127, "not-started", 0.0)


def main() -> None:
    """Serve the port that the first argument names, or the test host's."""
    path = sys.argv[1] if len(sys.argv) > 1 else f"/dev/virtio-ports/{PORT}"
    for _attempt in range(600):
        if os.path.exists(path):
            break
        time.sleep(0.1)
    Agent(os.open(path, os.O_RDWR)).serve()


if __name__ == "__main__":
    main()
