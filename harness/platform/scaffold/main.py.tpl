"""<your-rollout>: fill in the workflow and the grader."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from typing import Any

import uvicorn
from osmosis_ai.rollout.agent_workflow import AgentWorkflow
from osmosis_ai.rollout.backend.local import LocalBackend
from osmosis_ai.rollout.context import AgentWorkflowContext, GraderContext, get_rollout_context
from osmosis_ai.rollout.grader import Grader
from osmosis_ai.rollout.server import create_rollout_server


def complete(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask the rollout's model once. Agent frameworks do this for you: see `harness templates list`."""
    rollout = get_rollout_context()
    assert rollout is not None
    request = urllib.request.Request(
        rollout.chat_completions_url + "/chat/completions",
        json.dumps({"model": "osmosis-rollout", "messages": messages}).encode(),
        {"Authorization": f"Bearer {rollout.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
        return message


class Workflow(AgentWorkflow):
    async def run(self, ctx: AgentWorkflowContext) -> list[dict[str, Any]]:
        """Drive the model; what is returned is the conversation that is graded and trained on."""
        return [*ctx.prompt, await asyncio.to_thread(complete, ctx.prompt)]


class AnswerGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        """`ctx.label` is the row's ground truth; it is here only, never where the workflow runs."""
        answer = str(ctx.sample.messages[-1].get("content")) if ctx.sample and ctx.sample.messages else ""
        ctx.set_reward(1.0 if ctx.label and ctx.label in answer else 0.0)


def main() -> None:
    backend = LocalBackend(workflow=Workflow, grader=AnswerGrader)
    app = create_rollout_server(backend=backend)
    port = int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000"))
    # Outlive the platform load balancer's idle timeout of 2100 s, or it reuses connections that are just being closed.
    uvicorn.run(app, host="0.0.0.0", port=port, timeout_keep_alive=2160)


if __name__ == "__main__":
    main()
