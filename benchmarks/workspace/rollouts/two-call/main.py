"""Two model calls and a grader that looks at the last one: as little work as a trial can have."""

import asyncio
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from osmosis_ai.rollout import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext, get_rollout_context


def call(url: str, key: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=600)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", f"{address.path}/chat/completions", json.dumps({"messages": messages}), headers)
    message: dict[str, Any] = json.load(connection.getresponse())["choices"][0]["message"]
    connection.close()
    return message


class TwoCalls(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> list[dict[str, Any]]:
        context = get_rollout_context()
        assert context is not None
        assert context.api_key is not None
        messages = list(ctx.prompt)
        for _ in range(2):
            messages.append(await asyncio.to_thread(call, context.chat_completions_url, context.api_key, messages))
        return messages


class Answered(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        assert ctx.sample is not None
        ctx.set_reward(1.0 if ctx.sample.messages[-1]["content"] == ctx.label else 0.0)
