# SPDX-License-Identifier: Apache-2.0
"""References to images, the environment's layers, and finding the image a reference means."""

import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from dsecd.core.images import records
from dsecd.core.images.compose import MAX_LAYERS, compose
from dsecd.core.images.names import Reference, parse, parse_name
from libdsec.errors import Conflict, InvalidSpec, NotFound
from libdsec.types import ImageInfo

A, B = "a" * 64, "a" * 20 + "b" * 44


@pytest.mark.parametrize(("text", "expected"), [
    ("debian", Reference("debian", "latest", None)),
    ("swe/django-1234:v1.0_X", Reference("swe/django-1234", "v1.0_X", None)),
    (f"swe/django@sha256:{A}", Reference("swe/django", None, A)),
    (f"sha256:{A[:12]}", Reference(None, None, A[:12])),
    ("0123456789ab", Reference(None, None, "0123456789ab")),
    ("0123456789a", Reference("0123456789a", "latest", None)),
    ("abcdefabcdef:1", Reference("abcdefabcdef", "1", None)),
])
def test_references_are_read(text: str, expected: Reference) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("text", [
    "", "/", "a//b", "../x", "a/..", "Upper", "a:", "a:b:c", "a:/x", "a@sha256:12", f"a@md5:{A}", "sha256:12", "a b",
    "a\n", "-a", "a-", "n" * 129, "a:" + "t" * 129, "a:.x", f"sha256:{A}0",
])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidSpec):
        parse(text)


@pytest.mark.parametrize("text", ["0123456789ab", "0123456789ab:1", f"a@sha256:{A}", f"sha256:{A}"])
def test_what_reads_as_a_digest_cannot_be_given_as_a_name(text: str) -> None:
    with pytest.raises(InvalidSpec, match="digest"):
        parse_name(text)


def test_layers_are_stacked_with_the_last_toolkit_on_top() -> None:
    assert compose("base", "work", ["t1", "t2"]) == ("t2", "t1", "work", "base")
    assert compose("base", None, []) == ("base",)
    assert compose("base", None, ["t", "t", "base"]) == ("base", "t")
    with pytest.raises(InvalidSpec, match="at most 16") as caught:
        compose("base", "work", [str(number) for number in range(MAX_LAYERS - 1)])
    assert caught.value.hint is not None


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    """Two images whose digests begin alike."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(records.SCHEMA)
    for digest, name in ((A, "one"), (B, "two")):
        info = ImageInfo(
            digest=f"sha256:{digest}", created_at=datetime.now(UTC), entries=1, size_bytes=1, metadata_bytes=1,
            manifest_digest="sha256:" + digest[::-1],
        )
        records.begin(connection, info, "import")
        records.publish(connection, digest, (name, "latest"))
    yield connection
    connection.close()


def test_a_digest_prefix_must_fit_one_image(db: sqlite3.Connection) -> None:
    assert records.find(db, parse(B[:21])) == B
    assert records.find(db, parse(f"sha256:{A}")) == A
    with pytest.raises(Conflict, match="several"):
        records.find(db, parse(A[:20]))
    with pytest.raises(NotFound):
        records.find(db, parse("f" * 12))


def test_a_name_with_a_digest_means_ours_or_the_manifest(db: sqlite3.Connection) -> None:
    assert records.find(db, parse(f"one@sha256:{A}")) == A
    assert records.find(db, parse(f"one@sha256:{A[::-1]}")) == A
    with pytest.raises(NotFound):
        records.find(db, parse(f"one@sha256:{B}"))


def test_an_unfinished_image_is_seen_by_nobody(db: sqlite3.Connection) -> None:
    db.execute("UPDATE images SET state = 'removing' WHERE digest = ?", (A,))
    with pytest.raises(NotFound):
        records.info(db, A)
    with pytest.raises(NotFound, match="was removed"):
        records.hold(db, A, "box")
    assert [info.digest for info in records.infos(db)] == [f"sha256:{B}"]


def test_counts_go_in_and_out_and_never_below_zero(db: sqlite3.Connection) -> None:
    objects = [bytes([number]) * 32 for number in range(4)]
    records.count_in(db, A, 0, objects[:3])
    records.count_in(db, B, 0, objects[1:])
    records.count_out(db, A, 0, objects[:3])
    assert records.unused_objects(db, 10) == [objects[0]]
    records.drop_objects(db, objects)
    assert {bytes(digest) for (digest,) in db.execute("SELECT digest FROM objects")} == set(objects[1:])
    with pytest.raises(sqlite3.IntegrityError):
        records.count_out(db, B, 0, [*objects[1:], objects[1]])


def test_removal_begins_only_without_names_and_holders(db: sqlite3.Connection) -> None:
    assert not records.begin_removal(db, A)
    records.hold(db, A, "box")
    records.untag(db, parse("one"), force=True)
    assert not records.begin_removal(db, A)
    records.release(db, A, "box")
    assert records.begin_removal(db, A)
    assert not records.begin_removal(db, A)
