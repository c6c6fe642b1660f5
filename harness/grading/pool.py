"""The pool of grader workers.

A grader is user code in the host: a crash, an exit or a hang costs its own trial, and its worker is replaced.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio

import harness.guest
from harness.errors import EntryPointError, GraderError, HarnessError
from harness.grading.process import WorkerProcess
from harness.grading.records import Graded, GradeRequest, GradeResult, GraderInfo, Ready, failed, result_of

_START_S = 180.0


class GraderPool:
    """Grades samples in up to ``workers`` processes, which are started when they are needed and stay warm.

    :param python: the interpreter of the rollout's own environment.
    :param rollout: the rollout's folder; working folder of the workers.
    :param env: the workers' whole environment.
    :param lib: the guest's modules, which load the rollout here as they do in a sandbox.
    :param grace_s: how long after its deadline a grader that does not yield is killed.
    """

    def __init__(
        self,
        python: Path,
        rollout: Path,
        entrypoint: str,
        env: Mapping[str, str],
        workers: int,
        lib: Path | None = None,
        *,
        grace_s: float = 5.0,
    ) -> None:
        self._python = python
        self._rollout = rollout
        self._entrypoint = entrypoint
        self._env = env
        self._lib = lib or Path(harness.guest.__file__).parent
        self._grace_s = grace_s
        self._slots = anyio.CapacityLimiter(workers)
        self._idle: list[WorkerProcess] = []
        self._info: GraderInfo | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):  # each close is bounded by itself
            async with anyio.create_task_group() as closing:
                while self._idle:
                    closing.start_soon(self._idle.pop().close)

    async def check(self) -> GraderInfo:
        """What the entry point wires in the host; loaded once.

        :raises EntryPointError: it cannot be loaded. A note of the exception holds the traceback.
        :raises GraderError: the environment's Python cannot be started.
        """
        if self._info is None:
            async with self._slots, self._worker():
                pass
        assert self._info is not None
        return self._info

    async def grade(self, request: GradeRequest) -> GradeResult:
        """Grade one trial's samples. Whatever the grader does is in the result; only cancellation is raised."""
        if request.label is None and request.metadata is None:
            message = "the row has neither a label nor metadata, so its samples cannot be graded"
            return failed(request, "NotGraded", message, "validation_error")
        async with self._slots:
            try:
                async with self._worker() as worker:
                    if self._info is not None and self._info.grader is None:
                        message = "the rollout has no grader, so there is no reward"
                        return failed(request, "NotGraded", message, "validation_error")
                    started = time.monotonic()
                    result = await self._grade(worker, request)
                    return result.model_copy(update={"seconds": time.monotonic() - started})
            except HarnessError as exc:
                return failed(request, type(exc).__name__, str(exc), exc.category)

    async def _grade(self, worker: WorkerProcess, request: GradeRequest) -> GradeResult:
        limit = math.inf if request.timeout_s is None else max(request.timeout_s, 0.0) + self._grace_s
        reply: dict[str, Any] | None = None
        try:
            with anyio.move_on_after(limit) as deadline:
                reply = await worker.exchange({"type": "grade", **request.model_dump(mode="json")})
            if deadline.cancelled_caught:
                await worker.kill()
                message = f"grader exceeded its {request.timeout_s}s deadline"
                return failed(request, "TimeoutError", message, "timeout", worker.take_log())
            if reply is None:
                message = f"the grader's process {worker.ending}"
                return failed(request, "GraderCrashed", message, "agent_error", worker.take_log())
            graded = Graded.model_validate(reply)
            result = result_of(graded)
        except ValueError as exc:
            message = f"the grader's process gave no valid answer: {exc}"
            return failed(request, "GraderCrashed", message, "agent_error", worker.take_log())
        worker.reusable = not graded.last
        return result.model_copy(update={"log": worker.take_log()})

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[WorkerProcess]:
        """One that has loaded the rollout. Kept for the next if its last answer was good, else closed."""
        worker = None
        while worker is None and self._idle:
            worker = self._idle.pop()
            if not worker.waiting:
                await worker.close()
                worker = None
        worker = worker or await self._start()
        try:
            yield worker
        finally:
            if worker.reusable:
                self._idle.append(worker)
            else:
                await worker.close()

    async def _start(self) -> WorkerProcess:
        try:
            worker = await WorkerProcess.start(self._python, self._rollout, self._entrypoint, self._env, self._lib)
        except OSError as exc:
            raise GraderError(f"the Python that grades cannot be started: {exc}") from exc
        try:
            with anyio.move_on_after(_START_S) as deadline:
                reply = await worker.exchange(None)
            if deadline.cancelled_caught:
                raise EntryPointError(f"{self._entrypoint} was still loading in the host after {_START_S:g} s")
            if reply is None:
                await worker.kill()
                message = f"{self._entrypoint} cannot be loaded in the host: its process {worker.ending}"
                raise EntryPointError(message, hint=worker.take_log()[-2000:].strip())
            ready = Ready.model_validate(reply)
            if ready.info is None:
                error = EntryPointError(ready.error.message if ready.error else f"{self._entrypoint} cannot be loaded")
                error.add_note(ready.error.traceback if ready.error else "")
                raise error
        except BaseException as exc:
            await worker.close()
            if isinstance(exc, ValueError):
                raise EntryPointError(
                    f"{self._entrypoint} sent nonsense while it was loaded in the host: {exc}"
                ) from exc
            raise
        self._info = ready.info
        worker.reusable = True
        worker.take_log()  # what was printed at import belongs to no trial
        return worker
