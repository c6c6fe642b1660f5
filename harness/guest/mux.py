"""Many streams over one: the state machine of the wire, the same at both ends.

It does no I/O of its own. Whoever owns the transport calls ``feed`` with what arrived, and sends what ``take``
returns whenever ``wake`` was called. Everything runs in one asyncio loop; nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from typing import Any

from . import wire
from .control import decode

HIGH_WATER = 512 * 1024
"""Bytes waiting for the transport above which writers pause."""
MAX_STREAMS = 128
SMALL = 4096
CREDIT_STEP = wire.WINDOW // 4


class StreamReset(ConnectionError):
    """Raised when the other side dropped the stream, or the whole channel went away."""


class Stream:
    """One two-way stream of bytes. Reading and writing are each for one task at a time."""

    def __init__(self, mux: Mux, number: int, purpose: str) -> None:
        self.number = number
        self.purpose = purpose
        self._mux = mux
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._consumed = 0
        self._credit = wire.WINDOW
        self._read_closed = False
        self._write_closed = False
        self._error: StreamReset | None = None
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """The next bytes; ``b""`` when the other side has finished.

        :raises StreamReset: the stream was dropped.
        """
        while not self._chunks:
            if self._read_closed:
                return b""
            if self._error is not None:
                raise self._error
            self._readable = asyncio.get_running_loop().create_future()
            await self._readable
        chunk = self._chunks.popleft()
        self._held -= len(chunk)
        self._consumed += len(chunk)
        if self._consumed >= CREDIT_STEP and not self._read_closed:
            self._mux.put(wire.encode_credit(self.number, self._consumed))
            self._consumed = 0
        return chunk

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it, waiting for credit and for the transport.

        :raises StreamReset: the stream was dropped, or this side has finished already.
        """
        view = memoryview(data)
        while view:
            if self._error is not None:
                raise self._error
            if self._write_closed:
                raise StreamReset("write after the end")
            if self._credit == 0:
                self._writable = asyncio.get_running_loop().create_future()
                await self._writable
                continue
            count = min(len(view), self._credit, wire.MAX_PAYLOAD)
            self._credit -= count
            self._mux.put(wire.encode(wire.DATA, self.number, bytes(view[:count])))
            view = view[count:]
            await self._mux.room()

    def write_eof(self) -> None:
        """Say that no more will be written. Idempotent."""
        if not self._write_closed and self._error is None:
            self._write_closed = True
            self._mux.put(wire.encode(wire.EOF, self.number))
            self._forget()

    def reset(self) -> None:
        """Drop the stream at once, both ways. Idempotent. What the other side has finished can still be read."""
        if self._error is None and not (self._read_closed and self._write_closed):
            self._mux.put(wire.encode(wire.RESET, self.number))
        self.drop(StreamReset("reset"))

    def drop(self, error: StreamReset) -> None:
        self._error = self._error or error
        if not self._read_closed:  # after its end, a stream that is dropped has still said all it had to say
            self._chunks.clear()
            self._held = 0
        self._wake()
        self._mux.streams.pop(self.number, None)

    def receive(self, frame: wire.Frame) -> None:
        """Take a frame of this stream.

        :raises wire.WireError: the other side sent more than its credit, or something after its end.
        """
        if frame.type == wire.RESET:
            self.drop(StreamReset("reset by the other side"))
        elif frame.type == wire.CREDIT:
            self._credit += int.from_bytes(frame.payload, "big")
            if self._credit > wire.WINDOW:
                raise wire.WireError("more credit than was used")
            self._wake()
        elif self._read_closed:
            raise wire.WireError("data after the end of a stream")
        elif frame.type == wire.EOF:
            self._read_closed = True
            self._wake()
            self._forget()
        elif frame.payload:
            if self._chunks and len(self._chunks[-1]) + len(frame.payload) <= SMALL:
                self._chunks[-1] += frame.payload  # a million one-byte frames must not become a million objects
            else:
                self._chunks.append(frame.payload)
            self._held += len(frame.payload)
            if self._held + self._consumed > wire.WINDOW:
                raise wire.WireError("more data than the stream had credit for")
            self._wake()

    def _wake(self) -> None:
        for waiter in (self._readable, self._writable):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def _forget(self) -> None:
        if self._read_closed and self._write_closed:
            self._mux.streams.pop(self.number, None)


