"""One run of a workflow, as the SDK's ``LocalBackend`` runs it, except that the label is not there."""

from __future__ import annotations

import asyncio
import copy
import importlib
import time
from pathlib import Path
from typing import Any

from .failures import error_info, reported, say, text_of
from .rollout import Wiring
from .samples import sample_data


async def run_workflow(
    wiring: Wiring,
    *,
    prompt: list[dict[str, Any]],
    metadata: dict[str, Any] | None,
    artifacts_dir: Path | None,
    rollout_id: str,
    url: str,
    token: str,
    timeout_s: float | None,
) -> dict[str, Any]:
    """Run it and report: the ``ended`` message without its type.

    ``how`` is ``returned`` (with ``samples``, and ``labelled``: the SDK puts the row's label on these, which the host
    must do), ``raised`` or ``timeout`` (with ``error``), or ``exited`` (with ``code``). ``agent_s`` is always there.
    """
    started = time.monotonic()
    try:
        result = await _run(wiring, prompt, metadata, artifacts_dir, (url, token, rollout_id), timeout_s, started)
    except SystemExit as exc:
        result = exited(exc)
    except BaseException as exc:
        result = {"how": "raised", "error": reported(exc)}
    return {**result, "agent_s": time.monotonic() - started}


def exited(exc: SystemExit) -> dict[str, Any]:
    """How a run ended that called ``sys.exit``, with the status that Python would give the process."""
    if exc.code is None or isinstance(exc.code, int):
        return {"how": "exited", "code": (exc.code or 0) & 0xFF}
    say(text_of(exc.code))
    return {"how": "exited", "code": 1}


async def _run(
    wiring: Wiring,
    prompt: list[dict[str, Any]],
    metadata: dict[str, Any] | None,
    artifacts_dir: Path | None,
    policy: tuple[str, str, str],
    timeout_s: float | None,
    started: float,
) -> dict[str, Any]:
    context: Any = importlib.import_module("osmosis_ai.rollout.context")
    config = copy.deepcopy(wiring.workflow_config)
    ctx = context.AgentWorkflowContext(prompt=prompt, config=config, metadata=metadata, artifacts_dir=artifacts_dir)
    url, token, rollout_id = policy
    rollout_ctx = context.RolloutContext(chat_completions_url=url, api_key=token, rollout_id=rollout_id)
    workflow = wiring.workflow(config)
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            collect = _collect_0_2 if wiring.generation == "0.2" else _collect_0_3
            samples, labelled = await collect(workflow, ctx, rollout_ctx)
    except Exception as exc:
        if not deadline.expired():  # a TimeoutError of the user's own keeps its text
            raise
        return _timed_out(reported(exc), timeout_s)
    # Late success is no success: the cancellation was swallowed, or synchronous code held up the loop.
    if timeout_s is not None and (deadline.expired() or time.monotonic() - started > timeout_s):
        return _timed_out(error_info(TimeoutError()), timeout_s)
    data = [{"name": name, "data": sample_data(sample)} for name, sample in samples.items()]
    return {"how": "returned", "samples": data, "labelled": labelled}


def _timed_out(error: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
    message = f"workflow exceeded its {float(timeout_s or 0)}s deadline"
    return {"how": "timeout", "error": {**error, "message": message, "category": "timeout"}}


async def _collect_0_3(workflow: Any, ctx: Any, rollout_ctx: Any) -> tuple[dict[str, Any], bool]:
    types: Any = importlib.import_module("osmosis_ai.rollout.types")
    coerce_output = importlib.import_module("osmosis_ai.rollout.types.output").coerce_output
    with rollout_ctx:
        output = coerce_output(await workflow.run(ctx))
        if output is None:
            sample = await rollout_ctx.get_sample()
        elif output.messages is None:
            sample = None
        else:
            sample = types.RolloutSample(messages=output.messages, metrics=dict(output.metrics))
    result = types.ExecutionResult(status=types.RolloutStatus.SUCCESS, sample=sample)  # its validation is the SDK's
    return ({} if result.sample is None else {"": result.sample}), output is not None


async def _collect_0_2(workflow: Any, ctx: Any, rollout_ctx: Any) -> tuple[dict[str, Any], bool]:
    types: Any = importlib.import_module("osmosis_ai.rollout.types")
    with rollout_ctx:
        await workflow.run(ctx)
    samples = await rollout_ctx.get_samples()
    return types.ExecutionResult(status=types.RolloutStatus.SUCCESS, samples=samples).samples, False
