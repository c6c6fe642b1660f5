"""Training configs: ``configs/training/<name>.toml``. None means that the platform's default holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from harness.config.experiment import ExperimentConfig, load
from harness.config.toml import Table
from harness.config.workspace import Kind


class Training(Table):
    """``[training]``. Lengths are in tokens."""

    lr: float | None = None
    total_epochs: int | None = None
    n_samples_per_prompt: int | None = None
    """Trials of one group."""
    rollout_batch_size: int | None = None
    """Groups of one step."""
    max_prompt_length: int | None = None
    max_response_length: int | None = None
    agent_workflow_timeout_s: float | None = None
    grader_timeout_s: float | None = None


class Sampling(Table):
    """``[sampling]``."""

    rollout_temperature: float | None = None
    rollout_top_p: float | None = None


class Checkpoints(Table):
    """``[checkpoints]``, in steps."""

    eval_interval: int | None = None
    checkpoint_save_freq: int | None = None


class TrainingConfig(ExperimentConfig):
    """A loaded training config."""

    kind: ClassVar[Kind] = "training"
    label: ClassVar[str] = "Training"
    sections: ClassVar[Mapping[str, type[Table]]] = {
        "training": Training,
        "sampling": Sampling,
        "checkpoints": Checkpoints,
    }

    training: Training = Field(default_factory=Training)
    sampling: Sampling = Field(default_factory=Sampling)
    checkpoints: Checkpoints = Field(default_factory=Checkpoints)


def load_training_config(path: Path) -> TrainingConfig:
    """Read ``configs/training/<name>.toml``.

    :raises ConfigError: with every problem of the file, in the platform's wording.
    """
    return load(TrainingConfig, path)
