"""One channel: the shared state machine of ``harness.guest.mux`` driven over an anyio byte stream."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from harness.background import Background
from harness.errors import ChannelClosed, ChannelError, ProtocolError
from harness.guest import wire
from harness.guest.mux import Mux, Stream, StreamReset


class ChannelStream(ByteStream):
    """One of the channel's streams as an anyio byte stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._left = b""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """The next bytes.

        :raises anyio.EndOfStream: the other side finished.
        :raises anyio.BrokenResourceError: it dropped the stream.
        """
        try:
            data = self._left or await self._stream.read()
        except StreamReset as error:
            raise anyio.BrokenResourceError from error
        if not data:
            raise anyio.EndOfStream
        data, self._left = data[:max_bytes], data[max_bytes:]
        return data

    async def send(self, item: bytes) -> None:
        """:raises anyio.BrokenResourceError: the other side dropped the stream."""
        try:
            await self._stream.write(item)
        except StreamReset as error:
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        self._stream.write_eof()

    async def aclose(self) -> None:
        """Finish the stream: the other side can read all that was sent. Under cancellation it is dropped instead."""
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
            self._stream.write_eof()
        finally:
            self._stream.reset()

    def drop(self) -> None:
        """Drop the stream at once, unless it is closed. The other side sees that it was cut."""
        self._stream.reset()


class Channel:
    """Reads and writes a sandbox's byte stream for as long as the ``async with`` lasts.

    :param transport: the sandbox's bytes.
    :param on_message: called with each message of the guest. It may raise ``ProtocolError``.
    :param on_stream: awaited in a task of its own for each stream of the guest; must not raise for what it does.
    :param on_close: called once, when ``error`` is set.
    """

    def __init__(
        self,
        transport: ByteStream,
        on_message: Callable[[dict[str, Any]], None],
        on_stream: Callable[[str, ChannelStream], Coroutine[Any, Any, None]],
        on_close: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._on_stream = on_stream
        self._on_close = on_close
        self._wake = anyio.Event()
        self._background = Background()
        self._tasks = self._background.tasks
        self._mux = Mux(host=True, on_message=on_message, on_open=self._accept, wake=self._awake)
        self.error: ChannelError | None = None
        """Why the channel is of no use any more."""

    async def __aenter__(self) -> Self:
        await self._background.__aenter__()
        self._tasks.start_soon(self._receive)
        self._tasks.start_soon(self._send)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.fail(ChannelClosed("the channel was closed"))
        await self._background.__aexit__(kind, error, trace)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message for the guest.

        :raises ChannelError: the channel is gone.
        """
        if self.error is not None:
            raise self.error
        self._mux.send(message)

    def open(self, purpose: str) -> ChannelStream:
        """Open a stream to the guest.

        :raises ChannelError: the channel is gone.
        """
        if self.error is not None:
            raise self.error
        return ChannelStream(self._mux.open(purpose))

    def fail(self, error: ChannelError) -> None:
        """Give the channel up; only the first reason counts."""
        if self.error is None:
            self.error = error
            self._mux.fail(error.message)
            self._on_close()

    def _awake(self) -> None:
        self._wake.set()

    def _accept(self, stream: Stream) -> None:
        self._tasks.start_soon(self._on_stream, stream.purpose, ChannelStream(stream))

    async def _receive(self) -> None:
        try:
            while True:
                self._mux.feed(await self._transport.receive(256 * 1024))
        except wire.WireError as error:
            self.fail(ProtocolError(f"the guest broke the protocol: {error}"))
        except ChannelError as error:
            self.fail(error)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            self.fail(ChannelClosed("the sandbox closed its channel"))

    async def _send(self) -> None:
        try:
            while self.error is None:
                await self._wake.wait()
                self._wake = anyio.Event()
                while data := self._mux.take():
                    await self._transport.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            return  # what the guest said before it went is still to be read, and then ``_receive`` finds the end
