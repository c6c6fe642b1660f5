"""One trial's life: a sandbox, the workflow in it, its files out, the sandbox gone, and only then the grading."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import anyio
from anyio.abc import ByteStream

from harness.channel import Ended
from harness.errors import ChannelError, HarnessError, ProviderUnavailable
from harness.grading import GradeRequest, GradeResult, GraderPool
from harness.models import CallRecord, Failure, Message, Sample, Timing, TrialRecord, Usage
from harness.policy import Policy
from harness.store import ArtifactLimits, receive_artifacts
from harness.trial import outcome
from harness.trial.fleet import Fleet
from harness.trial.session import Listener, Session, describe, gone

EXPORT_S = 120.0
CANCEL_GRACE_S = 2.0
MAX_ATTEMPTS = 3

Phase = Literal["queued", "running", "grading"]
Observe = Callable[[Phase], Awaitable[None]]


async def _nobody(phase: Phase) -> None:
    pass


@dataclass(frozen=True)
class TrialRequest:
    """What to run and how to score it. The label never leaves the host."""

    rollout_id: str
    prompt: list[Message]
    label: str | None = None
    metadata: dict[str, Any] | None = None
    agent_timeout_s: float | None = None
    queued_s: float = 0.0
    """Seconds of the agent's time that were spent waiting before; none where waiting is free."""
    grader_timeout_s: float | None = None
    grade: bool = True
    policy: Policy | None = None
    """Answers this trial's model calls; None: the relay's own."""
    row_index: int = 0
    source_row_index: int = 0
    run_index: int = 0


class TrialFiles(Protocol):
    """Where a trial's files go."""

    artifacts: Path

    def call(self, record: CallRecord) -> None: ...

    def log(self, source: str, text: str) -> None: ...

    async def restart(self) -> None:
        """Forget what an attempt whose sandbox was lost has left."""


