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


class Journal:
    """Appends entries durably, one at a time.

    :raises StoreError: the file cannot be opened, or a line before the last is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.latest: dict[Key, Entry] = {}
        self.torn_bytes = 0
        """Length of a half-written last line that was dropped: the process was killed while writing it."""
        self._size = 0
        self._lock = anyio.Lock()
        with writing(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                self._replay()
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
        line = json_line(entry.model_dump(exclude_none=True, exclude_defaults=True), canonical=True)
        with anyio.CancelScope(shield=True):  # a flush cannot be called back, and it ends by itself
            async with self._lock:
                await anyio.to_thread.run_sync(self._write, line)
                self.latest[entry.key] = entry

    def _write(self, data: bytes) -> None:
        with writing(self.path):
            os.ftruncate(
                self._descriptor, self._size
            )  # half a line of a failed write must never stand before a whole one
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._descriptor, view) :]
                os.fsync(self._descriptor)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
                raise
        self._size += len(data)

    def close(self) -> None:
        os.close(self._descriptor)
