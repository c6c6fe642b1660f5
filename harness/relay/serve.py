"""One connection from a sandbox: an HTTP/1.1 server on a byte stream, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import anyio
from aiohttp import web
from anyio.abc import ByteStream

from harness.errors import ChannelError
from harness.relay.request import error_body

GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, ChannelError, OSError)
"""What a byte stream raises when the other side is not there any more."""

_HIGH_WATER = 256 * 1024
_CLOSE_S = 10.0
"""How long a closing connection may take to hand over what was written."""


class HttpConnection(web.RequestHandler):
    """aiohttp's server protocol with error bodies that OpenAI clients can read, and no logging of what a peer sent."""

    def __init__(self, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,
            lingering_time=2.0,
            max_line_size=16 * 1024,
            max_field_size=16 * 1024,
        )
        self.idle = anyio.Event()
        """Set while no request is being handled."""
        self.idle.set()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already") from exc
        text = " ".join(message.split())[:500] if message and status < 500 else "The relay failed"
        body = error_body(status, "bad_request" if status < 500 else "relay_error", text)
        headers = {"Content-Type": "application/json", "x-should-retry": "false"}
        response = web.Response(status=status, body=body, headers=headers)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Peers cause these at will; what matters is raised or recorded elsewhere."""


class StreamTransport(asyncio.Transport):
    """Runs a protocol on a byte stream: bounded buffer, back-pressure both ways, and an end that can be abrupt."""

    def __init__(self, stream: ByteStream, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._stream, self._protocol = stream, protocol
        self._pieces: list[bytes] = []
        self._size = 0
        """Bytes that were written and not yet handed to the stream: those in ``_pieces`` and those on their way."""
        self._paused = self._closing = False
        self._wake = anyio.Event()
        self._drained = anyio.Event()
        self._readable = anyio.Event()
        self._readable.set()
        self._scope = anyio.CancelScope()

    async def run(self, first: bytes) -> None:
        """Serve until either side ends. Never raises for what the peer does.

        :param first: bytes that were read from the stream already.
        """
        self._protocol.connection_made(self)
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._write_loop)
                    await self._read_loop(first)
                    self._scope.cancel()
        finally:
            self._closing = True
            self._drained.set()
            self._protocol.connection_lost(None)

    async def _read_loop(self, data: bytes) -> None:
        with suppress(*GONE):
            while True:
                if not self._closing:
                    self._protocol.data_received(data)
                await self._readable.wait()
                data = await self._stream.receive()

    async def _write_loop(self) -> None:
        with suppress(*GONE):
            while True:
                while self._pieces:
                    data = b"".join(self._pieces)
                    self._pieces.clear()
                    await self._stream.send(data)
                    self._size -= len(data)
                    if self._paused and self._size <= _HIGH_WATER:
                        self._paused = False
                        self._protocol.resume_writing()
                self._drained.set()
                if self._closing:
                    break
                self._wake = anyio.Event()
                await self._wake.wait()
        self._scope.cancel()

    async def flush(self) -> bool:
        """Wait until everything written has been handed to the stream, or the connection is gone; says which."""
        while self._size and not self._closing:
            self._drained = anyio.Event()
            await self._drained.wait()
        return not self._size

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or not data:
            return
        self._pieces.append(bytes(data))
        self._size += len(data)
        self._wake.set()
        if self._size > _HIGH_WATER and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return self._size

    def close(self) -> None:
        """Hand over what was written, then close."""
        if not self._closing:
            self._closing = True
            self._scope.deadline = anyio.current_time() + _CLOSE_S
            self._wake.set()

    def abort(self) -> None:
        """Drop the connection now, with whatever was not handed over yet."""
        self._closing = True
        self._scope.cancel()

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        if self._readable.is_set():
            self._readable = anyio.Event()

    def resume_reading(self) -> None:
        self._readable.set()
