"""multiply-local-openai: an agent of the OpenAI Agents SDK multiplies two numbers with a tool."""

from __future__ import annotations

import os
import re
from typing import Any

import uvicorn
from agents import ModelSettings, Runner, function_tool
from agents.models.interface import Model
from osmosis_ai.rollout.agent_workflow import AgentWorkflow
from osmosis_ai.rollout.backend.local import LocalBackend
from osmosis_ai.rollout.context import AgentWorkflowContext, GraderContext
from osmosis_ai.rollout.grader import Grader
from osmosis_ai.rollout.integrations.agents.openai_agents import (
    OsmosisAgent,
    OsmosisMemorySession,
    OsmosisRolloutModel,
)
from osmosis_ai.rollout.server import create_rollout_server
from osmosis_ai.rollout.types import AgentWorkflowConfig, GraderConfig

ANSWER = re.compile(r"####\s*([-+]?\d*\.?\d+)")
MAX_TURNS = 8


@function_tool
async def multiply_tool(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


class MultiplyConfig(AgentWorkflowConfig):
    name: str = "MultiplyAgentWorkflow"
    description: str = "Multiply two numbers using OpenAI Agents"
    model: Model
    model_settings: ModelSettings
    tools: Any


workflow_config = MultiplyConfig(
    model=OsmosisRolloutModel(),
    model_settings=ModelSettings(temperature=1.0, top_p=1.0, max_tokens=4096),
    tools=[multiply_tool],
)


class MultiplyGraderConfig(GraderConfig):
    name: str = "MultiplyGrader"
    description: str = "Compares the number after #### with the row's ground truth"


grader_config = MultiplyGraderConfig()


class MultiplyWorkflow(AgentWorkflow[MultiplyConfig]):
    async def run(self, ctx: AgentWorkflowContext[MultiplyConfig]) -> None:
        config = ctx.config
        assert config is not None
        agent = OsmosisAgent(
            name="multiply", model=config.model, model_settings=config.model_settings, tools=config.tools
        )
        await Runner.run(agent, ctx.prompt, session=OsmosisMemorySession(), max_turns=MAX_TURNS)


class MultiplyGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        content = ctx.sample.messages[-1].get("content", "") if ctx.sample and ctx.sample.messages else ""
        if isinstance(content, list):
            content = "\n".join(part.get("text", "") for part in content if part.get("type") == "output_text")
        found = ANSWER.search(content)
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
