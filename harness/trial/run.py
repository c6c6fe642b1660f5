"""A run: everything prepared, checked from inside one sandbox, then every pending trial, then the sum of it."""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Sequence
from importlib.metadata import version

import anyio
import anyio.to_thread
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

from harness.errors import HarnessError, SandboxError, StoreError
from harness.models import Row, TrialRecord
from harness.policy import Policy
from harness.report import Reporter
from harness.sandbox.base import describe
from harness.sandbox.owner import this_process
from harness.store import ArtifactLimits, RunInfo, RunResult, RunStore
from harness.trial.files import TrialDirectory
from harness.trial.fleet import Fleet
from harness.trial.plan import Plan
from harness.trial.preflight import check_session
from harness.trial.prepare import Prepared, prepare
from harness.trial.provenance import provenance, will_differ
from harness.trial.session import Blueprint, Session
from harness.trial.signals import Interrupts
from harness.trial.trial import MAX_ATTEMPTS, TrialRequest, TrialRunner

AHEAD = 0.25
"""Sandboxes that wait, loaded, as a share of those in flight; at least one."""
BREAKER = 5
"""After this many trials in a row that the policy or the provider failed, no more are started: they would all fail."""

Work = Sequence[tuple[Row, int]]


class WorkIsLeft(HarnessError):
    """Raised when a run ended without its sum: by Ctrl-C before the first trial, or for want of disk after some."""


async def execute(plan: Plan, reporter: Reporter) -> RunResult:
    """Run a plan to its end, or until it is interrupted.

    :raises WorkIsLeft: it ended without its sum; what is journalled is safe, the same command goes on.
    :raises HarnessError: before the first trial was started; nothing is left behind then.
    """
    info = await anyio.to_thread.run_sync(_info, plan)
    flags = plan.flags
    async with Interrupts.listen() as interrupts:
        with RunStore.open(
            flags.output,
            flags.name,
            plan.inputs,
            info,
            fresh=flags.fresh,
            retry=flags.retry,
            redact=plan.redactor.redact,
        ) as store:
            pinned = will_differ(info.provenance) if "git_pinned" in info.provenance else []
            for note in [*plan.notes, *pinned, *store.notes]:
                reporter.warning(note)
            pending = store.pending(plan.selection.rows, plan.n)
            reporter.start(
                store.name, store.planned, store.planned - len(pending), plan.config.evaluation.pass_threshold
            )
            try:
                if pending:
                    await _prepare_and_run(plan, store, pending, interrupts, reporter)
                try:
                    return await store.finish()
                except StoreError as error:
                    raise WorkIsLeft(error.message, hint=error.hint) from error
            finally:
                reporter.close()
                store.discard_if_unused()


async def _prepare_and_run(
    plan: Plan, store: RunStore, pending: Work, interrupts: Interrupts, reporter: Reporter
) -> None:
    with anyio.CancelScope() as whole:
        interrupts.on_first = interrupts.on_second = whole.cancel
        async with prepare(plan, reporter.phase) as prepared:
            for warning in prepared.warnings:
                reporter.warning(warning)
            blueprint = Blueprint(
                provider=prepared.provider,
                environment=prepared.environment,
                settings=plan.settings.sandbox,
                owner=this_process(store.name),
                relay=prepared.relay,
                entrypoint=plan.rollout.entrypoint,
                code=prepared.code,
                journal=lambda name: store.log.write("info", "sandbox", f"making {name}"),
            )
            ahead = max(1, round(plan.max_in_flight * AHEAD))
            async with Fleet(blueprint, max_in_flight=plan.max_in_flight, ahead=ahead, demand=len(pending)) as fleet:
                reporter.phase("checking the policy from inside a sandbox")
                fleet.put(await _checked(fleet, prepared.policy))
                trials = _Trials(plan, prepared, fleet, store, reporter)
                interrupts.on_first = trials.stop
                await trials.run(pending)
    if whole.cancelled_caught and interrupts.on_first == whole.cancel:
        raise WorkIsLeft("interrupted before the first trial was started")


