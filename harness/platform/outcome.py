"""Between the platform's records and ours."""

from __future__ import annotations

from typing import Any

from osmosis_ai.rollout.types import (
    ExecutionOutcome,
    ExecutionResult,
    RolloutErrorCategory,
    RolloutSample,
    RolloutStatus,
)
from pydantic import SecretStr, ValidationError

from harness.errors import ConfigError, HarnessError
from harness.models import TrialRecord
from harness.platform.keeper import NOBODY
from harness.policy import Policy
from harness.policy.resolve import base_url


def policy_of(url: str, key: str | None) -> Policy:
    """Who answers a rollout's model calls. The model named in a call is kept: the platform's endpoint decides.

    :raises ConfigError: the URL or the key cannot be used.
    """
    if not url:
        return NOBODY
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("llm_api_key holds characters that cannot be sent in a header")
    return Policy(
        name="the rollout's chat endpoint",
        base_url=base_url(url, "chat_completions_url"),
        model="",
        key=SecretStr(key) if key else None,
    )


def failed(error: HarnessError) -> ExecutionOutcome:
    """The outcome of a rollout that never had a sandbox."""
    return ExecutionOutcome(
        workflow=ExecutionResult(
            status=RolloutStatus.FAILURE,
            err_message=str(error),
            err_category=RolloutErrorCategory(error.category),
            extra_fields={"backend": "harness", "phase": "sandbox", "error": type(error).__name__},
        )
    )


def cancelled() -> ExecutionOutcome:
    return ExecutionOutcome(workflow=ExecutionResult(status=RolloutStatus.CANCELLED, err_message="cancelled"))


def outcome_of(record: TrialRecord, *, waited_s: float, ungraded: bool) -> ExecutionOutcome:
    """What the platform is told of a trial.

    :param waited_s: seconds in the queue, which the record does not know.
    :param ungraded: a reward was asked for, but there is no grader or nothing to grade by: to the SDK a failure.
    """
    if record.status == "cancelled":
        return cancelled()
    extra = _diagnostics(record, waited_s)
    try:
        sample = _sample(record)
    except ValueError as error:
        return ExecutionOutcome(workflow=_failure(str(error), RolloutErrorCategory.VALIDATION_ERROR, None, extra))
    failure = record.failure
    if failure is not None and failure.party != "grader":
        category = RolloutErrorCategory(failure.category)
        return ExecutionOutcome(workflow=_failure(failure.message, category, None, extra))
    workflow = ExecutionResult(status=RolloutStatus.SUCCESS, sample=sample, extra_fields=extra)
    if ungraded:
        return ExecutionOutcome(workflow=workflow, grader=ExecutionResult(status=RolloutStatus.FAILURE))
    if failure is not None:
        grader = _failure(failure.message, RolloutErrorCategory(failure.category), sample, extra)
        return ExecutionOutcome(workflow=workflow, grader=grader)
    return ExecutionOutcome(workflow=workflow)


def _failure(
    message: str, category: RolloutErrorCategory, sample: RolloutSample | None, extra: dict[str, Any]
) -> ExecutionResult:
    return ExecutionResult(
        status=RolloutStatus.FAILURE, sample=sample, err_message=message, err_category=category, extra_fields=extra
    )


def _sample(record: TrialRecord) -> RolloutSample | None:
    """:raises ValueError: more than one, which this protocol cannot carry, or one that is none."""
    if len(record.samples) > 1:
        names = ", ".join(sample.name for sample in record.samples)
        raise ValueError(f"the rollout yielded {len(record.samples)} samples ({names}); the protocol carries one")
    if not record.samples:
        return None
    try:
        return RolloutSample.model_validate(record.samples[0].data)
    except ValidationError as error:
        raise ValueError(f"the rollout's sample is not valid: {error}") from error


def _diagnostics(record: TrialRecord, waited_s: float) -> dict[str, Any]:
    """Beside the result, in ``diagnostics.json``: where the time went and what became of the sandbox."""
    failure = record.failure
    return {
        "backend": "harness",
        "phase": "grader" if failure and failure.party == "grader" else "agent",
        "error": None if failure is None else {**failure.model_dump(), "traceback": failure.traceback[-4000:]},
        "timings_sec": record.timing.model_dump() | {"queued_s": waited_s},
        "usage": record.usage.model_dump(),
        "attempts": record.attempts,
        "sandbox": record.sandbox,
        "warnings": record.warnings,
    }