class Mux:
    """All streams of one channel, and the JSON messages of stream 0.

    :param host: this is the host's end (odd stream numbers); the guest's are even.
    :param on_message: called with each message; a ``WireError`` it raises is the peer's fault.
    :param on_open: called with each stream that the other side opened.
    :param wake: called when there is something to ``take``.
    """

    def __init__(
        self,
        *,
        host: bool,
        on_message: Callable[[dict[str, Any]], None],
        on_open: Callable[[Stream], None],
        wake: Callable[[], None],
    ) -> None:
        self.streams: dict[int, Stream] = {}
        self._decoder = wire.Decoder()
        self._lines = wire.Lines()
        self._on_message = on_message
        self._on_open = on_open
        self._wake = wake
        self._next = 1 if host else 2
        self._highest_peer = 0
        self._out: list[bytes] = []
        self.waiting = 0
        """Bytes queued for the transport."""
        self._room: deque[asyncio.Future[None]] = deque()
        self._failure: StreamReset | None = None

    def feed(self, data: bytes) -> None:
        """Take what arrived.

        :raises wire.WireError: the other side broke the protocol; the channel is of no use any more.
        """
        for frame in self._decoder.feed(data):
            if frame.type == wire.CONTROL:
                for line in self._lines.feed(frame.payload):
                    self._on_message(_parse(line))
            elif frame.type == wire.OPEN:
                self._accept(frame)
            elif (stream := self.streams.get(frame.stream)) is not None:
                stream.receive(frame)
            elif (
                frame.stream >= self._next if frame.stream % 2 == self._next % 2 else frame.stream > self._highest_peer
            ):
                raise wire.WireError(f"frame for stream {frame.stream}, which nobody opened")

    def open(self, purpose: str) -> Stream:
        """Open a stream to the other side.

        :raises StreamReset: the channel is gone.
        """
        if self._failure is not None:
            raise self._failure
        stream = Stream(self, self._next, purpose)
        self.streams[stream.number] = stream
        self._next += 2
        self.put(wire.encode(wire.OPEN, stream.number, purpose.encode()))
        return stream

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message. Messages are few; whoever sends many calls ``room`` between them."""
        for frame in wire.encode_message(json.dumps(message, separators=(",", ":"), allow_nan=False).encode()):
            self.put(frame)

    def put(self, frame: bytes) -> None:
        if self._failure is None:
            self._out.append(frame)
            self.waiting += len(frame)
            self._wake()

    def take(self) -> bytes:
        """Everything that waits for the transport."""
        data = b"".join(self._out)
        self._out.clear()
        self.waiting = 0
        while self._room:
            waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_result(None)
        return data

    async def room(self) -> None:
        """Wait while the transport is behind."""
        while self.waiting > HIGH_WATER and self._failure is None:
            waiter = asyncio.get_running_loop().create_future()
            self._room.append(waiter)
            await waiter

    def fail(self, reason: str) -> None:
        """The channel is gone: every stream is dropped."""
        self._failure = self._failure or StreamReset(reason)
        self.take()
        for stream in list(self.streams.values()):
            stream.drop(self._failure)

    def _accept(self, frame: wire.Frame) -> None:
        if frame.stream % 2 == self._next % 2 or frame.stream <= self._highest_peer:
            raise wire.WireError(f"stream {frame.stream} cannot be opened")
        self._highest_peer = frame.stream
        stream = Stream(self, frame.stream, frame.payload[:64].decode("ascii", "replace"))
        self.streams[frame.stream] = stream
        if len(self.streams) > MAX_STREAMS:
            stream.reset()
        else:
            self._on_open(stream)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = decode(line)
    except ValueError as error:
        raise wire.WireError(f"message is not JSON: {error}") from error
    if not isinstance(message.get("type"), str):
        raise wire.WireError("message has no type")
    return message
