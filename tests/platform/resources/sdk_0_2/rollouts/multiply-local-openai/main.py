"""The OpenAI Agents rollout as SDK 0.2 has it: samples by name, a session with a name."""

from __future__ import annotations

import os
import re
from typing import Any

from agents import ModelSettings, Runner, function_tool
from agents.models.interface import Model
from osmosis_ai.rollout.agent_workflow import AgentWorkflow
from osmosis_ai.rollout.backend.local import LocalBackend
from osmosis_ai.rollout.context import AgentWorkflowContext, GraderContext
from osmosis_ai.rollout.grader import Grader
from osmosis_ai.rollout.integrations.agents.openai_agents import OsmosisAgent, OsmosisMemorySession, OsmosisRolloutModel
from osmosis_ai.rollout.server import create_rollout_server
from osmosis_ai.rollout.types import AgentWorkflowConfig, GraderConfig


@function_tool
async def multiply_tool(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


class MultiplyConfig(AgentWorkflowConfig):
    name: str = "MultiplyAgentWorkflow"
    model: Model
    model_settings: ModelSettings
    tools: Any


workflow_config = MultiplyConfig(
    model=OsmosisRolloutModel(), model_settings=ModelSettings(temperature=1.0), tools=[multiply_tool]
)
grader_config = GraderConfig(name="MultiplyGrader")


class MultiplyWorkflow(AgentWorkflow):
    async def run(self, ctx: AgentWorkflowContext) -> None:
        config = ctx.config
        agent = OsmosisAgent(
            name="multiply", model=config.model, model_settings=config.model_settings, tools=config.tools
        )
        await Runner.run(agent, ctx.prompt, session=OsmosisMemorySession(name="multiply"), max_turns=8)


class MultiplyGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        content = ctx.get_samples()["multiply"].messages[-1]["content"]
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        found = re.search(r"####\s*([-+]?\d*\.?\d+)", text)
        ctx.set_sample_reward("multiply", float(found is not None and float(found[1]) == float(ctx.label)))


def main() -> None:
    import uvicorn

    backend = LocalBackend(
        workflow=MultiplyWorkflow,
        workflow_config=workflow_config,
        grader=MultiplyGrader,
        grader_config=grader_config,
    )
    uvicorn.run(create_rollout_server(backend=backend), port=int(os.environ.get("ROLLOUT_PORT", "8000")))


if __name__ == "__main__":
    main()
