"""Eval configs: ``configs/eval/<name>.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from harness.config.experiment import ExperimentConfig, load
from harness.config.toml import Table, refuse
from harness.config.workspace import Kind


class Evaluation(Table):
    """``[evaluation]``."""

    pass_threshold: float = 1.0
    """A sample passes when its reward is at least this."""
    n: int = 1
    """Attempts for each row."""
    batch_size: int | None = None
    """Trials in flight; None: the harness decides."""
    agent_workflow_timeout_s: float | None = None
    """None: no deadline. The platform would take 450."""
    grader_timeout_s: float | None = None
    """None: no deadline. The platform would take 150."""
    limit: int | None = None
    """First rows to run; None or not positive: all."""

    @field_validator("n")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value <= 0:
            raise refuse("must be a positive integer", value)
        return value


class EvalConfig(ExperimentConfig):
    """A loaded eval config."""

    kind: ClassVar[Kind] = "eval"
    label: ClassVar[str] = "Evaluation"
    secrets_required: ClassVar[bool] = True
    sections: ClassVar[Mapping[str, type[Table]]] = {"evaluation": Evaluation}

    evaluation: Evaluation = Field(default_factory=Evaluation)


def load_eval_config(path: Path) -> EvalConfig:
    """Read ``configs/eval/<name>.toml``.

    :raises ConfigError: with every problem of the file, in the platform's wording.
    """
    return load(EvalConfig, path)
