"""Where text for people goes: it cannot stall or fail the run, nor play tricks on a terminal."""

from __future__ import annotations

import io
import os
import queue
import threading
import unicodedata
from contextlib import suppress
from typing import IO, TextIO, cast

from rich.console import Console


class Terminal(io.TextIOBase):
    """Writes to ``stream`` from a thread of its own: a stopped terminal or a full pipe never blocks the event loop.

    When far too much is waiting, or the stream is closed or broken, text is dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._queue: queue.Queue[str | None] = queue.Queue(maxsize=4096)
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (text := self._queue.get()) is not None:
            with suppress(OSError, ValueError):  # broken pipe, closed file: nobody reads any more
                self._put(text)

    def _put(self, text: str) -> None:
        try:
            descriptor = self._stream.fileno()
        except io.UnsupportedOperation:
            self._stream.write(text)
            return
        # Past the stream's own buffer: a thread stuck in that would hold a lock that the interpreter's end waits for.
        view = memoryview(text.encode(self.encoding, "replace"))
        while view:
            view = view[os.write(descriptor, view) :]

    def write(self, text: str) -> int:
        with suppress(queue.Full):
            self._queue.put_nowait(text)
        return len(text)

    def flush(self) -> None:
        """Nothing to do: the thread flushes."""

    def close(self) -> None:
        """Wait, at most two seconds, until what was written has gone out."""
        if not self.closed:
            with suppress(queue.Full):
                self._queue.put(None, timeout=2)
                self._thread.join(2)
            super().close()

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except ValueError:
            return False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"


def make_console(stream: TextIO | Terminal, *, plain: bool = False) -> Console:
    """A console that takes text as it is: no markup, no emoji codes, no highlighting. ``plain``: as if no terminal."""
    terminal = not plain and stream.isatty()
    return Console(
        file=cast("IO[str]", stream),
        markup=False,
        emoji=False,
        highlight=False,
        force_terminal=terminal,
        soft_wrap=not terminal,
        width=None if terminal else 1000,
    )


def printable(text: str, limit: int = 200) -> str:
    """Untrusted text on one line: no control or direction characters, no escapes, cut at ``limit`` characters."""
    text = text[: 4 * limit]
    text = "".join(" " if char.isspace() else char if unicodedata.category(char)[0] != "C" else "?" for char in text)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def seconds(value: float) -> str:
    """A duration for people: ``4.2s``, ``3:11``, ``1:02:03``."""
    if value < 60:
        return f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
