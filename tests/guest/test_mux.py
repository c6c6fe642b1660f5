from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from harness.guest import wire
from harness.guest.mux import MAX_STREAMS, Mux, Stream, StreamReset

pytestmark = pytest.mark.anyio


class Pair:
    """A host's and a guest's end, joined by a transport that cuts bytes anywhere."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.messages: list[dict[str, Any]] = []
        self.opened: asyncio.Queue[Stream] = asyncio.Queue()
        self.wake = asyncio.Event()
        self.host = Mux(host=True, on_message=self.messages.append, on_open=self.opened.put_nowait, wake=self.wake.set)
        self.guest = Mux(
            host=False, on_message=self.messages.append, on_open=self.opened.put_nowait, wake=self.wake.set
        )
        self.most_waiting = 0

    async def carry(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            for source, target in ((self.host, self.guest), (self.guest, self.host)):
                self.most_waiting = max(self.most_waiting, source.waiting)
                data = source.take()
                while data:
                    size = self.random.randint(1, 100_000)
                    target.feed(data[:size])
                    data = data[size:]
            await asyncio.sleep(0)


@pytest.fixture
async def pair() -> Any:
    pair = Pair()
    task = asyncio.create_task(pair.carry())
    yield pair
    task.cancel()


async def read_all(stream: Stream) -> bytes:
    data = bytearray()
    while chunk := await stream.read():
        data += chunk
    return bytes(data)


async def test_many_streams_both_ways_at_once(pair: Pair) -> None:
    async def echo(stream: Stream) -> None:
        while chunk := await stream.read():
            await stream.write(chunk)
        stream.write_eof()

    async def one(mux: Mux, number: int) -> None:
        payload = random.Random(number).randbytes(number * 100_000)
        stream = mux.open(f"s{number}")
        reader = asyncio.create_task(read_all(stream))
        await stream.write(payload)
        stream.write_eof()
        assert await reader == payload

    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(one(pair.host if number % 2 else pair.guest, number))
        for _ in range(8):
            tasks.create_task(echo(await pair.opened.get()))
    assert pair.host.streams == {}
    assert pair.guest.streams == {}


async def test_a_slow_reader_holds_back_its_own_stream_only(pair: Pair) -> None:
    slow, fast = pair.host.open("slow"), pair.host.open("fast")
    await pair.opened.get()
    fast_reader = asyncio.create_task(read_all(await pair.opened.get()))
    stuck = asyncio.create_task(slow.write(bytes(wire.WINDOW + 1)))
    await fast.write(bytes(5 * wire.WINDOW))
    fast.write_eof()
    assert len(await fast_reader) == 5 * wire.WINDOW
    assert not stuck.done()
    stuck.cancel()


async def test_reset_reaches_both_sides(pair: Pair) -> None:
    ours = pair.host.open("x")
    theirs = await pair.opened.get()
    theirs.reset()
    with pytest.raises(StreamReset):
        await ours.read()
    with pytest.raises(StreamReset):
        await ours.write(b"late")
    with pytest.raises(StreamReset):
        await theirs.read()


async def test_failure_of_the_channel_wakes_everyone(pair: Pair) -> None:
    stream = pair.host.open("x")
    await pair.opened.get()
    reading = asyncio.create_task(stream.read())
    writing = asyncio.create_task(stream.write(bytes(wire.WINDOW * 2)))
    await asyncio.sleep(0.01)
    pair.host.fail("gone")
    for task in (reading, writing):
        with pytest.raises(StreamReset):
            await task
    with pytest.raises(StreamReset):
        pair.host.open("y")


async def test_messages_of_any_size_arrive_in_order(pair: Pair) -> None:
    sent = [{"type": "x", "n": n, "text": "ü\n" * n * 5000} for n in range(12)]
    for message in sent:
        pair.host.send(message)
    await asyncio.sleep(0.05)
    assert pair.messages == sent


@pytest.mark.parametrize(
    "attack",
    [
        wire.encode(wire.DATA, 2, b"x"),
        wire.encode(wire.CREDIT, 99, b"\0\0\0\1"),
        wire.encode(wire.OPEN, 1, b"ours"),
        wire.encode(wire.OPEN, 2) + wire.encode(wire.OPEN, 2),
        wire.encode(wire.OPEN, 2) + wire.encode(wire.EOF, 2) + wire.encode(wire.DATA, 2, b"x"),
        wire.encode(wire.OPEN, 2) + wire.encode(wire.CREDIT, 2, b"\xff\xff\xff\xff"),
        wire.encode(wire.OPEN, 2) + wire.encode(wire.DATA, 2, bytes(65536)) * 5,
        wire.encode(wire.CONTROL, 0, b"not json\n"),
        wire.encode(wire.CONTROL, 0, b"[1]\n"),
        wire.encode(wire.CONTROL, 0, b"[" * 60_000 + b"\n"),
        wire.encode(wire.CONTROL, 0, b'{"type": 1}\n'),
    ],
    ids=range(11),
)
async def test_a_peer_that_breaks_the_protocol_is_told_so(attack: bytes) -> None:
    host = Mux(host=True, on_message=lambda m: None, on_open=lambda s: None, wake=lambda: None)
    with pytest.raises(wire.WireError):
        host.feed(attack)


async def test_too_many_streams_are_reset_not_kept() -> None:
    host = Mux(host=True, on_message=lambda m: None, on_open=lambda s: None, wake=lambda: None)
    for number in range(2, 2 * MAX_STREAMS + 200, 2):
        host.feed(wire.encode(wire.OPEN, number))
    assert len(host.streams) == MAX_STREAMS


async def test_single_bytes_do_not_cost_an_object_each() -> None:
    opened: list[Stream] = []
    host = Mux(host=True, on_message=lambda m: None, on_open=opened.append, wake=lambda: None)
    host.feed(wire.encode(wire.OPEN, 2))
    for _ in range(20):
        host.feed(wire.encode(wire.DATA, 2, b"x") * 1000)
    assert len(await opened[0].read()) > 1000
