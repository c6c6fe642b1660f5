"""A trial's transcript as an ATIF v1.7 document, by the same rules as the SDK's own converter.

The SDK is not imported: rollouts choose their version of it, and the harness works without. What it writes must equal
what ``osmosis_ai.rollout.trajectory`` 0.3.8 writes for the same messages; the tests compare the two. Unlike the SDK we
own the relay, so usage, token ids and log-probabilities are those of the calls and not what messages say of themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from harness.models import CallRecord, Row, Sample, TrialRecord

_SOURCES = {"system": "system", "developer": "system", "assistant": "agent", "user": "user"}

Document = dict[str, Any]


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
        step |= agent_only
    else:
        extra |= agent_only
    return step | _present({"extra": extra or None})


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
            step["metrics"] = entry
        step["llm_call_count"] = 1
    return []


def _present(values: Document) -> Document:
    return {key: value for key, value in values.items() if value is not None}
