"""A trial's files while it runs: model calls and output go to the disk as they come, off the event loop."""

from __future__ import annotations

import math
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from harness.background import Background
from harness.errors import StoreError
from harness.models import CallRecord
from harness.store import CallLog, TextLog


class Places(Protocol):
    """Where the files of each trial lie. A run's ``RunStore`` is one."""

    def trial_dir(self, rollout_id: str) -> Path: ...

    def call_log(self, rollout_id: str) -> CallLog: ...

    def text_log(self, rollout_id: str, source: str) -> TextLog: ...


class TrialDirectory:
    """``rollout_trials/<rollout_id>/`` of one trial. Whoever writes does not wait; one task carries it to the disk."""

    def __init__(self, store: Places, rollout_id: str) -> None:
        self.path = store.trial_dir(rollout_id)
        self.artifacts = self.path / "artifacts"
        self._calls: CallLog = store.call_log(rollout_id)
        self._texts: dict[str, TextLog] = {}
        self._store = store
        self._rollout_id = rollout_id
        # Unbounded, but the relay bounds the calls of a trial and the guest its log.
        self._send, self._receive = anyio.create_memory_object_stream[CallRecord | tuple[str, str]](math.inf)
        self._error: StoreError | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, store: Places, rollout_id: str) -> AsyncIterator[TrialDirectory]:
        """Everything written before the end of the ``async with`` is on the disk after it.

        :raises StoreError: the disk refused.
        """
        files = cls(store, rollout_id)
        async with Background() as tasks:
            tasks.start_soon(files._carry)
            try:
                yield files
            finally:
                files._send.close()
        if files._error is not None:
            raise files._error

    def call(self, record: CallRecord) -> None:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the trial is over
            self._send.send_nowait(record)

    def log(self, source: str, text: str) -> None:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._send.send_nowait((source, text))

    async def restart(self) -> None:
        """Forget the artifacts of an attempt whose sandbox was lost. Its calls and output stay: they were made."""
        await anyio.to_thread.run_sync(lambda: shutil.rmtree(self.artifacts, ignore_errors=True))

    async def _carry(self) -> None:
        with anyio.CancelScope(shield=True):  # ends when the sender is closed, even on the way out of a cancelled trial
            async for item in self._receive:
                if self._error is None:
                    try:
                        await self._write(item)
                    except StoreError as error:
                        self._error = error
            for text in self._texts.values():
                with suppress(StoreError):
                    await text.aclose()

    async def _write(self, item: CallRecord | tuple[str, str]) -> None:
        if isinstance(item, CallRecord):
            await self._calls.write(item)
            return
        source, text = item
        if source not in self._texts:
            self._texts[source] = self._store.text_log(self._rollout_id, source)
        await self._texts[source].write(text)
