# SPDX-License-Identifier: Apache-2.0
"""The test host's channel keeps its word over a damaged or abandoned stream: real agent, a socket for the port."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vm.channel import Channel, ChannelError, Result
from tests.vm.frames import FILLER, PAYLOAD_MAX, Decoder, Frame, Kind, encode
from tests.vm.guest_agent import Agent

_KINDS = st.sampled_from(list(Kind))
_FRAMES = st.builds(Frame, _KINDS, st.integers(0, 2**32 - 1), st.binary(max_size=300))


@given(st.lists(_FRAMES), st.integers(1, 400))
def test_frames_arrive_as_they_were_however_the_stream_is_cut(frames: list[Frame], size: int) -> None:
    stream = b"".join(encode(frame) for frame in frames)
    decoder = Decoder()
    found = [frame for at in range(0, len(stream), size) for frame in decoder.feed(stream[at : at + size])]
    assert found == frames
    assert decoder.skipped == 0


@given(st.binary(max_size=200), _FRAMES, _FRAMES, st.data())
def test_a_frame_is_found_behind_noise_and_half_a_frame(noise: bytes, broken: Frame, whole: Frame, data) -> None:
    half = encode(broken)[: data.draw(st.integers(0, len(encode(broken)) - 1))]
    assert list(Decoder().feed(noise + half + FILLER + encode(whole)))[-1] == whole


@given(_FRAMES, st.data())
def test_a_damaged_frame_is_none(frame: Frame, data) -> None:
    stream = bytearray(encode(frame))
    stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    assert frame not in list(Decoder().feed(bytes(stream) + FILLER))


def test_a_payload_has_an_end() -> None:
    assert len(encode(Frame(Kind.INPUT, 1, bytes(PAYLOAD_MAX)))) == len(FILLER)
    with pytest.raises(ValueError, match="at most"):
        encode(Frame(Kind.INPUT, 1, bytes(PAYLOAD_MAX + 1)))


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Path]:
    """A socket behind which an agent serves one peer after the other, as on a serial port."""
    path = tmp_path / "port"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                try:
                    Agent(peer.fileno()).serve(once=True)
                except OSError:
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    yield path
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(60)


def _run(port: Path, line: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> Result:
    channel = Channel(port, timeout_s=60)
    try:
        return channel.run(["sh", "-c", line], stdin=stdin, timeout_s=timeout_s, cwd="/")
    finally:
        channel.close()


def test_a_command_s_streams_and_status_come_back_apart(port: Path) -> None:
    data = bytes(range(256)) * 2000
    result = _run(port, "cat; printf problem >&2; exit 7", stdin=data)
    assert (result.stdout, result.stderr, result.status, result.reason) == (data, b"problem", 7, "exit")
    assert not result.ok


def test_a_signal_is_a_status_below_zero(port: Path) -> None:
    assert _run(port, "kill -TERM $$").status == -15


def test_a_command_that_cannot_be_started_is_told_apart(port: Path) -> None:
    channel = Channel(port, timeout_s=60)
    assert channel.run(["/no/such/program"], cwd="/").reason == "not-started"
    # And the channel serves on.
    assert channel.run(["true"], cwd="/").ok
    channel.close()


def test_a_command_is_ended_at_its_time(port: Path) -> None:
    result = _run(port, "echo before; sleep 60", timeout_s=2)
    assert (result.reason, result.status, result.stdout) == ("timeout", -9, b"before\n")


def test_input_that_nobody_reads_is_no_hindrance(port: Path) -> None:
    channel = Channel(port, timeout_s=60)
    assert channel.run(["true"], stdin=bytes(5 << 20), cwd="/").ok
    assert channel.run(["cat"], stdin=b"next", cwd="/").stdout == b"next"
    channel.close()


def test_what_a_command_leaves_behind_disturbs_no_later_one(port: Path, tmp_path: Path) -> None:
    channel = Channel(port, timeout_s=60)
    # The child holds the output open beyond the command's end, which is told nevertheless, and writes to it.
    left = f"(cd {tmp_path}; until [ -e go ]; do sleep 0.05; done; echo late; touch said) & head -c 300000 /dev/zero"
    assert channel.run(["sh", "-c", left], cwd="/").stdout == bytes(300_000)
    later = f"cd {tmp_path}; touch go; until [ -e said ]; do sleep 0.05; done; echo mine"
    assert channel.run(["sh", "-c", later], cwd="/").stdout == b"mine\n"
    channel.close()


def test_more_output_than_memory_should_take_is_an_error(port: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.vm.channel.OUTPUT_MAX", 1000)
    with pytest.raises(ChannelError, match="1000 bytes"):
        _run(port, "head -c 2000 /dev/zero")


def test_without_an_agent_there_is_no_channel(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match="does not answer"):
        Channel(tmp_path / "none", timeout_s=0.3)
