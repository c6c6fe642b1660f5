"""What a run takes from a training config, and what it leaves to the platform."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config import load_training_config
from harness.trial.training import as_eval


def config(root: Path, text: str) -> Path:
    path = root / "configs/training/x.toml"
    path.parent.mkdir(parents=True)
    path.write_text(
        f'[experiment]\nrollout = "x"\nentrypoint = "main.py"\nmodel_path = "Qwen/Q"\ndataset = "x"\n{text}'
    )
    return path


def test_groups_timeouts_and_sampling_are_used_and_the_rest_is_named(tmp_path: Path) -> None:
    text = (
        "[training]\nn_samples_per_prompt = 3\nrollout_batch_size = 2\nlr = 1e-6\nmax_response_length = 100\n"
        "agent_workflow_timeout_s = 7\ngrader_timeout_s = 5\n[sampling]\nrollout_temperature = 0.7\n"
        "[checkpoints]\neval_interval = 5\n"
    )
    found, sampling, notes = as_eval(load_training_config(config(tmp_path, text)), most_in_flight=100)
    assert (found.evaluation.n, found.evaluation.batch_size) == (3, 6)
    assert (found.evaluation.agent_workflow_timeout_s, found.evaluation.grader_timeout_s) == (7, 5)
    assert sampling == {"temperature": 0.7}
    assert notes == [
        "ignored, only the platform uses: training.lr, training.max_response_length, checkpoints.eval_interval"
    ]


@pytest.mark.parametrize(("most", "expected"), [(4, 4), (1000, 256)])
def test_defaults_are_the_platforms_and_bounded_by_the_machine(tmp_path: Path, most: int, expected: int) -> None:
    found, sampling, notes = as_eval(load_training_config(config(tmp_path, "")), most_in_flight=most)
    assert (found.evaluation.n, found.evaluation.batch_size, sampling, notes) == (8, expected, {}, [])
