"""The official client against the relay, over TCP as in a sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute

from tests.relay.support import DONE, HELLO, Box, Step, box, completion, says, scripted, streams

openai: Any = pytest.importorskip("openai")
pytestmark = pytest.mark.anyio


@asynccontextmanager
async def client_of(it: Box) -> AsyncIterator[Any]:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, it.lease.serve)
        port = listener.extra(SocketAttribute.local_port)
        url = f"http://127.0.0.1:{port}/v1/rollouts/r1"
        async with openai.AsyncOpenAI(base_url=url, api_key=it.lease.token) as client:
            yield client
        tasks.cancel_scope.cancel()


async def ask(client: Any, **more: Any) -> Any:
    messages = [{"role": "user", "content": "hi"}]
    return await client.chat.completions.create(model="osmosis-rollout", messages=messages, **more)


async def test_plain_and_streamed() -> None:
    async with (
        scripted(says(completion()), streams(*HELLO, DONE)) as server,
        box(server.policy()) as it,
        client_of(it) as client,
    ):
        assert (await ask(client)).choices[0].message.content == "hello"
        parts = [part.choices[0].delta.content or "" async for part in await ask(client, stream=True)]
        assert "".join(parts) == "hello"


@pytest.mark.parametrize("status", [429, 500])
async def test_final_errors_are_not_retried_by_the_client(status: int) -> None:
    async with scripted(says({}, status)) as server, box(server.policy()) as it, client_of(it) as client:
        with pytest.raises(openai.APIStatusError):
            await ask(client)
        assert len(it.records) == 1
        assert len(server.seen) == 3


@pytest.mark.parametrize(
    "step",
    [streams(HELLO[0], "cut"), streams(HELLO[0]), streams(HELLO[0], 0.1, DONE)],
    ids=["cut", "no finish", "done without finish"],
)
async def test_truncated_streams_raise(step: Step) -> None:
    async with scripted(step) as server, box(server.policy()) as it, client_of(it) as client:
        with pytest.raises(Exception, match=r"finish reason|cut off|closed the connection|reached"):
            async for _ in await ask(client, stream=True):
                pass
