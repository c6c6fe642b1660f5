"""What the child prints, on its way to the host: bounded, decoded late, head and tail kept."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import time

from .mux import HIGH_WATER, Mux

CHUNK = 16 * 1024
FINISH_S = 2.0


class LogPump:
    """Carries one pipe. The first half of the budget goes out as it comes, the last half is what was printed last."""

    def __init__(self, source: str, descriptor: int, budget: int, mux: Mux) -> None:
        self._source = source
        self._descriptor = descriptor
        self._mux = mux
        self._head_left = budget // 2
        self._tail_size = budget - self._head_left
        self._tail = bytearray()
        self._dropped = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ended = asyncio.Event()
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._readable)

    async def finish(self) -> None:
        """Read what is left, send the tail. Called when no process of the sandbox holds the pipe any more."""
        deadline = time.monotonic() + FINISH_S
        while not self._ended.is_set() and time.monotonic() < deadline:
            self._readable()
            await asyncio.sleep(0)
        self._close()
        if self._dropped:
            # The cut may have split a character on both sides of it.
            self._decoder.reset()
        tail, self._tail = bytes(self._tail), bytearray()
        for start in range(0, len(tail), CHUNK):
            self._send(tail[start : start + CHUNK])
            await self._mux.room()
        if rest := self._decoder.decode(b"", True):
            self._mux.send({"type": "log", "source": self._source, "text": rest, "dropped": self._dropped})

    def _readable(self) -> None:
        if self._ended.is_set():
            return
        try:
            data = os.read(self._descriptor, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        if self._head_left > 0 and self._mux.waiting < HIGH_WATER:
            head, data = data[: self._head_left], data[self._head_left :]
            self._head_left -= len(head)
            self._send(head)
        if data:
            self._head_left = 0  # once something went into the tail, all that follows must
            self._tail += data
            if len(self._tail) > self._tail_size:
                excess = len(self._tail) - self._tail_size
                del self._tail[:excess]
                self._dropped += excess

    def _send(self, data: bytes) -> None:
        if text := self._decoder.decode(data):
            self._mux.send({"type": "log", "source": self._source, "text": text, "dropped": self._dropped})

    def _close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            asyncio.get_running_loop().remove_reader(self._descriptor)
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
