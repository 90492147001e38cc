# SPDX-License-Identifier: Apache-2.0
"""Lines of the log."""

import logging

from dsecd.api.dispatch import REQUEST_ID
from dsecd.logs import Formatter


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
    line = Formatter(journal=True).format(record("path=%s", "/a\n<3>dsecd: all is lost\r"))
    assert line == "<6>dsecd.core: path=/a\\n<3>dsecd: all is lost\\r"


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
