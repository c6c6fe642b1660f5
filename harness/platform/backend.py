"""``SandboxBackend``: the platform's rollout server, with a sandbox for each rollout that it admits."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from osmosis_ai.rollout.agent_workflow import AgentWorkflow
from osmosis_ai.rollout.backend.base import ExecutionBackend
from osmosis_ai.rollout.context import RolloutContext, get_rollout_context
from osmosis_ai.rollout.grader import Grader
from osmosis_ai.rollout.types import (
    AgentWorkflowConfig,
    ExecutionOutcome,
    ExecutionRequest,
    GraderConfig,
    RolloutStatus,
)
from osmosis_ai.rollout.utils.file_artifacts import create_rollout_artifacts_dir, default_artifact_root
from osmosis_ai.rollout.utils.imports import resolve_object

from harness.config import Redactor, ambient_secrets
from harness.errors import HarnessError, StoreError
from harness.platform.keeper import Keeper, ServeJob, find_rollout
from harness.platform.outcome import cancelled, failed, outcome_of, policy_of
from harness.rollout.source import Rollout
from harness.sandbox.select import Choice
from harness.store import CallLog, TextLog
from harness.trial.files import TrialDirectory
from harness.trial.trial import Phase, TrialRequest

MAX_QUEUE_DEPTH = 1024
DEFAULT_IN_FLIGHT = 4
"""The SDK's own default where a rollout says nothing."""
LOG_BYTES = 1 << 20
_REMEMBERED = 10_000
_FINISHED = frozenset({RolloutStatus.SUCCESS, RolloutStatus.FAILURE, RolloutStatus.CANCELLED})


