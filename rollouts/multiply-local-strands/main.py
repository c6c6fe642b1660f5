"""multiply-local-strands: a Strands agent multiplies two numbers with a tool."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from typing import Any

import uvicorn
from osmosis_ai.rollout.agent_workflow import AgentWorkflow
from osmosis_ai.rollout.backend.local import LocalBackend
from osmosis_ai.rollout.context import AgentWorkflowContext, GraderContext
from osmosis_ai.rollout.grader import Grader
from osmosis_ai.rollout.integrations.agents.strands import OsmosisRolloutModel, OsmosisStrandsAgent
from osmosis_ai.rollout.server import create_rollout_server
from osmosis_ai.rollout.types import AgentWorkflowConfig, GraderConfig
from strands import tool
from strands.models.model import Model

logger = logging.getLogger(__name__)

ANSWER = re.compile(r"####\s*([-+]?\d*\.?\d+)")
MAX_INVOCATIONS = 8
MAX_ATTEMPTS = 3
TRANSIENT = ("connection error", "disconnected", "connection reset", "timed out", "temporarily unavailable")


@tool(name="multiply")
async def multiply_tool(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


class MultiplyConfig(AgentWorkflowConfig):
    name: str = "MultiplyAgentWorkflow"
    description: str = "Multiply two numbers using Strands"
    model: Model
    tools: Any


workflow_config = MultiplyConfig(
    model=OsmosisRolloutModel(params={"temperature": 1.0, "top_p": 1.0, "max_tokens": 16384}),
    tools=[multiply_tool],
)


class MultiplyGraderConfig(GraderConfig):
    name: str = "MultiplyGrader"
    description: str = "Compares the number after #### with the row's ground truth"


grader_config = MultiplyGraderConfig()


async def invoke(agent: OsmosisStrandsAgent) -> None:
    """One invocation; repeated when the model's endpoint failed for a moment. The tool has no effects to repeat."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            await agent.invoke_async()
            return
        except Exception as error:
            if attempt == MAX_ATTEMPTS or not any(word in str(error).lower() for word in TRANSIENT):
                raise
            logger.warning("the model failed (attempt %d of %d): %s", attempt, MAX_ATTEMPTS, error)
            await asyncio.sleep(2.0**attempt)


class MultiplyWorkflow(AgentWorkflow[MultiplyConfig]):
    async def run(self, ctx: AgentWorkflowContext[MultiplyConfig]) -> None:
        assert ctx.config is not None
        agent = OsmosisStrandsAgent(
            name="multiply",
            model=ctx.config.model,
            tools=ctx.config.tools,
            messages=ctx.prompt,
            callback_handler=None,
        )
        for _ in range(MAX_INVOCATIONS):
            await invoke(agent)
            if not any("toolUse" in block for block in agent.messages[-1]["content"]):
                return


class MultiplyGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        blocks = ctx.sample.messages[-1]["content"] if ctx.sample and ctx.sample.messages else []
        text = "".join(block.get("text", "") for block in blocks) if isinstance(blocks, list) else str(blocks)
        found = ANSWER.search(text)
        right = found is not None and abs(float(found[1]) - float(ctx.label or "nan")) < 1e-2
        ctx.set_reward(1.0 if right else 0.0)


def main() -> None:
    backend = LocalBackend(
        workflow=MultiplyWorkflow,
        workflow_config=workflow_config,
        grader=MultiplyGrader,
        grader_config=grader_config,
    )
    app = create_rollout_server(backend=backend)
    port = int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000"))
    # Outlive the platform load balancer's idle timeout of 2100 s, or it reuses connections that are just being closed.
    uvicorn.run(app, host="0.0.0.0", port=port, timeout_keep_alive=2160)


if __name__ == "__main__":
    main()
