# SPDX-License-Identifier: Apache-2.0
"""Published ports: the language."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.core.publishing import any_free
from libdsec.ports import normal, parse


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("8080:80", "127.0.0.1:8080:80"), (" 8080:80/tcp ", "127.0.0.1:8080:80"), ("0:80", "127.0.0.1:0:80"),
        ("127.1.2.3:65535:1", "127.1.2.3:65535:1"), ("[::1]:1:2", "[::1]:1:2"), ("[0:0::1]:1:2", "[::1]:1:2"),
    ],
)  # fmt: skip
def test_ports_are_read_into_one_form(text: str, form: str) -> None:
    assert str(parse(text)) == form
    assert parse(form) == parse(text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("80", "form"), ("1:2:3", "no address"), ("0.0.0.0:1:2", "loopback"), ("[::]:1:2", "loopback"),
        ("[::ffff:127.0.0.1]:1:2", "loopback"), ("192.0.2.1:1:2", "loopback"), ("[fe80::1%lo]:1:2", "form"),
        ("1:1/udp", "only tcp"), ("65536:1", "65535"), ("1:0", "not 0"), ("1:65536", "65535"), ("-1:1", "form"),
        ("٣:1", "form"), ("1:1\n", ""),
    ],
)  # fmt: skip
def test_what_is_none_is_refused_with_the_reason(text: str, word: str) -> None:
    if word:
        with pytest.raises(ValueError, match=word):
            parse(text)
    with pytest.raises(ValueError, match=r"port 1 .*; port 2 .*only tcp.*; 127.0.0.1 port 5 is there twice"):
        normal(["x", "1:1/sctp", "5:1", "5:2"])


@given(st.text())
def test_no_text_is_anything_but_loopback_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except ValueError:
        return
    assert found.address.is_loopback


def test_copies_get_ports_of_their_own() -> None:
    assert any_free(("127.0.0.1:8080:80", "[::1]:1:2")) == ("127.0.0.1:0:80", "[::1]:0:2")
