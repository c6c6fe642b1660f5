"""multiply: the model multiplies two numbers, in plain chat completions.

The workflow shows the model one worked example, asks, and asks once more when the answer has no ``#### <number>`` line.
The grader compares that number with the row's ground truth.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import urllib.error
import urllib.request
from typing import Any

import uvicorn
from osmosis_ai.rollout.agent_workflow import AgentWorkflow
from osmosis_ai.rollout.backend.local import LocalBackend
from osmosis_ai.rollout.context import AgentWorkflowContext, GraderContext, get_rollout_context
from osmosis_ai.rollout.grader import Grader
from osmosis_ai.rollout.server import create_rollout_server
from osmosis_ai.rollout.types import AgentWorkflowConfig, AgentWorkflowOutput, ConcurrencyConfig

Message = dict[str, Any]

ANSWER = re.compile(r"####\s*([-+]?\d*\.?\d+)")

# A worked example, as turns of the conversation: small models copy a form they have seen, not one they are told about.
EXAMPLE: list[Message] = [
    {"role": "user", "content": "3 * 4"},
    {"role": "assistant", "content": "3 * 4 = 12\n#### 12"},
]
REMINDER: Message = {"role": "user", "content": "Give the final answer as a number on a line of its own: #### <number>"}


class MultiplyConfig(AgentWorkflowConfig):
    max_calls: int = 2
    max_tokens: int = 1024
    call_timeout_s: float = 600.0


config = MultiplyConfig(name="multiply", concurrency=ConcurrencyConfig(max_concurrent=32))


def post(url: str, key: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """One JSON request. The standard library's client is imported in a fraction of the time that others take.

    :raises RuntimeError: the policy refused; the message has its status and the beginning of its answer.
    """
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"policy answered {error.code}: {error.read(500).decode(errors='replace')}") from error


async def complete(messages: list[Message], config: MultiplyConfig) -> Message:
    """Ask the rollout's policy for the next message. Whoever serves it decides on the model and how it is sampled."""
    rollout = get_rollout_context()
    assert rollout is not None, "the backend runs a workflow inside a rollout context"
    body = {"model": "osmosis-rollout", "messages": messages, "max_completion_tokens": config.max_tokens}
    url = rollout.chat_completions_url.rstrip("/") + "/chat/completions"
    answer = await asyncio.to_thread(post, url, rollout.api_key or "", body, config.call_timeout_s)
    return {"role": "assistant", "content": answer["choices"][0]["message"].get("content") or ""}


class MultiplyWorkflow(AgentWorkflow[MultiplyConfig]):
    async def run(self, ctx: AgentWorkflowContext[MultiplyConfig]) -> AgentWorkflowOutput:
        settings = ctx.config or config
        system = [message for message in ctx.prompt if message["role"] == "system"]
        messages = [*system, *EXAMPLE, *ctx.prompt[len(system) :]]
        calls = 0
        while True:
            messages.append(await complete(messages, settings))
            calls += 1
            if calls == settings.max_calls or ANSWER.search(messages[-1]["content"]):
                return AgentWorkflowOutput(messages=messages, metrics={"calls": calls})
            messages.append(REMINDER)


class MultiplyGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        if ctx.label is None or ctx.sample is None:
            raise ValueError("nothing to compare: the row has no ground truth, or the rollout no sample")
        found = ANSWER.search(str(ctx.sample.messages[-1]["content"]))
        right = found is not None and abs(float(found[1]) - float(ctx.label)) < 1e-2
        ctx.set_reward(1.0 if right else 0.0)


def main() -> None:
    backend = LocalBackend(workflow=MultiplyWorkflow, workflow_config=config, grader=MultiplyGrader)
    app = create_rollout_server(backend=backend)
    port = int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000"))
    # Outlive the platform load balancer's idle timeout of 2100 s, or it reuses connections that are just being closed.
    uvicorn.run(app, host="0.0.0.0", port=port, timeout_keep_alive=2160)


if __name__ == "__main__":
    main()
