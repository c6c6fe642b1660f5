"""A training config as a run: the same rollouts, sampled and graded as in training, and no training."""

from __future__ import annotations

from typing import Any

from harness.config import EvalConfig, Evaluation, TrainingConfig

DEFAULT_GROUP = 8
"""The platform's ``n_samples_per_prompt``."""
DEFAULT_BATCH = 32
"""The platform's ``rollout_batch_size``."""


def as_eval(config: TrainingConfig, most_in_flight: int) -> tuple[EvalConfig, dict[str, Any], list[str]]:
    """What a run takes from a training config.

    :param most_in_flight: what this machine is good for; a step of ``rollout_batch_size`` groups may need fewer.
    :returns: the groups as an evaluation, the fields for model calls that set none themselves, and remarks.
    """
    training = config.training
    n = training.n_samples_per_prompt or DEFAULT_GROUP
    step = n * (training.rollout_batch_size or DEFAULT_BATCH)
    evaluation = Evaluation(
        n=n,
        batch_size=min(step, most_in_flight),
        agent_workflow_timeout_s=training.agent_workflow_timeout_s,
        grader_timeout_s=training.grader_timeout_s,
    )
    given = {"temperature": config.sampling.rollout_temperature, "top_p": config.sampling.rollout_top_p}
    sampling = {name: value for name, value in given.items() if value is not None}
    only_there = {
        "training": training.model_dump(
            include={"lr", "total_epochs", "max_prompt_length", "max_response_length"}, exclude_none=True
        ),
        "checkpoints": config.checkpoints.model_dump(exclude_none=True),
    }
    ignored = [f"{section}.{key}" for section, values in only_there.items() for key in values]
    notes = [f"ignored, only the platform uses: {', '.join(ignored)}"] if ignored else []
    shared = {name: getattr(config, name) for name in ("path", "workspace", "experiment", "env", "secrets", "advanced")}
    return EvalConfig(**shared, evaluation=evaluation), sampling, notes
