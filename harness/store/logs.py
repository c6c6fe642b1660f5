"""Files that grow while a run is going: model calls, the rollout's output, the run's own log."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.to_thread

from harness.models import CallRecord
from harness.store.files import Redact, clean, json_line, utc_now, writing

_LONGEST_SECRET = 4096


class Spool[T](ABC):
    """An append-only file. A little waits in memory; the rest reaches the disk off the event loop, in order.

    ``write`` waits for the disk when too much is held, and does nothing once the spool is closed: the trial is over.
    """

    most_held: ClassVar[int]

    def __init__(self, path: Path, redact: Redact) -> None:
        self.path = path
        self._redact = redact
        self._held: list[T] = []
        self._size = 0
        self._lock = anyio.Lock()
        self._closed = False

    async def write(self, item: T) -> None:
        """:raises StoreError: the disk refuses."""
        if self._closed:
            return
        self._held.append(item)
        self._size += self._measure(item)
        if self._size >= self.most_held:
            await self._flush(last=False)

    async def aclose(self) -> None:
        """:raises StoreError: the disk refuses."""
        if not self._closed:
            self._closed = True
            with anyio.CancelScope(shield=True):
                await self._flush(last=True)

    async def _flush(self, last: bool) -> None:
        async with self._lock:
            items, self._held, self._size = self._held, [], 0
            await anyio.to_thread.run_sync(self._append, items, last)

    def _append(self, items: list[T], last: bool) -> None:
        if data := self._encode(items, last):
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)

    @abstractmethod
    def _measure(self, item: T) -> int:
        """How much of ``most_held`` it takes."""

    @abstractmethod
    def _encode(self, items: list[T], last: bool) -> bytes: ...


class CallLog(Spool[CallRecord]):
    """``calls.jsonl`` of one trial, in the order in which the calls ended; ``index`` is the order of dispatch."""

    most_held = 4

    def _measure(self, item: CallRecord) -> int:
        return 1

    def _encode(self, items: list[CallRecord], last: bool) -> bytes:
        lines = []
        for call in items:
            data = call.model_dump()
            data |= {name: clean(data[name], self._redact) for name in ("path", "request", "response", "error")}
            lines.append(json_line(data))
        return b"".join(lines)


class TextLog(Spool[str]):
    """Output of the rollout, cut at ``limit`` bytes with a mark. Secrets are found across the pieces it arrives in."""

    most_held = 64 * 1024

    def __init__(self, path: Path, redact: Redact, limit: int) -> None:
        super().__init__(path, redact)
        self._left = limit
        self._dropped = 0
        self._rest = ""

    def _measure(self, item: str) -> int:
        return len(item)

    def _encode(self, items: list[str], last: bool) -> bytes:
        text = self._redact(self._rest + "".join(items))
        # A secret whose end is still to come lies within the last characters: they wait for it.
        cut = len(text) if last else max(0, len(text) - _LONGEST_SECRET)
        data, self._rest = text[:cut].encode("utf-8", "replace"), text[cut:]
        kept = data[: self._left]
        self._left -= len(kept)
        self._dropped += len(data) - len(kept)
        return kept + (f"\n[{self._dropped} more bytes were cut]\n".encode() if last and self._dropped else b"")


class RunLog:
    """``logs.txt``: ``<time> LEVEL [step] message {details}``, readable by its owner alone.

    Lines are short and rare, so each is one small write to the page cache and ``write`` is not awaited. A line that
    the disk refuses is lost: the log must not end a run.
    """

    def __init__(self, path: Path, redact: Redact) -> None:
        self._redact = redact
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, level: str, step: str, message: str, **details: Any) -> None:
        line = f"{utc_now()} {level.upper()} [{step}] {message}"
        if details:
            line += " " + json_line(clean(details, self._redact), canonical=True).decode().rstrip("\n")
        line = self._redact(line)[:16384].replace("\n", "\\n").replace("\r", "\\r")
        with suppress(OSError):
            os.write(self._descriptor, line.encode("utf-8", "replace") + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)
