# SPDX-License-Identifier: Apache-2.0
"""The codec of the agent protocol: round trips, any chunking, and bytes from a hostile agent."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.backends.agentlink import frames, records
from dsecd.backends.agentlink.frames import FROM_AGENT, Fields, FrameParser, Tag, Type, Violation
from tests.support import fake_agent

FramesSeen = list[tuple[int, int, int, bytes]]

agent_frames = st.tuples(
    st.sampled_from(sorted(FROM_AGENT)), st.integers(0, 2**32 - 1), st.binary(max_size=300)
)


def parse(chunks: list[bytes]) -> FramesSeen:
    """What a parser makes of the chunks, each of which is overwritten after use as a receive buffer would be."""
    seen: FramesSeen = []
    parser = FrameParser()
    for chunk in chunks:
        buffer = bytearray(chunk)
        parser.feed(
            memoryview(buffer),
            lambda kind, flags, channel, payload: seen.append((kind, flags, channel, bytes(payload))),
        )
        buffer[:] = b"\xee" * len(buffer)
    return seen


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` in pieces that end at the cuts."""
    ends = sorted({*(c % (len(data) + 1) for c in cuts), len(data)})
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def test_numbers_are_those_of_the_document() -> None:
    """Types and tags agree with the tables of an independent reading of the document."""
    tags = {name.lower(): value for name, value in vars(Tag).items() if not name.startswith("_")}
    assert tags == fake_agent.TAGS
    assert (Type.HELLO, Type.PEEK, Type.OUTPUT, Type.EXIT, Type.OK, Type.ERROR) == (
        1,
        0xE,
        0x10,
        0x12,
        0x1E,
        0x1F,
    )
    assert (Type.FILE_GET, Type.DATA, Type.COMMIT, Type.READY) == (0x20, 0x21, 0x23, 0x29)


@given(st.lists(agent_frames, max_size=8), st.lists(st.integers(0, 10_000), max_size=40))
def test_any_chunking_gives_the_same_frames(sent: list[tuple[int, int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(fake_agent.make_frame(kind, channel, payload) for kind, channel, payload in sent)
    expected = [(kind, 0, channel, payload) for kind, channel, payload in sent]
    assert parse(cut(stream, cuts)) == expected
    assert parse([stream[i : i + 1] for i in range(len(stream))]) == expected


def test_largest_frame_passes_in_small_pieces() -> None:
    data = fake_agent.make_frame(Type.DATA, 5, bytes(65536))
    assert parse([data[i : i + 1000] for i in range(0, len(data), 1000)]) == [(Type.DATA, 0, 5, bytes(65536))]


@given(st.sampled_from(sorted(FROM_AGENT)), st.binary(max_size=64), st.integers(0, 2**31), st.integers(0, 3))
def test_frames_we_write_are_read_by_the_document(
    kind: int, payload: bytes, channel: int, flags: int
) -> None:
    assert frames.frame(kind, channel, payload, flags) == fake_agent.make_frame(kind, channel, payload, flags)


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<IBBHI", 65537, Type.OUTPUT, 0, 0, 1),
        struct.pack("<IBBHI", 2**32 - 1, Type.OK, 0, 0, 1),
        struct.pack("<IBBHI", 0, Type.START, 0, 0, 1),
        struct.pack("<IBBHI", 0, 0, 0, 0, 1),
        struct.pack("<IBBHI", 0, 0xFF, 0, 0, 1),
        struct.pack("<IBBHI", 0, Type.OK, 1, 0, 1),
        struct.pack("<IBBHI", 0, Type.OUTPUT, 2, 0, 1),
        struct.pack("<IBBHI", 0, Type.OK, 0, 1, 1),
    ],
)
@pytest.mark.parametrize("step", [1, 12])
def test_bad_header_is_refused_before_its_payload(header: bytes, step: int) -> None:
    with pytest.raises(Violation):
        parse([header[i : i + step] for i in range(0, len(header), step)])


def test_parser_holds_no_more_than_one_frame() -> None:
    parser = FrameParser()
    whole = fake_agent.make_frame(Type.OUTPUT, 1, bytes(65536))
    for piece in (whole + whole[:-1], whole[-1:] + whole[:-1]):
        parser.feed(memoryview(piece), lambda *_: None)
        assert parser.held_bytes == 65536 + 12 - 1


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=10))
def test_random_bytes_raise_nothing_but_violation(data: bytes, cuts: list[int]) -> None:
    try:
        parse(cut(data, cuts))
    except Violation:
        pass


