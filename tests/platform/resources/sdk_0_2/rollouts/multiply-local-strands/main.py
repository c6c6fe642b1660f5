"""The Strands rollout as SDK 0.2 has it: samples by name, classes found in the namespace, no program at the end."""

from __future__ import annotations

import re
from typing import Any

from osmosis_ai.rollout.agent_workflow import AgentWorkflow
from osmosis_ai.rollout.context import AgentWorkflowContext, GraderContext
from osmosis_ai.rollout.grader import Grader
from osmosis_ai.rollout.integrations.agents.strands import OsmosisRolloutModel, OsmosisStrandsAgent
from osmosis_ai.rollout.types import AgentWorkflowConfig, GraderConfig
from strands import tool
from strands.models.model import Model


@tool(name="multiply")
async def multiply_tool(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


class MultiplyConfig(AgentWorkflowConfig):
    name: str = "MultiplyAgentWorkflow"
    model: Model
    tools: Any


workflow_config = MultiplyConfig(model=OsmosisRolloutModel(params={"temperature": 1.0}), tools=[multiply_tool])
grader_config = GraderConfig(name="MultiplyGrader")


class MultiplyWorkflow(AgentWorkflow):
    async def run(self, ctx: AgentWorkflowContext) -> None:
        agent = OsmosisStrandsAgent(
            name="multiply",
            model=ctx.config.model,
            tools=ctx.config.tools,
            messages=ctx.prompt,
            callback_handler=None,
        )
        await agent.invoke_async()


class MultiplyGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        blocks = ctx.get_samples()["multiply"].messages[-1]["content"]
        found = re.search(r"####\s*([-+]?\d*\.?\d+)", "".join(block.get("text", "") for block in blocks))
        ctx.set_sample_reward("multiply", float(found is not None and float(found[1]) == float(ctx.label)))
