"""The journal, ``events.jsonl``: the one authority on which trials have a result."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
from pydantic import Field, ValidationError

from harness.errors import StoreError
from harness.models import Record
from harness.store.files import json_line, sync_folder, writing

Key = tuple[int, int]
"""Row index, run index."""


class Entry(Record, extra="ignore"):
    """One line of the journal: the final state of one trial. A later line for the same row and run replaces it."""

    row_index: int = Field(ge=0, strict=True)
    run_index: int = Field(ge=0, strict=True)
    rollout_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    status: Literal["success", "failed", "skipped"]
    source_row_index: int | None = None
    reward: float | None = None
    tokens: int | None = None
    duration_ms: float = 0.0
    error_type: str | None = None
    error: str | None = None
    """The failure in one short line."""
    timing: dict[str, float] = Field(default_factory=dict)
    """``harness.models.Timing`` as it was."""
    generation: int = 1
    """Which of the rollout's sources ran, counted from 1 (see ``manifest.py``)."""

    @property
    def key(self) -> Key:
        return self.row_index, self.run_index


class _Waiting:
    """An entry that is on its way to the disk."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.line = json_line(entry.model_dump(exclude_none=True, exclude_defaults=True), canonical=True)
        self.done = False
        self.error: StoreError | None = None


class Journal:
    """Appends entries durably. Entries that arrive while one flush is under way share the next.

    :raises StoreError: the file cannot be opened, or a line before the last is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.latest: dict[Key, Entry] = {}
        self.torn_bytes = 0
        """Length of a half-written last line that was dropped: the process was killed while writing it."""
        self._size = 0
        self._broken = False
        self._lock = anyio.Lock()
        self._waiting: list[_Waiting] = []
        with writing(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                self._replay()
                if self.torn_bytes:
                    os.ftruncate(self._descriptor, self._size)
                os.fsync(self._descriptor)
                sync_folder(path.parent)
            except BaseException:
                os.close(self._descriptor)
                raise

    def _replay(self) -> None:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    self.torn_bytes = len(line)
                    break
                try:
                    entry = Entry.model_validate_json(line)
                except ValidationError as error:
                    raise StoreError(
                        f"{self.path}:{number} is damaged: {error.errors()[0]['msg']}",
                        hint="Repair or remove that line, or start over under the same name with --fresh.",
                    ) from error
                self.latest[entry.key] = entry
                self._size += len(line)

    async def append(self, entry: Entry) -> None:
        """Returns once the entry is on the disk.

        :raises StoreError: it is not; the journal holds what it held before.
        """
        mine = _Waiting(entry)
        self._waiting.append(mine)
        with anyio.CancelScope(shield=True):  # a flush cannot be called back, and it ends by itself
            async with self._lock:
                if not mine.done:
                    await self._commit()
        if mine.error is not None:
            raise StoreError(mine.error.message, hint=mine.error.hint)

    async def _commit(self) -> None:
        batch, self._waiting = self._waiting, []
        try:
            await anyio.to_thread.run_sync(self._write, b"".join(waiting.line for waiting in batch))
        except StoreError as error:
            for waiting in batch:
                waiting.error = error
        else:
            self.latest.update({waiting.entry.key: waiting.entry for waiting in batch})
        for waiting in batch:
            waiting.done = True

    def _write(self, data: bytes) -> None:
        if self._broken:
            raise StoreError(
                f"{self.path} could not be repaired after a failed write", hint="Run the same command again."
            )
        with writing(self.path):
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._descriptor, view) :]
                os.fsync(self._descriptor)
            except OSError:
                self._broken = True
                with suppress(OSError):  # half a line must never stand before a whole one
                    os.ftruncate(self._descriptor, self._size)
                    self._broken = False
                raise
        self._size += len(data)

    def close(self) -> None:
        os.close(self._descriptor)
