"""The channel's bytes over a container's attached standard streams.

The engine hijacks the attach request's connection: what we write is the container's standard input, and what we read is
its output and error output, cut into frames (``kind:u8 0 0 0 length:u32 payload``, big-endian). The connection's
transport is taken over from aiohttp, because aiodocker's own ``Stream`` inspects the container once more and copies its
whole buffer for each frame.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import anyio
from anyio import lowlevel
from anyio.abc import ByteStream

_STDERR_TAIL = 8 * 1024
_HIGH, _LOW = 256 * 1024, 64 * 1024
"""Reading pauses above and resumes below these many unread bytes, so a guest that floods blocks on its own pipe."""


class _Demultiplexer(asyncio.Protocol):
    """Sorts the engine's frames as they come in, however they were cut."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.output = bytearray()
        self.errors = bytearray()
        self.readable, self.writable = asyncio.Event(), asyncio.Event()
        self.writable.set()
        self.ended = False
        self.error: Exception | None = None
        self._header = bytearray()
        self._kind, self._left = 1, 0
        self._paused = False

    def data_received(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view):
            if not self._left:
                take = 8 - len(self._header)
                self._header += view[:take]
                view = view[take:]
                if len(self._header) < 8:
                    break
                self._kind, self._left = self._header[0], int.from_bytes(self._header[4:])
                if self._kind > 3 or any(self._header[1:4]):
                    self._fail(ValueError(f"not an attach frame: {bytes(self._header)!r}"))
                    return
                self._header.clear()
                continue
            piece = view[: self._left]
            view = view[len(piece) :]
            self._left -= len(piece)
            if self._kind == 1:
                self.output += piece
            else:
                self.errors += piece
        del self.errors[:-_STDERR_TAIL]
        if self.output:
            self.readable.set()
            if len(self.output) > _HIGH and not self._paused:
                self._paused = True
                self.transport.pause_reading()

    def take(self, max_bytes: int) -> bytes:
        chunk = bytes(self.output[:max_bytes])
        del self.output[:max_bytes]
        if self._paused and len(self.output) < _LOW:
            self._paused = False
            self.transport.resume_reading()
        if not self.output and not self.ended:
            self.readable.clear()
        return chunk

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def eof_received(self) -> bool:
        if self._left or self._header:
            self.error = EOFError("the connection ended inside a frame")
        self.ended = True
        self.readable.set()
        return False  # close our direction as well: nobody is left to read it

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = self.error or exc
        self.ended = True
        self.readable.set()
        self.writable.set()

    def _fail(self, error: Exception) -> None:
        self.error = error
        self.transport.abort()


class AttachStream(ByteStream):
    """Standard input and output of a container as one byte stream, for one sending and one receiving task at a time.

    The end of the container's output is ``EndOfStream``; a connection that broke is ``BrokenResourceError``.
    """

    def __init__(self, transport: asyncio.Transport, received: bytes, release: Callable[[], None]) -> None:
        """:param received: bytes that had already arrived behind the response's head.
        :param release: tells the HTTP client that the connection is no longer in use.
        """
        self._transport = transport
        self._release = release
        self._protocol = _Demultiplexer(transport)
        self._receiving, self._sending = anyio.ResourceGuard("receiving from"), anyio.ResourceGuard("sending to")
        self._closed = False
        transport.set_protocol(self._protocol)
        if received:
            self._protocol.data_received(received)

    @property
    def at_eof(self) -> bool:
        """Whether the other side ended or lost the connection (unread bytes may still be there)."""
        return self._protocol.ended

    @property
    def last_words(self) -> str:
        """The last 8 KiB that the guest wrote to its descriptor 2."""
        return self._protocol.errors.decode(errors="replace")

    async def receive(self, max_bytes: int = 65536) -> bytes:
        with self._receiving:
            if self._protocol.output or self._protocol.ended or self._closed:
                await lowlevel.checkpoint()
            else:
                await self._protocol.readable.wait()
            if self._closed:
                raise anyio.ClosedResourceError
            if self._protocol.output:
                return self._protocol.take(max_bytes)
            if self._protocol.error is not None:
                raise anyio.BrokenResourceError from self._protocol.error
            raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        with self._sending:
            await lowlevel.checkpoint()
            self._check_sendable()
            self._transport.write(item)
            if not self._protocol.writable.is_set():
                await self._protocol.writable.wait()
                self._check_sendable()

    def _check_sendable(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        if self._protocol.ended or self._transport.is_closing():
            raise anyio.BrokenResourceError from self._protocol.error

    async def send_eof(self) -> None:
        """End the container's standard input, where the transport can do so (TLS cannot)."""
        if self._transport.can_write_eof() and not self._transport.is_closing():
            with contextlib.suppress(OSError):
                self._transport.write_eof()
        await lowlevel.checkpoint()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            # What fits into the socket's buffer still goes out; a peer that does not read is not waited for.
            self._transport.close()
            self._release()
            self._protocol.readable.set()
            self._protocol.writable.set()
            with anyio.CancelScope(shield=True):
                await lowlevel.checkpoint()
            self._transport.abort()
        await lowlevel.checkpoint()