@dataclass
class _Live:
    """A rollout between its admission and its result."""

    status: RolloutStatus = RolloutStatus.QUEUED
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class SandboxBackend(ExecutionBackend):
    """Runs each rollout in a sandbox of its own and grades it in the host. Takes what ``LocalBackend`` takes, and::

        app = create_rollout_server(backend=SandboxBackend(workflow=W, workflow_config=c, grader=G, sandbox="docker"))

    In the sandbox the same ``main.py`` is loaded again, up to here; the harness itself need not be installed there.
    Model calls go to the request's ``chat_completions_url`` with its key, which the sandbox never sees. The first use
    prepares in the background; rollouts wait for that outside of their deadlines. Waiting for a free place counts, as
    the SDK counts it.

    :param sandbox: ``docker``, ``local``, ``daytona``, ``process`` or ``auto``; None: what ``[tool.harness]`` says.
    :param image: base image for docker, as ``--image``.
    :param max_in_flight: rollouts at the same time, at most what the workflow's ``concurrency`` allows. Neither: 4.
    :param max_queue_depth: rollouts that may wait for a place; more are answered with 429.
    :param entrypoint: the file that sandboxes load; None: the running program.
    :raises ConfigError: no rollout is found, or its settings are wrong.
    """

    def __init__(
        self,
        *,
        workflow: type[AgentWorkflow[Any]] | str,
        workflow_config: AgentWorkflowConfig | str | None = None,
        grader: type[Grader] | str | None = None,
        grader_config: GraderConfig | str | None = None,
        sandbox: Choice | None = None,
        image: str | None = None,
        max_in_flight: int | None = None,
        max_queue_depth: int = MAX_QUEUE_DEPTH,
        entrypoint: Path | None = None,
    ) -> None:
        # Grader and config are wired by the entry point, which the workers load themselves.
        config = resolve_object(workflow_config) if workflow_config else None
        limits = [max_in_flight, config.concurrency.max_concurrent if config else None]
        self._setup(
            ServeJob.of(find_rollout(workflow, entrypoint), sandbox=sandbox, image=image),
            min((limit for limit in limits if limit), default=_unbounded() if config else DEFAULT_IN_FLIGHT),
            max_queue_depth,
        )

    @classmethod
    def of_rollout(
        cls,
        rollout: Rollout,
        *,
        sandbox: Choice | None = None,
        image: str | None = None,
        max_in_flight: int | None = None,
        max_queue_depth: int = MAX_QUEUE_DEPTH,
    ) -> SandboxBackend:
        """The backend of a rollout that is not loaded in this process.

        :raises ConfigError: its settings are wrong.
        """
        backend = cls.__new__(cls)
        job = ServeJob.of(rollout, sandbox=sandbox, image=image)
        backend._setup(job, max_in_flight or _unbounded(), max_queue_depth)
        return backend

    def _setup(self, job: ServeJob, max_in_flight: int, max_queue_depth: int) -> None:
        self.artifact_root = default_artifact_root()
        self.sandbox = job.sandbox
        self.keeper = Keeper(job, max_in_flight)
        self._max_in_flight, self._max_queue_depth = max_in_flight, max_queue_depth
        self._slots = anyio.CapacityLimiter(max_in_flight)
        self._live: dict[str, _Live] = {}
        self._finished: OrderedDict[str, RolloutStatus] = OrderedDict()
        secrets = [job.environ[name] for name in job.settings.secrets]
        self._redactor = Redactor([*secrets, *ambient_secrets(job.environ)])

    # -- what the server asks

    def health(self) -> dict[str, Any]:
        self.keeper.start()
        error = self.keeper.error
        return {
            "status": "ok" if error is None else "error",
            "backend": "harness",
            "concurrency": {
                "max_concurrent": self._max_in_flight,
                "queued": self._count(RolloutStatus.QUEUED),
                "running": len(self._live) - self._count(RolloutStatus.QUEUED),
                "max_queue_depth": self._max_queue_depth,
            },
            "chat_endpoint": {"environment": self.sandbox, "requires_public_url": False},
            **({} if error is None else {"error": str(error)}),
        }

    def has_capacity(self) -> bool:
        return len(self._live) < self._max_in_flight + self._max_queue_depth

    def rollout_status(self, rollout_id: str) -> dict[str, Any] | None:
        live = self._live.get(rollout_id)
        status = live.status if live is not None else self._finished.get(rollout_id)
        return None if status is None else {"status": status}

    def cancel_rollouts(
        self, ids: Sequence[str] | None = None, prefix: str | None = None, all: bool = False
    ) -> dict[str, str]:
        if all or prefix is not None:
            ids = [each for each in self._live if all or each.startswith(prefix or "")]
        return {each: self._cancel(each) for each in ids or ()}

    async def shutdown(self) -> None:
        self.cancel_rollouts(all=True)
        await self.keeper.close()

    async def execute(self, request: ExecutionRequest) -> ExecutionOutcome:
        live = self._live[request.id] = _Live()
        outcome = cancelled()
        try:
            with live.scope:
                outcome = await self._execute(request, live)
        except HarnessError as error:
            outcome = failed(error)
        finally:
            # Kept until the result is delivered, so that a late cancel finds it finished and not unknown.
            self._live.pop(request.id, None)
            self._finished[request.id] = outcome.result.status
            while len(self._finished) > _REMEMBERED:
                self._finished.popitem(last=False)
        return outcome

    # -- one rollout

    async def _execute(self, request: ExecutionRequest, live: _Live) -> ExecutionOutcome:
        context = get_rollout_context() or RolloutContext(rollout_id=request.id)
        policy = policy_of(context.chat_completions_url, context.api_key)
        ready = await self.keeper.ready()
        queued = time.monotonic()
        async with self._slots:
            waited = time.monotonic() - queued
            ready = await self.keeper.ready()
            graded = request.grade and ready.info.grader is not None
            graded = graded and (request.label is not None or request.metadata is not None)
            trial = TrialRequest(
                rollout_id=request.id,
                prompt=request.prompt,
                label=request.label,
                metadata=request.metadata,
                agent_timeout_s=request.agent_timeout_sec,
                queued_s=waited,
                grader_timeout_s=request.grader_timeout_sec,
                grade=graded,
                policy=policy,
            )

            async def observe(phase: Phase) -> None:
                live.status = RolloutStatus(phase)
                if phase == "grading":
                    await context.set_status(RolloutStatus.GRADING)

            await create_rollout_artifacts_dir(self.artifact_root, request.id)
            places = _Folders(self.artifact_root, self._redactor)
            try:
                async with TrialDirectory.open(places, request.id) as files:
                    record = await ready.runner.run(trial, files, observe)
            finally:
                await places.aclose()
            return outcome_of(record, waited_s=waited, ungraded=request.grade and not graded)

    def _cancel(self, rollout_id: str) -> str:
        live = self._live.get(rollout_id)
        if live is None:
            return "not_found"
        live.scope.cancel()
        return "cancelled_queued" if live.status is RolloutStatus.QUEUED else "cancelled_running"

    def _count(self, status: RolloutStatus) -> int:
        return sum(live.status is status for live in self._live.values())


class _Folders:
    """``<artifact root>/<rollout id>/``, where the platform collects."""

    def __init__(self, root: Path, redactor: Redactor) -> None:
        self._root = root
        self._redact = redactor.redact
        self._calls: list[CallLog] = []

    def trial_dir(self, rollout_id: str) -> Path:
        return self._root / rollout_id

    def call_log(self, rollout_id: str) -> CallLog:
        self._calls.append(CallLog(self._root / rollout_id / "calls.jsonl", self._redact))
        return self._calls[-1]

    def text_log(self, rollout_id: str, source: str) -> TextLog:
        return TextLog(self._root / rollout_id / "logs" / f"{source}.txt", self._redact, LOG_BYTES)

    async def aclose(self) -> None:
        for calls in self._calls:
            with suppress(StoreError):  # a record that the disk refuses must not cost the reward
                await calls.aclose()


def _unbounded() -> int:
    """What this machine is good for, where nobody sets a limit."""
    return max(DEFAULT_IN_FLIGHT, 2 * (os.cpu_count() or 1))
