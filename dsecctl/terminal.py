# SPDX-License-Identifier: Apache-2.0
"""Our standard streams tied to a command in a sandbox: raw terminal, window size, signals, detach keys.

Here: one attachment from beginning to end. Not here: how the command was started (``commands/execs.py``), reconnecting
(``libdsec``).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from dsecctl.interrupts import heeded
from libdsec import ExecStream
from libdsec import types as t
from libdsec.errors import DsecError
from libdsec.frames import StreamName

#: ctrl-p ctrl-q leaves the command running, as elsewhere.
DETACH_KEYS = b"\x10\x11"
_QUIT = 0


class Attachment:
    """A stream and our terminal or pipes.

    All writing to the stream happens in one thread beside the reader; signal handlers only leave a number in a pipe for
    it, because they may interrupt code that holds locks.
    """

    def __init__(self, stream: ExecStream, *, stdin: bool, terminal: bool) -> None:
        self._stream = stream
        self._stdin = stdin
        self._terminal = terminal
        self._wake_reading, self._wake_writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._interrupts = 0
        self._keys = DetachKeys()
        #: Whether the user left the command running.
        self.detached = False

    def run(self) -> t.ExecInfo | None:
        """Until the command ends or the user detaches (None). Raises ExecTimeout, SandboxLost, ConnectionFailed."""
        with self._raw(), self._signals():
            thread = threading.Thread(target=self._pump, name="input", daemon=True)
            thread.start()
            try:
                self._show()
            finally:
                self._wake(_QUIT)
                # It may be stuck in a write that the command never reads; it dies with us.
                thread.join(timeout=0.5)
        return None if self.detached else self._stream.wait()

    # --- output ------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        for name, data in self._stream:
            write_out(name, data)

    # --- input -------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        try:
            if self._terminal:
                self._resize()
            watched = [self._wake_reading, *([0] if self._stdin else [])]
            while True:
                ready, _, _ = select.select(watched, [], [])
                if self._wake_reading in ready and not self._attend():
                    return
                if 0 in ready and not self._feed():
                    if self.detached:
                        return
                    watched.remove(0)
        except DsecError:
            pass  # the reader meets the same and tells it

    def _feed(self) -> bool:
        """Pass on what is typed or piped; False at its end."""
        data = os.read(0, 32768)
        if self._terminal:
            data, leave = self._keys.filter(data)
            if data:
                self._stream.write(data)
            if leave:
                self.detached = True
                self._stream.detach()
                return False
            return True
        if not data:
            self._stream.close_stdin()
            return False
        self._stream.write(data)
        return True

    def _attend(self) -> bool:
        """Act on signals; False when it is time to stop."""
        for number in os.read(self._wake_reading, 64):
            if number == _QUIT:
                return False
            if number == signal.SIGWINCH:
                self._resize()
            else:
                self._forward(number)
        return True

    def _forward(self, number: int) -> None:
        self._interrupts += 1
        if self._interrupts > 2:
            self._stream.signal(signal.SIGKILL, tree=True)
        else:
            self._stream.signal(number)

    def _resize(self) -> None:
        self._stream.resize(*_terminal_size())

    # --- our side ----------------------------------------------------------------------------------------------

    def _wake(self, number: int) -> None:
        try:
            os.write(self._wake_writing, bytes([number]))
        except BlockingIOError:
            pass  # 64 KiB of signals are waiting

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def handler(number: int, _frame: FrameType | None) -> None:
            self._wake(number)

        numbers = [*heeded(), signal.SIGQUIT, *([signal.SIGWINCH] if self._terminal else [])]
        before = {number: signal.signal(number, handler) for number in numbers}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    @contextmanager
    def _raw(self) -> Iterator[None]:
        """Raw mode while the block runs, however it ends."""
        if not (self._terminal and self._stdin):
            yield
            return
        before: list[Any] = termios.tcgetattr(0)
        try:
            tty.setraw(0, termios.TCSANOW)
            yield
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, before)


class DetachKeys:
    """Watches for ctrl-p ctrl-q in what is typed; keys of an unfinished sequence are held back until the next one."""

    def __init__(self) -> None:
        self._held = b""

    def filter(self, data: bytes) -> tuple[bytes, bool]:
        """What to pass on, and whether the sequence was completed."""
        text = self._held + data
        at = text.find(DETACH_KEYS)
        if at >= 0:
            return text[:at], True
        self._held = DETACH_KEYS[:1] if text.endswith(DETACH_KEYS[:1]) else b""
        return text[: len(text) - len(self._held)], False


def write_out(name: StreamName, data: bytes) -> None:
    """Bytes to our own stdout or stderr, at once."""
    out = click.get_binary_stream("stdout" if name == "stdout" else "stderr")
    out.write(data)
    out.flush()


def _terminal_size() -> tuple[int, int]:
    """Rows and columns of the terminal we are on, whatever COLUMNS and LINES are; 0 is one nobody told its size."""
    for fd in (0, 1, 2):
        try:
            size = os.get_terminal_size(fd)
        except OSError:
            continue
        if size.lines and size.columns:
            return size.lines, size.columns
    return 24, 80


def check_terminal(*, wanted: bool, stdin: bool) -> None:
    """Refuse a terminal for a command whose input is none."""
    if wanted and stdin and not sys.stdin.isatty():
        raise click.UsageError("-t needs a terminal, and standard input is none; leave it out to pipe")


def status_of(info: t.ExecInfo) -> int:
    """The exit status a shell would give: the command's, or 128 and the signal's number."""
    return info.exit_code if info.exit_code is not None else 128 + (info.signal or 0)
