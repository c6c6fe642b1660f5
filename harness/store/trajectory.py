"""A trial's transcript as an ATIF v1.7 document, by the same rules as the SDK's own converter.

The SDK is not imported: rollouts choose their version of it, and the harness works without. What it writes must equal
what ``osmosis_ai.rollout.trajectory`` 0.3.8 writes for the same messages; the tests compare the two. Unlike the SDK we
own the relay, so the agent's steps carry the token ids and log-probabilities that the policy gave.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, ValidationError

from harness.models import CallRecord, Row, Sample, TrialRecord

_SOURCES = {"system": "system", "developer": "system", "assistant": "agent", "user": "user"}
_DETAILS = ("prompt_tokens_details", "input_tokens_details", "completion_tokens_details", "output_tokens_details")

Document = dict[str, Any]


class _Usage(BaseModel, allow_inf_nan=False):
    """Usage that a message carries; numbers are coerced, or refused, as the SDK's model does it."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    extra: dict[str, Any] | None = None


def to_trajectory(trial: TrialRecord, row: Row, calls: Iterable[CallRecord], model: str) -> Document | None:
    """The document for ``trajectory.json``; None when no sample has messages or the rollout opted out of trajectories.

    The first sample with messages is the main trajectory; others (SDK 0.2) are embedded as ``subagent_trajectories``.

    :param calls: the trial's model calls, in any order.
    :param model: name of the policy.
    """
    transcripts = [(sample, _steps(messages)) for sample in trial.samples if (messages := _messages(sample))]
    if not transcripts:
        return None
    (sample, steps), others = transcripts[0], transcripts[1:]
    metrics = [_call_metrics(call) for call in sorted(calls, key=lambda call: call.index) if call.complete]
    # Which sample a call belongs to is unknown, so with several of them nothing is attributed.
    unmatched = metrics if others else _attach(steps, metrics)
    osmosis = {
        "rollout_id": trial.rollout_id,
        "label": row.label,
        "reward": trial.reward if trial.status == "success" else None,
        "request_metadata": row.metadata,
        "request_extra_fields": {"row_index": trial.row_index, "run_index": trial.run_index},
        "unmatched_llm_call_metrics": unmatched or None,
    }
    document = _document(trial.rollout_id, trial.rollout_id, sample, steps, osmosis, model)
    for name in ("prompt_tokens", "completion_tokens"):
        counts = [entry[name] for entry in metrics if name in entry]
        if counts:
            document["final_metrics"][f"total_{name}"] = sum(counts)
    if others:
        document["subagent_trajectories"] = [
            _document(
                trial.rollout_id,
                f"{trial.rollout_id}/{index}-{other.name}",
                other,
                other_steps,
                {
                    "rollout_id": trial.rollout_id,
                    "reward": other.data.get("reward") if trial.status == "success" else None,
                },
                model,
            )
            for index, (other, other_steps) in enumerate(others, start=1)
        ]
    return document


def encode(document: Document) -> bytes:
    """As JSON, one step a line: readable, and quick with long arrays of token ids."""
    head = json.dumps(
        {key: value for key, value in document.items() if key != "steps"}, ensure_ascii=False, allow_nan=False
    )
    steps = ",\n".join(json.dumps(step, ensure_ascii=False, allow_nan=False) for step in document["steps"])
    return f'{head[:-1]}, "steps": [\n{steps}\n]}}\n'.encode()


def tool_calls(document: Document) -> Iterator[Document]:
    """Every tool call of the document, embedded trajectories included."""
    for trajectory in [document, *document.get("subagent_trajectories", [])]:
        for step in trajectory["steps"]:
            yield from step.get("tool_calls", [])
            yield from step.get("extra", {}).get("tool_calls", [])


def _messages(sample: Sample) -> list[Mapping[str, Any]]:
    messages = (
        sample.data["trajectory_messages"] if "trajectory_messages" in sample.data else sample.data.get("messages")
    )
    return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []


def _document(
    session: str, identity: str, sample: Sample, steps: list[Document], osmosis: Document, model: str
) -> Document:
    if sample.data.get("label") is not None:
        osmosis["label"] = sample.data["label"]
    osmosis["sample_metrics"] = sample.data.get("metrics") or None
    osmosis["sample_extra_fields"] = sample.data.get("extra_fields") or None
    osmosis["sample_name"] = sample.name or None
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": session,
        "trajectory_id": identity,
        "agent": {"name": "rollout-harness", "version": version("rollout-harness"), "model_name": model},
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
        "extra": {"osmosis": _present(osmosis)},
    }


def _steps(messages: Sequence[Mapping[str, Any]]) -> list[Document]:
    steps: list[Document] = []
    for message in messages:
        role = str(message.get("role", ""))
        if role in ("tool", "function"):
            _add_observation(steps, message, role)
        else:
            steps.append(_step(len(steps) + 1, message, role))
    return steps


