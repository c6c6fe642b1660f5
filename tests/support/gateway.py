"""The machine's Docker engine at another socket, where its calls can be seen, cut and swallowed."""

from __future__ import annotations

import re
from pathlib import Path

import anyio
from anyio import CancelScope
from anyio.abc import SocketStream, TaskStatus


class Gateway:
    """A way to the engine that notes the calls, and can be cut."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder / 'engine.sock'}"
        self.calls: list[str] = []
        self.swallow = b""
        """A connection ends in nothing when these bytes are sent on it."""

    async def serve(self, *, task_status: TaskStatus[CancelScope]) -> None:
        listener = await anyio.create_unix_listener(self.url.removeprefix("unix://"))
        with CancelScope() as scope:
            async with listener:
                task_status.started(scope)
                await listener.serve(self._carry)

    async def _carry(self, client: SocketStream) -> None:
        try:
            async with (
                client,
                await anyio.connect_unix("/var/run/docker.sock") as engine,
                anyio.create_task_group() as tasks,
            ):

                async def answers() -> None:
                    async for data in engine:
                        await client.send(data)
                    tasks.cancel_scope.cancel()

                tasks.start_soon(answers)
                async for data in client:
                    self.calls += re.findall(
                        r"^(?:GET|POST|DELETE|PUT|HEAD) .*(?= HTTP/1.1)", data.decode("latin-1"), re.M
                    )
                    if self.swallow and self.swallow in data:
                        await anyio.sleep_forever()
                    await engine.send(data)
                tasks.cancel_scope.cancel()
        except* (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
