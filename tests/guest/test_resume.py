from __future__ import annotations

import random
from collections import deque
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.guest.resume import CHUNK, END, HEADER, WINDOW, Resumable, ResumeError


class Wire:
    """Two ends and the messages between them, which a cut loses."""

    def __init__(self) -> None:
        self.ends = (Resumable(), Resumable())
        self.flying: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        """Messages that end 0, and end 1, has sent."""
        self.got = (bytearray(), bytearray())

    def pump(self, which: int) -> None:
        while (message := self.ends[which].next_message()) is not None:
            self.flying[which].append(message)

    def deliver(self, to: int) -> None:
        if self.flying[1 - to]:
            self.got[to].extend(self.ends[to].receive(self.flying[1 - to].popleft()))

    def cut(self) -> None:
        for flying in self.flying:
            flying.clear()
        has = [end.received for end in self.ends]
        for end, other in zip(self.ends, reversed(has), strict=True):
            end.rewind(other)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_nothing_is_lost_or_repeated_however_often_the_connection_is_cut(seed: int) -> None:
    chance, wire = random.Random(seed), Wire()
    wrote = (bytearray(), bytearray())
    for _ in range(chance.randrange(300)):
        which = chance.randrange(2)
        match chance.randrange(6):
            case 0 | 1:
                if not wire.ends[which].full:
                    data = chance.randbytes(chance.choice((1, 10, 1000, 100_000)))
                    wire.ends[which].write(data)
                    wrote[which].extend(data)
            case 2:
                wire.pump(which)
            case 3 | 4:
                wire.deliver(which)
            case 5 if chance.random() < 0.3:
                wire.cut()
            case _:
                wire.flying[which].append(wire.ends[which].keep_alive())
    for which, end in enumerate(wire.ends):
        end.end(b"bye %d" % which)
    wire.cut()
    for _ in range(1000):
        for which in (0, 1):
            wire.pump(which)
            wire.deliver(which)
    assert wire.got == (wrote[1], wrote[0])
    assert [end.last_words for end in wire.ends] == [b"bye 1", b"bye 0"]


def test_what_is_not_acknowledged_is_bounded_and_freed_by_an_acknowledgement() -> None:
    wire = Wire()
    written = 0
    while not wire.ends[0].full:
        wire.ends[0].write(bytes(CHUNK))
        written += CHUNK
    assert written == WINDOW
    wire.pump(0)
    while wire.flying[0]:
        wire.deliver(1)
    wire.pump(1)
    wire.deliver(0)
    assert wire.ends[0].settled
    assert not wire.ends[0].full


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"short",
        HEADER.pack(7, 0, 0),
        HEADER.pack(0, 5, 0) + b"a gap",
        HEADER.pack(0, 0, 99),
        HEADER.pack(END, 3, 0),
        HEADER.pack(0, 2**64 - 1, 0) + b"x",
    ],
)
def test_a_message_that_cannot_be_is_refused(message: bytes) -> None:
    with pytest.raises(ResumeError):
        Resumable().receive(message)


def test_an_end_that_lost_what_this_one_has_freed_is_another_streams() -> None:
    wire = Wire()
    wire.ends[0].write(b"gone")
    wire.pump(0)
    wire.deliver(1)
    wire.flying[1].append(wire.ends[1].keep_alive())
    wire.deliver(0)
    with pytest.raises(ResumeError):
        wire.ends[0].rewind(0)


@given(st.binary(max_size=100))
def test_no_message_does_more_than_that(message: bytes) -> None:
    end = Resumable()
    end.write(b"something")
    with suppress(ResumeError):
        assert len(end.receive(message)) <= len(message)