def _step(number: int, message: Mapping[str, Any], role: str) -> Document:
    source = _SOURCES.get(role, "user")
    reasoning = message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        reasoning = json.dumps(reasoning, ensure_ascii=False, default=str)
    calls = _tool_calls(message.get("tool_calls"))
    agent_only: Document = _present({"reasoning_content": reasoning, "tool_calls": calls})
    step: Document = {"step_id": number, "source": source, "message": _text(message.get("content"))}
    extra: Document = {} if role in _SOURCES else {"original_role": role}
    if source == "agent":
        usage = _usage(message)
        step |= agent_only | _present({"model_name": _model(message), "metrics": usage})
        if usage:
            step["llm_call_count"] = 1
    else:
        extra |= agent_only
    return step | _present({"timestamp": _timestamp(message), "extra": extra or None})


def _add_observation(steps: list[Document], message: Mapping[str, Any], role: str) -> None:
    """Fold a tool's answer into the agent's step before it; the format wants its call in the same step."""
    call_id = message.get("tool_call_id")
    target = steps[-1] if steps and steps[-1]["source"] == "agent" else None
    known = [call["tool_call_id"] for call in target.get("tool_calls", [])] if target else []
    result: Document = {"content": _text(message.get("content"))}
    result |= {"source_call_id": call_id} if call_id in known else {"extra": {"tool_call_id": call_id}}
    if target is None:
        target = {"step_id": len(steps) + 1, "source": "system", "message": "", "extra": {"original_role": role}}
        steps.append(target)
    target.setdefault("observation", {"results": []})["results"].append(result)


def _tool_calls(raw: Any) -> list[Document] | None:
    calls = []
    for index, item in enumerate(raw if isinstance(raw, list) else []):
        if isinstance(item, dict):
            function = item.get("function")
            function = function if isinstance(function, dict) else {}
            calls.append(
                {
                    "tool_call_id": str(item.get("id") or f"call_{index}"),
                    "function_name": str(function.get("name") or "unknown"),
                    "arguments": _arguments(function.get("arguments")),
                }
            )
    return calls or None


def _arguments(raw: Any) -> Document:
    if isinstance(raw, dict):
        return raw
    if not isinstance(raw, str) or not raw:
        return {}
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"_raw": raw}


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        if parts and all(part.get("type") == "text" for part in parts):
            return "\n".join(str(part.get("text", "")) for part in parts)
    return json.dumps(content, ensure_ascii=False, default=str)


def _response(message: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = message.get("extra")
    response = extra.get("response") if isinstance(extra, dict) else None
    return response if isinstance(response, dict) else {}


def _model(message: Mapping[str, Any]) -> str | None:
    name = message.get("model") or message.get("model_name") or _response(message).get("model")
    return str(name) if name else None


def _usage(message: Mapping[str, Any]) -> Document | None:
    usage = message.get("usage")
    if not isinstance(usage, dict):
        usage = _response(message).get("usage")
        if not isinstance(usage, dict):
            return None

    def first(*names: str) -> Any:
        return next((usage[name] for name in names if usage.get(name) is not None), None)

    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = usage.get("cached_tokens")
    if cached is None and isinstance(details, dict):
        cached = details.get("cached_tokens")
    extra = {name: value for name in _DETAILS if isinstance(value := usage.get(name), dict) and value}
    try:
        metrics = _Usage(
            prompt_tokens=first("prompt_tokens", "input_tokens"),
            completion_tokens=first("completion_tokens", "output_tokens"),
            cached_tokens=cached,
            cost_usd=usage.get("cost_usd"),
            extra=extra or None,
        )
    except ValidationError:
        return None
    return metrics.model_dump(exclude_none=True) or None


def _timestamp(message: Mapping[str, Any]) -> str | None:
    extra = message.get("extra")
    values = [message.get(name) for name in ("created_at", "timestamp", "completed_at")]
    for value in [*values, extra.get("timestamp") if isinstance(extra, dict) else None]:
        try:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return datetime.fromtimestamp(value, tz=UTC).isoformat()
            if isinstance(value, str):
                return datetime.fromisoformat(value.replace("Z", "+00:00")).isoformat()
        except (OSError, OverflowError, ValueError):
            continue
    return None


def _call_metrics(call: CallRecord) -> Document:
    tokens: Document = {}
    if call.tokens_complete:
        tokens = call.model_dump(include={"prompt_token_ids", "completion_token_ids", "logprobs"})
    return _present({"prompt_tokens": call.prompt_tokens, "completion_tokens": call.completion_tokens} | tokens)


def _attach(steps: list[Document], metrics: list[Document]) -> list[Document]:
    """Give each of the agent's steps its call, only when they are as many; returns what could not be given."""
    agent = [step for step in steps if step["source"] == "agent"]
    if len(agent) != len(metrics):
        return metrics
    for step, entry in zip(agent, metrics, strict=True):
        if entry:
            step["metrics"] = step.get("metrics", {}) | entry
        step["llm_call_count"] = 1
    return []


def _present(values: Document) -> Document:
    return {key: value for key, value in values.items() if value is not None}
