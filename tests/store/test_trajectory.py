"""Our transcripts against those of the SDK's own converter and strict model, on many shapes of messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from osmosis_ai.rollout.trajectory.atif import Trajectory
from osmosis_ai.rollout.trajectory.converter import convert_sample_to_trajectory
from osmosis_ai.rollout.trajectory.report import LlmCallMetrics, SampleReport
from osmosis_ai.rollout.types import RolloutSample

from harness.models import CallRecord, Row, Sample
from harness.store.files import json_line
from harness.store.trajectory import to_trajectory
from tests.store.helpers import row, trial
from tests.store.test_run import call

text = st.text(alphabet=st.characters(codec="utf-8"), max_size=8)
leaf = (
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | text
)
anything = st.recursive(
    leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6
)
part = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"])}, optional={"text": text})
content = st.none() | text | st.lists(part, max_size=3) | anything
ids = st.sampled_from(["a", "b", "c"])
arguments = st.none() | text | st.dictionaries(text, anything, max_size=2) | anything.map(json.dumps)
function = st.fixed_dictionaries({}, optional={"name": text, "arguments": arguments}) | anything
tool_call = st.fixed_dictionaries({"function": function}, optional={"id": ids | st.none()}) | anything
message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(
            ["system", "developer", "user", "assistant", "assistant", "tool", "tool", "function", "odd"]
        )
    },
    optional={
        "content": content,
        "tool_calls": st.lists(tool_call, max_size=3) | text | st.none(),
        "tool_call_id": ids | st.none(),
        "reasoning_content": text | anything,
    },
)


def sdk(messages: list[dict[str, Any]], record: Any, source: Row, report: SampleReport | None = None) -> dict[str, Any]:
    sample = RolloutSample(messages=messages, reward=record.reward, metrics={"m": 1.0})
    return convert_sample_to_trajectory(
        sample,
        rollout_id=record.rollout_id,
        request_label=source.label,
        request_metadata=source.metadata,
        request_extra_fields={"row_index": record.row_index, "run_index": record.run_index},
        report=report,
        default_model_name="m",
    ).to_json_dict()


def ours(messages: Any, calls: list[CallRecord] | None = None, **changes: Any) -> tuple[Any, dict[str, Any]]:
    record = trial(samples=[Sample(name="", data={"messages": messages, "metrics": {"m": 1.0}})], **changes)
    document = to_trajectory(record, row(), calls or [], "m")
    assert document is not None
    return record, json.loads(json_line(document))


@settings(max_examples=50, deadline=None)
@given(st.lists(message, min_size=1, max_size=6))
def test_any_messages_give_what_the_sdk_gives(messages: list[dict[str, Any]]) -> None:
    record, document = ours(messages)
    expected = sdk(messages, record, row())
    assert document.pop("agent")["name"] == "rollout-harness"
    del expected["agent"]
    assert document == json.loads(json.dumps(expected))


@settings(max_examples=20, deadline=None)
@given(st.lists(message, min_size=1, max_size=6))
def test_any_messages_give_a_strictly_valid_document(messages: list[dict[str, Any]]) -> None:
    _, document = ours(messages, [call(0), call(1)])
    Trajectory.model_validate(document, strict=True)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_calls_are_attached_only_when_they_are_as_many_as_steps(steps: int) -> None:
    messages = [{"role": "assistant", "content": str(n)} for n in range(steps)]
    calls = [call(1, prompt_tokens=30), call(0), call(2, complete=False, status=None)]
    record, document = ours(messages, calls)
    entries = [
        LlmCallMetrics(
            prompt_tokens=c.prompt_tokens,
            completion_tokens=c.completion_tokens,
            prompt_token_ids=c.prompt_token_ids,
            completion_token_ids=c.completion_token_ids,
            logprobs=c.logprobs,
        )
        for c in (calls[1], calls[0])
    ]
    expected = sdk(messages, record, row(), SampleReport(llm_call_metrics=entries))
    del expected["agent"], document["agent"]
    assert document == expected
    assert ("unmatched_llm_call_metrics" in document["extra"]["osmosis"]) == (steps != 2)


def test_incomplete_tokens_are_left_out() -> None:
    _, document = ours([{"role": "assistant", "content": ""}], [call(tokens_complete=False)])
    assert document["steps"][0]["metrics"] == {"prompt_tokens": 3, "completion_tokens": 2}


def test_a_failed_trial_has_no_reward() -> None:
    _, document = ours([{"role": "user", "content": ""}], status="failed", reward=None)
    assert "reward" not in document["extra"]["osmosis"]


@pytest.mark.parametrize(
    "data", [{}, {"messages": []}, {"messages": [1]}, {"messages": [{}], "trajectory_messages": None}]
)
def test_no_messages_or_an_opt_out_give_no_document(data: dict[str, Any]) -> None:
    assert to_trajectory(trial(samples=[Sample(name="", data=data)]), row(), [], "m") is None


def test_the_messages_made_for_trajectories_win() -> None:
    data = {
        "messages": [{"role": "user", "content": "native"}],
        "trajectory_messages": [{"role": "user", "content": "chat"}],
    }
    document = to_trajectory(trial(samples=[Sample(name="", data=data)]), row(), [], "m")
    assert document is not None
    assert document["steps"][0]["message"] == "chat"


def test_several_samples_are_one_valid_document() -> None:
    samples = [
        Sample(name=name, data={"messages": [{"role": "assistant", "content": name}], "reward": 0.5})
        for name in ("a", "b", "c")
    ]
    document = to_trajectory(trial(samples=samples), row(), [call()], "m")
    assert document is not None
    Trajectory.model_validate(json.loads(json_line(document)), strict=True)
    assert document["steps"][0]["message"] == "a"
    assert [s["extra"]["osmosis"]["sample_name"] for s in document["subagent_trajectories"]] == ["b", "c"]
    assert document["extra"]["osmosis"]["unmatched_llm_call_metrics"]