field_values = st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=40))


@given(st.dictionaries(st.integers(0, 65535), field_values, max_size=12))
def test_fields_round_trip(values: dict[int, int | bytes]) -> None:
    ours = b"".join(
        frames.u64(tag, value) if isinstance(value, int) else frames.raw(tag, value)
        for tag, value in values.items()
    )
    assert ours == b"".join(fake_agent.field(tag, value) for tag, value in values.items())
    read = Fields(ours)
    for tag, value in values.items():
        if isinstance(value, int):
            assert read.u64(tag, frames.U64_MAX) == value
        else:
            assert read.raw(tag, 40) == value


record_readers = st.sampled_from(
    [
        records.error_from,
        records.exec_record_from,
        records.usage_from,
        records.file_info_from,
        records.dir_entry_from,
        lambda fields: records.exit_from(fields, "x"),
    ]
)
nearly_fields = st.lists(
    st.tuples(
        st.integers(1, 63),
        st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 5), st.binary(max_size=12), st.just(b"abc")),
    ),
    max_size=70,
).map(lambda pairs: b"".join(fake_agent.field(tag, value) for tag, value in pairs))


@given(record_readers, st.one_of(nearly_fields, st.binary(max_size=200)))
def test_records_raise_nothing_but_violation(read: object, payload: bytes) -> None:
    assert callable(read)
    try:
        read(Fields(payload))
    except Violation:
        pass


def test_field_that_comes_twice_is_refused() -> None:
    with pytest.raises(Violation):
        Fields(fake_agent.fields(pid=1) * 2)


@pytest.mark.parametrize("short", range(1, 15))
def test_field_that_is_cut_short_is_refused(short: int) -> None:
    """Also one whose value has no fixed size, and would pass as a shorter one."""
    with pytest.raises(Violation):
        Fields(fake_agent.fields(message=b"a message")[:-short])


def test_unknown_tags_are_skipped() -> None:
    assert Fields(fake_agent.field(999, b"?") + fake_agent.fields(pid=4)).u64(Tag.PID) == 4


def test_text_is_decoded_with_replacement() -> None:
    error = records.error_from(Fields(fake_agent.fields(code="io-error", errno=5, message=b"\xff\xfe!")))
    assert (error.code, error.errno, error.message) == ("io-error", 5, "\ufffd\ufffd!")


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"/", b"a\0b", b"x" * 256])
def test_names_that_leave_the_directory_are_refused(name: bytes) -> None:
    with pytest.raises(Violation):
        records.dir_entry_from(Fields(fake_agent.file_fields(name=name)))


def test_time_before_1970_is_negative() -> None:
    assert records.file_info_from(Fields(fake_agent.file_fields(mtime_ns=2**64 - 5))).mtime_ns == -5


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": 0}, {"kind": 3}, {"status": 256}, {"kind": 2, "status": 0}, {"kind": 2, "status": 65},
        {"reason": 6}, {"total_out": 2**63}, {"status": b"\0"}, {"finished_ns": 2**64 - 1},
    ],
)  # fmt: skip
def test_exits_that_linux_does_not_have_are_refused(changes: dict[str, int | bytes | str]) -> None:
    with pytest.raises(Violation):
        records.exit_from(Fields(fake_agent.exit_fields("x", **changes)), "x")


@given(st.lists(st.integers(0, 200_000), max_size=12))
def test_split_requests_join_to_the_whole(sizes: list[int]) -> None:
    parts = [frames.raw(Tag.ARGV, bytes(size)) for size in sizes]
    payloads = frames.split_request(parts)
    assert b"".join(payloads) == b"".join(parts)
    assert max(map(len, payloads)) <= frames.MAX_PAYLOAD
    small = all(len(part) <= frames.MAX_PAYLOAD for part in parts)
    if small and len(payloads) > 1:  # then every frame is a list of whole fields
        assert sum(len(fake_agent._read_fields(payload).get(Tag.ARGV, [])) for payload in payloads) == len(
            parts
        )


def test_request_over_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        frames.split_request([bytes(frames.MAX_REQUEST + 1)])


@pytest.mark.parametrize("value", ["", "a b", "x" * 65, "a/b", "é", "a\n"])
def test_ids_of_another_form_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="not a valid id"):
        frames.check_id(value)