@dataclass
class _Attempt:
    """What one sandbox yielded."""

    ended: Ended | None = None
    failure: Failure | None = None
    usage: Usage = field(default_factory=Usage)
    timing: dict[str, float] = field(default_factory=dict)
    sandbox: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class TrialRunner:
    """Runs trials on a fleet and grades them.

    :param graders: scores the samples.
    :param keep: take the work folder of each sandbox out too, into ``sandbox/`` beside the artifacts.
    """

    def __init__(self, fleet: Fleet, graders: GraderPool, *, limits: ArtifactLimits, keep: bool = False) -> None:
        self._fleet = fleet
        self._graders = graders
        self._limits = limits
        self._keep = keep
        self._running: dict[str, anyio.CancelScope] = {}

    def cancel(self, rollout_id: str) -> bool:
        """End a trial that has or awaits a sandbox; its record then says ``cancelled``. False if it does neither."""
        scope = self._running.get(rollout_id)
        if scope is not None:
            scope.cancel()
        return scope is not None

    def stop(self) -> None:
        """``cancel`` every trial."""
        for rollout_id in list(self._running):
            self.cancel(rollout_id)

    async def run(self, request: TrialRequest, files: TrialFiles, observe: Observe = _nobody) -> TrialRecord:
        """The trial's final state. Its failures are data; what is raised concerns every trial.

        :raises ProviderUnavailable: no sandbox can be made any more.
        """
        began = time.monotonic()
        warnings: list[str] = []
        await observe("queued")
        for number in range(1, MAX_ATTEMPTS + 1):
            with anyio.CancelScope() as scope:
                self._running[request.rollout_id] = scope
                attempt = _Attempt()
                try:
                    await self._attempt(request, files, observe, attempt)
                finally:
                    del self._running[request.rollout_id]
            warnings += attempt.warnings
            failure = attempt.failure
            if scope.cancelled_caught:
                return TrialRecord(**_identity(request), status="cancelled", attempts=number, warnings=warnings)
            if failure is None or not (failure.retryable and failure.party == "sandbox") or number == MAX_ATTEMPTS:
                break
            warnings.append(f"attempt {number} was lost: {failure.message}")
            await files.restart()
            await anyio.sleep(0.2 * 2**number)
        samples = attempt.ended.samples if attempt.ended else []
        if attempt.ended and attempt.ended.labelled and not request.grade:  # else grading does it
            samples = [Sample(name=each.name, data={**each.data, "label": request.label}) for each in samples]
        graded = GradeResult(samples=samples)
        timing = attempt.timing
        if failure is None and request.grade:
            started = time.monotonic()
            graded = await self._grade(request, files, samples, attempt, observe)
            failure = graded.failure
            timing["grade_s"] = time.monotonic() - started
        removed = graded.remove_sample and failure is None
        return TrialRecord(
            **_identity(request),
            status="failed" if failure is not None else "skipped" if removed else "success",
            reward=None if failure is not None or removed else graded.reward,
            samples=graded.samples,
            failure=failure,
            usage=attempt.usage,
            timing=Timing(**timing, total_s=time.monotonic() - began),
            attempts=number,
            sandbox=attempt.sandbox,
            warnings=warnings,
        )

    async def _attempt(self, request: TrialRequest, files: TrialFiles, observe: Observe, attempt: _Attempt) -> None:
        queued = time.monotonic()
        try:
            session = await self._fleet.take()
        except ProviderUnavailable:
            raise
        except HarnessError as error:
            attempt.failure = outcome.of_error(error)
            return
        waited = time.monotonic() - queued
        try:
            await observe("running")
            if request.policy is not None:
                session.lease.route(request.policy)
            session.attach(Listener(files.call, files.log))
            await self._run_workflow(request, session, attempt)
            if attempt.ended is not None:
                await self._collect(session, files, attempt)
        finally:
            with anyio.CancelScope(shield=True):
                await self._fleet.give_back(session)
        attempt.usage = session.lease.usage
        attempt.warnings += session.warnings
        attempt.sandbox = describe(session)
        if attempt.ended is not None:
            attempt.sandbox["peak_mib"] = attempt.ended.peak_mib
        attempt.timing |= {
            "queued_s": waited,
            "provision_s": session.provision_s,
            "load_s": session.load_s,
            "policy_s": session.lease.policy_s,
            "teardown_s": session.teardown_s,
        }

    async def _run_workflow(self, request: TrialRequest, session: Session, attempt: _Attempt) -> None:
        started = time.monotonic()
        limit = request.agent_timeout_s
        try:
            attempt.ended = await session.guest.run(
                rollout_id=request.rollout_id,
                prompt=request.prompt,
                metadata=request.metadata,
                timeout=None if limit is None else max(limit - request.queued_s, 0.0),
            )
        except (ChannelError, TimeoutError) as error:
            attempt.failure = outcome.of_error(await gone(session.sandbox, error))
            return
        finally:
            attempt.timing["agent_s"] = time.monotonic() - started
        lease = session.lease
        attempt.failure = outcome.of_ending(
            attempt.ended,
            timeout_s=limit,
            queued_s=request.queued_s,
            resources=self._fleet.blueprint.settings.resources,
            policy=lease.failure,
            # Whoever spent most of its time on its own is to blame for the rest, too.
            unanswered=lease.unanswered if lease.policy_s > attempt.timing["agent_s"] / 2 else None,
        )
        if attempt.failure is None and (failed := lease.usage.failed_calls):
            attempt.warnings.append(f"{failed} of {lease.usage.calls} model calls failed, see calls.jsonl")

    async def _collect(self, session: Session, files: TrialFiles, attempt: _Attempt) -> None:
        """Take the artifacts out, of failed workflows too. What cannot be had is a warning, never a failure."""
        started = time.monotonic()
        await self._take_out(session, "artifacts", files.artifacts, attempt)
        if self._keep:
            await self._take_out(session, "rollout", files.artifacts.with_name("sandbox"), attempt)
        attempt.timing["collect_s"] = time.monotonic() - started

    async def _take_out(self, session: Session, folder: str, target: Path, attempt: _Attempt) -> None:
        async def receive(stream: ByteStream) -> None:
            report = await receive_artifacts(stream, target, self._limits)
            attempt.warnings.extend(f"{folder}/{path} was skipped: {reason}" for path, reason in report.skipped)
            if report.skipped_more:
                attempt.warnings.append(f"{report.skipped_more} more files of {folder} were skipped")
            if report.error is not None:
                attempt.warnings.append(f"the files of {folder} ended early: {report.error}")

        try:
            exported = await session.guest.export(receive, EXPORT_S, folder)
            attempt.warnings += [
                f"{folder}/{skip.get('path')} was skipped: {skip.get('reason')}" for skip in exported.skipped
            ]
        except (ChannelError, TimeoutError) as error:
            attempt.warnings.append(f"the files of {folder} could not be taken out: {error}")

    async def _grade(
        self,
        request: TrialRequest,
        files: TrialFiles,
        samples: list[Sample],
        attempt: _Attempt,
        observe: Observe,
    ) -> GradeResult:
        await observe("grading")
        result = await self._graders.grade(
            GradeRequest(
                rollout_id=request.rollout_id,
                label=request.label,
                metadata=request.metadata,
                samples=samples,
                labelled=attempt.ended.labelled if attempt.ended else False,
                artifacts_dir=files.artifacts,
                timeout_s=request.grader_timeout_s,
            )
        )
        if result.log:
            files.log("grader", result.log)
        return result


def _identity(request: TrialRequest) -> dict[str, Any]:
    return {
        "rollout_id": request.rollout_id,
        "row_index": request.row_index,
        "source_row_index": request.source_row_index,
        "run_index": request.run_index,
    }
