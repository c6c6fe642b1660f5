from __future__ import annotations

import json
from typing import Any

import aiohttp
import anyio
import pytest

from tests.support.policy import Fault, Reply, ScriptedPolicy, refused_url

pytestmark = pytest.mark.anyio
ASK: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "4 * 5"}]}


async def ask(policy: ScriptedPolicy, **more: object) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{policy.url}/chat/completions", json={**ASK, **more}) as response,
    ):
        return response.status, await response.text(errors="replace")


async def test_a_stream_says_what_one_object_says(scripted_policy: ScriptedPolicy) -> None:
    scripted_policy.script = lambda body: Reply("two words", (("bash", {"command": "ls"}),))
    _, whole = await ask(scripted_policy, return_token_ids=True)
    _, stream = await ask(scripted_policy, stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    message, events = json.loads(whole)["choices"][0]["message"], stream.strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    deltas = [part["choices"][0]["delta"] for part in parts[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta] == [
        call["function"] for call in message["tool_calls"]
    ]
    assert parts[-1]["usage"] == json.loads(whole)["usage"]
    assert len(json.loads(whole)["choices"][0]["token_ids"]) == parts[-1]["usage"]["completion_tokens"]


async def test_faults_come_first_and_once_each(scripted_policy: ScriptedPolicy) -> None:
    scripted_policy.faults = [Fault("status", 429, retry_after="7"), Fault("garbage")]
    assert (await ask(scripted_policy))[0] == 429
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads((await ask(scripted_policy))[1])
    assert "#### 20" in (await ask(scripted_policy))[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["drop", "cut"])
async def test_a_broken_answer_is_an_error_to_the_client(
    scripted_policy: ScriptedPolicy, kind: Any, stream: bool
) -> None:
    scripted_policy.faults = [Fault(kind)]
    with pytest.raises(aiohttp.ClientError):
        await ask(scripted_policy, stream=stream)


async def test_a_client_that_leaves_is_noticed(scripted_policy: ScriptedPolicy) -> None:
    scripted_policy.faults = [Fault("hang")]
    with anyio.move_on_after(0.5):
        await ask(scripted_policy)
    with anyio.fail_after(5):
        while not scripted_policy.aborted:
            await anyio.sleep(0.01)


async def test_wrong_keys_and_closed_ports_are_refused(scripted_policy: ScriptedPolicy) -> None:
    scripted_policy.key = "right"
    assert (await ask(scripted_policy))[0] == 401
    scripted_policy.url = refused_url()
    with pytest.raises(aiohttp.ClientConnectorError):
        await ask(scripted_policy)
