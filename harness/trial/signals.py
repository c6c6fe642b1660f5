"""Ctrl-C in two steps, in the one place that handles signals."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskStatus

from harness.background import Background


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP and calls whoever wants to know.

    ``on_first`` is called at the first signal, ``on_second`` at each later one. Both may be replaced at any time.
    """

    def __init__(self) -> None:
        self.count = 0
        self.on_first: Callable[[], None] = lambda: None
        self.on_second: Callable[[], None] = lambda: None

    @classmethod
    @asynccontextmanager
    async def listen(cls) -> AsyncIterator[Interrupts]:
        interrupts = cls()
        async with Background() as tasks:
            await tasks.start(interrupts._receive)
            yield interrupts

    async def _receive(self, *, task_status: TaskStatus[None]) -> None:
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            wanted.append(signal.SIGHUP)
        with anyio.open_signal_receiver(*wanted) as signals:
            task_status.started()
            async for _ in signals:
                self.count += 1
                if self.count == 1:
                    self.on_first()
                else:
                    self.on_second()
