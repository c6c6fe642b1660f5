"""Eval and training configs, held against the platform's own loader."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from osmosis_ai.cli.errors import CLIError
from osmosis_ai.platform.cli.eval_config import load_eval_submit_config
from osmosis_ai.platform.cli.eval_run import _integer, _numeric
from osmosis_ai.platform.cli.shared_config import validate_workspace_rollout_paths
from osmosis_ai.platform.cli.training_config import load_train_submit_config

from harness.config import load_eval_config, load_training_config
from harness.errors import ConfigError
from tests.config.conftest import WriteConfig

EXPERIMENT = '[experiment]\nrollout = "r"\nentrypoint = "main.py"\nmodel_path = "openai/gpt-5-mini"\ndataset = "d"\n'
SECRETS = "[secrets]\nrequired = []\n"
GOOD = EXPERIMENT + SECRETS


def platform_says(path: Path, kind: str = "eval") -> str | None:
    """The message of the platform's loader and of its local run's checks; None when it takes the file."""
    try:
        if kind == "training":
            load_train_submit_config(path)
            return None
        config = load_eval_submit_config(path)
        validate_workspace_rollout_paths(
            rollout=config.experiment_rollout,
            entrypoint=config.experiment_entrypoint,
            workspace_directory=path.parents[2],
            command_label="Evaluation",
        )
        section = config.evaluation_config
        _numeric(section.get("pass_threshold"), field="pass_threshold")
        n = _integer(section.get("n"), field="n")
        if n is not None and n <= 0:
            return f"evaluation.n must be a positive integer, got {n!r}"
        _integer(section.get("batch_size"), field="batch_size")
        _numeric(section.get("agent_workflow_timeout_s"), field="agent_workflow_timeout_s")
        _numeric(section.get("grader_timeout_s"), field="grader_timeout_s")
        _integer(section.get("limit"), field="limit")
    except CLIError as error:
        return str(error)
    return None


def harness_says(path: Path, kind: str = "eval") -> str | None:
    try:
        load_eval_config(path) if kind == "eval" else load_training_config(path)
    except ConfigError as error:
        return error.message
    return None


def evaluation(text: str) -> str:
    return GOOD + "[evaluation]\n" + text + "\n"


ONE_PROBLEM = {
    "no experiment": SECRETS,
    "experiment no table": "experiment = 1\n" + SECRETS,
    "no rollout": GOOD.replace('rollout = "r"\n', ""),
    "no dataset": GOOD.replace('dataset = "d"\n', ""),
    "rollout no string": GOOD.replace('"r"', "7"),
    "unknown key": GOOD.replace("[experiment]", "[experiment]\nfoo = 1"),
    "unknown section": GOOD + "[local]\nx = 1\n",
    "unknown top key": "x = 1\n" + GOOD,
    "several keys": evaluation("foo = 1\nbar = 2") + "[other]\n",
    "empty branch": GOOD.replace("[experiment]", '[experiment]\nbranch = ""'),
    "branch with space": GOOD.replace("[experiment]", '[experiment]\nbranch = "a b"'),
    "bad sha": GOOD.replace("[experiment]", '[experiment]\ncommit_sha = "xyz"'),
    "branch and sha": GOOD.replace("[experiment]", '[experiment]\nbranch = "a"\ncommit_sha = "abcdef0"'),
    "env no table": "env = 1\n" + GOOD,
    "env no string": GOOD + "[env]\nA = 1\nB = true\n",
    "env name": GOOD + '[env]\nlower = "1"\n',
    "env reserved": GOOD + '[env]\n_OSMOSIS_X = "1"\n',
    "no secrets": EXPERIMENT,
    "secrets no table": "secrets = []\n" + EXPERIMENT,
    "secrets without required": EXPERIMENT + "[secrets]\n",
    "secrets unknown key": GOOD + "optional = []\n",
    "secrets no list": EXPERIMENT + '[secrets]\nrequired = "A"\n',
    "secrets no strings": EXPERIMENT + "[secrets]\nrequired = [1]\n",
    "secret name": EXPERIMENT + '[secrets]\nrequired = ["_A"]\n',
    "secret twice": EXPERIMENT + '[secrets]\nrequired = ["A", "A"]\n',
    "secret and env": EXPERIMENT + '[secrets]\nrequired = ["A"]\n[env]\nA = "1"\n',
    "evaluation no table": "evaluation = 3\n" + GOOD,
    "advanced no table": "advanced = 3\n" + GOOD,
    "n zero": evaluation("n = 0"),
    "n bool": evaluation("n = true"),
    "n float": evaluation("n = 1.0"),
    "n inf": evaluation("n = inf"),
    "threshold string": evaluation('pass_threshold = "1"'),
    "threshold nan": evaluation("pass_threshold = nan"),
    "threshold bool": evaluation("pass_threshold = false"),
    "timeout inf": evaluation("agent_workflow_timeout_s = inf"),
    "timeout list": evaluation("grader_timeout_s = [1]"),
    "batch float": evaluation("batch_size = 2.5"),
    "limit string": evaluation('limit = "ten"'),
    "rollout path": GOOD.replace('"r"', '"a/b"'),
    "rollout absolute": GOOD.replace('"r"', '"/a"'),
    "rollout dots": GOOD.replace('"r"', '".."'),
    "rollout empty": GOOD.replace('"r"', '""'),
    "entrypoint outside": GOOD.replace("main.py", "../main.py"),
    "entrypoint absolute": GOOD.replace("main.py", "/main.py"),
    "syntax": GOOD + "x = = 1\n",
    "byte order mark": "\ufeff" + GOOD,
}


@pytest.mark.parametrize("text", ONE_PROBLEM.values(), ids=ONE_PROBLEM.keys())
def test_one_problem_is_reported_in_the_platforms_words(write_config: WriteConfig, text: str) -> None:
    path = write_config(text)
    expected = platform_says(path)
    assert expected is not None
    assert harness_says(path) == expected


@pytest.mark.parametrize(
    "pair", list(itertools.combinations(["n zero", "env name", "no dataset", "unknown section"], 2))
)
def test_two_problems_are_both_reported(write_config: WriteConfig, pair: tuple[str, str]) -> None:
    parts = {
        "n zero": "[evaluation]\nn = 0\n",
        "env name": '[env]\nlower = "1"\n',
        "no dataset": "",
        "unknown section": "[local]\n",
    }
    base = ONE_PROBLEM["no dataset"] if "no dataset" in pair else GOOD
    path = write_config(base + "".join(parts[name] for name in pair))
    expected, said = platform_says(path), harness_says(path)
    assert expected is not None
    assert said is not None
    assert said.startswith(expected)
    texts = {
        "n zero": "evaluation.n must be a positive integer, got 0",
        "env name": "Invalid env var name 'lower' in [env] of",
        "no dataset": "Missing 'dataset' in [experiment] section of",
        "unknown section": "Invalid eval config:\n  - local: Unrecognized section",
    }
    for name in pair:
        assert texts[name] in said


GOOD_FILES = {
    "minimal": GOOD,
    "values": evaluation(
        "limit = 0\nn = 4\nbatch_size = 8\npass_threshold = 0\nagent_workflow_timeout_s = 0.5\ngrader_timeout_s = -1"
    ),
    "everything": EXPERIMENT
    + 'branch = "main"\n[secrets]\nrequired = ["A", "B_2"]\n[env]\n_X = "1"\n[advanced]\na = {b = [1, 2020-01-01]}\n',
    "crlf": GOOD.replace("\n", "\r\n"),
}


@pytest.mark.parametrize("text", GOOD_FILES.values(), ids=GOOD_FILES.keys())
def test_good_files_mean_the_same(write_config: WriteConfig, text: str) -> None:
    path = write_config(text)
    assert platform_says(path) is None
    theirs, ours = load_eval_submit_config(path), load_eval_config(path)
    assert ours.experiment.model_dump() == theirs.experiment.model_dump()
    assert ours.env == theirs.env
    assert list(ours.secrets) == theirs.secrets
    assert ours.advanced == theirs.advanced_config
    assert ours.evaluation.model_dump(exclude_unset=True) == theirs.evaluation_config
    assert ours.workspace.root == path.parents[2]
    assert ours.path == path


def test_defaults(write_config: WriteConfig) -> None:
    section = load_eval_config(write_config(GOOD)).evaluation
    assert (section.n, section.pass_threshold, section.limit, section.batch_size) == (1, 1.0, None, None)
    assert (section.agent_workflow_timeout_s, section.grader_timeout_s) == (None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (EXPERIMENT, None),
        (EXPERIMENT + "[training]\nlr = 1e-6\nfoo = 1\n[sampling]\nbar = 2\n[checkpoints]\nbaz = 3\n", "foo"),
        (EXPERIMENT + "[evaluation]\nn = 1\n", "evaluation: Unrecognized section"),
    ],
)
def test_training_keys_as_the_platform_has_them(write_config: WriteConfig, text: str, expected: str | None) -> None:
    path = write_config(text, "training")
    said = harness_says(path, "training")
    assert said == platform_says(path, "training")
    assert (expected in said) if expected and said else said is None


def test_training_values_are_typed(write_config: WriteConfig) -> None:
    good = "[training]\nlr = 1\nn_samples_per_prompt = 8\n[sampling]\nrollout_temperature = 0.5\n"
    config = load_training_config(write_config(EXPERIMENT + good, "training"))
    assert (config.training.lr, config.training.n_samples_per_prompt) == (1.0, 8)
    assert config.sampling.rollout_temperature == 0.5
    assert config.checkpoints.eval_interval is None
    with pytest.raises(ConfigError) as caught:
        load_training_config(write_config(EXPERIMENT + '[training]\nlr = "x"\ntotal_epochs = 1.5\n', "training"))
    assert caught.value.message == (
        "training.lr must be a number, got 'x'\ntraining.total_epochs must be an integer, got 1.5"
    )


def test_unreadable_files(write_config: WriteConfig, tmp_path: Path) -> None:
    missing = tmp_path / "configs" / "eval" / "nope.toml"
    with pytest.raises(ConfigError, match=f"Config file not found: {missing}"):
        load_eval_config(missing)
    with pytest.raises(ConfigError, match=r"not UTF-8 \(at line 3\)"):
        load_eval_config(write_config(b"# a\n# b\nx = '\xff'\n"))
    with pytest.raises(ConfigError, match=r"at line 2, column 5"):
        load_eval_config(write_config("[a]\nx = = 1\n"))
    with pytest.raises(ConfigError, match="Cannot read config file"):
        load_eval_config(tmp_path)
