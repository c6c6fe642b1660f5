"""What goes into a grading and what comes out of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from harness.errors import Category
from harness.models import Failure, Record, Sample


class GraderInfo(Record):
    """What the entry point wires, as it was loaded in the host."""

    workflow: str
    grader: str | None
    sdk: str
    """Version of osmosis-ai."""
    generation: Literal["0.2", "0.3"]


class GradeRequest(Record):
    """What to grade."""

    rollout_id: str
    label: str | None
    metadata: dict[str, Any] | None
    samples: list[Sample]
    """As they came out of the sandbox. A reward in them is ignored: only the host gives rewards."""
    labelled: bool = False
    """Whether the sample gets the label, as the SDK gives it to messages that a workflow returned."""
    artifacts_dir: Path | None = None
    timeout_s: float | None = None
    """None: as long as it takes."""


class GradeResult(Record):
    """What came of it.

    ``samples`` are the graded ones; after a failure they are there too, with reward null. ``reward`` is that of the one
    sample; with several (SDK 0.2) it is the mean over those that were not removed, and each keeps its own in its data.
    """

    samples: list[Sample]
    reward: float | None = None
    remove_sample: bool = False
    """Every sample was removed, by the workflow or the grader: the trial is to be skipped, not scored."""
    failure: Failure | None = None
    log: str = ""
    """What the grader printed, its middle left out when it is long."""
    seconds: float = 0.0


class WorkerError(BaseModel):
    """An ``error`` object, see ``harness.guest``."""

    model_config = ConfigDict(extra="ignore")
    types: list[str] = Field(min_length=1)
    message: str
    traceback: str = ""
    category: str = "agent_error"


class Ready(BaseModel):
    """A worker's first message."""

    model_config = ConfigDict(extra="ignore")
    ok: bool
    info: GraderInfo | None = None
    error: WorkerError | None = None


class Graded(BaseModel):
    """A worker's answer. Its process runs user code, so nothing in it is taken on trust."""

    model_config = ConfigDict(extra="ignore")
    samples: list[Sample]
    error: WorkerError | None = None
    party: Literal["grader", "rollout"] = "grader"
    """Who is at fault; the rollout, when its workflow's sample is none."""
    last: bool = False
    """The worker ends after this one."""


def result_of(graded: Graded) -> GradeResult:
    """:raises ValueError: a success without its rewards."""
    if graded.error is not None:
        error = graded.error
        category: Category = error.category if error.category in get_args(Category) else "agent_error"  # type: ignore[assignment]
        message = error.message or error.types[0]
        failure = Failure(
            party=graded.party, category=category, kind=error.types[0], message=message, traceback=error.traceback
        )
        return GradeResult(samples=[_ungraded(sample) for sample in graded.samples], failure=failure)
    if not graded.samples:
        raise ValueError("no samples after grading")
    samples = [_ungraded(sample) if sample.data.get("remove_sample") else sample for sample in graded.samples]
    rewards = [_reward(sample) for sample in samples if not sample.data.get("remove_sample")]
    if not rewards:
        return GradeResult(samples=samples, remove_sample=True)
    return GradeResult(samples=samples, reward=math.fsum(rewards) / len(rewards))


def failed(request: GradeRequest, kind: str, message: str, category: Category, log: str = "") -> GradeResult:
    """The request's own samples, and why they have no reward."""
    samples = [_ungraded(sample) for sample in request.samples]
    if request.labelled:
        samples = [Sample(name=sample.name, data={**sample.data, "label": request.label}) for sample in samples]
    failure = Failure(party="grader", category=category, kind=kind, message=message)
    return GradeResult(samples=samples, failure=failure, log=log)


def _ungraded(sample: Sample) -> Sample:
    return Sample(name=sample.name, data={**sample.data, "reward": None})


def _reward(sample: Sample) -> float:
    reward = sample.data.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"the reward {reward!r} is not a finite number")
    return float(reward)
