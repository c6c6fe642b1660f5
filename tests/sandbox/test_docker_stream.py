"""The attached stream: every byte arrives, in order, both ways; back-pressure holds; ends and breaks are told apart."""

from __future__ import annotations

import hashlib
import random
import socket
from collections.abc import Callable

import anyio
import pytest
from anyio import to_thread

from harness.sandbox.docker.stream import AttachStream
from tests.sandbox.test_docker import nothing_left, program, spec

pytestmark = pytest.mark.anyio

ECHO = """
import os
while data := os.read(0, 65536):
    view = memoryview(data)
    while view:
        view = view[os.write(1, view):]
"""


@pytest.mark.docker
async def test_megabytes_arrive_whole_both_ways() -> None:
    provider = program(ECHO)
    choice = random.Random(1)
    data = choice.randbytes(1 << 20) * 8
    async with nothing_left(provider), await provider.create(spec()) as sandbox:
        stream = sandbox.stream

        async def feed() -> None:
            at = 0
            while at < len(data):
                size = choice.choice([1, 100, 65536, 300_000])
                await stream.send(data[at : at + size])
                at += size
            await stream.send_eof()

        found = hashlib.sha256()
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed)
                async for chunk in stream:
                    found.update(chunk)
        assert found.digest() == hashlib.sha256(data).digest()
        assert (await sandbox.outcome()).code == 0


@pytest.mark.docker
async def test_a_flood_nobody_reads_stays_in_the_guest() -> None:
    provider = program("import os\nwhile True: os.write(1, b'x' * 65536)")
    async with nothing_left(provider), await provider.create(spec()) as sandbox:
        await anyio.sleep(1)
        assert len(sandbox.stream._protocol.output) < 2 << 20
        with anyio.fail_after(10):
            for _ in range(100):
                assert set(await sandbox.stream.receive()) == {ord("x")}


@pytest.mark.docker
async def test_a_guest_that_does_not_read_blocks_the_sender_and_not_the_end() -> None:
    provider = program("import time; time.sleep(60)")
    async with nothing_left(provider), await provider.create(spec()) as sandbox:
        sent = 0
        with anyio.move_on_after(2) as scope:
            while True:
                await sandbox.stream.send(bytes(65536))
                sent += 65536
        assert scope.cancelled_caught
        assert sent < 8 << 20
        with anyio.fail_after(20):
            await sandbox.destroy()


@pytest.mark.docker
async def test_it_cannot_be_used_after_its_end() -> None:
    provider = program(ECHO)
    async with nothing_left(provider), await provider.create(spec()) as sandbox:
        await sandbox.stream.aclose()
        with pytest.raises(anyio.ClosedResourceError):
            await sandbox.stream.receive()
        with pytest.raises(anyio.ClosedResourceError):
            await sandbox.stream.send(b"x")


class Peer:
    """The engine's end of an attached connection, without an engine."""

    def __init__(self, stream: AttachStream, sock: socket.socket) -> None:
        self.stream = stream
        self._sock = sock

    async def send(self, data: bytes) -> None:
        await to_thread.run_sync(self._sock.sendall, data)

    def close(self) -> None:
        self._sock.close()


async def peer(received: bytes = b"") -> Peer:
    import asyncio

    ours, theirs = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    return Peer(AttachStream(transport, received, lambda: None), theirs)


async def drain(stream: AttachStream) -> None:
    async for _ in stream:
        pass


def frame(kind: int, payload: bytes) -> bytes:
    return bytes([kind, 0, 0, 0]) + len(payload).to_bytes(4) + payload


async def test_frames_are_put_together_however_they_are_cut() -> None:
    choice = random.Random(3)
    expected, errors, data = b"", b"", b""
    for _ in range(200):
        payload = choice.randbytes(choice.randrange(0, 3000))
        if choice.random() < 0.3:
            errors, data = errors + payload, data + frame(2, payload)
        else:
            expected, data = expected + payload, data + frame(1, payload)
    other = await peer(received=data[:100])
    data = data[100:]

    async def feed() -> None:
        at = 0
        while at < len(data):
            size = choice.choice([1, 5, 8, 700, 9000])
            await other.send(data[at : at + size])
            at += size
        other.close()

    found = b""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed)
        async for chunk in other.stream:
            found += chunk
    assert found == expected
    assert other.stream.last_words == errors[-8192:].decode(errors="replace")
    await other.stream.aclose()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(frame(1, b"hello")[:-2], id="cut-payload"),
        pytest.param(frame(1, b"hello") + b"\x01\x00", id="cut-header"),
        pytest.param(b"HTTP/1.1 500 what", id="not-a-frame"),
    ],
)
async def test_a_broken_connection_is_not_a_clean_end(data: bytes) -> None:
    other = await peer()
    await other.send(data)
    other.close()
    with anyio.fail_after(5), pytest.raises(anyio.BrokenResourceError):
        await drain(other.stream)
    with pytest.raises(anyio.BrokenResourceError):
        await other.stream.send(b"x")
    await other.stream.aclose()


@pytest.mark.parametrize("end", [lambda other: other.close()], ids=["close"])
async def test_a_waiting_receiver_is_woken_by_the_end(end: Callable[[Peer], None]) -> None:
    other = await peer()
    async with anyio.create_task_group() as tasks:

        async def receive() -> None:
            with pytest.raises(anyio.EndOfStream):
                await other.stream.receive()

        tasks.start_soon(receive)
        await anyio.wait_all_tasks_blocked()
        end(other)
    assert other.stream.at_eof
    await other.stream.aclose()
