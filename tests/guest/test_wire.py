from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.guest import wire

frames = st.one_of(
    st.tuples(st.just(wire.CONTROL), st.just(0), st.binary(max_size=300)),
    st.tuples(
        st.sampled_from([wire.OPEN, wire.DATA, wire.EOF, wire.RESET]),
        st.integers(1, 2**32 - 1),
        st.binary(max_size=300),
    ),
    st.tuples(st.just(wire.CREDIT), st.integers(1, 2**32 - 1), st.binary(min_size=4, max_size=4)),
)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


@given(st.lists(frames, max_size=20), st.lists(st.integers(0, 200), max_size=50))
def test_frames_survive_any_cutting(sent: list[tuple[int, int, bytes]], sizes: list[int]) -> None:
    decoder = wire.Decoder()
    received = []
    for piece in cut(b"".join(wire.encode(*frame) for frame in sent), sizes):
        received += decoder.feed(piece)
    assert received == sent
    assert decoder.rest() == b""


@given(st.binary(max_size=400), st.lists(st.integers(0, 50), max_size=20))
def test_garbage_is_a_wire_error_or_frames_within_bounds(data: bytes, sizes: list[int]) -> None:
    decoder = wire.Decoder()
    try:
        for piece in cut(data, sizes):
            for frame in decoder.feed(piece):
                assert len(frame.payload) <= wire.MAX_PAYLOAD
                assert (frame.type == wire.CONTROL) == (frame.stream == 0)
    except wire.WireError:
        pass


@pytest.mark.parametrize(
    "frame",
    [
        wire.HEADER.pack(6, 1, 0),
        wire.HEADER.pack(wire.DATA, 1, wire.MAX_PAYLOAD + 1),
        wire.HEADER.pack(wire.DATA, 0, 0),
        wire.HEADER.pack(wire.CONTROL, 1, 0),
        wire.HEADER.pack(wire.CREDIT, 1, 3) + b"abc",
    ],
    ids=["unknown type", "too long", "data on stream 0", "control on stream 1", "short credit"],
)
def test_a_frame_that_cannot_be_is_refused(frame: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.Decoder().feed(frame)


@given(st.lists(st.binary(min_size=1, max_size=200).filter(lambda b: b"\n" not in b), max_size=10), st.integers(1, 99))
def test_messages_are_put_together_again(messages: list[bytes], size: int) -> None:
    lines, received = wire.Lines(), []
    data = b"".join(message + b"\n" for message in messages)
    for start in range(0, len(data), size):
        received += lines.feed(data[start : start + size])
    assert received == messages


def test_an_endless_message_is_refused() -> None:
    lines = wire.Lines(limit=1000)
    with pytest.raises(wire.WireError):
        for _ in range(100):
            lines.feed(b"x" * 100)
