"""Tasks that end with their owner."""

from __future__ import annotations

from types import TracebackType

import anyio
from anyio.abc import TaskGroup


class Background:
    """A task group for what runs beside its owner: leaving the ``async with`` cancels and awaits it.

    Unlike a bare task group it does not wrap what the owner's own body raises, so callers catch it as it was raised.
    """

    def __init__(self) -> None:
        self.tasks = anyio.create_task_group()

    async def __aenter__(self) -> TaskGroup:
        return await self.tasks.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tasks.cancel_scope.cancel()
        await self.tasks.__aexit__(None, None, None)
