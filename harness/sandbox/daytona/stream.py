"""The channel's bytes over a WebSocket that is dialled again after each cut, for as long as the guest's lease.

Nobody owns a background task here: whoever waits in ``receive`` dials, keeps the connection alive and sends again what
was lost, which the channel does as long as it is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import anyio
from aiohttp import WSMsgType
from anyio import lowlevel
from anyio.abc import ByteStream

from harness.errors import ProtocolError
from harness.guest import websocket
from harness.guest.resume import WINDOW, Resumable, ResumeError

KEEP_ALIVE_S = 10.0
DEAD_AFTER = 2.5
"""A connection on which nothing came for so many keep-alives is dead."""
CLOSE_S = 0.5
DIAL_S = 15.0
FIRST_RETRY_S, LAST_RETRY_S = 0.02, 5.0


class Socket(aiohttp.ClientWebSocketResponse):
    """A connection on which writing never waits, as nobody would then notice that it is dead: what is under way is
    bounded by the stream's window. Made by a session whose ``ws_response_class`` it is."""

    def __init__(self, reader: Any, writer: Any, *rest: Any, **more: Any) -> None:
        super().__init__(reader, writer, *rest, **more)
        self.transport: asyncio.WriteTransport = writer.transport
        self.transport.set_write_buffer_limits(high=4 * WINDOW)


Dial = Callable[[bool], Awaitable[Socket]]
"""Makes a connection; with a fresh link and token when told that the last ones were refused."""


class Refused(aiohttp.ClientError):
    """Raised by a ``Dial`` whose link or token is no longer good, or leads elsewhere."""


class NobodyThere(Exception):
    """Raised by a ``Dial`` when there is no such sandbox any more."""


class ResumingStream(ByteStream):
    """One sending and one receiving task at a time. ``EndOfStream`` when the guest has ended, with ``last_words``.

    :param lease_s: how long a guest waits for its host; after that there is nobody to come back to.
    """

    def __init__(self, dial: Dial, lease_s: float) -> None:
        self._dial = dial
        self._lease_s = lease_s
        self.keep_alive_s = min(KEEP_ALIVE_S, lease_s / 6)
        self._secret = secrets.token_hex(16)
        self._link = Resumable()
        self._socket: Socket | None = None
        self._room = anyio.Event()
        self._left = b""
        self._heard = self._sent = 0.0
        self._closed = False
        self._broken: Exception | None = None
        self.dials = 0
        """Connections that were made: one, and one for each cut."""
        self.pid: int | None = None
        """The bridge's, as it says."""
        self.last_words: dict[str, Any] | None = None
        """What the bridge said of the guest's end: ``code``, ``oom_kills``, ``last_lines``. Not to be trusted."""

    async def open(self, timeout: float) -> None:
        """Dial until the guest answers.

        :raises TimeoutError: it did not.
        :raises anyio.BrokenResourceError: there is no sandbox any more, or the answer makes no sense.
        """
        with anyio.fail_after(timeout):
            await self._connect(time.monotonic() + timeout)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await lowlevel.checkpoint_if_cancelled()
        while not self._left:
            if self._closed:
                raise anyio.ClosedResourceError
            if self._broken is not None:
                raise anyio.BrokenResourceError from self._broken
            if self.last_words is not None:
                raise anyio.EndOfStream
            if self._socket is None:
                await self._connect(time.monotonic() + self._lease_s)
            else:
                await self._receive(self._socket)
        data, self._left = self._left[:max_bytes], self._left[max_bytes:]
        return data

    async def send(self, item: bytes) -> None:
        await lowlevel.checkpoint_if_cancelled()
        self._link.write(item)
        await self._flush()
        while self._link.full:
            self._check()
            self._room = anyio.Event()
            await self._room.wait()
        self._check()

    def _check(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        if self._broken is not None or self.last_words is not None:
            raise anyio.BrokenResourceError from self._broken

    async def send_eof(self) -> None:
        await lowlevel.checkpoint()

    async def aclose(self) -> None:
        self._closed = True
        self._room.set()
        await self._drop()

    async def _connect(self, deadline: float) -> None:
        """Dial again and again. The first refusal of a token asks for another one."""
        pause, fresh = FIRST_RETRY_S, False
        while not self._closed:
            try:
                with anyio.fail_after(DIAL_S):
                    socket = await self._dial(fresh)
                    try:
                        await self._greet(socket)
                    except BaseException:
                        await _close(socket)
                        raise
                self.dials += 1
                return
            except (NobodyThere, ResumeError, ProtocolError) as error:
                self._fail(error)
            except Refused:
                fresh = True
            except (aiohttp.ClientError, OSError, TimeoutError):
                fresh = False
            if time.monotonic() + pause > deadline:
                self._fail(TimeoutError("the guest's lease is over"))
            await anyio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 1.6, LAST_RETRY_S)
        raise anyio.ClosedResourceError

    async def _greet(self, socket: Socket) -> None:
        """Say what has arrived here, hear what has arrived there, and go on from that."""
        await socket.send_str(json.dumps({"secret": self._secret, "received": self._link.received}))
        message = await socket.receive()
        if message.type is WSMsgType.CLOSE and message.data in (websocket.POLICY, websocket.PROTOCOL):
            raise ProtocolError(f"the bridge refused this host: {str(message.extra)[:200]}")
        if message.type is not WSMsgType.TEXT:
            raise aiohttp.ClientConnectionError("the bridge did not answer")
        try:
            said = json.loads(message.data)
            received, pid = int(said["received"]), int(said["pid"])
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError("the bridge's first message makes no sense") from error
        self._link.rewind(received)
        self.pid = pid
        self._socket, self._heard = socket, time.monotonic()
        await self._flush()

    async def _receive(self, socket: Socket) -> None:
        message = None
        with anyio.move_on_after(self.keep_alive_s):
            message = await socket.receive()
        now = time.monotonic()
        if message is None:
            if now - self._heard > DEAD_AFTER * self.keep_alive_s:
                await self._drop()  # half-open: what is sent goes nowhere, and no error will come
                return
        elif message.type is not WSMsgType.BINARY:
            await self._drop()
            return
        else:
            self._heard = now
            try:
                self._left = self._link.receive(message.data)
                if self._link.last_words is not None:
                    self.last_words = _last_words(self._link.last_words)
            except ResumeError as error:
                self._fail(error)
            if not self._link.full or self.last_words is not None:
                self._room.set()
        await self._flush()
        if now - self._sent > self.keep_alive_s:
            await self._transmit(self._link.keep_alive())

    async def _flush(self) -> None:
        # A message is written to the connection before anything is awaited: two tasks cannot swap theirs.
        while self._socket is not None and (message := self._link.next_message()) is not None:
            await self._transmit(message)

    async def _transmit(self, message: bytes) -> None:
        if self._socket is not None:
            self._sent = time.monotonic()
            # When this connection is over ``receive`` finds out, and the next one brings the message again.
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await self._socket.send_bytes(message)

    def _fail(self, error: Exception) -> None:
        self._broken = error
        self._room.set()
        raise anyio.BrokenResourceError from error

    async def _drop(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await _close(socket)


async def _close(socket: Socket) -> None:
    with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_S):
        await socket.close()
    socket.transport.abort()  # what a dead connection still has to send would keep it open


def _last_words(data: bytes) -> dict[str, Any]:
    try:
        said = json.loads(data)
        return {
            "code": int(said["code"]),
            "oom_kills": int(said["oom_kills"]),
            "last_lines": str(said["last_lines"])[:8192],
        }
    except (ValueError, KeyError, TypeError):
        return {"code": 1, "oom_kills": 0, "last_lines": ""}
