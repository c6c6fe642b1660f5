from __future__ import annotations

import uuid
from typing import Any

from harness.models import Failure, Row, Sample, Timing, TrialRecord, Usage
from harness.store import DatasetInputs, RolloutInputs, RunInfo, RunInputs


def inputs(**changes: Any) -> RunInputs:
    values: dict[str, Any] = {
        "model_path": "openai/tiny",
        "dataset": DatasetInputs(sha256="d" * 64, selected_source_rows="0-2"),
        "n": 2,
        "rollout": RolloutInputs(name="multiply", entrypoint="main.py", source_digest="one"),
        "env": {"MODE": "x"},
        "secret_names": ["B", "A"],
    }
    return RunInputs(**(values | changes))


def info(**changes: Any) -> RunInfo:
    values: dict[str, Any] = {
        "dataset_name": "multiply",
        "sampled_rows": 3,
        "total_dataset_rows": 10,
        "provenance": {"git_head": "abc", "git_dirty": False, "git_branch": None},
        "harness": {"version": "0", "sandbox": "local"},
    }
    return RunInfo(**(values | changes))


def row(index: int = 0) -> Row:
    prompt = [{"role": "user", "content": f"row {index}"}]
    return Row(index=index, source_index=index + 5, prompt=prompt, label=str(index), metadata={"k": index})


ROWS = [row(index) for index in range(3)]


def trial(row_index: int = 0, run_index: int = 0, **changes: Any) -> TrialRecord:
    """A success with reward 1.0 unless told otherwise."""
    messages = [{"role": "user", "content": "2*3"}, {"role": "assistant", "content": "6"}]
    values: dict[str, Any] = {
        "rollout_id": uuid.uuid4().hex,
        "row_index": row_index,
        "source_row_index": row_index + 5,
        "run_index": run_index,
        "status": "success",
        "reward": 1.0,
        "samples": [Sample(name="", data={"messages": messages, "metrics": {"m": 1.0}})],
        "usage": Usage(calls=1, prompt_tokens=3, completion_tokens=4),
        "timing": Timing(agent_s=1.5, policy_s=1.0, total_s=2.0),
    }
    return TrialRecord(**(values | changes))


def failed(row_index: int = 0, run_index: int = 0, message: str = "boom") -> TrialRecord:
    failure = Failure(party="rollout", category="agent_error", kind="ValueError", message=message)
    return trial(row_index, run_index, status="failed", reward=None, failure=failure, samples=[])
