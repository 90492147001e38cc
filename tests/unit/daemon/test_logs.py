# SPDX-License-Identifier: Apache-2.0
"""Lines of the log, and entries of the journal as its socket gets them."""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.api.dispatch import REQUEST_ID
from dsecd.logs import Formatter, JournalHandler, message_id


def record(
    text: str, *args: object, level: int = logging.INFO, error: BaseException | None = None
) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("dsecd.core", level, __file__, 1, text, args, exc_info)


def test_a_line_for_the_journal_begins_with_its_priority() -> None:
    formatter = Formatter(journal=True)
    levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
    lines = [formatter.format(record("sandbox=%s", "a", level=level)) for level in levels]
    assert lines == [f"<{number}>dsecd.core: sandbox=a" for number in (7, 6, 4, 3, 3)]


def test_text_of_a_client_makes_no_line_of_its_own() -> None:
    line = Formatter(journal=True).format(record("path=%s", "/a\n<3>dsecd: all is lost\r\u2028<3>"))
    assert line == "<6>dsecd.core: path=/a\\n<3>dsecd: all is lost\\r\u2028<3>"


def test_every_line_of_a_traceback_is_marked() -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        lines = (
            Formatter(journal=True).format(record("failed", level=logging.ERROR, error=error)).splitlines()
        )
    assert lines[0] == "<3>dsecd.core: failed"
    assert lines[-1] == "<3>KeyError: 'x'"
    assert all(line.startswith("<3>") for line in lines)


def test_a_line_names_its_request() -> None:
    token = REQUEST_ID.set("ab-1")
    try:
        assert Formatter(journal=True).format(record("x")) == "<6>dsecd.core: x request=ab-1"
    finally:
        REQUEST_ID.reset(token)


# --- the journal's own protocol ----------------------------------------------------------------------------------


class Journal:
    """What listens where journald would, and the handler that talks to it."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(60)
        self.lines: list[str] = []
        otherwise = logging.Handler()
        otherwise.emit = lambda record: self.lines.append(Formatter(journal=True).format(record))  # type: ignore[method-assign]
        self.handler = JournalHandler(path, otherwise)

    def log(self, text: str, *args: object, error: BaseException | None = None) -> None:
        self.handler.handle(record(text, *args, error=error))

    def entry(self) -> dict[str, str]:
        """Read as systemd's page on the native protocol says."""
        data, fields = self.socket.recv(1 << 20), {}
        while data:
            line, _, data = data.partition(b"\n")
            name, is_plain, value = line.partition(b"=")
            if not is_plain:
                length = int.from_bytes(data[:8], "little")
                value, end, data = data[8 : 8 + length], data[8 + length : 9 + length], data[9 + length :]
                assert end == b"\n"
            assert name.decode() not in fields
            fields[name.decode()] = value.decode()
        return fields


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal")
    yield journal
    journal.handler.close()
    journal.socket.close()


def test_an_entry_has_the_named_values_as_fields(journal: Journal) -> None:
    journal.log("event=%s sandbox=%s took_s=%.1f, 50%% of %d", "sandbox.failed", "web", 1.25, 7)
    entry = journal.entry()
    assert entry["MESSAGE"] == "dsecd.core: event=sandbox.failed sandbox=web took_s=1.2, 50% of 7"
    assert {name: entry[name] for name in entry if name.startswith("DSEC_")} == {
        "DSEC_EVENT": "sandbox.failed", "DSEC_SANDBOX": "web", "DSEC_TOOK_S": "1.25",
    }  # fmt: skip
    assert (entry["PRIORITY"], entry["SYSLOG_IDENTIFIER"]) == ("6", "dsecd")
    assert entry["MESSAGE_ID"] == message_id("sandbox.failed") != message_id("sandbox.stopped")
    assert len(bytes.fromhex(entry["MESSAGE_ID"])) == 16


def test_text_of_a_client_makes_no_field_of_its_own(journal: Journal) -> None:
    journal.log("path=%s: %s", "/a\nDSEC_SANDBOX=other", "sandbox=%s MESSAGE_ID=1")
    entry = journal.entry()
    assert "DSEC_SANDBOX" not in entry and "MESSAGE_ID" not in entry
    assert entry["DSEC_PATH"] == "/a\nDSEC_SANDBOX=other"
    assert "\n" not in entry["MESSAGE"]


def test_an_entry_names_its_request_and_holds_its_traceback(journal: Journal) -> None:
    token = REQUEST_ID.set("ab-1")
    try:
        raise KeyError("x")
    except KeyError as error:
        journal.log("failed", error=error)
    finally:
        REQUEST_ID.reset(token)
    entry = journal.entry()
    assert entry["DSEC_REQUEST"] == "ab-1"
    assert entry["MESSAGE"].splitlines()[0] == "dsecd.core: failed request=ab-1"
    assert entry["MESSAGE"].splitlines()[-1] == "KeyError: 'x'"


def test_names_that_are_no_text_are_logged_all_the_same(journal: Journal) -> None:
    journal.log("path=%s", "/a\udcff")
    assert journal.entry()["DSEC_PATH"] == "/a\\udcff"


def test_what_the_journal_does_not_take_is_a_line(journal: Journal) -> None:
    journal.log("sandbox=%s %s", "web", "x" * 10_000_000)
    assert [line[:28] for line in journal.lines] == ["<6>dsecd.core: sandbox=web x"]
    for number in range(10_000):
        journal.log("number=%d", number)
    assert journal.entry()["DSEC_NUMBER"] == "0"
    assert journal.lines[-1] == "<6>dsecd.core: number=9999"
    journal.socket.close()
    journal.log("sandbox=%s", "late")
    assert journal.lines[-1] == "<6>dsecd.core: sandbox=late"