async def _checked(fleet: Fleet, policy: Policy) -> Session:
    """A session that has asked the policy a question. A sandbox that is lost then is made again, as for a trial."""
    tries = AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, SandboxError) and error.retryable),
        stop=stop_after_attempt(MAX_ATTEMPTS),
        sleep=anyio.sleep,
        reraise=True,
    )
    async for attempt in tries:
        with attempt:
            session = await fleet.open()
            try:
                await check_session(session, policy)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await session.release()
                raise
    return session


class _Trials:
    """Every pending trial: admitted, run, recorded."""

    def __init__(self, plan: Plan, prepared: Prepared, fleet: Fleet, store: RunStore, reporter: Reporter) -> None:
        self._plan = plan
        self._store = store
        self._reporter = reporter
        limits = plan.settings.artifacts
        self._runner = TrialRunner(
            fleet,
            prepared.graders,
            limits=ArtifactLimits(files=limits.max_files, total_bytes=limits.max_mib << 20),
            keep=plan.flags.keep,
        )
        # Trials that are being graded hold no sandbox, but there must not be ever more of them.
        self._admitted = anyio.Semaphore(2 * plan.max_in_flight)
        self._admission = anyio.CancelScope()
        self._failed_in_a_row = 0

    def stop(self) -> None:
        """Start no more trials and end the running ones; what is being graded may finish."""
        self._admission.cancel()
        self._runner.stop()
        self._reporter.warning("interrupted: ending the running trials; again to end at once")

    async def run(self, pending: Work) -> None:
        async with anyio.create_task_group() as tasks:
            with self._admission:
                for row, run_index in pending:
                    await self._admitted.acquire()
                    tasks.start_soon(self._trial, row, run_index)

    async def _trial(self, row: Row, run_index: int) -> None:
        request = TrialRequest(
            rollout_id=uuid.uuid4().hex,
            prompt=row.prompt,
            label=row.label,
            metadata=row.metadata,
            agent_timeout_s=self._plan.agent_timeout_s,
            grader_timeout_s=self._plan.grader_timeout_s,
            row_index=row.index,
            source_row_index=row.source_index,
            run_index=run_index,
        )
        try:
            self._reporter.trial_started(row.index, run_index)
            async with TrialDirectory.open(self._store, request.rollout_id) as files:
                record = await self._runner.run(request, files)
            await self._store.record(record, row)
            self._reporter.trial_finished(record)
            self._judge(record)
        except HarnessError as error:
            self._halt(str(error), "free some space, then " if isinstance(error, StoreError) else "")
        except Exception as error:
            # A fault of the harness itself: this trial stays pending, the others go on.
            self._store.log.write("error", "trial", traceback.format_exc(), rollout_id=request.rollout_id)
            self._reporter.warning(f"row {row.index} run {run_index}: internal error, see logs.txt: {error!r}")
        finally:
            self._admitted.release()

    def _judge(self, record: TrialRecord) -> None:
        failure = record.failure
        if record.status == "cancelled":
            return
        if failure is None or failure.party not in ("policy", "sandbox") or not failure.retryable:
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        if self._failed_in_a_row == BREAKER:
            self._halt(
                f"{BREAKER} trials in a row failed for want of a {failure.party}: {failure.message}",
                then=", with --retry unscored to try these again",
            )

    def _halt(self, reason: str, first: str = "", then: str = "") -> None:
        if not self._admission.cancel_called:
            self._admission.cancel()
            self._reporter.warning(f"no more trials are started: {reason}")
            self._reporter.warning(f"{first}run the same command again to go on where this stopped{then}")


def _info(plan: Plan) -> RunInfo:
    workspace = plan.config.workspace
    return RunInfo(
        dataset_name=plan.config.experiment.dataset,
        sampled_rows=len(plan.selection.rows),
        total_dataset_rows=plan.selection.total_rows,
        pass_threshold=plan.config.evaluation.pass_threshold,
        provenance=provenance(
            plan.config.path, workspace.root, plan.config.experiment.branch, plan.config.experiment.commit_sha
        ),
        harness={
            "version": version("rollout-harness"),
            "sandbox": plan.sandbox,
            "settings": dict(describe(plan.settings.sandbox)),
            "max_in_flight": plan.max_in_flight,
        },
    )
